"""The same thread or task enters again at no cost; every other one is excluded."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, closing, suppress
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from django_distlock import (
    Lease,
    LockDeadlock,
    LockLost,
    LockNotHeld,
    current_lease,
    lock,
    lock_all,
    locks,
)
from django_distlock.engine.holding import _held_here
from django_distlock.engine.registry import registry
from django_distlock.ground import sync_to_async as bridges
from tests.fixtures.eventually import aeventually, never

from .crew import can_take, elsewhere, taken
from .faults import Faulty, total
from .profiles import needs
from .rivals import Rivals

pytestmark = needs("typical")


async def _atry(using: str, name: str) -> bool:
    lease = await lock(name, using=using, timeout=0).aacquire()
    if lease:
        await lease.arelease()
    return lease is not None


def test_a_thread_enters_again_without_a_request(faulty: Faulty, using: str, name: str) -> None:
    with lock(name, using=using, renew=False) as outer:
        before = total(faulty.calls)
        with lock(name, using=using) as inner, lock(name, using=using) as innermost:
            assert outer is inner is innermost
        assert total(faulty.calls) == before
        assert outer.held

    assert not outer.held


@pytest.mark.parametrize(
    "through", [asyncio.ensure_future, partial(asyncio.wait_for, timeout=20), asyncio.gather]
)
async def test_a_task_enters_again_whoever_awaited_the_lease_for_it(
    using: str, name: str, through: Callable[[Any], Any]
) -> None:
    kept = await through(lock(name, using=using).aacquire())

    assert await _atry(using, name)
    assert await sync_to_async(can_take)(using, name)
    assert not await asyncio.create_task(_atry(using, name))
    lease = current_lease(name)
    assert kept
    assert lease
    await lease.arelease()


async def test_calls_that_were_dropped_before_they_began_leave_nothing(
    using: str, name: str
) -> None:
    both = lock_all(f"{name}:b", f"{name}:a", using=using)
    for _ in range(4):
        for call in (lock(name, using=using).aacquire, both.aacquire):
            with suppress(TimeoutError):
                await asyncio.wait_for(call(), 0)
        gc.collect()  # asyncio leaves some in cycles

    levels = contextvars.copy_context()[_held_here]
    # Other tests of this process have left notes that are not merged yet.
    ours = {locks[using].key_of(f"{name}{end}") for end in ("", ":a", ":b")}
    left = [known for level in levels for (_, key), known in level.items() if key in ours]
    assert sum(map(len, left)) < 4


async def test_a_task_enters_each_of_several_again(using: str, name: str) -> None:
    both = lock_all(f"{name}:b", f"{name}:a", using=using)
    leases = await asyncio.ensure_future(both.aacquire())

    assert leases
    assert [await _atry(using, lease.name) for lease in leases] == [True, True]
    await both.arelease()
    assert [lease.held for lease in leases] == [False, False]


def test_a_thread_enters_again_what_a_task_took_for_it(using: str, name: str) -> None:
    lease = asyncio.run(lock(name, using=using).aacquire())

    assert can_take(using, name)
    assert not elsewhere(lambda: can_take(using, name))
    assert lease
    lease.release()


def test_only_the_outermost_exit_frees_it(using: str, name: str, rival: Rivals) -> None:
    other, mine = rival(), lock(name, using=using)
    with mine:
        assert mine.acquire()
        mine.release()
        assert not other.tries()
        with pytest.raises(ZeroDivisionError), lock(name, using=using):
            raise ZeroDivisionError
        assert not other.tries()

    assert other.tries()


def test_it_is_reentrant_by_name_and_not_by_object_or_terms(using: str, name: str) -> None:
    with lock(name, using=using, ttl=3), lock(name, using=using, timeout=0, ttl=2) as inner:
        assert inner.ttl == 3
        with lock(f"{name}:other", using=using) as other:
            assert other is not inner


def test_another_thread_with_our_context_is_excluded(using: str, name: str) -> None:
    with lock(name, using=using):
        context = contextvars.copy_context()

        assert not elsewhere(lambda: context.run(can_take, using, name))


async def test_the_children_of_gather_are_excluded_and_with_reentrant_false_the_task_itself(
    using: str, name: str
) -> None:
    async with lock(name, using=using):
        assert not any(await asyncio.gather(*(_atry(using, name) for _ in range(3))))
        assert not await lock(name, using=using, reentrant=False, timeout=0).aacquire()


class TestOverTheBridgesOfAsgiref:
    """Who holds the lock and waits for the code on the other side lets it in; nobody else does."""

    @pytest.mark.parametrize("thread_sensitive", [True, False])
    async def test_a_task_lets_the_thread_in_that_it_awaits(
        self, using: str, name: str, thread_sensitive: bool
    ) -> None:
        across = sync_to_async(can_take, thread_sensitive=thread_sensitive)

        async with lock(name, using=using) as lease:
            assert await across(using, name)
            lease.check()

        assert not await lock(name, using=using).alocked()

    def test_a_thread_lets_the_task_in_that_it_waits_for(self, using: str, name: str) -> None:
        with lock(name, using=using) as lease:
            assert async_to_sync(_atry)(using, name)
            assert asyncio.run(_atry(using, name))
            lease.check()

        assert not lock(name, using=using).locked()

    async def test_an_async_generator_may_stand_in_between(self, using: str, name: str) -> None:
        async def inner() -> AsyncGenerator[bool, None]:
            try:
                for thread_sensitive in (True, False):
                    across = sync_to_async(can_take, thread_sensitive=thread_sensitive)
                    yield await across(using, name)
            finally:
                closed.append(await sync_to_async(can_take)(using, name))

        async def outer() -> AsyncGenerator[bool, None]:
            async with aclosing(inner()) as parts:
                async for part in parts:
                    yield part

        closed = list[bool]()
        async with lock(name, using=using):
            assert [part async for part in outer()] == [True, True]
            async with aclosing(outer()) as parts:
                assert await anext(parts, None)

        assert closed == [True, True]

    async def test_both_bridges_may_be_crossed_many_times(
        self, faulty: Faulty, using: str, name: str
    ) -> None:
        depth = 0

        async def in_a_task() -> int:
            async with lock(name, using=using, timeout=0):
                return await sync_to_async(in_a_thread)() if depth < 6 else depth

        def in_a_thread() -> int:
            nonlocal depth
            depth += 1
            with lock(name, using=using, timeout=0):
                return async_to_sync(in_a_task)()

        async with lock(name, using=using, renew=False):
            before = total(faulty.calls)
            assert await in_a_task() == 6
            assert total(faulty.calls) == before

    @pytest.mark.parametrize("thread_sensitive", [True, False])
    async def test_code_in_between_need_not_enter(
        self, using: str, name: str, thread_sensitive: bool
    ) -> None:
        across = sync_to_async(can_take, thread_sensitive=thread_sensitive)
        back = sync_to_async(async_to_sync(across), thread_sensitive=thread_sensitive)

        async with lock(name, using=using):
            assert await back(using, name)
            assert await sync_to_async(asyncio.run)(_atry(using, name))

        def hold() -> bool:
            with lock(name, using=using):
                return async_to_sync(across)(using, name)

        assert await asyncio.to_thread(hold)

    def test_a_thread_lets_in_what_is_called_deep_inside_its_task(
        self, using: str, name: str
    ) -> None:
        def across(work: Callable[..., bool]) -> Callable[..., bool]:
            return async_to_sync(sync_to_async(work, thread_sensitive=False))

        with lock(name, using=using):
            assert across(async_to_sync(_atry))(using, name)
            assert across(across(can_take))(using, name)

    def test_a_new_event_loop_for_an_inner_call_hides_nothing(self, using: str, name: str) -> None:
        def work() -> bool:
            async_to_sync(sync_to_async(int), force_new_loop=True)()
            return can_take(using, name)

        with lock(name, using=using):
            assert async_to_sync(sync_to_async(work, thread_sensitive=False))()

    async def test_an_inner_call_in_the_same_thread_that_is_over_hides_nothing(
        self, using: str, name: str
    ) -> None:
        def work() -> list[bool]:
            async_to_sync(sync_to_async(int))()
            return [can_take(using, name), async_to_sync(_atry)(using, name)]

        async with lock(name, using=using):
            assert await sync_to_async(work)() == [True, True]

    async def test_a_task_that_crosses_both_bridges_beside_the_holder_is_excluded(
        self, using: str, name: str
    ) -> None:
        may_leave = threading.Event()
        across = sync_to_async(async_to_sync(_atry), thread_sensitive=False)

        async with lock(name, using=using):
            beside = asyncio.create_task(across(using, name))
            beside.add_done_callback(lambda _: may_leave.set())
            await sync_to_async(may_leave.wait, thread_sensitive=False)(20)
            assert not await beside

    async def test_a_thread_whose_event_loop_cannot_say_who_awaits_it_is_told_at_once(
        self, using: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bridges, "LATE", 0.1)
        failures: Future[BaseException | None] = Future()

        def work() -> None:
            try:
                lock(name, using=using, timeout=None).acquire()
            except LockDeadlock as error:
                failures.set_result(error)

        async with lock(name, using=using):
            beside = asyncio.create_task(sync_to_async(work, thread_sensitive=False)())
            await asyncio.sleep(0)  # it has begun
            assert "is blocked" in str(failures.result(20))
            await beside

    async def test_the_holder_may_stand_in_between(self, using: str, name: str) -> None:
        def hold() -> bool:
            with lock(name, using=using):
                return async_to_sync(sync_to_async(can_take))(using, name)

        assert await sync_to_async(hold)()
        assert await sync_to_async(async_to_sync(sync_to_async(hold)))()

    async def test_a_task_that_was_let_in_and_has_ended_leaves_the_lock_to_the_holder(
        self, using: str, name: str
    ) -> None:
        recipe = lock(name, using=using)

        assert await recipe.aacquire()
        assert await sync_to_async(async_to_sync(recipe.aacquire))()

        await asyncio.to_thread(never, lambda: not recipe.locked(), 0.3)
        await recipe.arelease()
        assert await recipe.alocked()
        await sync_to_async(async_to_sync(recipe.arelease))()
        assert not await recipe.alocked()

    async def test_a_task_beside_the_one_that_waits_is_excluded(
        self, using: str, name: str
    ) -> None:
        async def beside() -> list[bool]:
            across = sync_to_async(can_take, thread_sensitive=False)
            direct, over = asyncio.create_task(_atry(using, name)), across(using, name)
            return [await direct, *await asyncio.gather(over, _atry(using, name))]

        async with lock(name, using=using):
            assert await beside() == [False, False, False]
            assert await sync_to_async(async_to_sync(beside))() == [False, False, False]
            assert not await asyncio.to_thread(can_take, using, name)

    def test_a_task_beside_the_one_that_a_thread_waits_for_and_another_thread_are_excluded(
        self, using: str, name: str
    ) -> None:
        async def beside() -> bool:
            return await asyncio.create_task(_atry(using, name))

        with lock(name, using=using):
            assert not async_to_sync(beside)()
            assert not asyncio.run(beside())
            context = contextvars.copy_context()
            assert not elsewhere(lambda: context.run(async_to_sync(_atry), using, name))

    def test_of_those_that_the_holder_waits_for_one_is_let_in_at_a_time(
        self, using: str, name: str
    ) -> None:
        inside, may_leave = asyncio.Event(), asyncio.Event()

        async def main() -> tuple[bool, bool]:
            async def beside() -> bool:
                await inside.wait()
                # In the thread that holds the lock, which runs it while it waits.
                entered = await sync_to_async(can_take)(using, name)
                may_leave.set()
                return entered

            other = asyncio.create_task(beside())
            async with lock(name, using=using) as lease:
                inside.set()
                await may_leave.wait()
                lease.check()
            return await other, await sync_to_async(can_take)(using, name)

        with lock(name, using=using):
            assert async_to_sync(main)() == (False, True)

    def test_a_thread_that_runs_other_code_while_it_waits_lets_nobody_in(
        self, using: str, name: str
    ) -> None:
        inside, may_leave = threading.Event(), threading.Event()

        def stay() -> None:
            with lock(name, using=using, timeout=0):
                inside.set()
                may_leave.wait(20)

        async def main() -> list[bool]:
            beside = asyncio.create_task(sync_to_async(stay)())
            await asyncio.to_thread(inside.wait, 20)
            entered = await _atry(using, name)
            may_leave.set()
            await beside
            return [entered, await _atry(using, name)]

        with lock(name, using=using):
            assert async_to_sync(main)() == [False, True]

    async def test_what_a_thread_runs_after_the_call_that_the_holder_awaits_is_excluded(
        self, using: str, name: str
    ) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        async with lock(name, using=using):
            beside = asyncio.create_task(asyncio.to_thread(can_take, using, name))
            await sync_to_async(time.sleep, thread_sensitive=False)(0.1)
            assert not await beside

    @pytest.mark.parametrize("is_closed", [True, False])
    def test_a_thread_of_an_event_loop_that_has_ended_is_excluded(
        self, using: str, name: str, is_closed: bool
    ) -> None:
        loop = asyncio.new_event_loop()
        with ThreadPoolExecutor(1) as pool, closing(loop), lock(name, using=using):
            call = sync_to_async(int, thread_sensitive=False, executor=pool)
            loop.run_until_complete(call())
            if is_closed:
                loop.close()
            context = contextvars.copy_context()
            assert not pool.submit(context.run, can_take, using, name).result()

    async def test_a_holder_that_leaves_while_its_thread_asks_lets_it_in_no_more(
        self, using: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ask, has_asked, has_left = bridges._ask, threading.Event(), threading.Event()

        def ask_slowly(*question: Any) -> bool:
            answer = ask(*question)
            has_asked.set()
            has_left.wait(20)
            return answer

        def work() -> None:
            try:
                entered.set_result(lock(name, using=using).acquire())
            except LockNotHeld:
                entered.set_result(None)

        async def hold() -> None:
            async with lock(name, using=using):
                await sync_to_async(work, thread_sensitive=False)()

        entered: Future[Lease | None] = Future()
        monkeypatch.setattr(bridges, "_ask", ask_slowly)
        task = asyncio.create_task(hold())
        await asyncio.to_thread(has_asked.wait, 20)
        task.cancel()
        await asyncio.wait([task], timeout=20)
        has_left.set()

        assert not await asyncio.wrap_future(entered)

    async def test_those_who_cross_exclude_each_other(self, using: str, name: str) -> None:
        inside: list[int] = []

        async def deepest(number: int) -> set[int]:
            async with lock(name, using=using, timeout=0):
                inside.append(number)
                await asyncio.sleep(0.001)
                return set(inside)

        def in_a_thread(number: int) -> set[int]:
            with lock(name, using=using, timeout=0):
                return async_to_sync(deepest)(number)

        async def work(number: int) -> set[int]:
            async with lock(name, using=using, timeout=60):
                seen = await sync_to_async(in_a_thread, thread_sensitive=number % 2 == 0)(number)
                inside.clear()
                return seen

        async def crowd(numbers: range) -> list[set[int]]:
            return await asyncio.gather(*map(work, numbers))

        seen = await asyncio.gather(
            crowd(range(5)), asyncio.to_thread(async_to_sync(crowd), range(5, 10))
        )

        assert [*seen[0], *seen[1]] == [{number} for number in range(10)]

    @pytest.mark.parametrize("leaves", [True, False], ids=["who leaves", "who only ends"])
    async def test_a_thread_that_outlives_the_task_that_let_it_in_keeps_it(
        self, using: str, name: str, rival: Rivals, leaves: bool
    ) -> None:
        other, entered, may_leave = rival(), threading.Event(), threading.Event()
        left: Future[bool] = Future()

        def stay() -> None:
            recipe = lock(name, using=using)
            recipe.acquire()
            entered.set()
            may_leave.wait(20)
            left.set_result(current_lease(name) is not None)
            recipe.release()

        async def cross() -> None:
            lease = await lock(name, using=using).aacquire()
            try:
                await sync_to_async(stay, thread_sensitive=False)()
            finally:
                if leaves and lease:
                    await lease.arelease()

        task = asyncio.create_task(cross())
        await asyncio.to_thread(entered.wait, 20)
        task.cancel()
        await asyncio.wait([task], timeout=20)
        del task
        registry._look()
        gc.collect()

        assert not await asyncio.to_thread(other.tries)
        may_leave.set()
        assert await asyncio.wrap_future(left)
        await asyncio.to_thread(other.takes, 20)


async def test_a_thread_that_outlives_the_task_it_was_started_by_is_excluded(
    using: str, name: str
) -> None:
    may_try = asyncio.Event()
    loop = asyncio.get_running_loop()
    tried: asyncio.Future[bool] = loop.create_future()
    kept: list[Lease | None] = []

    def outlive() -> None:
        asyncio.run_coroutine_threadsafe(may_try.wait(), loop).result(10)
        loop.call_soon_threadsafe(tried.set_result, can_take(using, name))

    async def take_and_end() -> None:
        kept.append(await lock(name, using=using).aacquire())
        loop.run_in_executor(None, contextvars.copy_context().run, outlive)

    await asyncio.create_task(take_and_end())
    # The task is garbage now.
    may_try.set()

    has_tried = await tried
    assert kept[0]
    # On a busy machine it may have been noticed by now that nobody will release it.
    assert has_tried is False or kept[0].lost
    with suppress(LockLost):
        await kept[0].arelease()


def test_a_released_lease_is_not_entered_again(using: str, name: str) -> None:
    first = taken(name, using=using)
    first.release()

    with lock(name, using=using, timeout=0) as second:
        assert second is not first


async def test_what_is_being_given_back_is_not_entered_again(
    faulty: Faulty, using: str, name: str
) -> None:
    mine = lock(name, using=using, timeout=0)
    lease = await mine.aacquire()
    assert lease
    hung = faulty.hang_replies("release")
    ending = asyncio.create_task(lease.arelease())
    await aeventually(lambda: faulty.answers["release"])

    again = await mine.aacquire()

    assert again is not lease
    faulty.heal()
    hung.set()
    await ending
    if again:
        await again.arelease()
