"""The deadline is our own: it passes on time whatever renewals do, and who holds it is told."""

from __future__ import annotations

import asyncio

import pytest

from django_distlock import LockLost, lock
from django_distlock.engine.registry import registry
from django_distlock.ground import clock
from django_distlock.ground.clock import drift
from tests.fixtures.clocks import PutForward
from tests.fixtures.eventually import eventually, never

from .crew import start, taken
from .faults import Faulty
from .profiles import needs

pytestmark = needs("leased", "typical")


@pytest.fixture
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has leases looked at only when a renewal or their deadline is due."""
    monkeypatch.setattr("django_distlock.engine.registry.SWEEP", 60.0)


def test_the_deadline_counts_from_before_the_request(
    faulty: Faulty, using: str, name: str, tick: float
) -> None:
    began = clock.lease_time()
    arrived: list[float] = []
    faulty.notice("try_acquire", lambda: arrived.append(clock.lease_time()))

    with lock(name, using=using, ttl=200 * tick, renew=False) as lease:
        asked = lease.deadline - lease.ttl + drift(lease.ttl)
        assert began - 1e-7 <= asked <= arrived[-1] + 1e-7
        assert 0 < lease.remaining < lease.ttl


def test_a_grant_that_arrives_after_its_own_end_is_none(
    faulty: Faulty, using: str, name: str, tick: float
) -> None:
    faulty.hang_replies("try_acquire")
    taking = start(lambda: lock(name, using=using, ttl=5 * tick, timeout=200 * tick).acquire())
    eventually(lambda: faulty.answers["try_acquire"])
    late = clock.lease_time() + 5 * tick
    [pending] = [each for each in registry.leases() if each.name == name]
    first = pending.request.owner

    eventually(lambda: clock.lease_time() > late)
    faulty.heal()

    lease = taking.result(30)
    assert lease
    assert lease.deadline > late
    # The server may know that the first owner gave the lock back.
    assert lease.request.owner != first
    registry.release_all()


@pytest.mark.usefixtures("no_sweep")
@pytest.mark.parametrize("trouble", ["hang", "fail"])
def test_a_lease_is_lost_on_time_though_renewals_fail(
    faulty: Faulty, using: str, name: str, tick: float, trouble: str
) -> None:
    getattr(faulty, trouble)("extend")
    told: list[tuple[float, str]] = []
    lease = taken(name, using=using, ttl=10 * tick)
    lease.on_lost(lambda reason: told.append((clock.lease_time(), reason)))
    deadline = lease.deadline

    eventually(lambda: told)
    never(lambda: len(told) > 1, 3 * tick)

    [(lost_at, reason)] = told
    assert lost_at >= deadline
    assert reason == lease.reason
    assert "deadline" in reason
    assert lease.lost
    assert lease.remaining == 0
    with pytest.raises(LockLost):
        lease.check()


@pytest.mark.parametrize("trouble", ["hang", "fail"])
async def test_a_body_that_wants_it_so_is_cancelled_when_its_lease_is_lost(
    faulty: Faulty, using: str, name: str, tick: float, trouble: str
) -> None:
    getattr(faulty, trouble)("extend")

    with pytest.raises(LockLost) as caught:
        async with lock(name, using=using, ttl=10 * tick, cancel_when_lost=True) as lease:
            deadline = lease.deadline
            await asyncio.Event().wait()

    assert clock.lease_time() >= deadline
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


@pytest.mark.parametrize("trouble", ["hang", "fail"])
def test_a_lease_whose_renewal_is_late_or_failed_is_in_jeopardy_before_it_is_lost(
    faulty: Faulty, using: str, name: str, trouble: str, put_forward: PutForward
) -> None:
    lease = taken(name, using=using, ttl=100)
    assert not lease.in_jeopardy
    getattr(faulty, trouble)("extend")

    put_forward(35)  # it should have been renewed at 33
    eventually(lambda: faulty.calls["extend"])
    if trouble == "fail":
        eventually(lambda: lease.in_jeopardy)  # with more than half of its ttl left

    put_forward(60)
    assert lease.in_jeopardy
    assert lease.held

    put_forward(100)
    assert lease.lost
    assert not lease.in_jeopardy
    with pytest.raises(LockLost):
        lease.release()


@pytest.mark.slow
def test_a_lease_survives_renewals_that_fail_for_a_while(
    faulty: Faulty, using: str, name: str, put_forward: PutForward
) -> None:
    with lock(name, using=using, ttl=100) as lease:
        first = lease.deadline
        faulty.fail("extend", times=3)

        # At a third of its ttl, and then nine times in one.
        put_forward(35)
        eventually(lambda: faulty.calls["extend"] >= 1)
        put_forward(47)
        eventually(lambda: faulty.calls["extend"] >= 2)
        put_forward(59)
        eventually(lambda: faulty.calls["extend"] >= 3)
        put_forward(71)
        eventually(lambda: lease.deadline > first and not lease.in_jeopardy)

        put_forward(110)
        lease.check()


@pytest.mark.slow
def test_a_hung_server_does_not_delay_the_renewals_of_another_alias(
    faulty: Faulty, using: str, name: str, put_forward: PutForward
) -> None:
    faulty.hang("extend")
    hung = lock(name, using=using, ttl=100).acquire()
    other = lock(f"{name}:other", using="site0", ttl=100).acquire()
    assert hung
    assert other

    first = other.deadline
    put_forward(35)
    eventually(lambda: faulty.calls["extend"])
    eventually(lambda: other.deadline > first)
    second = other.deadline
    put_forward(70)
    eventually(lambda: other.deadline > second)

    put_forward(110)
    assert not faulty.answers["extend"]
    assert hung.lost
    other.release()
    with pytest.raises(LockLost):
        hung.release()


def test_a_callback_that_fails_hinders_no_other(
    using: str, name: str, put_forward: PutForward
) -> None:
    lease = taken(name, using=using, ttl=100, renew=False)
    told: list[str] = []
    lease.on_lost(lambda reason: 1 / 0)
    lease.on_lost(told.append)

    put_forward(200)
    eventually(lambda: told)

    assert lease.lost
    with pytest.raises(LockLost):
        lease.release()
