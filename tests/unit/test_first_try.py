"""A first try that fails: what it leaves behind once the second one is granted."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import LockOutcomeUnknown, lock
from django_distlock.exceptions import Contended
from django_distlock.ground import clock
from tests.fixtures.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_distlock import Lease, LockBackendError
    from django_distlock.backends.locmem import LocMemBackend
    from tests.fixtures.clocks import StoppedClock


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def _take() -> Lease | None:
    return lock("a", timeout=5).acquire()


def _atake() -> Lease | None:
    async def take() -> Lease | None:
        return await lock("a", timeout=5).aacquire()

    return asyncio.run(take())


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("error", [Contended, LockOutcomeUnknown])
@pytest.mark.parametrize("take", [_take, _atake])
def test_its_error_keeps_no_lease_alive(
    memory: LocMemBackend, monkeypatch: pytest.MonkeyPatch, error: type[LockBackendError], take: Any
) -> None:
    tries, ask = [], memory.try_acquire

    def fail_once(*args: Any, **wishes: Any) -> Any:
        tries.append(error)
        if len(tries) == 1:
            raise error("default", "this time only")
        return ask(*args, **wishes)

    monkeypatch.setattr(memory, "try_acquire", fail_once)
    lease = take()
    known = lease.ref
    lease.release()
    del lease

    assert len(tries) == 2
    # The clock thread refers to all leases for a moment, once a second; without the GIL, other threads do, too.
    eventually(lambda: known() is None)


@pytest.mark.parametrize(("timeout", "tries"), [(0, 1), (1.5, 1), (2.5, 2), (None, 2)])
def test_one_that_took_long_is_repeated_if_as_much_time_is_left(
    memory: LocMemBackend,
    monkeypatch: pytest.MonkeyPatch,
    wait_clock: StoppedClock,
    timeout: float | None,
    tries: int,
) -> None:
    monkeypatch.setattr(clock, "lease_time", wait_clock)
    asked = []

    def hang(*args: Any, **wishes: Any) -> Any:
        asked.append(args)
        wait_clock.now += 1.0
        raise LockOutcomeUnknown("default", "no answer within a second")

    monkeypatch.setattr(memory, "try_acquire", hang)

    with pytest.raises(LockOutcomeUnknown):
        lock("a", timeout=timeout).acquire()
    assert len(asked) == tries
