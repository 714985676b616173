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
from tests.fixtures.eventually import eventually

from .crew import held_in_thread, start, waiting_for
from .profiles import needs
from .rivals import Children

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
def test_another_process_is_let_in_after_one_hand_off(
    child: Children, backend: BaseLockBackend, name: str, wait: Wait, shared: bool
) -> None:
    names = [f"{name}:{number}" for number in range(ROUNDS)]
    other = child("stand_in_lines", names=names, using=backend.alias, shared=shared)
    overtaken = 0

    for each in names:
        with held_in_thread(lock(each, using=backend.alias, timeout=20)):
            waiting = [wait(backend, each, time.monotonic) for _ in range(2)]
            eventually(lambda: waiting_for(backend, each) == 2)  # noqa: B023
            other.tell("go")
            other.expect("queued")
        last = max(each.result(20) for each in waiting)
        overtaken += last < other.expect("held")["at"]

    # A waiter that stands still for too long is overtaken: that is no reason to fail.
    assert overtaken <= 1


@needs("shared")
@pytest.mark.parametrize("wait", [by_thread, by_task])
@needs("typical")
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
        for number in range(12):
            waiting.append(wait(backend, name, lambda number=number: served.append(number)))  # type: ignore[misc]
            eventually(lambda: waiting_for(backend, name) == len(waiting))
    for each in waiting:
        each.result(30)

    assert sum(other < one for one, other in pairwise(served)) <= 1
