"""Several locks as one: all or none, within one timeout, in one order."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from django_distlock import Lease, Lock, LockNotAcquired, LockNotHeld, lock, lock_all
from django_distlock.backends.base import BaseLockBackend
from tests.fixtures.clocks import PutForward
from tests.fixtures.eventually import eventually

from .crew import ataken, elsewhere, start, together, waiting_for
from .faults import Faulty
from .profiles import needs
from .rivals import Rivals

pytestmark = needs("typical")


@pytest.fixture
def names(name: str) -> list[str]:
    return [f"{name}:{part}" for part in "abc"]


def test_all_are_held_and_all_are_freed(using: str, names: list[str], rival: Rivals) -> None:
    others = [rival(of=name) for name in names]

    with lock_all(*names, using=using) as leases:
        assert [lease.name for lease in leases] == names
        assert all(lease.held for lease in leases)
        assert not any(other.tries() for other in others)

    assert all(other.tries() for other in others)


@pytest.mark.parametrize("busy", [0, 1, 2])
def test_one_that_is_busy_leaves_none_taken(
    using: str, names: list[str], rival: Rivals, busy: int
) -> None:
    rival(of=names[busy]).takes()

    with pytest.raises(LockNotAcquired) as caught, lock_all(*names, using=using, timeout=0):
        pytest.fail("one of them is held by somebody else")

    assert caught.value.name == names[busy]
    assert not lock_all(*names, using=using, timeout=0).acquire()
    for number in {0, 1, 2} - {busy}:
        assert rival(of=names[number]).tries()


@needs("min_hold")
@pytest.mark.parametrize("is_async", [False, True])
def test_what_was_never_used_is_not_reserved(
    using: str, names: list[str], rival: Rivals, is_async: bool
) -> None:
    async def enter() -> None:
        async with lock_all(*names, using=using, timeout=0, min_hold=100):
            pytest.fail("one of them is held by somebody else")

    rival(of=names[2]).takes()
    with pytest.raises(LockNotAcquired) as caught:
        if is_async:
            asyncio.run(enter())
        lock_all(*names, using=using, timeout=0, min_hold=100).__enter__()

    assert caught.value.name == names[2]
    with lock(names[0], using=using, timeout=0), pytest.raises(LockNotAcquired):
        lock_all(*names, using=using, timeout=0, min_hold=100).__enter__()
    assert all(rival(of=name).tries() for name in names[:2])


@needs("min_hold")
def test_what_was_used_before_is_reserved(
    using: str, names: list[str], rival: Rivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = lock(names[0], using=using, min_hold=100), rival(of=names[1])
    other.takes()
    lease = first.acquire()
    assert lease

    def leave_and_refuse(self: Lock, timeout: float | None, **more: Any) -> Lease:
        if self.name == names[1]:
            elsewhere(lease.release)  # as a task that is cancelled while its thread waits
        return enter(self, timeout, **more)

    enter = Lock.enter
    monkeypatch.setattr(Lock, "enter", leave_and_refuse)
    with pytest.raises(LockNotAcquired):
        lock_all(*names[:2], using=using, timeout=0).__enter__()

    assert not rival(of=names[0]).tries()


def test_they_share_one_timeout(
    using: str, names: list[str], rival: Rivals, tick: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = rival(of=names[0], ttl=4 * tick), rival(of=names[2])
    first.takes()
    last.takes()
    enter, spent, given = Lock.enter, [0.0], list[float]()

    def noting(self: Lock, timeout: float | None, **more: Any) -> Lease:
        given.append(timeout or 0.0)
        began = time.monotonic()
        try:
            return enter(self, timeout, **more)
        finally:
            spent.append(spent[-1] + time.monotonic() - began)

    monkeypatch.setattr(Lock, "enter", noting)
    began = time.monotonic()

    assert not lock_all(*names, using=using, timeout=8 * tick).acquire()

    assert time.monotonic() - began >= 8 * tick
    for timeout, before in zip(given, spent, strict=False):
        assert timeout <= max(0.0, 8 * tick - before) + 0.001  # what is left, not the whole again


def test_of_locks_that_are_not_all_held_release_gives_back_the_others(
    using: str, names: list[str]
) -> None:
    both = lock_all(*names, using=using)
    leases = both.acquire()
    assert leases
    leases[1].release()

    with pytest.raises(LockNotHeld):
        both.release()

    assert not any(lease.held for lease in leases)


def test_they_are_taken_in_one_order_whatever_order_is_written(
    faulty: Faulty, using: str, names: list[str]
) -> None:
    with lock_all(*names, using=using) as leases:
        forwards = [lease.fencing_token or 0 for lease in leases]
    with lock_all(*reversed(names), using=using) as leases:
        backwards = [lease.fencing_token or 0 for lease in leases]

    assert forwards == sorted(forwards)
    assert backwards == sorted(backwards, reverse=True)
    assert faulty.calls["try_acquire"] == 6


def test_the_same_name_twice_is_one_lock(using: str, name: str) -> None:
    with lock_all(name, name, using=using) as (first, second):
        assert first is second
        assert first.held

    assert not first.held


@needs("leased")
@pytest.mark.parametrize("call", ["with", "acquire", "async with", "aacquire"])
def test_the_block_begins_only_while_all_are_held(
    backend: BaseLockBackend, names: list[str], rival: Rivals, put_forward: PutForward, call: str
) -> None:
    other = rival(of=names[2])
    other.takes()
    both = lock_all(names[0], names[2], using=backend.alias, ttl=100, renew=False, timeout=30)

    def held(leases: tuple[Lease, ...] | None) -> list[bool]:
        return [lease.held for lease in leases or ()]

    def take() -> list[bool]:
        if call == "with":
            with both as leases:
                return held(leases)
        acquired = held(both.acquire())
        both.release()
        return acquired

    async def atake() -> list[bool]:
        if call == "async with":
            async with both as leases:
                return held(leases)
        acquired = held(await both.aacquire())
        await both.arelease()
        return acquired

    is_task = call in {"async with", "aacquire"}
    taking = start((lambda: asyncio.run(atake())) if is_task else take)
    eventually(lambda: waiting_for(backend, names[2]))
    put_forward(150)
    other.leaves()

    assert taking.result(30) == [True, True]


def test_each_lock_has_terms_of_its_own(using: str, names: list[str], rival: Rivals) -> None:
    first, second, third = names
    mixed = lock_all(
        lock(third, using=using, limit=2),
        lock(second, using=using, purpose="its own"),
        first,
        using=using,
        purpose="that of names",
        timeout=0,
    )

    with mixed as leases:
        assert [lease.name for lease in leases] == [third, second, first]
        assert [lease.holder.purpose for lease in leases[1:]] == ["its own", "that of names"]
        assert leases[0].place in {0, 1}
        assert rival(of=third, limit=2).tries()
        assert not rival(of=third, limit=2).tries()
        assert not rival(of=first).tries()

    assert not any(lease.held for lease in leases)


@needs("shared")
def test_a_reader_and_a_writer_go_together(using: str, names: list[str], rival: Rivals) -> None:
    read, written = names[:2]
    reader = rival(of=read, shared=True)
    reader.takes()

    with lock_all(lock(read, using=using, shared=True), written, using=using, timeout=0) as leases:
        assert [lease.shared for lease in leases] == [True, False]
    reader.leaves()

    assert rival(of=read).tries()
    assert rival(of=written).tries()


async def test_a_place_that_is_busy_leaves_a_task_none(using: str, names: list[str]) -> None:
    first, last = names[:2]
    place = await ataken(last, using=using, limit=1, reentrant=False)
    both = lock_all(
        lock(last, using=using, limit=1, reentrant=False), first, using=using, timeout=0
    )

    assert await both.aacquire() is None
    assert not await lock(first, using=using).alocked()
    await place.arelease()
    leases = await both.aacquire()
    assert leases
    await both.arelease()

    assert [lease.place for lease in leases] == [0, None]
    assert not any(lease.held for lease in leases)


def test_a_name_on_two_aliases_is_two_locks(using: str, name: str, rival: Rivals) -> None:
    both = lock_all(lock(name, using="prefixed"), name, using=using, timeout=0)

    with both as (there, here):
        assert [there.using, here.using] == ["prefixed", using]
        assert not rival().tries()
    other = rival(site="prefixed")
    other.takes()
    assert both.acquire() is None
    assert not lock(name, using=using).locked()
    other.leaves()
    leases = both.acquire()

    assert leases
    both.release()
    assert not any(lease.held for lease in leases)


def test_aliases_of_one_server_do_not_deadlock(sites: list[str], names: list[str]) -> None:
    here, there = sites[:2]
    first, second = names[:2]

    def work(one: str, other: str) -> int:
        for _ in range(10):
            with lock_all(lock(first, using=one), lock(second, using=other), timeout=30):
                pass
        return 10

    pairs = [(here, there), (there, here)] * 2
    assert together(*(partial(work, *pair) for pair in pairs)) == [10] * 4
