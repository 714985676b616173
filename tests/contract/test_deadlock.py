"""Callers of one process that wait for each other: one is told at once, and the others go on."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from django_distlock import LockDeadlock, LockNotAcquired, lock, lock_all
from django_distlock.backends.base import BaseLockBackend
from tests.fixtures.eventually import eventually

from .crew import elsewhere, held_in_thread, start, taken, waiting_for
from .profiles import needs
from .rivals import Rivals

pytestmark = needs("typical")

#: Seconds that nobody waits for in vain: whoever is in a circle is told long before.
PATIENCE = 20.0

#: Makes a caller that takes the first lock, says so, and takes the second one once it may.
Cross = Callable[["Crossing", dict[str, Any], dict[str, Any]], "Future[str]"]


class Crossing:
    """Callers that take a lock each, and then, when all have theirs, one after the other a second one."""

    def __init__(self, backend: BaseLockBackend, count: int) -> None:
        self._backend = backend
        self._ready = threading.Barrier(count + 1)
        self._may_go_on = [threading.Event() for _ in range(count)]
        self._callers: list[tuple[Future[str], str]] = []

    def add(self, cross: Cross, first: dict[str, Any], second: dict[str, Any]) -> None:
        terms = {"timeout": PATIENCE, "using": self._backend.alias}
        outcome = cross(self, {**terms, **first}, {**terms, **second})
        self._callers.append((outcome, second["name"]))

    def outcomes(self) -> list[str]:
        """Let each wait for its second lock, the next one when the one before does; return what came of it."""
        self._ready.wait(PATIENCE)
        for number, (outcome, name) in enumerate(self._callers):
            waiting = waiting_for(self._backend, name)
            self._may_go_on[number].set()
            eventually(
                lambda: outcome.done() or waiting_for(self._backend, name) > waiting  # noqa: B023
            )
        return [outcome.result(2 * PATIENCE) for outcome, _ in self._callers]

    def pause(self, number: int) -> None:
        self._ready.wait(PATIENCE)
        assert self._may_go_on[number].wait(PATIENCE)

    def __len__(self) -> int:
        return len(self._callers)


def by_thread(crossing: Crossing, first: dict[str, Any], second: dict[str, Any]) -> Future[str]:
    number = len(crossing)

    def cross() -> str:
        with lock(**first):
            crossing.pause(number)
            try:
                with lock(**second):
                    return "held"
            except (LockDeadlock, LockNotAcquired) as error:
                return type(error).__name__

    return start(cross)


def by_task(crossing: Crossing, first: dict[str, Any], second: dict[str, Any]) -> Future[str]:
    number = len(crossing)

    async def cross() -> str:
        async with lock(**first):
            await asyncio.to_thread(crossing.pause, number)
            try:
                async with lock(**second):
                    return "held"
            except (LockDeadlock, LockNotAcquired) as error:
                return type(error).__name__

    return start(lambda: asyncio.run(cross()))


def circle(backend: BaseLockBackend, name: str, *crossers: Cross) -> list[str]:
    """Return what came of callers, each of whom wants the lock that the next one has."""
    crossing, names = (
        Crossing(backend, len(crossers)),
        [f"{name}:{i}" for i in range(len(crossers))],
    )
    for number, cross in enumerate(crossers):
        crossing.add(cross, {"name": names[number]}, {"name": names[number - 1]})
    return crossing.outcomes()


class TestCircles:
    @pytest.mark.parametrize(
        "crossers",
        [
            pytest.param([by_thread] * 2, id="two threads"),
            pytest.param([by_task] * 2, id="two tasks"),
            pytest.param([by_thread, by_task, by_thread], id="threads and a task"),
        ],
    )
    def test_the_last_one_is_told_and_the_others_go_on(
        self, backend: BaseLockBackend, name: str, crossers: Sequence[Cross]
    ) -> None:
        outcomes = circle(backend, name, *crossers)

        assert outcomes == ["held"] * (len(crossers) - 1) + ["LockDeadlock"]

    async def test_tasks_of_one_loop(self, using: str, name: str) -> None:
        both = asyncio.Barrier(2)

        async def cross(first: str, second: str) -> str:
            async with lock(first, using=using, timeout=PATIENCE):
                await both.wait()
                try:
                    async with lock(second, using=using, timeout=PATIENCE):
                        return "held"
                except LockDeadlock:
                    return "LockDeadlock"

        outcomes = await asyncio.gather(
            cross(f"{name}:a", f"{name}:b"), cross(f"{name}:b", f"{name}:a")
        )

        assert sorted(outcomes) == ["LockDeadlock", "held"]

    def test_by_the_locks_of_two_aliases(
        self, backend: BaseLockBackend, sites: list[str], name: str
    ) -> None:
        crossing = Crossing(backend, 2)
        one, other = {"name": f"{name}:a"}, {"name": f"{name}:b", "using": sites[-1]}

        crossing.add(by_thread, one, other)
        crossing.add(by_thread, other, one)

        assert crossing.outcomes() == ["held", "LockDeadlock"]

    def test_by_the_lock_of_somebody_who_stands_in_line_before(
        self, backend: BaseLockBackend, name: str
    ) -> None:
        """The one who is told holds a lock that another waiter of its own lock wants."""
        crossing = Crossing(backend, 3)
        hot, one, other = f"{name}:hot", f"{name}:one", f"{name}:other"

        crossing.add(by_thread, {"name": one}, {"name": hot})
        crossing.add(by_thread, {"name": other}, {"name": hot})
        crossing.add(by_thread, {"name": hot}, {"name": other})

        assert crossing.outcomes() == ["held", "held", "LockDeadlock"]

    def test_of_several_locks_at_once(self, using: str, name: str) -> None:
        first, second, third = f"{name}:1", f"{name}:2", f"{name}:3"
        ready = threading.Barrier(2)

        def cross(taken: str, *wanted: str) -> str:
            with lock(taken, using=using, timeout=PATIENCE):
                ready.wait(PATIENCE)
                try:
                    with lock_all(*wanted, using=using, timeout=PATIENCE):
                        return "held"
                except LockDeadlock:
                    return "LockDeadlock"

        crossing = [start(lambda: cross(third, first, second)), start(lambda: cross(second, third))]

        assert sorted(each.result(2 * PATIENCE) for each in crossing) == ["LockDeadlock", "held"]


@needs("shared")
class TestReaders:
    def test_two_that_hold_it_and_would_both_write(
        self, backend: BaseLockBackend, name: str
    ) -> None:
        crossing = Crossing(backend, 2)
        read, write = {"name": name, "shared": True}, {"name": name, "reentrant": False}

        # The one that is told leaves, and the other one still reads itself: nobody else frees that.
        crossing.add(by_thread, read, {**write, "timeout": 1})
        crossing.add(by_thread, read, {**write, "timeout": PATIENCE})

        assert crossing.outcomes() == ["LockNotAcquired", "LockDeadlock"]

    def test_one_of_many_readers_is_enough(self, backend: BaseLockBackend, name: str) -> None:
        crossing = Crossing(backend, 2)
        one, other = f"{name}:a", f"{name}:b"

        with held_in_thread(lock(one, using=backend.alias, shared=True)):
            crossing.add(by_thread, {"name": one, "shared": True}, {"name": other})
            crossing.add(by_thread, {"name": other}, {"name": one, "timeout": 0.5})
            assert crossing.outcomes() == ["held", "LockDeadlock"]

    @needs("spares_writers")
    def test_a_reader_that_is_served_after_a_writer_that_waits(
        self, backend: BaseLockBackend, name: str
    ) -> None:
        if not backend.waiting.writers_first:
            pytest.skip("the server alone knows the order")
        crossing = Crossing(backend, 3)
        one, other = f"{name}:a", f"{name}:b"

        crossing.add(by_thread, {"name": f"{name}:c"}, {"name": one})
        crossing.add(by_thread, {"name": other}, {"name": one, "shared": True})
        crossing.add(by_thread, {"name": one, "shared": True}, {"name": other})

        assert crossing.outcomes() == ["held", "held", "LockDeadlock"]

    def test_readers_that_cross_are_in_no_circle(self, backend: BaseLockBackend, name: str) -> None:
        crossing = Crossing(backend, 2)
        one = {"name": f"{name}:a", "shared": True}
        other = {"name": f"{name}:b", "shared": True}

        crossing.add(by_thread, one, other)
        crossing.add(by_thread, other, one)

        assert crossing.outcomes() == ["held", "held"]


class TestNoCircle:
    def test_a_single_try_is_refused_and_not_told_of_one(self, using: str, name: str) -> None:
        one, other = f"{name}:a", f"{name}:b"
        ready, over = threading.Barrier(2), threading.Event()

        def hold_and_wait() -> bool:
            with lock(one, using=using):
                ready.wait(PATIENCE)
                with lock(other, using=using, timeout=PATIENCE):
                    return over.is_set()

        with lock(other, using=using):
            waiting = start(hold_and_wait)
            ready.wait(PATIENCE)
            assert lock(one, using=using, timeout=0).acquire() is None
            over.set()

        assert waiting.result(PATIENCE)

    def test_who_waits_for_itself_waits(self, using: str, name: str, tick: float) -> None:
        with lock(name, using=using):
            assert lock(name, using=using, reentrant=False, timeout=tick).acquire() is None

    def test_who_has_given_up_is_waited_for_by_nobody(
        self, backend: BaseLockBackend, name: str, tick: float
    ) -> None:
        using, one, other = backend.alias, f"{name}:a", f"{name}:b"
        gave_up = threading.Event()

        def give_up() -> None:
            with lock(one, using=using):
                assert lock(other, using=using, timeout=tick).acquire() is None
                gave_up.set()
                eventually(lambda: waiting_for(backend, one))

        with lock(other, using=using):
            impatient = start(give_up)
            assert gave_up.wait(PATIENCE)
            with lock(one, using=using, timeout=PATIENCE) as lease:
                lease.check()

        impatient.result(PATIENCE)

    def test_a_lease_that_was_handed_on_is_released_by_another_thread(
        self, backend: BaseLockBackend, name: str
    ) -> None:
        using, one, other = backend.alias, f"{name}:a", f"{name}:b"
        handed = taken(one, using=using)
        # As a response that streams does.
        handed.caller = None

        def hold_and_wait() -> bool:
            with lock(other, using=using), lock(one, using=using, timeout=PATIENCE) as lease:
                return lease.held

        waiting = start(hold_and_wait)
        eventually(lambda: waiting_for(backend, one))

        def release() -> None:
            eventually(lambda: waiting_for(backend, other))
            handed.release()

        releasing = start(release)
        with lock(other, using=using, timeout=PATIENCE):
            pass

        assert waiting.result(PATIENCE)
        releasing.result(PATIENCE)


def test_callers_in_any_order_are_served_or_told_and_never_stuck(using: str, name: str) -> None:
    outcomes: list[str] = []

    def work(number: int) -> None:
        dice = random.Random(number)
        for _ in range(10):
            first, second = dice.sample(range(3), 2)
            with lock(f"{name}:{first}", using=using, timeout=60):
                try:
                    with lock(f"{name}:{second}", using=using, timeout=60):
                        outcomes.append("held")
                except LockDeadlock:
                    outcomes.append("told")

    workers = [start(lambda number=number: work(number)) for number in range(5)]  # type: ignore[misc]
    for worker in workers:
        worker.result(50)

    assert len(outcomes) == 50
    assert "held" in outcomes


def test_another_process_that_holds_it_is_in_no_circle_of_ours(
    using: str, name: str, tick: float, rival: Rivals
) -> None:
    one = rival(of=f"{name}:a")
    one.takes()

    def hold_and_wait() -> bool:
        with lock(f"{name}:b", using=using):
            return lock(f"{name}:a", using=using, timeout=5 * tick).acquire() is None

    waiting = start(hold_and_wait)

    assert elsewhere(lambda: lock(f"{name}:b", using=using, timeout=30).acquire())
    assert waiting.result(PATIENCE)
