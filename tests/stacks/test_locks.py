"""What a lock does, on each kind of server, while packages watch its drivers."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from django_distlock import LockLost, LockNotAcquired, force_release, lock, locks
from django_distlock.signals import lock_extended
from tests.contract.rivals import Rival
from tests.fixtures.eventually import eventually

from .profiles import ALIASES
from .settings import STACK

if TYPE_CHECKING:
    from django_distlock.backends.base import BaseLockBackend

#: Long enough for memcached, and a third of it short enough for a test.
TTL = 3.0


@pytest.fixture(params=STACK.aliases)
def using(request: pytest.FixtureRequest) -> str:
    """An alias of DISTLOCK whose server runs."""
    alias = str(request.param)
    request.getfixturevalue(ALIASES[alias])
    return alias


@pytest.fixture
def rival(backend: BaseLockBackend, name: str) -> Rival:
    """Another holder, as the server sees it."""
    return Rival.of(backend, name)


def test_a_held_lock_is_refused_until_its_release(using: str, name: str, rival: Rival) -> None:
    with lock(name, using=using) as lease:
        assert lease.remaining > 0
        assert not rival.tries()

    assert rival.tries()
    with pytest.raises(LockNotAcquired), lock(name, using=using, timeout=0.2):
        pass
    rival.leaves()
    _cycle(name, using)


def test_a_waiter_gets_the_lock_when_it_is_released(using: str, name: str, rival: Rival) -> None:
    assert rival.tries()

    with ThreadPoolExecutor() as pool:
        waiter = pool.submit(_cycle, name, using)
        assert not waiter.done()
        rival.leaves()

        waiter.result(30)


def _cycle(name: str, using: str) -> None:
    with lock(name, using=using, timeout=20):
        pass


def test_a_lease_is_renewed(using: str, name: str) -> None:
    extended: list[str] = []

    def note(name: str, **_: object) -> None:
        extended.append(name)

    lock_extended.connect(note)
    try:
        with lock(name, using=using, ttl=TTL) as lease:
            eventually(lambda: name in extended or not locks[using].supports_extend, 10)
            lease.check()
    finally:
        lock_extended.disconnect(note)


def test_a_forced_release_is_told_to_the_holder(
    using: str, name: str, backend: BaseLockBackend
) -> None:
    if not backend.supports_listing:
        pytest.skip("it lists nothing")
    with pytest.raises(LockLost), lock(name, using=using) as lease:
        assert force_release(name, using=using)

        lease.check()


async def test_a_task_waits_and_a_cancelled_one_leaves_nothing(using: str, name: str) -> None:
    async with lock(name, using=using):
        waiter = asyncio.create_task(_acycle(name, using))
        cancelled = asyncio.create_task(_acycle(name, using))
        await asyncio.sleep(0.1)
        cancelled.cancel()

    await asyncio.wait_for(waiter, 30)
    await _acycle(name, using)


async def _acycle(name: str, using: str) -> None:
    async with lock(name, using=using, timeout=20):
        pass


def test_two_places_are_held_by_two(using: str, name: str) -> None:
    with ThreadPoolExecutor() as pool, lock(name, using=using, limit=2):
        assert pool.submit(_place, name, using, 10.0).result(30)
        with lock(name, using=using, limit=2, reentrant=False):
            assert not pool.submit(_place, name, using, 0.2).result(30)


def _place(name: str, using: str, timeout: float) -> bool:
    lease = lock(name, using=using, limit=2, timeout=timeout).acquire()
    if lease is None:
        return False
    lease.release()
    return True


def test_readers_hold_it_together(using: str, name: str, backend: BaseLockBackend) -> None:
    if not backend.supports_shared:
        pytest.skip("it knows no readers")
    reader = Rival.of(backend, name, shared=True)
    with lock(name, using=using, shared=True):
        assert reader.tries()
        reader.leaves()
