"""The deadline is our own: it passes on time whatever renewals do, and who holds it is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_distlock import LockLost, LockNotHeld, clock, lock
from django_distlock.holding import State
from django_distlock.registry import registry
from tests.fixtures.eventually import eventually, never

from .crew import start
from .faults import Faulty
from .profiles import lacks, needs
from .rivals import Rival

pytestmark = needs("leased")


def test_the_deadline_counts_from_before_the_request(
    faulty: Faulty, using: str, name: str, tick: float
) -> None:
    began = clock.lease_time()
    arrived: list[float] = []
    faulty.notice("try_acquire", lambda: arrived.append(clock.lease_time()))

    with lock(name, using=using, ttl=20 * tick) as lease:
        assert began < lease.deadline < arrived[0] + 20 * tick
        assert 0 < lease.remaining < 20 * tick


@lacks("whole_seconds")
def test_a_grant_that_arrives_after_its_own_end_is_none(
    faulty: Faulty, using: str, name: str, tick: float
) -> None:
    faulty.hang_replies("try_acquire")

    def take() -> tuple[bool, float]:
        with lock(name, using=using, ttl=3 * tick, timeout=50 * tick) as lease:
            return lease.held, lease.deadline

    waiting = start(take)
    eventually(lambda: faulty.answers["try_acquire"])
    answered = clock.lease_time()

    eventually(lambda: clock.lease_time() > answered + 3 * tick)
    faulty.heal()

    is_held, deadline = waiting.result(20)
    assert is_held
    assert deadline > answered + 3 * tick


@lacks("whole_seconds")
@pytest.mark.parametrize("trouble", ["hang", "fail"])
def test_a_lease_is_lost_on_time_though_renewals_fail(
    faulty: Faulty, using: str, name: str, tick: float, trouble: str
) -> None:
    getattr(faulty, trouble)("extend")
    reasons: list[str] = []
    lease = lock(name, using=using, ttl=10 * tick).acquire()
    assert lease
    lease.on_lost(reasons.append)
    deadline = lease.deadline

    eventually(lambda: reasons, 20 * tick)

    assert deadline <= clock.lease_time() < deadline + 5 * tick
    assert lease.lost
    assert lease.remaining == 0
    with pytest.raises(LockLost):
        lease.check()


@lacks("whole_seconds")
@pytest.mark.parametrize("trouble", ["hang", "fail"])
def test_a_lease_whose_renewal_is_late_or_failed_is_in_jeopardy_before_it_is_lost(
    faulty: Faulty, using: str, name: str, tick: float, trouble: str
) -> None:
    lease = lock(name, using=using, ttl=10 * tick).acquire()
    assert lease
    eventually(lambda: not lease.in_jeopardy)  # at once, unless the machine is busy
    getattr(faulty, trouble)("extend")

    eventually(lambda: lease.in_jeopardy or lease.lost, 20 * tick)

    assert lease.in_jeopardy
    assert lease.held
    eventually(lambda: lease.lost, 20 * tick)
    assert not lease.in_jeopardy


@pytest.mark.slow
@lacks("whole_seconds")
def test_a_lease_survives_renewals_that_fail_for_a_while(
    faulty: Faulty, using: str, name: str, tick: float
) -> None:
    with lock(name, using=using, ttl=10 * tick) as lease:
        faulty.fail("extend", times=3)

        eventually(lambda: lease.in_jeopardy, 10 * tick)
        eventually(lambda: lease.held and not lease.in_jeopardy, 10 * tick)
        never(lambda: lease.lost, 12 * tick)


@pytest.mark.slow
@lacks("whole_seconds")
def test_a_hung_server_does_not_delay_the_renewals_of_another_alias(
    faulty: Faulty, sites: list[str], using: str, name: str, tick: float
) -> None:
    faulty.hang("extend")
    other = lock(f"{name}:other", using="site0", ttl=10 * tick).acquire()
    hung = lock(name, using=using, ttl=10 * tick).acquire()
    assert other
    assert hung

    eventually(lambda: hung.lost, 20 * tick)
    never(lambda: other.lost, 12 * tick)

    other.release()


@lacks("whole_seconds")
def test_somebody_else_can_have_what_was_lost(
    faulty: Faulty, using: str, name: str, tick: float, rival: Callable[..., Rival]
) -> None:
    faulty.fail("extend")
    lease = lock(name, using=using, ttl=5 * tick).acquire()
    assert lease

    eventually(lambda: lease.lost, 10 * tick)
    rival().takes(within=5 * tick)


@lacks("whole_seconds")
def test_lost_is_final(faulty: Faulty, using: str, name: str, tick: float) -> None:
    renewal = faulty.hang("extend")
    lease = lock(name, using=using, ttl=5 * tick).acquire()
    assert lease
    eventually(lambda: lease.lost, 10 * tick)

    renewal.set()

    never(lambda: lease.held, 5 * tick)
    assert lease.state is State.LOST
    with pytest.raises(LockLost):
        lease.extend()


@lacks("whole_seconds")
def test_the_holder_is_told_once_and_why(
    faulty: Faulty, using: str, name: str, tick: float
) -> None:
    faulty.fail("extend")
    lease = lock(name, using=using, ttl=5 * tick).acquire()
    assert lease
    told: list[str] = []
    lease.on_lost(told.append)

    eventually(lambda: lease.lost, 10 * tick)
    never(lambda: len(told) > 1, 3 * tick)

    assert told == [lease.reason]
    assert "deadline" in lease.reason


@lacks("whole_seconds")
def test_who_asks_late_is_told_at_once(using: str, name: str, tick: float) -> None:
    lease = lock(name, using=using, ttl=2 * tick, renew=False).acquire()
    assert lease
    eventually(lambda: lease.lost)
    told: list[str] = []

    lease.on_lost(told.append)

    assert told == [lease.reason]


@lacks("whole_seconds")
def test_a_released_lease_tells_nobody(using: str, name: str, tick: float) -> None:
    told: list[str] = []
    with lock(name, using=using, ttl=3 * tick) as lease:
        lease.on_lost(told.append)

    never(lambda: told, 5 * tick)


@lacks("whole_seconds")
def test_a_callback_that_fails_hinders_no_other(using: str, name: str, tick: float) -> None:
    lease = lock(name, using=using, ttl=2 * tick, renew=False).acquire()
    assert lease
    told: list[str] = []
    lease.on_lost(lambda reason: 1 / 0)
    lease.on_lost(told.append)

    eventually(lambda: told, 10 * tick)

    assert lease.lost


def test_check_is_silent_while_it_is_held_and_tells_when_it_was_released(
    using: str, name: str
) -> None:
    with lock(name, using=using) as lease:
        lease.check()

    with pytest.raises(LockNotHeld) as caught:
        lease.check()
    assert not isinstance(caught.value, LockLost)


@lacks("whole_seconds")
def test_after_a_grant_that_came_too_late_another_owner_asks(
    faulty: Faulty, using: str, name: str, tick: float
) -> None:
    hung = faulty.hang_replies("try_acquire")
    taking = start(lambda: lock(name, using=using, ttl=2 * tick, timeout=200 * tick).acquire())
    eventually(lambda: faulty.answers["try_acquire"])
    late = clock.lease_time() + 2 * tick
    (pending,) = registry.leases()
    first = pending.request.owner
    eventually(lambda: clock.lease_time() > late)
    faulty.heal()
    hung.set()

    lease = taking.result(20)

    assert lease
    assert lease.request.owner != first
    lease.abandon()
