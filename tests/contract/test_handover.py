"""A lease handed to another process: detach here, attach there."""

from __future__ import annotations

import asyncio

import pytest
from django.core.signing import BadSignature

from django_distlock import Lease, LockLost, LockNotHeld, lock
from django_distlock.engine.values import State
from tests.fixtures.clocks import PutForward
from tests.fixtures.eventually import eventually, never

from .crew import ataken, elsewhere, taken
from .faults import Faulty
from .profiles import lacks, needs
from .rivals import Children, Rivals

pytestmark = [needs("detach"), lacks("variant")]


def _detached(using: str, name: str, ttl: float = 30) -> tuple[Lease, str]:
    lease = taken(name, using=using, ttl=ttl)
    return lease, lease.detach()


@needs("cross_process")
def test_another_process_goes_on_with_the_lock(
    child: Children, using: str, name: str, rival: Rivals
) -> None:
    other = rival()
    lease, text = _detached(using, name)
    assert not other.tries()

    heir = child("attach", text=text)
    attached = heir.expect("attached")

    assert attached["name"] == name
    assert attached["token"] == lease.fencing_token
    assert not other.tries()
    heir.tell("leave")
    heir.result()
    assert other.tries()


def test_here_the_lease_is_over(using: str, name: str) -> None:
    lease, text = _detached(using, name)

    assert lease.state is State.DETACHED
    assert not lease.held
    for operation in (lease.check, lease.release, lease.extend, lease.detach):
        with pytest.raises(LockNotHeld):
            operation()

    Lease.attach(text).release()


def test_leaving_the_with_does_not_free_what_was_handed_over(
    using: str, name: str, rival: Rivals
) -> None:
    other = rival()
    with lock(name, using=using) as lease:
        text = lease.detach()

    assert not other.tries()
    Lease.attach(text).release()
    assert other.tries()


def test_another_thread_of_this_process_can_attach_and_enter_again(using: str, name: str) -> None:
    _, text = _detached(using, name)

    def go_on() -> bool:
        with Lease.attach(text) as lease, lock(name, using=using, timeout=0) as again:
            return again is lease

    assert elsewhere(go_on)
    assert not lock(name, using=using).locked()


async def test_a_task_can_detach_and_attach(using: str, name: str) -> None:
    async with lock(name, using=using) as lease:
        text = await lease.adetach()

    async with await Lease.aattach(text) as attached:
        assert attached.held
        assert attached.fencing_token == lease.fencing_token
    assert not await lock(name, using=using).alocked()


@pytest.mark.slow
def test_an_attached_lease_is_renewed(
    using: str, name: str, rival: Rivals, put_forward: PutForward
) -> None:
    other = rival()
    _, text = _detached(using, name, ttl=100)

    with Lease.attach(text) as lease:
        first = lease.deadline
        put_forward(40)
        eventually(lambda: lease.deadline > first)
        put_forward(110)
        lease.check()
        assert not other.tries()


@needs("min_hold")
def test_who_attached_it_decides_if_a_min_hold_counts(using: str, name: str, rival: Rivals) -> None:
    def handed_on(name: str) -> Lease:
        lease = taken(name, using=using, min_hold=100, free_on_error=True)
        return Lease.attach(lease.detach())

    with pytest.raises(ZeroDivisionError), handed_on(name):
        raise ZeroDivisionError
    with handed_on(f"{name}:done"):
        pass

    assert rival().tries()
    assert not rival(of=f"{name}:done").tries()


@needs("leased")
def test_who_attached_it_and_dies_leaves_it_for_its_own_ttl(
    using: str, name: str, rival: Rivals, tick: float
) -> None:
    other = rival()
    text = taken(name, using=using, ttl=15 * tick, renew=False).detach(ttl=600 * tick)

    lease = Lease.attach(text)

    assert lease.ttl == 15 * tick
    assert lease.remaining <= 15 * tick
    never(other.tries, 5 * tick)
    other.takes(within=10)
    assert lease.lost


@needs("min_hold")
def test_a_min_hold_goes_on_for_the_attached_lease(
    using: str, name: str, rival: Rivals, tick: float
) -> None:
    text = taken(name, using=using, ttl=6 * tick, min_hold=25 * tick, renew=False).detach()
    lease = Lease.attach(text)
    eventually(lambda: lease.lost)

    never(rival().tries, 10 * tick)


def test_an_attached_lease_keeps_the_terms_and_max_hold_goes_on_while_the_text_travels(
    using: str, name: str, put_forward: PutForward
) -> None:
    text = taken(name, using=using, ttl=100, max_hold=50, renew=False).detach(ttl=200)

    put_forward(30)

    with Lease.attach(text) as lease:
        assert not lease.renews
        assert lease.remaining <= 20
        lease.extend(100)
        assert lease.remaining <= 20


def test_a_text_whose_max_hold_is_over_is_a_loss(
    using: str, name: str, put_forward: PutForward, rival: Rivals, tick: float
) -> None:
    text = taken(name, using=using, ttl=10 * tick, max_hold=10 * tick).detach()

    put_forward(11 * tick)

    with pytest.raises(LockLost, match="max_hold"):
        Lease.attach(text)
    rival().takes(within=10)


def test_the_last_extension_gives_the_text_time_to_travel(
    using: str, name: str, rival: Rivals, tick: float
) -> None:
    other = rival()

    text = taken(name, using=using, ttl=10 * tick).detach(ttl=100 * tick)

    never(other.tries, 12 * tick)
    Lease.attach(text).release()


@needs("leased")
def test_attaching_too_late_is_a_loss(using: str, name: str, rival: Rivals, tick: float) -> None:
    other = rival()
    _, text = _detached(using, name, ttl=10 * tick)
    other.takes(within=10)

    with pytest.raises(LockLost):
        Lease.attach(text)

    assert other.holds


def test_a_forged_text_is_refused(using: str, name: str) -> None:
    _, text = _detached(using, name)

    with pytest.raises(BadSignature):
        Lease.attach(text[:-2] + "xx")

    Lease.attach(text).release()


async def test_a_detached_lease_makes_way_in_the_line_of_its_process(using: str, name: str) -> None:
    lease = await ataken(name, using=using)

    async def take() -> bool:
        async with lock(name, using=using, timeout=None) as taken:
            return taken.held

    waiting = asyncio.create_task(take())
    text = await lease.adetach()

    await (await Lease.aattach(text)).arelease()

    assert await asyncio.wait_for(waiting, 20)


@pytest.mark.usefixtures("is_never_hung")
def test_nobody_is_told_of_lost_replies_on_the_way(faulty: Faulty, using: str, name: str) -> None:
    faulty.lose_replies("extend")
    faulty.lose_replies("take_over")

    lease, text = _detached(using, name)
    attached = Lease.attach(text)

    assert attached.fencing_token == lease.fencing_token
    attached.release()


@needs("typical")
@pytest.mark.usefixtures("is_never_hung")
async def test_nor_is_a_task(faulty: Faulty, using: str, name: str) -> None:
    faulty.lose_replies("extend")
    faulty.lose_replies("take_over")
    lease = await ataken(name, using=using, ttl=30)

    attached = await Lease.aattach(await lease.adetach())

    assert attached.fencing_token == lease.fencing_token
    await attached.arelease()


def test_a_text_serves_once(using: str, name: str) -> None:
    _, text = _detached(using, name)

    with Lease.attach(text) as lease:
        with pytest.raises(LockLost, match="attached elsewhere"):
            Lease.attach(text)
        lease.extend()
