"""What the answers of five servers mean together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from django_distlock.backends.redlock.votes import Count, Election, Question
from django_distlock.engine.values import Busy
from django_distlock.ground.holder import Holder

YES, NO, RESTARTED = [1, 40, 0], [0, b"other", 3_000_000, b"", b"try"], [2, 900]


def _counted(*answers: Any, asked: Iterable[int] = range(5)) -> Count:
    """Return the count of *answers*, by the servers in turn; None is one that has not answered."""
    count = Count(5, frozenset(asked))
    for server, answer in enumerate(answers):
        if answer is not None:
            count.take(server, answer)
    return count


def test_who_has_not_answered_nor_failed_is_pending() -> None:
    count = _counted(None, YES, None, asked=[0, 1, 2])
    count.miss(2, "it is gone", was_asked=False)

    assert count.pending == {0}


def test_a_failure_has_its_cause_and_may_have_been_carried_out_if_it_was_asked() -> None:
    refusal, silence = ValueError("out of memory"), TimeoutError("too late")
    count = _counted(refusal)

    count.miss(1, "it is silent", silence, was_asked=True)
    count.miss(2, "it took too long", was_asked=False)

    assert count.failures == {
        0: "it refused: out of memory",
        1: "it is silent",
        2: "it took too long",
    }
    assert count.errors[:2] == [refusal, silence]
    assert isinstance(count.errors[2], TimeoutError)
    assert str(count.errors[2]) == "it took too long"
    assert count.unsure == {1}


def test_failures_of_a_later_question_are_noted_and_change_no_vote() -> None:
    count, later = _counted(YES, YES, YES), _counted(1)
    later.miss(1, "it is gone", was_asked=True)

    count.add_failures(later)

    assert count.failures == {1: "it is gone"}
    assert len(count.errors) == 1
    assert count.unsure == set()
    assert count.election() is Election.WON


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([YES, YES, YES], Election.WON),
        ([YES, YES, NO], Election.OPEN),
        ([YES, NO, NO, NO], Election.BUSY),
        ([YES, YES, NO, NO, RESTARTED], Election.BUSY),
        ([RESTARTED, RESTARTED, RESTARTED], Election.UNREACHABLE),
        ([YES, YES, RESTARTED, RESTARTED, RESTARTED], Election.UNREACHABLE),
    ],
)
def test_a_server_that_restarted_lately_votes_for_nobody(
    answers: list[Any], outcome: Election
) -> None:
    assert _counted(*answers).election() is outcome


def test_a_vote_is_over_when_nobody_can_change_it() -> None:
    assert not _counted(YES, YES).is_elected()
    assert _counted(YES, YES, YES).is_elected()
    assert _counted(NO, NO, NO).is_elected()


def test_who_asks_again_waits_for_all_to_learn_which_token_was_agreed_on() -> None:
    noted, other = [1, 40, 1], [1, 41, 0]

    assert _counted(YES, YES, YES).agreed_token() is None
    assert _counted(noted, other, other).agreed_token() == 0
    assert not _counted(noted, other, other).is_elected()
    assert _counted(noted, other, other, other, other).is_elected()
    assert _counted(noted, noted, noted).agreed_token() == 40
    assert _counted(noted, noted, noted).is_elected()
    assert _counted(noted, noted, NO, noted).agreed_token() == 40


def _refusal(owner: bytes, left: int, number: int = 1, its_try: bytes = b"try") -> list[Any]:
    holder = Holder("host", number, "thread").to_json().encode()
    return [0, owner, left, holder, its_try]


def test_a_majority_names_the_holder_and_the_longest_time_that_it_has_left() -> None:
    busy = _counted(
        _refusal(b"minor", 9_000_000, 2),
        _refusal(b"major", 1_000_000),
        _refusal(b"major", 4_000_000),
        _refusal(b"major", 2_000_000),
    ).busy()

    assert busy == Busy(Holder("host", 1, "thread"), 4.0)


def test_who_is_named_by_fewer_than_a_majority_has_no_lock() -> None:
    assert _counted(_refusal(b"one", 1), _refusal(b"one", 1), _refusal(b"two", 1)).busy() == Busy()


def test_votes_of_several_tries_of_one_owner_make_no_majority() -> None:
    tries = [_refusal(b"one", 1, its_try=each) for each in (b"1", b"1", b"2", b"2")]

    assert _counted(*tries).busy() == Busy()


def test_it_is_clear_who_has_the_lock_once_a_majority_says_so_or_nobody_can_have_it() -> None:
    one, two = [b"one", 1], [b"two", 2]

    assert _counted([one], [one], [one]).is_seen()
    assert not _counted([one], [one]).is_seen()
    assert not _counted([one], [[]], [[]]).is_seen()
    assert _counted([[]], [[]], [[]]).is_seen()
    assert _counted([one], [two], [[]], [[]]).is_seen()
    assert not _counted([one], [one], [[]], [[]]).is_seen()

    failed = _counted([[]], [[]])
    for server in (2, 3, 4):
        failed.miss(server, "it is gone", was_asked=True)
    assert not failed.is_seen()

    failed = _counted([one], [[]], [[]])
    for server in (3, 4):
        failed.miss(server, "it is gone", was_asked=True)
    assert not failed.is_seen()

    failed = _counted([one], [[]], [[]], [[]])
    failed.miss(4, "it is gone", was_asked=True)
    assert failed.is_seen()


def test_what_a_majority_did_is_done() -> None:
    assert _counted(1, 1, 1).says_yes() is True
    assert _counted(0, 2, 0).says_yes() is False
    assert _counted(1, 1, 0, 0).says_yes() is None


def test_each_of_several_locks_is_kept_by_a_majority_of_its_own() -> None:
    count = _counted([1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 1])

    assert count.says_kept() == [True, None, False]
    with pytest.raises(ValueError, match="shorter"):
        _counted([1, 1], [1]).says_kept()


class Bell:
    """Counts how often it was rung."""

    rings = 0

    may_stall = False

    def ring(self) -> bool:
        self.rings += 1
        return True


def _question(count: Count, is_decided: Callable[[Count], bool]) -> tuple[Question, Bell]:
    question = Question({}, is_decided, within=1.0, connecting=1.0)
    question.count, question.bell = count, (bell := Bell())
    question.end_if_decided()
    return question, bell


def test_a_question_is_over_when_it_is_decided_or_nobody_is_left_to_answer() -> None:
    asked = _counted(YES, None, asked=[0, 1])

    open_one, silent = _question(asked, lambda count: count is not asked)
    decided, first = _question(asked, lambda count: True)
    answered, second = _question(_counted(YES, NO, asked=[0, 1]), lambda count: False)

    assert [open_one.is_over, decided.is_over, answered.is_over] == [False, True, True]
    assert [silent.rings, first.rings, second.rings] == [0, 1, 1]


def test_failures_of_two_questions_are_told_together() -> None:
    first, second = _counted(asked=[0, 1]), _counted(asked=[0, 1])
    first.miss(0, "gone", was_asked=False)
    second.miss(1, "slow", was_asked=True)

    first.add_failures(second)

    assert first.failures == {0: "gone", 1: "slow"}
    assert [str(error) for error in first.errors] == ["gone", "slow"]
