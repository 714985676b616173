"""Locks and the transactions of their callers."""

from __future__ import annotations

import random
import time
import uuid
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
from django.db import DatabaseError, connections, transaction
from django.db.utils import InterfaceError
from django.test.utils import CaptureQueriesContext

from django_distlock import (
    LockNotAcquired,
    ReleasedBeforeCommit,
    SnapshotBeforeLock,
    lock,
    locks,
)
from django_distlock.models import MethodLock
from testproject.models import Account
from tests.backends.conftest import apart, isolated
from tests.contract.rivals import Rival
from tests.fixtures.eventually import never

from .session_tools import end_session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper
    from pytest_django.fixtures import Settings

    from django_distlock.engine.values import Release, Request

THREADS, UPDATES = 4, 20
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


class RolledBack(Exception):
    """Ends an atomic block."""


@pytest.fixture
def account(server_database: str) -> Iterator[Account]:
    made = Account.objects.using(server_database).create(
        name=uuid.uuid4().hex, balance=0, opening_balance=0
    )
    yield made
    made.delete(using=server_database)


def is_held(alias: str, name: str) -> bool:
    return MethodLock.objects.using(alias).filter(method_name=name, owner__isnull=False).exists()


def ask_elsewhere(alias: str, name: str) -> bool:
    """Return whether another thread sees the lock held: on a connection of its own."""
    [answer] = apart(alias, partial(is_held, alias, name))
    return answer


# A lease never lives in the caller's transaction.


def test_lease_taken_in_a_transaction_is_committed_at_once_and_survives_rollback(
    server_database: str, name: str
) -> None:
    recipe, lease = lock(name, using=server_database), None
    with pytest.raises(RolledBack), transaction.atomic(using=server_database):
        Account.objects.using(server_database).count()
        lease = recipe.acquire()
        assert ask_elsewhere(server_database, name)
        raise RolledBack

    assert lease is not None
    assert is_held(server_database, name)
    lease.check()
    lease.release()
    assert not is_held(server_database, name)


def test_lease_taken_late_in_an_old_transaction_has_its_full_ttl(
    server_database: str, name: str
) -> None:
    with transaction.atomic(using=server_database):
        Account.objects.using(server_database).count()
        time.sleep(0.9)

        began = time.monotonic()
        lease = lock(name, using=server_database, ttl=10, renew=False).acquire()
        assert lease
    with lease:
        held = [h for h in locks[server_database].held() if h.name == name]

        # An instant of the transaction's beginning would leave 9.1 seconds.
        assert lease.remaining + (time.monotonic() - began) > 9.5
        assert (held[0].remaining or 0) + (time.monotonic() - began) > 9.5


@pytest.mark.parametrize("level", LEVELS)
def test_busy_lock_leaves_the_callers_transaction_usable(
    server_database: str, name: str, level: str, account: Account
) -> None:
    other = Rival.of(locks[server_database], name, ttl=30)
    other.takes()
    connection = connections[server_database]
    connection.close()

    with transaction.atomic(using=server_database):
        set_level(connection, level)
        Account.objects.using(server_database).filter(pk=account.pk).update(balance=7)
        with (
            CaptureQueriesContext(connection) as asked,
            pytest.raises(LockNotAcquired),
            lock(name, using=server_database, timeout=0.1),
        ):
            pass
        assert len(asked) == 0
        assert level_of(connection) == level
        assert Account.objects.using(server_database).get(pk=account.pk).balance == 7

    account.refresh_from_db()
    assert account.balance == 7
    other.leaves()
    # On MariaDB the level is the session's, and would be that of the tests that follow.
    connection.close()


def set_level(connection: BaseDatabaseWrapper, level: str) -> None:
    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute("ROLLBACK")
            cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
            cursor.execute("BEGIN")
        else:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")


def level_of(connection: BaseDatabaseWrapper) -> str:
    asks = {"mysql": "SELECT @@tx_isolation", "postgresql": "SHOW transaction_isolation"}
    with connection.cursor() as cursor:
        cursor.execute(asks[connection.vendor])
        return str(cursor.fetchone()[0]).upper().replace("-", " ")


# The nestings of a lock and a transaction.


def read_modify_write(account: Account, alias: str) -> None:
    balance = Account.objects.using(alias).get(pk=account.pk).balance
    time.sleep(random.uniform(0, 0.002))
    Account.objects.using(alias).filter(pk=account.pk).update(balance=balance + 1)


def lock_inside(account: Account, alias: str, name: str) -> None:
    with transaction.atomic(using=alias):
        with lock(name, using=alias, timeout=60):
            read_modify_write(account, alias)
        # What else the transaction does before it is committed.
        time.sleep(0.002)


def lock_until_commit(account: Account, alias: str, name: str) -> None:
    with transaction.atomic(using=alias):
        with lock(name, using=alias, timeout=60, release="on_commit"):
            read_modify_write(account, alias)
        time.sleep(0.002)


def lost_updates(
    nesting: Callable[[Account, str, str], None], account: Account, alias: str, name: str
) -> int:
    """Return how many updates by several threads are lost."""

    def work() -> None:
        with warnings.catch_warnings():
            for _ in range(UPDATES):
                nesting(account, alias, name)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReleasedBeforeCommit)
        apart(alias, *[work] * THREADS)
    return THREADS * UPDATES - int(Account.objects.using(alias).get(pk=account.pk).balance)


@pytest.fixture
def read_committed(server_database: str) -> Iterator[None]:
    """Have the threads of a test read what is committed: MariaDB's default is REPEATABLE READ."""
    with isolated(server_database, "read committed"):
        yield


@pytest.fixture
def patient(server_database: str, settings: Settings) -> None:
    """Have requests that the machine has no time for be answered late."""
    options = {"using": server_database, "io_timeout": 10.0}
    settings.DISTLOCK = {server_database: {"OPTIONS": options}}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("nesting", [lock_inside, lock_until_commit])
@pytest.mark.usefixtures("read_committed", "patient")
def test_no_update_is_lost_with_the_lock_around_the_transaction(
    nesting: Callable[[Account, str, str], None], account: Account, server_database: str, name: str
) -> None:
    assert lost_updates(nesting, account, server_database, name) == 0


# Each way that a transaction ends releases once.


def commit(alias: str, name: str) -> None:
    with transaction.atomic(using=alias):
        take_until_commit(alias, name)


def roll_back(alias: str, name: str) -> None:
    with pytest.raises(RolledBack), transaction.atomic(using=alias):
        take_until_commit(alias, name)
        raise RolledBack


def roll_back_savepoint_of_the_release(alias: str, name: str) -> None:
    with transaction.atomic(using=alias):
        lease = lock(name, using=alias).acquire()
        assert lease
        with pytest.raises(RolledBack), transaction.atomic(using=alias):
            lease.release()
            raise RolledBack
        still_held(alias, name)


@contextmanager
def by_hand(alias: str) -> Iterator[None]:
    """Manual transaction management."""
    transaction.set_autocommit(False, using=alias)
    try:
        yield
        transaction.set_autocommit(True, using=alias)
    except BaseException:
        connections[alias].close()
        raise


def commit_by_hand(alias: str, name: str) -> None:
    with by_hand(alias):
        take_until_commit(alias, name)
        transaction.commit(using=alias)
        assert not ask_elsewhere(alias, name)


def roll_back_by_hand(alias: str, name: str) -> None:
    with by_hand(alias):
        take_until_commit(alias, name)
        transaction.rollback(using=alias)
        assert not ask_elsewhere(alias, name)


def commit_what_the_settings_began(alias: str, name: str) -> None:
    """Take the lock as the first act of a thread with "AUTOCOMMIT": False."""
    connections.settings[alias]["AUTOCOMMIT"] = False

    def work() -> None:
        take_until_commit(alias, name)
        transaction.commit(using=alias)
        assert not ask_elsewhere(alias, name)

    try:
        apart(alias, work)
    finally:
        connections.settings[alias]["AUTOCOMMIT"] = True


def close_by_hand(alias: str, name: str) -> None:
    transaction.set_autocommit(False, using=alias)
    try:
        take_until_commit(alias, name)
    finally:
        connections[alias].close()


def still_held(alias: str, name: str) -> None:
    never(lambda: not ask_elsewhere(alias, name), 0.2)


def lose_connection(alias: str, name: str) -> None:
    connection = connections[alias]
    with pytest.raises((DatabaseError, InterfaceError)), transaction.atomic(using=alias):
        take_until_commit(alias, name)
        end_session_of(connection)
        Account.objects.using(alias).count()
    connection.close()


def lose_connection_after_commit(alias: str, name: str) -> None:
    connection = connections[alias]
    before = connection._commit  # type: ignore[attr-defined]  # not in the stubs

    def commit_and_die() -> None:
        before()
        end_session_of(connection)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises((DatabaseError, InterfaceError)),
        transaction.atomic(using=alias),
    ):
        take_until_commit(alias, name)
        patch.setattr(connection, "_commit", commit_and_die)
    is_kept = ask_elsewhere(alias, name)
    connection.close()
    assert not is_kept


def take_until_commit(alias: str, name: str) -> None:
    with lock(name, using=alias):
        Account.objects.using(alias).count()
    assert ask_elsewhere(alias, name)


ENDINGS = [
    *(commit, roll_back, roll_back_savepoint_of_the_release),
    *(lose_connection, lose_connection_after_commit),
    *(commit_by_hand, roll_back_by_hand, close_by_hand, commit_what_the_settings_began),
]


@pytest.mark.parametrize("ending", ENDINGS)
def test_each_end_of_a_transaction_releases_exactly_once(
    monkeypatch: pytest.MonkeyPatch,
    ending: Callable[[str, str], None],
    server_database: str,
    name: str,
) -> None:
    locked = locks[server_database]
    released, release = [], locked.release

    def note(request: Request) -> Release:
        if request.name == name:
            released.append(name)
        return release(request)

    monkeypatch.setattr(locked, "release", note)

    ending(server_database, name)

    assert not is_held(server_database, name)
    never(lambda: len(released) > 1, 0.3)
    assert released == [name]


def test_snapshot_older_than_the_lock_is_refused_by_guard_or_seen_through_by_claim(
    server_database: str, name: str, account: Account
) -> None:
    connection = connections[server_database]
    connection.close()
    with transaction.atomic(using=server_database):
        set_level(connection, "REPEATABLE READ")
        assert Account.objects.using(server_database).get(pk=account.pk).balance == 0
        rows = Account.objects.using(server_database).filter(pk=account.pk)
        apart(server_database, partial(rows.update, balance=5))

        with lock(name, using=server_database, release="on_commit") as lease:
            if connection.vendor == "mysql":
                assert lease.claim(account).balance == 5
            else:
                with pytest.raises(DatabaseError), transaction.atomic(using=server_database):
                    lease.claim(account)
        transaction.set_rollback(True, using=server_database)
    connection.close()


@pytest.fixture
def at_level(server_database: str) -> Iterator[Callable[[str], str]]:
    """Have the connections of Django be of an isolation level."""
    with ExitStack() as stack:
        yield lambda level: stack.enter_context(isolated(server_database, level))


def read(alias: str) -> None:
    list(Account.objects.using(alias).all()[:1])


def test_a_snapshot_from_before_the_lock_is_warned_of_at_the_call_site(
    at_level: Callable[[str], str], name: str
) -> None:
    alias = at_level("repeatable read")
    with transaction.atomic(using=alias):
        read(alias)
        with pytest.warns(SnapshotBeforeLock) as warned, lock(name, using=alias):
            pass

    assert [record.filename for record in warned] == [__file__]


def test_a_strict_alias_refuses_it_before_anything_is_taken(
    settings: Settings, at_level: Callable[[str], str], name: str
) -> None:
    alias = at_level("repeatable read")
    settings.DISTLOCK = {"default": {"STRICT": True, "OPTIONS": {"using": alias}}}

    with transaction.atomic(using=alias):
        read(alias)
        with pytest.raises(SnapshotBeforeLock, match=name):
            lock(name).acquire()
        assert not is_held(alias, name)
