"""Servers that wake nobody: one connection of the process watches for all who wait there."""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections

from django_distlock import lock, locks
from django_distlock.backends.database import waiters
from django_distlock.backends.database.bounds import cut
from django_distlock.engine.values import Grant, Release
from django_distlock.ground.holder import Holder
from tests.backends.conftest import backend
from tests.contract.crew import start, together
from tests.fixtures.eventually import eventually, never

if TYPE_CHECKING:
    import sqlite3

    from pytest_django.fixtures import Settings

    from django_distlock.backends.database.waiters import Watcher
    from django_distlock.engine.values import Request

DATABASE = "django_distlock.backends.database.DatabaseBackend"
WATCHED = ["default", pytest.param("mariadb", marks=pytest.mark.server)]


@pytest.fixture(params=WATCHED)
def watched(request: pytest.FixtureRequest) -> str:
    if request.param != "default":
        request.getfixturevalue(request.param)
    return str(request.param)


def rival(using: str, name: str, limit: int | None = None) -> Request:
    """Take the lock as another process would, with a *limit* any place of it."""
    request = locks[using].request(name, ttl=60, holder=Holder.current("rival"))
    if limit is not None:
        request = request.with_limit(limit)
    return next(
        each
        for each in request.holdings
        if isinstance(locks[using].try_acquire(each, queued=False), Grant)
    )


def take(using: str, name: str, limit: int | None = None) -> float:
    """Return when the lock was had."""
    try:
        with lock(name, using=using, timeout=30, limit=limit):
            return time.monotonic()
    finally:
        connections[using].close()


@pytest.mark.usefixtures("patient_waiters")
def test_a_waiter_has_the_lock_soon_though_it_looks_seldom_itself(watched: str, name: str) -> None:
    delays = []
    for number in range(5):  # who has released a lock that others want lets them go first
        held = rival(watched, f"{name}:{number}")
        taking = start(partial(take, watched, f"{name}:{number}"))
        never(taking.done, 0.3)

        released = time.monotonic()
        assert locks[watched].release(held) is Release.RELEASED

        delays.append(taking.result(20) - released)

    assert statistics.median(delays) < 2


@pytest.mark.usefixtures("patient_waiters")
def test_a_waiter_has_any_place_soon_that_is_released(watched: str, name: str) -> None:
    for number in range(3):
        held = [rival(watched, f"{name}:{number}", 3) for _ in range(3)]
        taking = start(partial(take, watched, f"{name}:{number}", 3))
        never(taking.done, 0.3)

        assert locks[watched].release(held[number]) is Release.RELEASED

        assert taking.result(5)


@pytest.mark.usefixtures("patient_waiters")
def test_one_connection_watches_for_all_who_wait(watched: str, name: str) -> None:
    held = [rival(watched, f"{name}:{number}") for number in range(20)]
    taking = [start(partial(take, watched, f"{name}:{number}")) for number in range(20)]
    watcher = backend(watched)._watcher
    assert watcher is not None
    eventually(lambda: len(watcher._bells) == 20, 10)

    for request in held:
        locks[watched].release(request)

    assert all(each.result(20) for each in taking)
    eventually(lambda: not watcher._bells, 5)


@pytest.mark.usefixtures("patient_waiters")
def test_a_watcher_whose_connection_is_lost_opens_another(
    watched: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiters, "TICK", 0.1)
    held = rival(watched, name)
    taking = start(lambda: take(watched, name))
    watcher = backend(watched)._watcher
    assert watcher is not None
    lost = eventually(lambda: watcher._connection, 10)
    never(taking.done, 0.2)

    if watched == "default":
        _close_at_the_next_look(watcher, lost.connection, monkeypatch)
    else:
        cut(lost)
    eventually(lambda: watcher._connection not in {None, lost}, 10)
    locks[watched].release(held)

    assert taking.result(5)


def _close_at_the_next_look(
    watcher: Watcher, lost: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that uses it: SQLite crashes if a file is closed in the middle of a statement."""
    version = watcher._dialect.version

    def losing(cursor: Any) -> object:
        if cursor.connection is lost:
            lost.close()
        return version(cursor)

    monkeypatch.setattr(watcher._dialect, "version", losing)


def test_who_has_just_released_what_others_want_lets_them_go_first(
    watched: str, name: str, settings: Settings
) -> None:
    """Who asks again at once would always be there before those who wait for the next look."""
    settings.DISTLOCK = {
        site: {"BACKEND": DATABASE, "OPTIONS": {"using": watched}} for site in ("first", "second")
    }
    order: list[str] = []
    third = rival("first", name)

    def work(site: str) -> None:
        for _ in range(20):
            with lock(name, using=site, timeout=60):
                order.append(site)
                time.sleep(0.002)

    def leave_once_both_were_refused() -> None:
        sites = [locks[site] for site in ("first", "second")]
        eventually(lambda: all(third.key in site.queue.contested.wanted for site in sites), 20)
        locks["first"].release(third)

    together(partial(work, "first"), partial(work, "second"), leave_once_both_were_refused)

    assert sum(one != next_one for one, next_one in itertools.pairwise(order)) >= 8
