"""A lease is extended for as long as it is held, and no longer than it may be."""

from __future__ import annotations

import time

import pytest

from django_distlock import LockLost, LockOutcomeUnknown, lock
from django_distlock.ground import clock
from tests.fixtures.clocks import PutForward
from tests.fixtures.eventually import eventually, never

from .crew import start, taken
from .faults import Faulty
from .profiles import lacks, needs
from .rivals import Rivals

pytestmark = needs("leased")


@pytest.mark.slow
def test_a_held_lock_outlives_its_ttl(using: str, name: str, tick: float, rival: Rivals) -> None:
    other = rival()

    with lock(name, using=using, ttl=20 * tick) as lease:
        never(other.tries, 30 * tick)
        lease.check()
        assert lease.remaining > 0


@lacks("whole_seconds")
def test_without_renewal_it_ends_with_its_ttl_and_never_before(
    using: str, name: str, tick: float, rival: Rivals
) -> None:
    other = rival()
    began = time.monotonic()
    lease = taken(name, using=using, ttl=6 * tick, renew=False)

    other.takes(within=10)

    # The server may count in coarser units than we do.
    assert time.monotonic() - began >= 6 * tick - 0.001
    assert lease.lost


@pytest.mark.usefixtures("is_never_hung")
@lacks("whole_seconds")
def test_the_lost_reply_of_a_renewal_is_asked_for_again_at_once(
    faulty: Faulty, using: str, name: str, put_forward: PutForward, caplog: pytest.LogCaptureFixture
) -> None:
    with lock(name, using=using, ttl=100) as lease:
        before = lease.deadline
        faulty.lose_replies("extend")

        put_forward(40)
        eventually(lambda: lease.deadline > before)

        assert "could not be renewed yet" not in caplog.text


@pytest.mark.usefixtures("is_never_hung")
async def test_the_ttl_counts_from_the_first_of_two_requests_to_acquire(
    faulty: Faulty, using: str, name: str, put_forward: PutForward
) -> None:
    asked: list[float] = []

    def lose_first() -> None:
        asked.append(clock.lease_time())
        if len(asked) == 1:
            put_forward(5)
            raise LockOutcomeUnknown(using, "the test loses this reply")

    faulty.notice("try_acquire", lose_first)
    async with lock(name, using=using, ttl=30) as lease:
        assert lease.deadline <= asked[0] + 30


@lacks("whole_seconds")
def test_renewal_stops_at_the_release(
    faulty: Faulty, using: str, name: str, tick: float, put_forward: PutForward
) -> None:
    with lock(name, using=using, ttl=100) as lease:
        first = lease.deadline
        put_forward(40)
        eventually(lambda: lease.deadline > first)
    before = faulty.calls["extend"]

    put_forward(80)
    never(lambda: faulty.calls["extend"] > before, 5 * tick)


@lacks("whole_seconds")
def test_what_is_being_released_is_not_renewed(
    faulty: Faulty, using: str, name: str, tick: float, put_forward: PutForward
) -> None:
    lease = taken(name, using=using, ttl=100)
    faulty.hang("release")
    releasing = start(lease.release)
    eventually(lambda: faulty.calls["release"])

    put_forward(40)
    never(lambda: faulty.calls["extend"], 5 * tick)

    put_forward(100)
    assert lease.lost
    faulty.heal()
    with pytest.raises(LockLost):
        releasing.result(10)


@lacks("whole_seconds")
def test_a_renewal_that_comes_back_after_the_release_changes_nothing(
    faulty: Faulty, using: str, name: str, rival: Rivals, put_forward: PutForward
) -> None:
    other = rival()
    hung = faulty.hang("extend")
    lease = taken(name, using=using, ttl=100)
    put_forward(40)
    eventually(lambda: faulty.calls["extend"])
    lease.release()
    other.takes()

    hung.set()

    eventually(lambda: faulty.answers["extend"])
    assert not lease.held
    assert other.holds


@lacks("whole_seconds")
def test_the_server_may_tell_that_a_lease_is_not_ours_any_more(
    faulty: Faulty, using: str, name: str, rival: Rivals, put_forward: PutForward
) -> None:
    other = rival(ttl=100)
    lease = taken(name, using=using, ttl=100)
    faulty.release(lease.request)
    other.takes()

    put_forward(40)
    eventually(lambda: lease.lost)

    assert "not ours" in lease.reason
    with pytest.raises(LockLost):
        lease.release()
    assert other.holds


@pytest.mark.slow
@lacks("whole_seconds")
def test_max_hold_ends_it_however_often_it_is_renewed(
    using: str, name: str, tick: float, rival: Rivals
) -> None:
    other = rival()
    began = time.monotonic()
    lease = taken(name, using=using, ttl=12 * tick, max_hold=20 * tick)
    first = lease.deadline

    eventually(lambda: lease.deadline > first or lease.lost)
    assert lease.deadline > first
    other.takes(within=15)  # never, were it renewed for ever

    assert time.monotonic() - began >= 20 * tick - 0.001
    assert lease.lost
    with pytest.raises(LockLost):
        lease.extend()


@lacks("whole_seconds")
def test_max_hold_below_the_ttl_is_the_ttl(using: str, name: str, tick: float) -> None:
    with lock(name, using=using, ttl=1000 * tick, max_hold=100 * tick) as lease:
        assert lease.remaining <= 100 * tick
