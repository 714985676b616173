"""extend() and min_hold: how long a name stays taken."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from django_distlock import LockLost, LockNotAcquired, lock
from django_distlock.lock import LockTerms
from tests.fixtures.eventually import eventually, never

from .crew import elsewhere, start, take_and_release, taken
from .faults import Faulty
from .profiles import lacks, needs
from .rivals import Rivals


@lacks("whole_seconds")
@needs("leased")
def test_extend_lets_it_live_longer_here_and_on_the_server_and_never_shortens(
    using: str, name: str, tick: float, rival: Rivals
) -> None:
    other = rival()

    with lock(name, using=using, ttl=10 * tick, renew=False) as lease:
        lease.extend(100 * tick)
        deadline = lease.deadline
        lease.extend(tick)

        assert lease.deadline == deadline
        assert lease.remaining > 50 * tick
        never(other.tries, 12 * tick)
        lease.check()


@needs("leased")
@needs("typical")
async def test_aextend_does_the_same(using: str, name: str, tick: float) -> None:
    async with lock(name, using=using, ttl=40 * tick, renew=False) as lease:
        await lease.aextend(200 * tick)

        assert lease.remaining > 150 * tick


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
    using: str, name: str, tick: float, rival: Rivals
) -> None:
    lease = taken(name, using=using, ttl=2 * tick, renew=False)
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


@needs("min_hold")
def test_min_hold_refuses_the_name_until_it_is_over_after_an_early_release(
    using: str, name: str, tick: float, rival: Rivals
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

    began = time.monotonic()
    for part in ("late", "waited"):
        with lock(f"{name}:{part}", using=using, min_hold=4 * tick):
            pass
    waiter = start(lambda: take_and_release(using, f"{name}:waited"))
    rival(of=f"{name}:late").takes(within=10)  # asks all the time, as a waiter need not
    assert time.monotonic() - began >= 4 * tick - 0.001
    assert 4 * tick - 0.001 <= waiter.result(30) - began < 100 * tick


@needs("min_hold")
def test_a_holder_is_told_from_what_its_min_hold_reserves(using: str, name: str) -> None:
    with lock(name, using=using, ttl=30, min_hold=100) as lease:
        with pytest.raises(LockNotAcquired) as caught:
            elsewhere(lock(name, using=using, timeout=0).__enter__)

        assert caught.value.holder == lease.holder
        assert caught.value.reserved_until is None


@needs("min_hold")
def test_free_on_error_reserves_only_what_was_done(using: str, name: str, rival: Rivals) -> None:
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
def test_a_late_release_leaves_the_min_hold_in_force(
    using: str, name: str, tick: float, rival: Rivals
) -> None:
    other = rival()
    began = time.monotonic()
    lease = taken(name, using=using, ttl=3 * tick, min_hold=18 * tick, renew=False)
    never(other.tries, 4 * tick, "the ttl is over")

    with pytest.raises(LockLost):
        lease.release()

    other.takes(within=10)
    assert time.monotonic() - began >= 18 * tick - 0.001


@needs("min_hold")
def test_a_release_after_the_end_of_the_lease_reserves_nothing(
    using: str, name: str, tick: float, rival: Rivals
) -> None:
    terms: LockTerms = {"using": using, "min_hold": 100, "free_on_error": True, "renew": False}
    terms["ttl"] = 3 * tick
    lease = taken(name, **terms)
    eventually(lambda: not lock(name, using=using).locked())

    with pytest.raises(LockLost):
        lease.release()

    assert rival().tries()
