"""Locked rows: what is special to them, beside what test_sessions.py says of all locks of a session."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from django.db import transaction

from django_distlock import LockNotAcquired, lock, locks, transaction_lock
from django_distlock.engine.values import Busy
from django_distlock.exceptions import InvalidLockBackend
from tests.backends.conftest import SERVERS
from tests.contract import crew
from tests.fixtures.eventually import eventually, told_in_time

from .session_tools import HUNT, aliases, backend, hunt, waiters

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from pytest_django.fixtures import Settings

    from tests.fixtures.postgres import PostgreSQL

Another = Callable[[str], "BaseDatabaseWrapper"]


@pytest.fixture(params=SERVERS)
def database(request: pytest.FixtureRequest, settings: Settings) -> str:
    """Each server, with its rows as the alias "locks"."""
    request.getfixturevalue(request.param)
    settings.DISTLOCK = aliases(request.param, "rowlock")
    return str(request.param)


def test_who_comes_first_in_the_queue_late_waits_no_longer_than_it_said(
    database: str, name: str
) -> None:
    """PostgreSQL makes it wait once for those before it, and then for the holder."""

    for using in ("site0", "site1"):
        with lock(f"{name}:{using}", using=using):
            pass  # the connections are open

    def too_long(using: str, timeout: float) -> float:
        began = time.monotonic()
        _refused(name, using, timeout)
        return time.monotonic() - began - timeout

    def wait_behind_another() -> float:
        first = crew.start(partial(too_long, "site0", 1.5))
        eventually(lambda: waiters(database) == 1 or first.done())
        if first.done():
            return math.inf  # nobody saw it wait
        outcomes = too_long("site1", 2.5), first.result(10)
        assert min(outcomes) >= 0
        return max(outcomes)

    with lock(name, using="locks"):
        told_in_time(wait_behind_another, 0, 0.5)


def _refused(name: str, using: str, timeout: float) -> None:
    assert not lock(name, using=using).acquire(timeout=timeout)


@pytest.mark.server
@pytest.mark.timeout(180)
def test_a_wait_that_times_out_as_it_is_granted_is_refused_or_a_lock_that_can_be_released(
    postgres: PostgreSQL, settings: Settings, name: str
) -> None:
    settings.DISTLOCK = aliases("postgres", "rowlock", io_timeout=10.0)

    assert hunt("postgres", name, HUNT) > 100


def test_a_row_that_was_only_looked_at_is_no_reason_to_refuse_a_single_try(
    database: str, name: str, another: Another, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks whether it is held locks the row for a moment."""
    with lock(name, using="locks") as lease:
        key = lease.request.key
    looker, refused, take = another(database), [], backend().server.take
    looker.set_autocommit(False)
    with looker.cursor() as cursor:
        statement = "SELECT 1 FROM django_distlock_methodlock WHERE method_name = %s FOR UPDATE"
        cursor.execute(statement, [key])

    def take_while_it_is_looked_at(*args: Any) -> Any:
        answer = take(*args)
        if isinstance(answer, Busy):
            refused.append(answer)
            looker.rollback()
        return answer

    monkeypatch.setattr(backend().server, "take", take_while_it_is_looked_at)
    with lock(name, using="locks", timeout=0):
        assert len(refused) == 1


def test_it_is_the_lock_of_transaction_lock(database: str, name: str) -> None:
    with transaction.atomic(using=database):
        transaction_lock(name, using=database)
        assert lock(name, using="locks").locked()
        assert not lock(name, using="locks").acquire(timeout=0)

    with lock(name, using="locks", timeout=0), transaction.atomic(using=database):
        with pytest.raises(LockNotAcquired):
            transaction_lock(name, using=database, timeout=0)


def test_a_database_that_has_no_row_locks_is_refused_with_its_alias(
    settings: Settings,
) -> None:
    settings.DISTLOCK = aliases("default", "rowlock")

    with pytest.raises(InvalidLockBackend, match=r"DISTLOCK\['locks'\].*'default'.*sqlite"):
        locks["locks"]
