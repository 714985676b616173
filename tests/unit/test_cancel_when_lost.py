"""cancel_when_lost: the body ends when its lease does, and other cancellations stay what they are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Never

import pytest
from django.http import StreamingHttpResponse
from django.test import AsyncRequestFactory

from django_distlock import Lease, LockLost, distributed_lock, force_release, lock, lock_all
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.engine.values import State
from tests.fixtures.eventually import aeventually

pytestmark = pytest.mark.usefixtures("memory")


async def for_ever() -> Never:
    await asyncio.Event().wait()
    raise AssertionError


async def lose(name: str = "a") -> None:
    assert await asyncio.to_thread(force_release, name)


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["b", "a"]], ids="-".join)
async def test_a_group_of_tasks_with_nothing_but_the_loss_is_the_loss(names: list[str]) -> None:
    """As of a TaskGroup whose tasks call check()."""

    watches = asyncio.Event()

    async def watch(lease: Lease) -> None:
        watches.set()
        try:
            await for_ever()
        finally:
            lease.check()

    with pytest.raises(LockLost) as caught:
        async with AsyncExitStack() as stack:
            leases = {}
            for name in names:
                block = lock(name, cancel_when_lost=True)
                leases[name] = await stack.enter_async_context(block)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            group.create_task(watch(leases["a"]))
            await watches.wait()
            await lose()
            await for_ever()

    assert caught.value.name == "a"
    # Since Python 3.13 a group cancels its task once more, and so the release of a lock between them.
    if names[-1] == "a" or sys.version_info < (3, 13):
        assert isinstance(caught.value.__cause__, BaseExceptionGroup)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_body_that_others_cancel_stays_cancelled_even_if_its_lease_is_lost_too(
    is_lost: bool,
) -> None:
    async def work() -> None:
        async with lock("a", cancel_when_lost=True) as lease:
            leases.append(lease)
            await for_ever()

    leases: list[Lease] = []
    working = asyncio.create_task(work())
    await aeventually(lambda: leases)
    if is_lost:
        leases[0].end(State.LOST, "somebody says so")
    working.cancel()

    with pytest.raises(asyncio.CancelledError):
        await working
    assert is_lost or not lock("a").locked()


async def test_a_body_that_goes_on_after_it_was_cancelled_is_told_at_its_end() -> None:
    with pytest.raises(LockLost):
        async with lock("a", cancel_when_lost=True):
            losing = asyncio.create_task(lose())
            with pytest.raises(asyncio.CancelledError):
                await for_ever()
            await losing

    task = asyncio.current_task()
    assert task
    assert not task.cancelling()


async def test_a_timeout_around_it_or_in_it_is_another_matter() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), lock("a", cancel_when_lost=True):
            await for_ever()
    async with lock("a", cancel_when_lost=True) as lease:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await for_ever()
        assert lease.held

    with pytest.raises(LockLost):
        async with asyncio.timeout(20), lock("a", cancel_when_lost=True), asyncio.timeout(20):
            losing = asyncio.create_task(lose())
            await for_ever()
    await losing


async def test_a_group_of_tasks_in_it_ends_and_one_around_it_is_told() -> None:
    ended: list[str] = []

    async def step(name: str) -> None:
        try:
            await for_ever()
        finally:
            ended.append(name)

    async def work() -> None:
        async with lock("a", cancel_when_lost=True), asyncio.TaskGroup() as group:
            group.create_task(step("one"))
            group.create_task(step("two"))
            group.create_task(lose())

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as outside:
            outside.create_task(work())

    assert caught.group_contains(LockLost)
    assert sorted(ended) == ["one", "two"]


async def test_of_two_locks_the_lost_one_ends_its_own_block() -> None:
    reached: list[str] = []
    async with lock("outer", cancel_when_lost=True) as outer:
        with pytest.raises(LockLost, match="'inner'"):
            async with lock("inner", cancel_when_lost=True):
                losing = asyncio.create_task(lose("inner"))
                await for_ever()
        assert outer.held
        await losing

    with pytest.raises(LockLost, match="'outer'"):
        async with lock("outer", cancel_when_lost=True):
            async with lock("inner", cancel_when_lost=True):
                losing = asyncio.create_task(lose("outer"))
                await for_ever()
            reached.append("after the inner block")
    await losing
    assert not reached
    assert not lock("inner").locked()


async def test_a_view_that_has_returned_its_stream_is_not() -> None:
    @distributed_lock("a", cancel_when_lost=True)
    async def view(request: object) -> StreamingHttpResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            await lose()
            yield b"two"

        return StreamingHttpResponse(parts())

    response = await view(AsyncRequestFactory().get("/"))

    with pytest.raises(LockLost):
        assert [part async for part in response] == [b"one", b"two"]


def test_what_is_no_block_of_a_task_is_refused(memory: LocMemBackend) -> None:
    mine = lock("a", cancel_when_lost=True)

    with pytest.raises(ValueError, match="not for with"), mine:
        pytest.fail("it began")
    with pytest.raises(ValueError, match="not for acquire"):
        mine.acquire()
    with pytest.raises(ValueError, match="not for acquire"):
        asyncio.run(mine.aacquire())
    with pytest.raises(ValueError, match="not for with"):
        lock_all("a", "b", cancel_when_lost=True).acquire()
    with pytest.raises(ValueError, match="not for acquire"):
        asyncio.run(lock_all("a", "b", cancel_when_lost=True).aacquire())
    assert not lock("a").locked()

    with pytest.raises(TypeError, match="plain"):

        @distributed_lock(cancel_when_lost=True)
        def plain() -> None: ...

    with pytest.raises(TypeError, match="generate"):

        @distributed_lock(cancel_when_lost=True)
        def generate() -> Iterator[None]:
            yield
