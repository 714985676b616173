"""The first caller of a process asks the server for all of its line: what becomes of the others when it cannot."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from django_distlock import lock, locks
from django_distlock.backends.base import BaseLockBackend
from django_distlock.ground.holder import Holder
from tests.fixtures.eventually import eventually

from .crew import start, take_and_release, waiting_for
from .profiles import needs
from .rivals import Children, Rival, Rivals


class Loop:
    """An event loop in a thread of its own, which can be blocked."""

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self._is_over = asyncio.Event()
        runs = threading.Event()

        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            runs.set()
            await self._is_over.wait()

        self._thread = start(lambda: asyncio.run(serve()))
        assert runs.wait(20)

    def take(self, using: str, name: str, *, shared: bool = False) -> Future[bool]:
        async def take() -> bool:
            # A short ttl: what the server grants while the loop is blocked ends with it.
            async with lock(name, using=using, timeout=60, ttl=5, shared=shared) as lease:
                lease.check()
                other = locks[using].request(name, ttl=20, holder=Holder.current())
                return await locks[using].aprobe(other) is not None

        return asyncio.run_coroutine_threadsafe(take(), self.loop)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        is_blocked, may_go_on = threading.Event(), threading.Event()

        def block() -> None:
            is_blocked.set()
            may_go_on.wait(60)

        self.loop.call_soon_threadsafe(block)
        assert is_blocked.wait(20)
        try:
            yield
        finally:
            may_go_on.set()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._is_over.set)
        self._thread.result(20)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@needs("typical")
def test_a_task_whose_loop_is_blocked_holds_up_nobody(
    name: str, backend: BaseLockBackend, holder: Rival, loop: Loop, shared: bool
) -> None:
    task = loop.take(backend.alias, name, shared=shared)
    eventually(lambda: waiting_for(backend, name) == 1)

    def take() -> bool:
        with lock(name, using=backend.alias, timeout=30, shared=shared) as lease:
            return lease.held

    others = [start(take) for _ in range(3)]
    eventually(lambda: waiting_for(backend, name) == 4)

    with loop.blocked():
        holder.leaves()
        for each in others:
            assert each.result(30)
        assert not task.done()

    assert task.result(30)


@needs("typical")
def test_code_that_blocks_the_loop_of_the_first_caller_gets_the_lock_itself(
    using: str, name: str, backend: BaseLockBackend, holder: Rival, loop: Loop
) -> None:
    if backend.asks_database:
        pytest.skip("Django refuses that in the thread of a loop")
    task = loop.take(using, name)
    eventually(lambda: waiting_for(backend, name) == 1)
    outcome: Future[float] = Future()
    loop.loop.call_soon_threadsafe(lambda: outcome.set_result(take_and_release(using, name)))
    eventually(lambda: waiting_for(backend, name) == 2)

    holder.leaves()

    assert outcome.result(30)
    assert task.result(30)


@needs("fair", "cross_process")
@pytest.mark.slow
def test_a_process_of_impatient_callers_keeps_its_position(
    using: str, name: str, child: Children, backend: BaseLockBackend
) -> None:
    """Each of them waits for less long than one hold lasts, so that one that began at the end would never be served."""
    if backend.waiting.position_is_grant:
        pytest.skip("who gives up there loses the position, as the page says")
    busy = [child("hold_again_and_again", name=name, using=using, seconds=1.0) for _ in range(2)]
    for each in busy:
        each.expect("held")
    is_over = threading.Event()
    served = threading.Semaphore(0)

    def want() -> None:
        while not is_over.is_set():
            if (lease := lock(name, using=using, timeout=0.2).acquire()) is not None:
                lease.release()
                served.release()

    callers = [start(want) for _ in range(4)]
    got = served.acquire(timeout=40)
    is_over.set()
    for caller in callers:
        caller.result(20)
    assert got


@needs("fair")
def test_who_has_given_up_refuses_the_lock_to_nobody(using: str, name: str, rival: Rivals) -> None:
    for _ in range(20):
        holder = rival(ttl=60)
        holder.takes()
        assert lock(name, using=using, timeout=0.02).acquire() is None
        holder.leaves()

        lease = lock(name, using=using, timeout=0).acquire()

        assert lease is not None
        lease.release()
