"""Waiters of several processes: woken, in order where that is promised, and never starved."""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import wait
from functools import partial
from itertools import pairwise

import pytest

from django_distlock import lock, locks
from django_distlock.conf import read_alias, read_settings
from django_distlock.engine import acquisition, waiting
from django_distlock.engine.local_queue import IN_A_ROW
from tests.fixtures.eventually import eventually, never

from .crew import is_contested, start, take_and_release
from .faults import Faulty, faulty_version_of
from .profiles import lacks, needs
from .rivals import Children, Rival, Rivals

#: Seconds that a machine which is busy with other things may take to run a thread that is woken.
SLOW = 1.0


def _served(sites: list[str], holder: Rival) -> list[int]:
    """Have one waiter by each of *sites* stand in line behind *holder*; return who was served when."""
    name, served = holder.request.name, list[int]()
    holder.takes()

    def stand(number: int) -> None:
        with lock(name, using=sites[number], timeout=30):
            served.append(number)

    waiters = []
    for number, site in enumerate(sites):
        watched, queued = locks[site], threading.Event()
        assert isinstance(watched, Faulty)
        watched.notice("enqueue", queued.set)
        waiters.append(start(partial(stand, number)))
        assert queued.wait(10)
    holder.leaves()

    for waiter in waiters:
        waiter.result(30)
    return served


class TestBetweenProcesses:
    @needs("fair", "cross_process")
    def test_waiters_are_served_in_the_order_they_came(
        self, sites: list[str], name: str, rival: Rivals
    ) -> None:
        for site in sites:
            locks.replace(
                site, faulty_version_of(locks[site], read_alias(site, read_settings()[site]))
            )

        # A waiter that stands still for too long is overtaken: that is no reason to fail.
        rounds = (_served(sites, rival(of=f"{name}:{number}")) for number in range(3))
        assert any(served == list(range(len(sites))) for served in rounds)

    @needs("fair", "cross_process")
    def test_nobody_overtakes_a_waiter(
        self, faulty: Faulty, sites: list[str], using: str, name: str, rival: Rivals
    ) -> None:
        # From another server, as this one is to hang.
        holder, late = rival(), rival(site=sites[1])
        holder.takes()
        queued = threading.Semaphore(0)
        faulty.notice("enqueue", queued.release)
        tried = threading.Event()

        def take() -> bool:
            with lock(name, using=using, timeout=30):
                return tried.wait(10)

        taking = start(take)
        assert queued.acquire(timeout=10)
        # Else the waiter may be so quick that nobody could overtake it.
        may_ask = faulty.hang("try_acquire")

        holder.leaves()
        assert not late.tries()
        tried.set()
        may_ask.set()

        assert taking.result(10)
        late.takes()

    @needs("fair", "cross_process")
    def test_a_waiter_that_was_killed_is_passed_over_after_a_while(
        self, child: Children, sites: list[str], using: str, name: str, holder: Rival
    ) -> None:
        dead = child("stand_in_line", name=name, using=using)
        dead.expect("queued")
        dead.kill()
        holder.leaves()

        with lock(name, using=sites[1], timeout=20) as lease:
            assert lease.held

    @needs("wakes_waiters")
    def test_a_release_wakes_the_waiter(
        self, faulty: Faulty, using: str, name: str, rival: Rivals, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Whoever is not woken sleeps for so long that it is seen.
        monkeypatch.setattr(waiting, "SHORTEST_PAUSE", 10.0)
        monkeypatch.setattr(waiting, "LONGEST_WAKEABLE_PAUSE", 10.0)
        delays = []
        for _ in range(5):
            holder, queued = rival(), threading.Event()
            holder.takes()
            faulty.notice("enqueue", queued.set)
            waiter = start(lambda: take_and_release(using, name))
            assert queued.wait(10)

            released = time.monotonic()
            holder.leaves()

            delays.append(waiter.result(20) - released)

        assert statistics.median(delays) < SLOW / 2
        assert max(delays) < 5

    @needs("wakes_waiters")
    def test_a_lost_wake_up_costs_little(
        self, faulty: Faulty, using: str, name: str, rival: Rivals
    ) -> None:
        holder, queued = rival(), threading.Event()
        holder.takes()
        faulty.is_deaf = True
        faulty.notice("enqueue", queued.set)
        waiter = start(lambda: take_and_release(using, name))
        assert queued.wait(10)

        released = time.monotonic()
        holder.leaves()

        assert waiter.result(20) - released < waiting.LONGEST_WAKEABLE_PAUSE + 5

    @lacks("wakes_waiters")
    def test_where_nobody_is_woken_a_waiter_looks_often(
        self, using: str, name: str, holder: Rival, tick: float
    ) -> None:
        waiter = start(lambda: take_and_release(using, name))
        never(waiter.done, 3 * tick)

        released = time.monotonic()
        holder.leaves()

        assert waiter.result(20) - released < waiting.LONGEST_PAUSE + 5

    @lacks("whole_seconds")
    def test_a_waiter_does_not_sleep_past_the_end_of_the_holder(
        self, using: str, name: str, rival: Rivals, tick: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for pause in ("SHORTEST_PAUSE", "LONGEST_WAKEABLE_PAUSE", "SHORTEST_POLL", "LONGEST_POLL"):
            monkeypatch.setattr(waiting, pause, 30.0)
        rival(ttl=3 * tick).takes()
        began = time.monotonic()

        take_and_release(using, name)

        assert time.monotonic() - began < 3 * tick + 8

    @needs("cross_process")
    @lacks("fair")  # where each has a place of its own
    def test_a_busy_process_gives_way_to_others(
        self, sites: list[str], name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # So long that nothing else takes as long.
        monkeypatch.setattr(acquisition, "GIVE_WAY", 2.0)
        over, taken = threading.Event(), list[float]()

        def be_busy() -> None:
            while not over.is_set():
                taken.append(take_and_release(sites[0], name))

        busy = []
        try:
            with lock(name, using=sites[1], timeout=20):
                # So many that there is always one in line.
                busy = [start(be_busy) for _ in range(8)]
                eventually(lambda: is_contested(locks[sites[0]], name))
            eventually(lambda: len(taken) >= 2 * IN_A_ROW, 30)
        finally:
            over.set()
            wait(busy)
        for each in busy:
            each.result()
        assert max(later - one for one, later in pairwise(sorted(taken))) >= 2.0
