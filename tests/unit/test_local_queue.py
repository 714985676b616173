"""The line of one process: in order, each turn passed on, and other processes let in at times."""

from __future__ import annotations

from typing import Any, cast
from weakref import ref

import pytest

from django_distlock import Lease, LockBackendError
from django_distlock.engine.local_queue import IN_A_ROW, SILENT, LocalQueue
from django_distlock.engine.values import Busy
from django_distlock.ground import clock


class Bell:
    """Counts how often it was rung."""

    def __init__(self, *, is_heard: bool = True, may_stall: bool = False) -> None:
        self.rings = 0
        self.may_stall = may_stall
        self._is_heard = is_heard

    def ring(self) -> bool:
        self.rings += 1
        return self._is_heard


class Lent:
    """Stands for a lease."""

    is_granted = True


@pytest.fixture
def queue() -> LocalQueue:
    return LocalQueue()


def _line(queue: LocalQueue, count: int) -> list[Bell]:
    bells = [Bell() for _ in range(count)]
    for bell in bells:
        queue.join("a", bell)
    return bells


def test_the_first_one_has_the_turn_at_once_and_rings_the_next_one_as_it_leaves(
    queue: LocalQueue,
) -> None:
    first, second, _ = bells = [Bell() for _ in range(3)]

    assert [queue.join("a", bell) for bell in bells] == [True, False, False]
    assert [queue.has_turn("a", bell) for bell in bells] == [True, False, False]

    queue.leave("a", first)

    assert queue.has_turn("a", second)
    assert [bell.rings for bell in bells] == [0, 1, 0]


@pytest.mark.parametrize("answer", ["granted", "refused"])
def test_a_failure_after_an_answer_is_a_single_one_again(queue: LocalQueue, answer: str) -> None:
    first, second, third = _line(queue, 3)
    error = LockBackendError("default", "the server hangs")

    queue.failed("a", error)
    queue.leave("a", first)
    if answer == "granted":
        queue.hold("a", second, cast("Any", ref(Lent())))
    else:
        queue.refused("a", Busy())
    queue.failed("a", error)
    assert queue.failure(third) is None

    queue.failed("a", error)
    assert str(queue.failure(third)) == str(error)


def test_who_cannot_hear_is_passed_over(queue: LocalQueue) -> None:
    first, deaf, third = Bell(), Bell(is_heard=False), Bell()
    for bell in (first, deaf, third):
        queue.join("a", bell)

    queue.leave("a", first)

    assert queue.has_turn("a", third)
    assert third.rings == 1


def test_a_line_that_is_empty_is_forgotten(queue: LocalQueue) -> None:
    for number in range(100):
        bell = Bell()
        queue.join(str(number), bell)
        queue.leave(str(number), bell)

    assert not queue.lines


def test_it_gives_way_after_many_in_a_row_if_others_want_the_lock(queue: LocalQueue) -> None:
    bells = _line(queue, 3 * IN_A_ROW + 3)
    gave_way = []
    for turn, bell in enumerate(bells[:-1]):
        gave_way.append(queue.gives_way("a"))
        if IN_A_ROW <= turn <= 2 * IN_A_ROW:  # nobody else wants it before and after
            queue.refused("a", Busy())
        queue.leave("a", bell)

    assert [turn for turn, gave in enumerate(gave_way) if gave] == [IN_A_ROW + 1, 2 * IN_A_ROW + 1]


def test_a_lease_that_is_not_granted_yet_holds_nothing(queue: LocalQueue) -> None:
    lease = Lent()
    lease.is_granted = False
    reference = queue.lines.setdefault("a", ref(cast("Lease", lease)))

    assert queue.held_by("a") is None

    queue.leave("a", cast("Any", reference))
    assert not queue.lines


def test_who_has_no_turn_or_has_left_is_not_noted_as_the_holder(queue: LocalQueue) -> None:
    lease = cast("Lease", Lent())
    bell = Bell()
    queue.hold("a", bell, ref(lease))
    assert not queue.lines

    _, second = _line(queue, 2)
    queue.hold("a", second, ref(lease))
    assert queue.held_by("a") is None


class TestASilentFirstCaller:
    def test_one_that_was_rung_and_does_not_ask_is_passed_over(
        self, queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, task, third = Bell(), Bell(may_stall=True), Bell()
        for bell in (first, task, third):
            queue.join("a", bell)
        queue.leave("a", first)
        assert not queue.pass_over("a", third)

        _let_pass(monkeypatch, SILENT)

        assert queue.pass_over("a", third)
        assert queue.has_turn("a", third)
        assert not queue.keeps_turn("a", task)
        queue.leave("a", third)
        assert queue.has_turn("a", task)

    def test_one_that_has_the_turn_again_before_it_goes_on_was_passed_over_all_the_same(
        self, queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The grant that it has perhaps got meanwhile was given back by the one that passed it over."""
        task, other = _behind_a_task(queue)
        _let_pass(monkeypatch, SILENT)
        assert queue.pass_over("a", other)
        queue.leave("a", other)

        assert not queue.keeps_turn("a", task)
        assert queue.was_passed_over("a", task)
        assert queue.has_turn("a", task)
        assert queue.keeps_turn("a", task)

    def test_one_that_may_be_silent_for_longer_is_not(
        self, queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task, other = _behind_a_task(queue)
        queue.expect("a", task, 60.0)

        _let_pass(monkeypatch, SILENT)
        assert not queue.pass_over("a", other)

        _let_pass(monkeypatch, 60.0)
        assert queue.pass_over("a", other)

    def test_a_thread_is_never_silent(
        self, queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second, third = _line(queue, 3)
        queue.leave("a", first)

        _let_pass(monkeypatch, 100 * SILENT)

        assert not queue.pass_over("a", third)
        assert queue.has_turn("a", second)


def _behind_a_task(queue: LocalQueue) -> tuple[Bell, Bell]:
    """Return a task, which has the turn, and one behind it."""
    task, other = Bell(may_stall=True), Bell()
    queue.join("a", task)
    queue.join("a", other)
    return task, other


def _let_pass(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    later = clock.wait_time() + seconds
    monkeypatch.setattr(clock, "wait_time", lambda: later)


def test_those_behind_rely_on_the_last_answer_while_it_is_young(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    _line(queue, 2)
    assert queue.answer("a", 1.0) is None

    queue.refused("a", Busy(remaining=3.0), 2)
    answer = queue.answer("a", 1.0)
    assert answer is not None
    assert (answer.busy, answer.limit) == (Busy(remaining=3.0), 2)

    _let_pass(monkeypatch, 1.0)
    assert queue.answer("a", 1.0) is None
