"""At most so many at once: numbered places under one name, each a lease of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from django_distlock import (
    Lease,
    Lock,
    LockNotAcquired,
    LockNotHeld,
    LockNotOwned,
    NotSupported,
    lock,
    locks,
)
from django_distlock.engine.registry import registry
from django_distlock.operators import force_release, holdings
from tests.fixtures.eventually import eventually, never

from .acts import WIDTH
from .crew import elsewhere, start
from .profiles import Profile, lacks, needs
from .rivals import Children, Rivals

LIMIT = 3


class Taker:
    """Takes places of one lock, each time another one, and gives back what it still has."""

    def __init__(self, using: str, name: str) -> None:
        self._using, self._name = using, name
        self._taken: list[Lease] = []

    def lock(self, limit: int = LIMIT, **terms: Any) -> Lock:
        terms = {"timeout": 0, **terms}
        return lock(self._name, using=self._using, limit=limit, reentrant=False, **terms)

    def __call__(self, limit: int = LIMIT, **terms: Any) -> Lease | None:
        """Return a lease, or None if all places are taken."""
        lease = self.lock(limit, **terms).acquire()
        if lease is not None:
            self._taken.append(lease)
        return lease

    def all(self, limit: int = LIMIT, **terms: Any) -> list[Lease]:
        leases = [self(limit, **terms) for _ in range(limit)]
        assert all(leases)
        return [lease for lease in leases if lease is not None]

    def give_back(self) -> None:
        for lease in self._taken:
            if lease.is_entered:
                with suppress(LockNotHeld):
                    lease.release()


@pytest.fixture
def take(using: str, name: str) -> Iterator[Taker]:
    taker = Taker(using, name)
    yield taker
    taker.give_back()


def test_so_many_hold_it_at_once_and_no_more_each_by_its_own_lease(take: Taker) -> None:
    leases = take.all()

    assert sorted(lease.place or 0 for lease in leases) == [0, 1, 2]
    with pytest.raises(LockNotAcquired) as caught:
        take.lock().__enter__()
    assert caught.value.limit == LIMIT

    freed = leases.pop(1)
    freed.release()
    with pytest.raises(LockNotHeld):
        freed.release()
    for lease in leases:
        lease.extend()
        lease.check()
    again = take()
    assert again is not None
    assert again.place == freed.place
    assert take() is None


def test_a_lower_limit_takes_only_places_below_it(take: Taker) -> None:
    leases = take.all()
    low = next(lease for lease in leases if lease.place == 0)

    assert take(1) is None
    low.release()

    again = take(1)
    assert again is not None
    assert again.place == 0


def test_whoever_waits_behind_a_lower_limit_is_told_that_limit_or_gets_a_place_above_it(
    using: str, name: str, take: Taker, rival: Rivals
) -> None:
    holders = [rival(limit=2), rival(limit=2)]
    for holder in holders:
        holder.takes()
    first = start(lambda: take(2, timeout=60))
    eventually(lambda: _waits(using, name))

    if locks[using].waiting.for_places().is_in_order:
        with pytest.raises(LockNotAcquired, match=r"taken at all of its 2 places") as caught:
            take.lock(5, timeout=0.5).__enter__()
        assert caught.value.limit == 2
    else:
        with take.lock(5, timeout=0.5) as lease:
            assert lease.place in {2, 3, 4}

    holders[0].leaves()
    assert first.result(30)


@needs("typical")
def test_the_caller_enters_its_place_again_and_a_name_with_a_limit_is_another_name(
    using: str, name: str
) -> None:
    with lock(name, using=using, limit=1) as outer, lock(name, using=using, limit=1) as inner:
        assert inner is outer
        with lock(name, using=using, timeout=0) as alone:
            assert alone is not outer
            assert alone.place is None


def test_a_waiter_gets_the_place_that_comes_free(using: str, name: str, take: Taker) -> None:
    leases = take.all()
    waiter = start(lambda: take(timeout=20))
    eventually(lambda: _waits(using, name))

    freed = leases.pop()
    freed.release()

    got = waiter.result(20)
    assert got is not None
    assert got.place == freed.place
    got.release()


def _waits(using: str, name: str) -> bool:
    """Return whether somebody of this process has been refused, and waits."""
    return any(lease.name == name and not lease.is_granted for lease in registry.leases())


@needs("fair")
def test_waiters_come_in_order_whichever_place_comes_free(name: str, take: Taker) -> None:
    leases: list[Lease | None] = [*take.all(2)]
    waiters = []
    for number in range(4):
        waiters.append(start(lambda: take(2, timeout=60)))
        eventually(lambda: _asleep(name) == number + 1)  # noqa: B023

    for waiter in waiters:
        freed = leases.pop(0)
        assert freed is not None
        freed.release()
        leases.append(waiter.result(20))

    assert all(leases)


def _asleep(name: str) -> int:
    """Return how many of this process wait for the lock, and ask nothing."""
    leases = [lease for lease in registry.leases() if lease.name == name]
    return sum(not lease.is_granted and not lease.is_asking for lease in leases)


@needs("typical")
def test_who_gives_up_lets_the_next_one_in(using: str, name: str, take: Taker, tick: float) -> None:
    leases = take.all(2)
    first = start(lambda: take(2, timeout=10 * tick))
    eventually(lambda: _waits(using, name))
    second = start(lambda: take(2, timeout=60))
    assert first.result(20) is None

    leases[0].release()

    assert second.result(20)


@needs("typical")
def test_a_holder_that_waits_for_us_is_no_deadlock_as_another_may_leave(
    using: str, name: str, take: Taker
) -> None:
    other, ours = elsewhere(lambda: take(2)), lock(f"{name}:ours", using=using, timeout=60)
    assert other is not None

    def wait_for_us() -> None:
        with take.lock(2), ours:
            pass

    def wait_for_it() -> bool:
        with ours:
            holder.append(start(wait_for_us))
            eventually(lambda: _waits(using, ours.name))
            is_holding.set()
            return take(2, timeout=60) is not None

    holder: list[Future[None]] = []
    is_holding = threading.Event()
    waiter = start(wait_for_it)
    assert is_holding.wait(20)
    eventually(lambda: _waits(using, name))
    other.release()

    assert waiter.result(30)
    holder[0].result(30)


def test_a_waiter_gives_up_in_time(take: Taker, tick: float) -> None:
    take.all()

    with pytest.raises(LockNotAcquired) as caught:
        take.lock(timeout=3 * tick).__enter__()

    assert caught.value.waited >= 3 * tick


def test_many_threads_are_never_more_than_the_limit(using: str, name: str) -> None:
    inside: Counter[int | None] = Counter()
    most: list[int] = []
    mutex = threading.Lock()

    def work() -> None:
        for _ in range(4):
            with lock(name, using=using, limit=LIMIT, timeout=60) as lease:
                with mutex:
                    inside[lease.place] += 1
                    most.append(sum(inside.values()))
                    assert inside[lease.place] == 1
                lease.check()
                with mutex:
                    inside[lease.place] -= 1

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result(120)
    assert max(most) <= LIMIT


@needs("cross_process")
def test_processes_never_share_a_place(
    child: Children, using: str, name: str, tmp_path: Path
) -> None:
    balances = tmp_path / "balances"
    balances.write_text("0" * WIDTH * LIMIT)
    terms = {"using": using, "name": name, "limit": LIMIT, "timeout": 60}
    spawned = [child("raise_balance", path=str(balances), rounds=12, **terms) for _ in range(4)]
    for each in spawned:
        each.expect("ready")
    for each in spawned:
        each.tell("go")
    for each in spawned:
        each.result(90)

    text = balances.read_text()
    assert sum(int(text[at : at + WIDTH]) for at in range(0, len(text), WIDTH)) == 4 * 12


@lacks("whole_seconds")
@needs("cross_process")
def test_the_places_of_killed_processes_come_free(
    child: Children, using: str, name: str, take: Taker, tick: float
) -> None:
    terms = {"using": using, "name": name, "limit": LIMIT, "ttl": 15 * tick}
    holders = [child("hold", **terms) for _ in range(LIMIT)]
    for holder in holders:
        holder.expect("held")
    assert take() is None
    waiting = start(lambda: take(timeout=200 * tick))
    eventually(lambda: _waits(using, name))

    for holder in holders:
        holder.kill()

    assert waiting.result(30)
    # All of them: none is lost for ever.
    assert [take(timeout=200 * tick) is not None for _ in range(LIMIT - 1)] == [True] * (LIMIT - 1)
    assert take() is None


@needs("cross_process", "wakes_waiters")
def test_a_release_in_another_process_wakes_the_waiter(
    child: Children, using: str, name: str, take: Taker
) -> None:
    holders = [child("hold", using=using, name=name, limit=2) for _ in range(2)]
    for holder in holders:
        holder.expect("held")
    waiting = start(lambda: take(2, timeout=30))
    eventually(lambda: _waits(using, name))
    never(waiting.done, 0.2)

    holders[0].tell("leave")

    assert waiting.result(10)


@needs("leased")
def test_a_place_comes_free_when_its_lease_ends(take: Taker, profile: Profile, tick: float) -> None:
    ttl = max(3 * tick, profile.shortest_ttl)
    leases = take.all(ttl=ttl, renew=False, timeout=20)  # one may end before its grant arrives

    got = elsewhere(lambda: take(timeout=20))

    assert got is not None
    assert all(lease.lost for lease in leases if lease.place == got.place)
    got.release()


@lacks("variant")
@needs("min_hold")
def test_a_rate_is_a_limit_with_min_hold(take: Taker, tick: float) -> None:
    for _ in range(LIMIT):
        with take.lock(min_hold=20 * tick):
            pass

    assert take() is None
    with take.lock(timeout=20):
        pass


@needs("listing")
def test_places_are_listed_and_freed_by_operators(using: str, name: str, take: Taker) -> None:
    leases = take.all(2)

    shown = holdings(using, name)

    assert sorted(held.place or 0 for held in shown) == [0, 1]
    assert {held.name for held in shown} == {name}
    assert force_release(name, using) == 2
    assert not any(lease.held for lease in leases)
    for lease in leases:
        with pytest.raises((LockNotHeld, LockNotOwned)):
            lease.release()
    with take.lock():
        pass


@needs("detach")
def test_a_place_is_handed_to_another_process(take: Taker) -> None:
    first, second = take.all(2)
    text = first.detach()

    attached = elsewhere(lambda: Lease.attach(text))

    assert attached.place == first.place
    assert take(2) is None
    attached.release()
    second.release()


@needs("typical")
def test_data_is_not_fenced_by_one_of_several(using: str, name: str, take: Taker) -> None:
    with take.lock() as lease, pytest.raises(NotSupported, match="with a limit"):
        lease.checked_token()
    with pytest.raises(NotSupported, match="shared=True with a limit"):
        lock(name, using=using, shared=True, limit=2)
