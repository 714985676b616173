"""The checker of torture runs, on histories made by hand: it passes good ones, and finds what is wrong in others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.torture.checker import LATE, MORE, YOUNG, Finding, Verdict, check
from tests.torture.history import SUFFIX, Event, Writer, read


class History:
    """Events of attempts, faults and rows, in the order of time."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def event(self, at: float, kind: str, worker: str = "w1", **details: Any) -> History:
        self._events.append(Event(at, kind, worker, details))
        return self

    def holding(
        self, id_: str, asked: float, got: float, until: float, token: int | None, **terms: Any
    ) -> History:
        """Add a holder who is sure of the lock from *got* to *until*."""
        place, worker = terms.pop("place", None), terms.pop("worker", f"w{id_}")
        known = {"lock": "a", "timeout": 1.0, "shared": False, **terms}
        self.event(asked, "asked", worker, id=id_, **known)
        self.event(got, "got", worker, id=id_, token=token, place=place)
        self.event(got, "checked", worker, id=id_)
        self.event(until, "checked", worker, id=id_)
        return self.event(until, "left", worker, id=id_, how="released")

    def fault(self, kind: str, began: float, ended: float, effect: str, **more: Any) -> History:
        known = {"what": kind, "began": began, "ended": ended, "effect": effect, **more}
        return self.event(ended, "fault", "nemesis", **known)

    @property
    def events(self) -> Sequence[Event]:
        return sorted(self._events, key=lambda event: event.at)

    def verdict(self, *, unfenced: bool = False) -> Verdict:
        return check(self.events, unfenced=unfenced)

    @property
    def broken(self) -> list[str]:
        return [finding.rule for finding in self.verdict().findings]


@pytest.fixture
def history() -> History:
    return History()


def test_holders_one_after_the_other_break_nothing(history: History) -> None:
    history.holding("1", 0, 1, 2, token=10).holding("2", 0.5, 2.5, 3, token=11)

    verdict = history.verdict()

    assert verdict.findings == []
    assert (verdict.grants, verdict.longest_gap) == (2, 1.5)


def test_two_holders_that_are_sure_at_once_are_found(history: History) -> None:
    history.holding("1", 0, 1, 3, token=10).holding("2", 1.5, 2, 4, token=11)

    [finding] = history.verdict().findings

    assert finding == Finding(
        "exclusion",
        "'a' had two holders for 1.0000 s: w1's 1 (token 10), sure from 1.0000 to 3.0000, "
        "and w2's 2 (token 11), sure from 2.0000 to 4.0000",
    )


def test_a_holder_between_others_hides_no_pair_and_readers_are_none(history: History) -> None:
    history.holding("1", 0, 1, 9, token=10, shared=True)
    history.holding("2", 1, 2, 3, token=11, shared=True)
    history.holding("3", 4, 5, 6, token=12)

    [finding] = history.verdict().findings

    assert "w1's 1" in finding.text
    assert "w3's 3" in finding.text


def test_places_of_a_lock_have_one_holder_each(history: History) -> None:
    history.holding("1", 0, 1, 3, token=10, place=0).holding("2", 1, 2, 4, token=10, place=1)
    assert history.broken == []

    history.holding("3", 1, 2, 3, token=12, place=1)
    assert history.broken == ["exclusion"]


def test_no_place_is_beyond_the_limit(history: History) -> None:
    history.holding("1", 0, 1, 3, token=10, place=1, limit=2)
    assert history.broken == []

    history.holding("2", 0, 1, 3, token=11, place=2, limit=2)
    assert history.broken == ["exclusion"]


def test_a_holder_that_never_checked_was_never_sure(history: History) -> None:
    history.event(0, "asked", "w1", id="1", lock="a", timeout=1.0, shared=False)
    history.event(9, "got", "w1", id="1", token=10, place=None)
    history.holding("2", 1, 2, 4, token=11)

    assert history.broken == []


@pytest.mark.parametrize(
    ("effect", "told", "broken"), [("F", 1.5, 0), ("B", 1.5, 0), ("F", 0.4, 1), ("X", 9, 1)]
)
def test_two_holders_are_allowed_after_some_faults_until_the_first_is_told(
    history: History, effect: str, told: float, broken: int
) -> None:
    history.holding("1", 0, 1, 3, token=10)
    history.fault("the server lost its data", 1.4, 1.6, effect, told=told)
    history.holding("2", 1.8, 2, 4, token=11)

    verdict = history.verdict()

    assert len(verdict.findings) == broken
    assert verdict.allowed_pairs == 1 - broken


@pytest.mark.parametrize(("began", "ended"), [(-2, -1), (2.5, 2.7)])
def test_a_fault_before_or_after_both_grants_excuses_nothing(
    history: History, began: float, ended: float
) -> None:
    history.holding("1", 0, 1, 3, token=10).holding("2", 1.5, 2, 4, token=11)
    history.fault("the server lost its data", began, ended, "F", told=9)

    assert history.broken == ["exclusion"]


def test_a_token_that_falls_is_found(history: History) -> None:
    history.holding("1", 0, 1, 2, token=11).holding("2", 2.5, 3, 4, token=10)

    [finding] = history.verdict().findings

    assert finding == Finding(
        "tokens", "'a': w2's 2 (token 10) asked after w1's 1 (token 11) was granted"
    )


def test_a_token_that_falls_behind_several_others_is_found(history: History) -> None:
    history.holding("1", 0, 1, 2, token=20).holding("2", 0.5, 2.5, 2.6, token=30)
    history.holding("3", 2.7, 3, 4, token=10)

    assert history.broken == ["tokens", "tokens"]


def test_tokens_of_those_who_asked_at_the_same_time_may_have_any_order(history: History) -> None:
    history.holding("1", 0, 1, 2, token=11).holding("2", 0.5, 3, 4, token=10)

    assert history.broken == []


def test_a_token_that_is_given_twice_is_found(history: History) -> None:
    history.holding("1", 0, 1, 2, token=10).holding("2", 0.5, 3, 4, token=10)

    assert history.broken == ["tokens"]


@pytest.mark.parametrize(
    ("faults", "broken"),
    [
        ({"eviction, `FLUSHALL`": 2.1, "server's clock is set back": 2.3}, 0),
        ({"eviction, `FLUSHALL`": 2.1}, 1),
        ({"server's clock is set back": 2.1}, 1),
        ({"eviction, `FLUSHALL`": 2.1, "server's clock is set back": 9}, 1),
        ({"eviction, `FLUSHALL`": 2.1, "server's clock is set back": -1}, 0),
        ({"eviction, `FLUSHALL`": 2.1, "server's clock is set back": -5}, 1),
    ],
)
def test_a_token_may_fall_if_the_record_is_lost_and_the_clock_is_set_back(
    history: History, faults: dict[str, float], broken: int
) -> None:
    history.holding("1", 0, 1, 2, token=11).holding("2", 2.5, 3, 4, token=10)
    for kind, at in faults.items():
        history.fault(kind, at, at + 0.1, "F")

    assert history.broken == ["tokens"] * broken


def test_holders_without_tokens_are_not_compared(history: History) -> None:
    history.holding("1", 0, 1, 2, token=None).holding("2", 2.5, 3, 4, token=None)

    assert history.broken == []


def test_an_attempt_without_an_outcome_is_found_unless_its_worker_was_killed(
    history: History,
) -> None:
    history.event(0, "asked", "w1", id="1", lock="a", timeout=1.0, shared=False)
    assert history.broken == []

    history.event(5, "ended", "w1")
    assert history.broken == ["progress"]


def test_a_wait_that_outlasts_its_timeout_is_found_unless_the_worker_was_stopped(
    history: History,
) -> None:
    late = 1.0 + LATE + 2.0
    history.event(0, "asked", "w1", id="1", lock="a", timeout=1.0, shared=False)
    history.event(late, "refused", "w1", id="1")
    assert history.broken == ["progress"]

    history.fault("holder stopped for longer", 1.0, 4.0, "V", target="w1")
    assert history.broken == []


def test_a_lock_that_nobody_gets_after_the_last_fault_is_found(history: History) -> None:
    history.holding("1", 0, 1, 2, token=10).event(3, "calm", "nemesis")
    assert history.broken == []  # nobody wanted it

    history.event(4, "asked", "w2", id="2", lock="a", timeout=1.0, shared=False)
    history.event(5, "refused", "w2", id="2")
    assert history.broken == ["progress"]

    history.holding("3", 2, 2.5, 6, token=11)
    assert history.broken == []


def test_a_lock_that_is_not_free_at_the_end_is_found(history: History) -> None:
    history.event(3, "stuck", "operator", lock="a", why="busy for 3 s")

    assert [*map(str, history.verdict().findings)] == [
        "progress: 'a' was not free at the end: busy for 3 s"
    ]


@pytest.mark.parametrize(("outcome", "broken"), [("got", 1), ("refused", 1), ("failed", 0)])
def test_an_answer_while_the_server_hangs_is_found(
    history: History, outcome: str, broken: int
) -> None:
    history.fault("server hangs", 1, 4, "X")
    history.event(2, "asked", "w1", id="1", lock="a", timeout=0.0, shared=False)
    history.event(3, outcome, "w1", id="1", token=1, error="LockBackendError")

    assert history.broken == ["truth"] * broken


def test_a_caller_of_the_same_process_may_be_in_the_way_while_the_server_hangs(
    history: History,
) -> None:
    history.fault("server hangs", 1, 4, "X")
    history.holding("1", 0, 0.5, 2.5, token=1, worker="w1")
    history.event(2, "asked", "w1", id="2", lock="a", timeout=0.0, shared=False)
    history.event(3, "refused", "w1", id="2")

    assert history.broken == []


def test_so_may_a_holder_whose_process_is_killed_before_its_release_has_an_answer(
    history: History,
) -> None:
    history.fault("server hangs", 1, 4, "X")
    history.event(0, "asked", "w1", id="1", lock="a", timeout=1.0, shared=False)
    history.event(0.5, "got", "w1", id="1", token=1)
    history.event(2, "asked", "w1", id="2", lock="a", timeout=0.0, shared=False)
    history.event(3, "refused", "w1", id="2")

    assert history.broken == []


def test_a_lost_update_of_a_claimed_row_is_found(history: History) -> None:
    for kind, counted in {"claimed": 9, "unfenced": 7}.items():
        history.event(9, "row", "operator", lock="a", row=kind, receipts=10, counted=counted)

    verdict = history.verdict()

    assert [*map(str, verdict.findings)] == [
        "lost updates: the claimed row of 'a' shows 9 of 10 updates"
    ]
    assert verdict.written == {"claimed": 10, "unfenced": 10}
    assert verdict.lost == {"claimed": 1, "unfenced": 3}
    assert len(history.verdict(unfenced=True).findings) == 2


def test_an_error_that_is_none_of_ours_is_found(history: History) -> None:
    history.event(1, "broke", "w1", id="1", text="OperationalError")

    assert history.broken == ["errors"]


@pytest.mark.parametrize("what", ["descriptors", "threads", "memory"])
def test_a_process_that_uses_more_and_more_is_found(history: History, what: str) -> None:
    few = {"descriptors": 10, "threads": 10, "memory": 50_000}
    history.event(0, "began", "w1", pid=1)
    for second in range(60):
        more = {what: few[what] + second * (MORE if what != "memory" else 1000)}
        history.event(YOUNG + second, "uses", "w1", **{**few, **more})
    assert history.broken == []  # it was killed, perhaps in the midst of something

    history.event(99, "ended", "w1")
    assert history.broken == ["resources"]


def test_errors_and_faults_are_counted(history: History) -> None:
    history.event(0, "asked", "w1", id="1", lock="a", timeout=1.0, shared=False)
    history.event(1, "failed", "w1", id="1", error="LockBackendError")
    history.fault("server hangs", 0, 2, "X").event(3, "stale", "w1", id="1")

    verdict = history.verdict()

    assert verdict.outcomes == {"failed": 1}
    assert verdict.errors == {"LockBackendError": 1}
    assert verdict.faults == {"server hangs": 1}
    assert verdict.refused_writes == 1


def test_what_is_written_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    first, second = Writer(tmp_path, "w1"), Writer(tmp_path, "w2")
    first.write("asked", id="1")
    second.write("calm", after=["a"])
    second.write("checked", at=1.0, id="1")
    first.close()
    second.close()

    events = read(tmp_path)

    assert [(event.kind, event.worker) for event in events] == [
        ("checked", "w2"),
        ("asked", "w1"),
        ("calm", "w2"),
    ]
    assert events[0].at == 1.0
    assert events[2]["after"] == ["a"]


def test_half_a_line_of_a_killed_process_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / f"w1{SUFFIX}"
    path.write_text('{"at": 1.0, "kind": "began"}\n{"at": 2.0, "ki')

    assert [event.kind for event in read(tmp_path)] == ["began"]
