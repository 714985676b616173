"""What the answers of five servers mean together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from django_distlock.backends.redlock.votes import Count, Election, Question
from django_distlock.engine.values import Busy, Grant, Release
from django_distlock.ground.holder import Holder

YES, NO, FAILED = Grant(40), Busy(None, 3.0), "it failed"


#: What a server answers to a look that has the lock in nobody's hands.
FREE = False


def _counted(*answers: Any, asked: Iterable[int] = range(5)) -> Count:
    """Return the count of *answers*, by the servers in turn; None is one that has not answered."""
    count = Count(5, frozenset(asked))
    for server, answer in enumerate(answers):
        if answer is FAILED:
            count.miss(server, FAILED, was_asked=False)
        elif answer is not None:
            count.answers[server] = answer
    return count


def test_who_has_not_answered_nor_failed_is_pending() -> None:
    count = _counted(None, YES, None, asked=[0, 1, 2])
    count.miss(2, "it is gone", was_asked=False)

    assert count.pending == {0}


def test_a_failure_has_its_cause_and_may_have_been_carried_out_if_it_was_asked() -> None:
    count, silence = _counted(), TimeoutError("too late")

    count.miss(1, "it is silent", silence, was_asked=True)
    count.miss(2, "it took too long", was_asked=False)

    assert count.failures == {1: "it is silent", 2: "it took too long"}
    assert count.errors[0] is silence
    assert isinstance(count.errors[1], TimeoutError)
    assert str(count.errors[1]) == "it took too long"
    assert count.unsure == {1}


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([YES, YES, YES], Election.WON),
        ([YES, YES, NO], Election.OPEN),
        ([YES, NO, NO, NO], Election.BUSY),
        ([YES, YES, NO, NO, FAILED], Election.BUSY),
        ([FAILED, FAILED, FAILED], Election.UNREACHABLE),
        ([YES, YES, FAILED, FAILED, FAILED], Election.UNREACHABLE),
    ],
)
def test_a_server_that_failed_votes_for_nobody(answers: list[Any], outcome: Election) -> None:
    assert _counted(*answers).election() is outcome


def test_a_vote_is_over_when_nobody_can_change_it() -> None:
    assert not _counted(YES, YES).is_elected()
    assert _counted(YES, YES, YES).is_elected()
    assert _counted(NO, NO, NO).is_elected()


def _refusal(number: int, left: float) -> Busy:
    return Busy(Holder("host", number, "thread"), left)


def test_a_majority_names_the_holder_and_the_longest_time_that_it_has_left() -> None:
    busy = _counted(_refusal(2, 9.0), _refusal(1, 1.0), _refusal(1, 4.0), _refusal(1, 2.0)).busy()

    assert busy == _refusal(1, 4.0)


def test_who_is_named_by_fewer_than_a_majority_has_no_lock() -> None:
    assert _counted(_refusal(1, 1.0), _refusal(1, 1.0), _refusal(2, 1.0)).busy() == Busy()


def test_servers_that_grant_or_refuse_and_name_nobody_name_nobody() -> None:
    overtaken = Busy()

    assert _counted(overtaken, overtaken, overtaken).busy() == Busy()
    assert _counted(YES, YES, YES).busy() == Busy()


def test_the_holder_that_most_servers_name_is_looked_at() -> None:
    one, two = _refusal(1, 1.0), _refusal(2, 2.0)

    assert _counted(one, two, two, FREE).favourite() == [two, two]
    assert _counted(FREE, FREE).favourite() == []


def test_it_is_clear_who_has_the_lock_once_a_majority_says_so_or_nobody_can_have_it() -> None:
    one, two = _refusal(1, 1.0), _refusal(2, 2.0)

    assert _counted(one, one, one).is_seen()
    assert not _counted(one, one).is_seen()
    assert not _counted(one, FREE, FREE).is_seen()
    assert _counted(FREE, FREE, FREE).is_seen()
    assert _counted(one, two, FREE, FREE).is_seen()
    assert not _counted(one, one, FREE, FREE).is_seen()

    assert not _counted(FREE, FREE, FAILED, FAILED, FAILED).is_seen()
    assert not _counted(one, FREE, FREE, FAILED, FAILED).is_seen()
    assert _counted(one, FREE, FREE, FREE, FAILED).is_seen()


def test_what_a_majority_did_is_done() -> None:
    done, gone, taken = Release.RELEASED, Release.GONE, Release.TAKEN

    assert _counted(done, done, done).says_yes() is True
    assert _counted(gone, taken, gone).says_yes() is False
    assert _counted(done, done, gone, gone).says_yes() is None
    assert _counted(True, True, True).says_yes() is True
    assert _counted(False, False, False).says_yes() is False


def test_each_of_several_locks_is_kept_by_a_majority_of_its_own() -> None:
    count = _counted(
        [True, True, False], [True, False, False], [True, True, False], [True, False, True]
    )

    assert count.says_kept() == [True, None, False]
    with pytest.raises(ValueError, match="shorter"):
        _counted([True, True], [True]).says_kept()


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


def test_a_question_whose_answers_are_nonsense_is_over() -> None:
    question, bell = _question(_counted(None, asked=[0]), lambda count: bool(1 // 0))

    assert question.is_over is True
    assert bell.rings == 1
