"""lead() and alead(): work again after a loss, end with the work, go on when a server has failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Never

import pytest

from django_distlock import (
    Lease,
    LockBackendError,
    LockLost,
    LockNotAcquired,
    alead,
    force_release,
    lead,
    lock,
)
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.engine import waiting
from django_distlock.signals import lock_busy
from django_distlock.testing import override_locks
from tests.contract.crew import elsewhere, held_in_thread, start, waiting_for
from tests.fixtures.eventually import aeventually, eventually, never

pytestmark = pytest.mark.usefixtures("memory")


async def for_ever() -> Never:
    await asyncio.Event().wait()
    raise AssertionError


def test_it_returns_what_the_work_returns_and_frees_the_lock() -> None:
    assert lead("poller", lambda lease: (lease.name, lease.held)) == ("poller", True)
    assert not lock("poller").locked()


def test_after_a_loss_it_leads_again() -> None:
    led: list[Lease] = []

    def work(lease: Lease) -> str:
        led.append(lease)
        if len(led) == 1:
            elsewhere(lambda: force_release("poller"))
        if len(led) == 2:
            elsewhere(lambda: force_release("poller"))
            lease.check()
        return "done"

    assert lead("poller", work) == "done"
    assert len({lease.fencing_token for lease in led}) == 3


def test_it_waits_while_somebody_else_leads_and_stops_when_it_is_told() -> None:
    stop = threading.Event()
    with held_in_thread(lock("poller")):
        leading = start(lambda: lead("poller", lambda lease: "led", stop=stop))
        waiting = start(lambda: lead("poller", lambda lease: "led too"))
        stop.set()
        assert leading.result(20) is None
        assert not waiting.done()
    assert waiting.result(20) == "led too"
    assert lead("poller", lambda lease: "led", stop=stop) is None


def test_while_it_waits_it_keeps_its_place_and_is_not_refused(
    memory: LocMemBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LOOK", 0.05)
    refused: list[str] = []

    def note(name: str, **_: object) -> None:
        refused.append(name)

    def wait() -> None:
        with lock("poller", timeout=None):
            order.append("waited")

    lock_busy.connect(note)
    order: list[str] = []
    with held_in_thread(lock("poller")):
        leading = start(
            lambda: lead("poller", lambda _: order.append("led"), stop=threading.Event())
        )
        eventually(lambda: waiting_for(memory, "poller") == 1)
        waits = start(wait)
        eventually(lambda: waiting_for(memory, "poller") == 2)
        never(leading.done, 0.3)
    leading.result(20)
    waits.result(20)
    lock_busy.disconnect(note)

    assert (order, refused) == (["led", "waited"], [])


@pytest.mark.parametrize(
    "error",
    [RuntimeError("so it is"), LockNotAcquired("b"), LockLost("b", "it is"), LockBackendError("b", "it is down")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_an_error_of_the_work_comes_out(error: Exception) -> None:
    def work(lease: Lease) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        lead("poller", work)
    assert caught.value is error

    async def awork(lease: Lease) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        asyncio.run(alead("poller", awork))
    assert caught.value is error
    assert not lock("poller").locked()


def test_the_loss_of_another_lock_comes_out_though_this_one_is_lost_too() -> None:
    def work(lease: Lease) -> None:
        eventually(lambda: lease.lost)
        raise LockLost("b", "it is")

    with pytest.raises(LockLost, match="'b'"):
        lead("poller", work, ttl=0.3, renew=False)

    async def awork(lease: Lease) -> None:
        with suppress(asyncio.CancelledError):
            await watch(lease)
        raise LockLost("b", "it is")

    with pytest.raises(LockLost, match="'b'"):
        asyncio.run(alead("poller", awork, ttl=0.3, renew=False))


def test_a_function_that_only_makes_a_coroutine_is_refused() -> None:
    async def work(lease: Lease, shop: int) -> None: ...

    def parts(lease: Lease) -> Iterator[Lease]:
        yield lease

    for function in (parts, lambda lease: work(lease, 7)):
        with pytest.raises(TypeError, match=r"which would run without the lock; finish the work"):
            lead("poller", function)
    with pytest.raises(TypeError, match=r"functools.partial\(work, ...\) in place of a lambda"):
        asyncio.run(alead("poller", lambda lease: work(lease, 7)))
    asyncio.run(alead("poller", partial(work, shop=7), cancel_when_lost=True))
    assert not lock("poller").locked()


def test_a_server_that_fails_is_asked_again(
    memory: LocMemBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = memory.try_acquire, []

    def fail(*args: object, **kwargs: object) -> object:
        tries.append(args)
        if len(tries) % 4:
            raise LockBackendError("default", "it is down")
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "try_acquire", fail)
    assert lead("poller", lambda lease: "led") == "led"
    tried = len(tries)
    assert tried > 1

    async def work(lease: Lease) -> str:
        return "led"

    assert asyncio.run(alead("poller", work)) == "led"
    assert len(tries) > tried + 1


@override_locks(busy=True)
def test_it_does_not_spin_where_every_lock_is_refused_at_once() -> None:
    stop = threading.Event()
    refused: list[str] = []

    def note(name: str, **_: object) -> None:
        refused.append(name)

    async def awork(lease: Lease) -> None:
        await for_ever()

    async def until_stopped() -> bool:
        task = asyncio.create_task(alead("poller", awork))
        await asyncio.to_thread(stop.wait)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    lock_busy.connect(note)
    leading = start(lambda: lead("poller", lambda lease: "led", stop=stop))
    task_leading = start(lambda: asyncio.run(until_stopped()))
    try:
        eventually(lambda: len(refused) > 4)
        never(lambda: len(refused) > 100, 0.5)
    finally:
        stop.set()

    assert leading.result(20) is None
    assert task_leading.result(20)
    lock_busy.disconnect(note)


async def test_a_task_is_cancelled_at_a_loss_and_leads_again() -> None:
    led: list[Lease] = []

    async def work(lease: Lease) -> str:
        led.append(lease)
        if len(led) < 3:
            await for_ever()
        return "done"

    leading = asyncio.create_task(alead("poller", work))
    for number in (1, 2):
        await aeventually(lambda: len(led) == number)  # noqa: B023 - it is called at once
        await asyncio.to_thread(force_release, "poller")

    assert await leading == "done"
    assert not await lock("poller").alocked()


async def test_a_task_that_waits_or_leads_ends_when_it_is_cancelled() -> None:
    led: list[Lease] = []

    async def work(lease: Lease) -> None:
        led.append(lease)
        await for_ever()

    first = asyncio.create_task(alead("poller", work))
    await aeventually(lambda: led)
    second = asyncio.create_task(alead("poller", work))
    for task in (second, first):
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(led) == 1
    await aeventually(lambda: not lock("poller").locked())


async def watch(lease: Lease) -> Never:
    while True:
        lease.check()
        await asyncio.sleep(0.01)


async def watch_in_a_group(lease: Lease) -> None:
    async with asyncio.TaskGroup() as outer:
        outer.create_task(watch(lease))
        async with asyncio.TaskGroup() as inner:
            inner.create_task(watch(lease))


def test_a_loss_in_a_group_of_tasks_is_a_loss() -> None:
    led: list[Lease] = []

    async def awork(lease: Lease) -> str:
        led.append(lease)
        if len(led) == 1:
            await watch_in_a_group(lease)
        return "led again"

    def work(lease: Lease) -> str:
        return asyncio.run(awork(lease))

    for cancels in (True, False):
        lost = alead("poller", awork, ttl=0.3, renew=False, cancel_when_lost=cancels)
        assert asyncio.run(lost) == "led again"
        led.clear()
    assert lead("poller", work, ttl=0.3, renew=False) == "led again"


def test_a_group_with_another_error_comes_out() -> None:
    async def fail(lease: Lease) -> None:
        with suppress(LockLost):
            await watch(lease)
        raise RuntimeError("so it is")

    async def awork(lease: Lease) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(lease))
            group.create_task(watch_in_a_group(lease))

    def work(lease: Lease) -> None:
        asyncio.run(awork(lease))

    with pytest.raises(BaseExceptionGroup) as caught:
        lead("poller", work, ttl=0.3, renew=False)
    assert caught.group_contains(RuntimeError)
    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(alead("poller", awork, ttl=0.3, renew=False))
    assert caught.group_contains(RuntimeError)


async def test_it_waits_for_ever_so_a_timeout_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"write stop=threading\.Event\(\), not timeout"):
        lead("poller", lambda lease: None, timeout=3)
    with pytest.raises(TypeError, match="cancel its task, and leave out timeout"):
        await alead("poller", for_ever, timeout=3)  # type: ignore[arg-type]  # it is not called


def test_several_may_lead_with_a_limit() -> None:
    go = threading.Event()
    led: list[int | None] = []

    def work(lease: Lease) -> None:
        led.append(lease.place)
        go.wait(20)

    both = [start(lambda: lead("poller", work, limit=2)) for _ in range(2)]
    eventually(lambda: len(led) == 2)
    go.set()
    for each in both:
        each.result(20)
    assert sorted(map(str, led)) == ["0", "1"]
