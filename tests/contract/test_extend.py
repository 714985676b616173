"""extend() and min_hold: how long a name stays taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from django_distlock import LockLost, LockNotAcquired, LockNotHeld, lock
from django_distlock.lock import LockTerms
from tests.fixtures.eventually import eventually, never

from .crew import start
from .faults import Faulty
from .profiles import lacks, needs
from .rivals import Rival


@lacks("whole_seconds")
@needs("leased")
def test_extend_lets_it_live_longer_here_and_on_the_server(
    using: str, name: str, tick: float, rival: Callable[..., Rival]
) -> None:
    other = rival()

    with lock(name, using=using, ttl=10 * tick, renew=False) as lease:
        lease.extend(100 * tick)

        assert lease.remaining > 50 * tick
        never(other.tries, 12 * tick)
        lease.check()


@needs("leased")
@needs("typical")
async def test_aextend_does_the_same(using: str, name: str, tick: float) -> None:
    async with lock(name, using=using, ttl=40 * tick, renew=False) as lease:
        await lease.aextend(200 * tick)

        assert lease.remaining > 150 * tick


@lacks("whole_seconds")
@needs("leased")
def test_extend_never_shortens(
    using: str, name: str, tick: float, rival: Callable[..., Rival]
) -> None:
    other = rival()

    with lock(name, using=using, ttl=100 * tick, renew=False) as lease:
        deadline = lease.deadline
        lease.extend(tick)

        assert lease.deadline == deadline
        never(other.tries, 4 * tick)
        lease.check()


@needs("leased")
@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), "5", True])
@needs("typical")
def test_extend_refuses_what_is_no_time(using: str, name: str, ttl: float) -> None:
    with lock(name, using=using) as lease:
        before = lease.ttl, lease.deadline

        with pytest.raises((TypeError, ValueError)):
            lease.extend(ttl)

        assert (lease.ttl, lease.deadline) == before


@lacks("whole_seconds")
@needs("leased")
def test_extend_takes_nothing_back_that_is_lost(
    using: str, name: str, tick: float, rival: Callable[..., Rival]
) -> None:
    lease = lock(name, using=using, ttl=2 * tick, renew=False).acquire()
    assert lease
    eventually(lambda: lease.lost)

    with pytest.raises(LockLost):
        lease.extend()

    assert lease.lost
    rival().takes()


@pytest.mark.usefixtures("is_never_hung")
def test_nobody_is_told_of_the_lost_reply_of_an_extension(
    faulty: Faulty, using: str, name: str
) -> None:
    with lock(name, using=using, ttl=30) as lease:
        faulty.lose_replies("extend")

        lease.extend()

        lease.check()


@needs("typical")
def test_extend_after_the_release_is_an_error(using: str, name: str) -> None:
    with lock(name, using=using) as lease:
        pass

    with pytest.raises(LockNotHeld):
        lease.extend()


@needs("min_hold")
def test_min_hold_refuses_the_name_for_a_while_after_an_early_release(
    using: str, name: str, tick: float, rival: Callable[..., Rival]
) -> None:
    other = rival()
    with lock(name, using=using, min_hold=100):
        pass

    assert not other.tries()
    assert other.refused.remaining is not None
    assert 0 < other.refused.remaining <= 100.001
    assert lock(name, using=using).locked()
    assert other.refused.reserved
    with pytest.raises(LockNotAcquired) as caught, lock(name, using=using, timeout=0):
        pass
    busy = caught.value
    assert busy.holder is None
    assert busy.reserved_until is not None
    assert 90 < (busy.reserved_until - datetime.now(UTC)).total_seconds() < 100.1
    assert f"Lock {name!r} is reserved until " in str(busy)

    late, began = rival(of=f"{name}:late"), time.monotonic()
    with lock(f"{name}:late", using=using, min_hold=4 * tick):
        pass
    late.takes(within=10)
    assert time.monotonic() - began >= 4 * tick - 0.001


@needs("min_hold")
def test_a_holder_is_told_from_what_its_min_hold_reserves(using: str, name: str) -> None:
    with lock(name, using=using, ttl=30, min_hold=100) as lease:
        [busy] = start(lambda: _refusals(name, using)).result(10)

        assert busy.holder == lease.holder
        assert busy.reserved_until is None


def _refusals(name: str, using: str) -> list[LockNotAcquired]:
    try:
        with lock(name, using=using, timeout=0):
            return []
    except LockNotAcquired as busy:
        return [busy]


@needs("min_hold")
def test_free_on_error_reserves_only_what_was_done(
    using: str, name: str, rival: Callable[..., Rival]
) -> None:
    terms: LockTerms = {"using": using, "min_hold": 100, "free_on_error": True}

    with pytest.raises(ZeroDivisionError), lock(name, **terms):
        raise ZeroDivisionError
    assert rival().tries()

    with lock(f"{name}:done", **terms):
        pass
    other = rival(of=f"{name}:done")
    assert not other.tries()
    assert other.refused.reserved
    assert other.refused.remaining is not None
    assert 90 < other.refused.remaining <= 100.001


@needs("min_hold")
def test_a_waiter_gets_the_lock_when_min_hold_is_over(using: str, name: str, tick: float) -> None:
    with lock(name, using=using, min_hold=3 * tick):
        pass

    began = time.monotonic()
    with lock(name, using=using, timeout=200 * tick) as lease:
        assert lease.held
    assert time.monotonic() - began < 100 * tick


@needs("min_hold")
def test_a_late_release_leaves_the_min_hold_in_force(
    using: str, name: str, tick: float, rival: Callable[..., Rival]
) -> None:
    other = rival()
    began = time.monotonic()
    lease = lock(name, using=using, ttl=3 * tick, min_hold=18 * tick, renew=False).acquire()
    assert lease
    never(other.tries, 4 * tick, "the ttl is over")

    with pytest.raises(LockLost):
        lease.release()

    other.takes(within=10)
    assert time.monotonic() - began >= 18 * tick - 0.001


@needs("min_hold")
def test_a_release_after_the_end_of_the_lease_reserves_nothing(
    using: str, name: str, tick: float, rival: Callable[..., Rival]
) -> None:
    terms: LockTerms = {"using": using, "min_hold": 100, "free_on_error": True, "renew": False}
    terms["ttl"] = 3 * tick
    lease = lock(name, **terms).acquire()
    assert lease
    eventually(lambda: not lock(name, using=using).locked())

    with pytest.raises(LockLost):
        lease.release()

    assert rival().tries()
