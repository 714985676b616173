"""Who may give a lock back, what a release tells, and that a request sent twice does no harm."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from django.db import transaction

from django_distlock import Lease, LockLost, LockNotHeld, LockNotOwned, LockOutcomeUnknown, lock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.engine.values import Release, State, new_owner
from tests.fixtures.eventually import eventually

from .crew import elsewhere, taken
from .faults import Faulty
from .profiles import Profile, lacks, needs
from .rivals import Rival, Rivals


def _expired(using: str, name: str, tick: float) -> Lease:
    """Return a lease whose time is over, on the server as well as here."""
    lease = taken(name, using=using, ttl=2 * tick, renew=False)
    eventually(lambda: lease.lost)
    return lease


def test_who_holds_it_is_told_without_trying(
    using: str, name: str, rival: Rivals, profile: Profile
) -> None:
    assert lock(name, using=using).holder() is None
    with lock(name, using=using, purpose="the yearly report") as lease:
        found = lock(name, using=using).holder()
        assert found == (lease.holder if profile.names_holder else None)
    assert lock(name, using=using).holder() is None

    assert rival().tries()
    found = lock(name, using=using).holder()
    assert (found is not None) is profile.names_holder


@needs("typical")
def test_after_a_rollback_its_caller_takes_it_again_at_once(using: str, name: str) -> None:
    for _ in range(3):
        with (
            pytest.raises(ZeroDivisionError),
            transaction.atomic(),
            lock(name, using=using, timeout=0),
        ):
            raise ZeroDivisionError


def test_a_released_lock_is_free_at_once_and_what_is_called_after_it_is_an_error_that_changes_nothing(
    using: str, name: str, rival: Rivals
) -> None:
    lease, other = taken(name, using=using), rival()
    assert not other.tries()

    lease.release()

    assert lease.state is State.RELEASED
    assert other.tries()
    for operation in (lease.release, lease.extend, lease.check):
        with pytest.raises(LockNotHeld) as caught:
            operation()
        assert not isinstance(caught.value, LockLost)
    assert other.holds


@lacks("whole_seconds")
@needs("leased")
def test_releasing_a_lease_that_had_ended_tells_that_it_was_lost(
    using: str, name: str, tick: float
) -> None:
    lease = _expired(using, name, tick)

    with pytest.raises(LockLost):
        lease.release()


@lacks("whole_seconds")
@needs("leased")
def test_releasing_what_somebody_else_holds_by_now_frees_nobody(
    using: str, name: str, tick: float, rival: Rivals
) -> None:
    lease = _expired(using, name, tick)
    other = rival()
    other.takes()

    with pytest.raises(LockNotOwned):
        lease.release()

    assert other.holds


def test_the_owner_is_compared_on_the_server(backend: BaseLockBackend, holder: Rival) -> None:
    thief = dataclasses.replace(holder.request, owner=new_owner())

    assert backend.release(thief) is Release.TAKEN
    assert list(backend.extend([thief])) == [False]
    assert holder.holds
    assert backend.release(holder.request) is Release.RELEASED
    assert backend.release(thief) is Release.GONE


def test_a_release_that_is_sent_again_answers_as_the_first_and_does_not_free_the_next_holder(
    backend: BaseLockBackend, rival: Rivals
) -> None:
    before, after = rival(), rival()
    before.takes()

    assert backend.release(before.request) is Release.RELEASED
    assert backend.release(before.request) is Release.RELEASED
    after.takes()
    backend.release(before.request)

    assert after.holds


def test_an_acquire_that_is_sent_again_gets_the_same_grant(rival: Rivals, holder: Rival) -> None:
    other = rival()
    first = holder.token

    assert holder.tries()
    assert holder.token == first
    assert not other.tries()
    holder.leaves()
    assert other.tries()


@lacks("whole_seconds")
@needs("leased")
def test_an_extension_of_what_has_expired_is_refused_and_takes_nothing(
    using: str, name: str, rival: Rivals, tick: float
) -> None:
    holder = rival(ttl=tick)
    holder.takes()
    eventually(lambda: not lock(name, using=using).locked())

    assert not holder.holds
    assert rival().tries()


def test_extensions_are_answered_one_by_one(
    backend: BaseLockBackend, name: str, rival: Rivals
) -> None:
    mine, gone, theirs = (rival(of=f"{name}:{part}") for part in "abc")
    mine.takes()
    theirs.takes()
    stranger = dataclasses.replace(theirs.request, owner=new_owner())

    kept = backend.extend([mine.request, gone.request, stranger])

    assert list(kept) == [True, False, False]


class TestWhenTheReplyIsLost:
    @pytest.mark.usefixtures("is_never_hung")
    def test_an_acquire_gets_its_own_grant_and_a_release_has_released(
        self, faulty: Faulty, using: str, name: str, rival: Rivals
    ) -> None:
        faulty.lose_replies("try_acquire")

        with lock(name, using=using) as lease:
            assert lease.held
            assert not rival().tries()
            faulty.lose_replies("release")

        assert lease.state is State.RELEASED
        assert rival().tries()

    @pytest.mark.usefixtures("is_never_hung")
    async def test_a_task_gets_its_own_grant_and_has_released_too(
        self, faulty: Faulty, using: str, name: str, rival: Rivals
    ) -> None:
        faulty.lose_replies("try_acquire")

        async with lock(name, using=using) as lease:
            assert lease.held
            assert not await asyncio.to_thread(rival().tries)
            faulty.lose_replies("release")

        assert lease.state is State.RELEASED
        assert await asyncio.to_thread(rival().tries)

    @pytest.mark.usefixtures("is_never_hung")
    def test_an_acquire_whose_replies_are_all_lost_leaves_nothing(
        self, faulty: Faulty, using: str, name: str, rival: Rivals
    ) -> None:
        faulty.lose_replies("try_acquire", times=2)

        with pytest.raises(LockOutcomeUnknown):
            lock(name, using=using).acquire()

        rival().takes(within=15)

    def test_a_release_whose_replies_are_all_lost_is_an_error_and_finished_in_the_background(
        self, faulty: Faulty, using: str, name: str, rival: Rivals
    ) -> None:
        with pytest.raises(LockOutcomeUnknown), lock(name, using=using):
            faulty.lose_replies("release", times=2)

        rival().takes(within=15)


@needs("typical")
def test_a_lease_may_be_released_by_another_thread_than_took_it(using: str, name: str) -> None:
    lease = taken(name, using=using)

    elsewhere(lease.release)

    assert not lock(name, using=using).locked()


@needs("typical")
def test_a_thread_that_failed_to_take_a_lock_cannot_release_it(using: str, name: str) -> None:
    shared = lock(name, using=using)
    lease = shared.acquire()
    assert lease

    def try_and_release() -> None:
        assert shared.acquire(timeout=0) is None
        shared.release()

    with pytest.raises(LockNotHeld):
        elsewhere(try_and_release)

    assert lease.held
    shared.release()
    assert not lease.held
