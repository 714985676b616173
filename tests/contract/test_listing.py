"""What operators see, and the one holding that they end by force."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

import pytest

from django_distlock import LockNotHeld, lock, locks
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.engine import waiting
from django_distlock.engine.values import Held, Release, digest
from django_distlock.operators import holdings
from tests.fixtures.eventually import eventually

from .crew import start, take_and_release, taken
from .faults import Faulty
from .profiles import Profile, lacks, needs
from .rivals import Children, Rival, Rivals

pytestmark = needs("listing")


def _records(backend: BaseLockBackend, rival: Rival) -> list[Held]:
    return [record for record in backend.held() if record.key == rival.request.key]


def test_a_held_lock_is_listed_with_its_facts(
    using: str, name: str, backend: BaseLockBackend, profile: Profile
) -> None:
    with lock(name, using=using, ttl=30, purpose="the yearly report") as lease:
        [record] = [record for record in backend.held() if record.key == lease.request.key]

    assert record.name == name
    assert record.holder == lease.holder
    assert record.holder.pid == os.getpid()
    assert record.holder.purpose == "the yearly report"
    assert record.token == lease.fencing_token
    assert not record.shared
    # A session that goes on has no end.
    assert (record.remaining is not None) is ("leased" in profile.traits)
    assert record.remaining is None or 25 < record.remaining < 30.01


def test_force_frees_the_lock_for_others_at_once(
    backend: BaseLockBackend, rival: Rivals, holder: Rival
) -> None:
    other = rival()
    [record] = _records(backend, holder)

    assert backend.force_release(record.key, record.owner_digest) is True

    assert other.tries()
    assert not holder.holds
    assert backend.release(holder.request) is Release.TAKEN


def test_force_never_frees_the_next_holder(backend: BaseLockBackend, rival: Rivals) -> None:
    seen, after = rival(), rival()
    seen.takes()
    [record] = _records(backend, seen)
    seen.leaves()
    after.takes()

    assert backend.force_release(record.key, record.owner_digest) is False
    assert backend.end_holding(record.key, record.owner_digest) is False  # the server compares, too

    assert after.holds


@needs("cross_process")
def test_an_alias_shows_and_frees_no_locks_of_other_prefixes(using: str, name: str) -> None:
    aliases = [using, "prefixed", "alike"]
    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(lock(name, using=alias))

        shown = [[each for each in locks[alias].held() if each.name == name] for alias in aliases]

        assert [len(records) for records in shown] == [1, 1, 1]
        for alias, [record] in zip(aliases, shown, strict=True):
            for other in set(aliases) - {alias}:
                assert locks[other].force_release(record.key, record.owner_digest) is False


@needs("min_hold")
def test_what_min_hold_reserves_is_listed_as_that_and_can_be_freed(
    using: str, name: str, backend: BaseLockBackend, rival: Rivals, caplog: pytest.LogCaptureFixture
) -> None:
    other = rival()
    with lock(name, using=using, min_hold=600) as lease:
        [held] = _records(backend, other)
    [reserved] = _records(backend, other)

    assert not held.reserved
    assert reserved.reserved
    assert (reserved.name, reserved.holder, reserved.shared) == (name, None, False)
    assert reserved.token == lease.fencing_token
    assert reserved.remaining is not None
    assert 590 < reserved.remaining < 600.01
    assert backend.force_release(held.key, held.owner_digest) is False
    assert not other.tries()
    assert backend.force_release(reserved.key, reserved.owner_digest) is True
    said = f"Lock {name}, reserved by min_hold: its release was forced by an operator"
    assert said in caplog.messages
    assert not _records(backend, other)
    assert other.tries()
    assert backend.force_release(reserved.key, reserved.owner_digest) is False
    assert backend.end_holding(reserved.key, reserved.owner_digest) is False
    assert other.holds


@needs("min_hold")
def test_what_the_min_hold_of_a_dead_holder_reserves_can_be_freed(
    using: str, name: str, backend: BaseLockBackend, rival: Rivals, tick: float
) -> None:
    other = rival()
    lease = taken(name, using=using, ttl=3 * tick, min_hold=600, renew=False)
    # Nobody has looked since it died.
    eventually(lambda: [each.reserved for each in _records(backend, other)] == [True])

    assert lock(name, using=using).locked()
    seen = backend.probe(other.request)
    assert not other.tries()
    for busy in (seen, other.refused):
        assert busy is not None
        assert (busy.holder, busy.reserved) == (None, True)
    [reserved] = _records(backend, other)
    assert backend.force_release(reserved.key, reserved.owner_digest) is True

    assert other.tries()
    with pytest.raises(LockNotHeld):
        lease.release()


@pytest.mark.usefixtures("is_never_hung")
def test_the_lost_reply_of_a_force_is_settled(
    faulty: Faulty, backend: BaseLockBackend, rival: Rivals, holder: Rival
) -> None:
    other = rival()
    [record] = _records(backend, holder)
    faulty.lose_replies("end_holding")

    assert backend.force_release(record.key, record.owner_digest) is True

    assert other.tries()


@needs("cross_process")
def test_a_holder_by_another_alias_of_the_same_place_is_told_at_once(
    name: str, sites: list[str]
) -> None:
    lease = taken(name, using=sites[0], ttl=60)
    [record] = locks[sites[1]].held(lease.request.key)

    assert locks[sites[1]].force_release(record.key, record.owner_digest)

    assert lease.lost
    with pytest.raises(LockNotHeld):
        lease.release()


@needs("wakes_waiters")
def test_a_waiter_has_it_soon_after_the_force(
    faulty: Faulty, using: str, name: str, rival: Rivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever is not woken sleeps for so long that it is seen.
    monkeypatch.setattr(waiting, "SHORTEST_PAUSE", 15.0)
    monkeypatch.setattr(waiting, "LONGEST_WAKEABLE_PAUSE", 15.0)
    stuck, queued = rival(ttl=60), threading.Event()
    stuck.takes()
    faulty.notice("enqueue", queued.set)
    waiter = start(lambda: take_and_release(using, name))
    assert queued.wait(10)
    [record] = _records(faulty, stuck)

    assert faulty.force_release(record.key, record.owner_digest)

    assert waiter.result(10)


@needs("lists_readers")
def test_readers_are_listed_one_by_one(backend: BaseLockBackend, rival: Rivals) -> None:
    readers = [rival(shared=True) for _ in range(2)]
    for reader in readers:
        reader.takes()

    records = _records(backend, readers[0])

    assert [record.shared for record in records] == [True, True]
    assert [record.holder for record in records] == [reader.request.holder for reader in readers]
    assert {record.owner_digest for record in records} == {
        digest(one.request.owner) for one in readers
    }
    assert backend.force_release(records[0].key, records[0].owner_digest)
    assert len(_records(backend, readers[0])) == 1


@pytest.mark.slow
@lacks("hides_age")
def test_the_age_grows_and_no_extension_resets_it(
    using: str, name: str, backend: BaseLockBackend, rival: Rivals, tick: float
) -> None:
    other = rival()
    with lock(name, using=using, ttl=30) as lease:
        [first] = _records(backend, other)
        assert first.age is not None
        assert 0 <= first.age < 5
        eventually(lambda: (_age(backend, other) or 0) > (first.age or 0) + tick, 20)

        lease.extend()

        assert (_age(backend, other) or 0) > first.age + tick


def _age(backend: BaseLockBackend, rival: Rival) -> float | None:
    [record] = _records(backend, rival)
    return record.age


@pytest.mark.slow
@needs("counts_waiters")
def test_the_number_of_waiters_is_that_of_their_places_on_the_server(
    using: str, name: str, backend: BaseLockBackend, holder: Rival
) -> None:
    waiters = [start(lambda: take_and_release(using, name)) for _ in range(3)]

    eventually(lambda: _waiters(using, name) == _places(backend, 3), 20)

    holder.leaves()
    assert all(waiter.result(20) for waiter in waiters)


@lacks("counts_waiters")
@pytest.mark.usefixtures("holder")
def test_waiters_are_unknown_without_a_queue_on_the_server(using: str, name: str) -> None:
    assert _waiters(using, name) is None


def _waiters(using: str, name: str) -> int | None:
    [held] = holdings(using, name)
    return held.waiters


def _places(backend: BaseLockBackend, waiters: int) -> int:
    """Return how many of so many writers of one process are known where the lock is: one asks for all."""
    return waiters if isinstance(backend, LocMemBackend) else 1


@pytest.mark.slow
@pytest.mark.usefixtures("holder")
def test_callers_that_have_given_up_are_not_counted(using: str, name: str, tick: float) -> None:
    waiters = [start(lambda: lock(name, using=using, timeout=5 * tick).acquire()) for _ in range(3)]
    for waiter in waiters:
        assert waiter.result(20) is None

    eventually(lambda: not any(held.waiters for held in holdings(using, name)), 20)


@pytest.mark.slow
@needs("cross_process", "wakes_waiters", "counts_waiters")
def test_waiters_of_all_processes_are_counted_until_they_are_gone(
    using: str, name: str, backend: BaseLockBackend, holder: Rival, child: Children
) -> None:
    others = child("wait_in_threads", name=name, using=using, number=2)
    waiters = [start(lambda: take_and_release(using, name)) for _ in range(3)]

    mine, theirs = _places(backend, 3), _places(backend, 2)
    eventually(lambda: _waiters(using, name) == mine + theirs, 20)
    others.kill()
    eventually(lambda: _waiters(using, name) == mine, 20)

    holder.leaves()
    assert all(waiter.result(20) for waiter in waiters)
