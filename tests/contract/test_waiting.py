"""The line of one process: first come, first served, for threads and tasks; nobody blocks a loop."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import wait
from functools import partial

import pytest

from django_distlock import lock
from django_distlock.backends.base import BaseLockBackend
from tests.fixtures.eventually import aeventually, eventually

from .crew import held_in_thread, length_of_line, start, take_and_release
from .profiles import needs


class TestInOneProcess:
    @needs("typical")
    def test_threads_are_served_in_the_order_they_came(
        self, using: str, name: str, backend: BaseLockBackend
    ) -> None:
        served: list[int] = []

        def stand(number: int) -> None:
            with lock(name, using=using, timeout=30):
                served.append(number)

        with held_in_thread(lock(name, using=using)):
            waiters = []
            for number in range(12):
                waiters.append(start(partial(stand, number)))
                eventually(lambda: length_of_line(backend, name) > len(waiters))

        for waiter in waiters:
            waiter.result(30)
        assert served == list(range(12))

    @needs("typical")
    @pytest.mark.slow
    def test_who_gives_up_or_is_cancelled_holds_up_nobody(
        self, using: str, name: str, backend: BaseLockBackend
    ) -> None:
        async def cancelled() -> None:
            task = asyncio.create_task(lock(name, using=using).aacquire())
            await aeventually(lambda: length_of_line(backend, name) == 3)
            task.cancel()
            await asyncio.wait([task])

        with held_in_thread(lock(name, using=using)):
            impatient = start(lambda: lock(name, using=using, timeout=2).acquire())
            eventually(lambda: length_of_line(backend, name) == 2)
            asyncio.run(cancelled())
            patient = start(lambda: take_and_release(using, name))
            assert impatient.result(10) is None

        assert patient.result(10)
        assert length_of_line(backend, name) == 0

    @needs("typical")
    def test_a_waiter_whose_event_loop_is_gone_holds_up_nobody(
        self, using: str, name: str, backend: BaseLockBackend
    ) -> None:
        loop = asyncio.new_event_loop()
        waiting_for_ever = lock(name, using=using, timeout=None).aacquire()

        with held_in_thread(lock(name, using=using)):
            # Where one listens for all of them, it is this one.
            first = start(lambda: take_and_release(using, name))
            eventually(lambda: length_of_line(backend, name) == 2)
            ghost = loop.create_task(waiting_for_ever)
            while length_of_line(backend, name) < 3:
                loop.run_until_complete(asyncio.sleep(0.01))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            # Longer than the test waits: at its end the server is asked, whoever's turn it is.
            patient = start(lambda: take_and_release(using, name, timeout=15))
            eventually(lambda: length_of_line(backend, name) == 4)
        try:
            assert first.result(10)
            assert patient.result(10)
        finally:
            wait([patient])
            # Who looks after the garbage would be told of a task that is not done.
            ghost._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own switch
            waiting_for_ever.close()

    async def test_80_tasks_on_one_lock_are_all_served_and_block_no_loop(
        self, using: str, name: str
    ) -> None:
        served = 0
        gaps = [0.0]

        async def work() -> None:
            nonlocal served
            async with lock(name, using=using, timeout=40):
                served += 1

        async def tick_along() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.001)
                gaps.append(time.monotonic() - before)

        ticker = asyncio.create_task(tick_along())
        await asyncio.gather(*(work() for _ in range(80)))
        ticker.cancel()

        assert served == 80
        # One blocking wait for the lock would be longer.
        assert max(gaps) < 10

    @needs("typical")
    async def test_tasks_wait_in_no_thread_that_others_need(self, using: str, name: str) -> None:
        async with lock(name, using=using):
            waiters = [asyncio.create_task(lock(name, using=using).aacquire()) for _ in range(60)]
            await asyncio.sleep(0)

            # The default executor, and the line of releases, are as free as before.
            await asyncio.wait_for(asyncio.to_thread(int), 5)
            async with lock(f"{name}:other", using=using, timeout=5):
                pass
            for waiter in waiters:
                waiter.cancel()
            await asyncio.wait(waiters)
