"""First come, first served, whatever process the waiters are in, and whether they read or write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest

from django_distlock import Lease, lock
from django_distlock.backends.base import BaseLockBackend
from tests.fixtures.eventually import eventually, never
from tests.fixtures.processes import Child

from .crew import held_in_thread, start, waiting_for
from .faults import Faulty, total
from .profiles import lacks, needs

pytestmark = needs("fair")

ROUNDS = 5
#: Waits for a lock, and returns what is seen when it has it.
Wait = Callable[[BaseLockBackend, str, Callable[[], Any]], Future[Any]]


def by_thread(backend: BaseLockBackend, name: str, look: Callable[[], Any]) -> Future[Any]:
    def wait() -> Any:
        with lock(name, using=backend.alias, timeout=30):
            return look()

    return start(wait)


def by_task(backend: BaseLockBackend, name: str, look: Callable[[], Any]) -> Future[Any]:
    async def wait() -> Any:
        async with lock(name, using=backend.alias, timeout=30):
            return look()

    return start(lambda: asyncio.run(wait()))


@needs("cross_process")
@pytest.mark.parametrize("wait", [by_thread, by_task])
def test_who_waits_in_the_holders_process_is_served_before_another_that_came_later(
    child: Callable[..., Child], backend: BaseLockBackend, name: str, wait: Wait
) -> None:
    _another_comes_later(child, backend, name, wait, shared=False)


@needs("cross_process", "shared")
@pytest.mark.parametrize("wait", [by_thread, by_task])
def test_who_waits_in_the_holders_process_is_served_before_a_reader_that_came_later(
    child: Callable[..., Child], backend: BaseLockBackend, name: str, wait: Wait
) -> None:
    _another_comes_later(child, backend, name, wait, shared=True)


def _another_comes_later(
    child: Callable[..., Child], backend: BaseLockBackend, name: str, wait: Wait, *, shared: bool
) -> None:
    names = [f"{name}:{number}" for number in range(ROUNDS)]
    later = child("stand_in_lines", names=names, using=backend.alias, shared=shared)
    overtaken = 0

    for each in names:
        with held_in_thread(lock(each, using=backend.alias, timeout=20)):
            waiting = wait(backend, each, time.monotonic)
            eventually(lambda: waiting_for(backend, each))  # noqa: B023
            later.tell("go")
            later.expect("queued")
        overtaken += waiting.result(20) > later.expect("held")["at"]

    # A waiter that stands still for too long is overtaken: that is no reason to fail.
    assert overtaken <= 1


@needs("shared")
@pytest.mark.parametrize("wait", [by_thread, by_task])
def test_a_reader_does_not_overtake_a_writer_of_the_holders_process(
    backend: BaseLockBackend, name: str, wait: Wait
) -> None:
    served = list[str]()

    def read() -> Lease:
        with lock(name, using=backend.alias, shared=True, timeout=30) as lease:
            served.append("reader")
        return lease

    with held_in_thread(lock(name, using=backend.alias)):
        writing = wait(backend, name, lambda: served.append("writer"))
        eventually(lambda: waiting_for(backend, name) == 1)
        reading = start(read)
        eventually(lambda: waiting_for(backend, name) == 2)

    writing.result(20)
    reading.result(20)
    assert served == ["writer", "reader"]


@pytest.mark.parametrize("wait", [by_thread, by_task])
def test_many_of_one_process_are_served_in_the_order_they_came(
    backend: BaseLockBackend, name: str, wait: Wait
) -> None:
    served = list[int]()
    waiting = []

    with held_in_thread(lock(name, using=backend.alias)):
        for number in range(30):
            waiting.append(wait(backend, name, lambda number=number: served.append(number)))  # type: ignore[misc]
            eventually(lambda: waiting_for(backend, name) == len(waiting))
    for each in waiting:
        each.result(30)

    assert sum(other < one for one, other in pairwise(served)) <= 1


@pytest.mark.slow
@needs("cross_process")
@lacks("session_bound")  # where a place is kept by a connection, and nobody asks for long
@pytest.mark.parametrize("wait", [by_thread, by_task])
def test_many_of_one_process_keep_their_places_by_few_requests(
    child: Callable[..., Child], faulty: Faulty, name: str, wait: Wait
) -> None:
    """Longer than a waiter's place counts if it is not heard of."""
    crowd, span = 30, 3.5
    later = child("stand_in_lines", names=[name], using=faulty.alias)
    waiting = []

    with held_in_thread(lock(name, using=faulty.alias)):
        for number in range(1, crowd + 1):
            waiting.append(wait(faulty, name, time.monotonic))
            eventually(lambda: waiting_for(faulty, name) == number)  # noqa: B023
        later.tell("go")
        later.expect("queued")
        before = total(faulty.calls)
        never(lambda: waiting_for(faulty, name) < crowd, span)
        asked = total(faulty.calls) - before

    served = [each.result(30) for each in waiting]
    # A waiter that stands still for too long is overtaken: that is no reason to fail.
    assert sum(other < one for one, other in pairwise(served)) <= 1
    assert max(served) < later.expect("held")["at"]
    # Each of them would ask several times a second.
    assert asked < crowd * span
