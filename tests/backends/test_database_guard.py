"""guard(): inside the user's transaction, no later holder can commit first."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from django.db import connections, transaction

from django_distlock import LockError, NotSupported, StaleFencingToken, lock, locks
from django_distlock.holder import Holder
from django_distlock.protocol import Busy, Grant
from tests.backends.conftest import SERVERS, backend
from tests.fixtures.eventually import eventually, in_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper
    from pytest_django.fixtures import Settings

    from django_distlock.protocol import Request


def rival(alias: str, name: str, ttl: float = 30) -> Request:
    """Return a request as another process would make it."""
    return locks[alias].request(name, ttl=ttl, holder=Holder.current("rival"))


def test_guard_outside_a_transaction_is_an_error(database: str, name: str) -> None:
    with lock(name, using=database) as lease, pytest.raises(LockError, match="inside atomic"):
        lease.guard(using=database)


@pytest.mark.server
def test_guard_on_another_database_is_not_supported(postgres: object, name: str) -> None:
    with (
        lock(name, using="postgres") as lease,
        transaction.atomic(using="default"),
        pytest.raises(NotSupported, match="live in 'postgres'"),
    ):
        lease.guard(using="default")


@pytest.mark.parametrize("database", SERVERS)
def test_later_holder_waits_for_the_guarding_transaction_even_if_the_lease_runs_out(
    request: pytest.FixtureRequest, database: str, name: str, settings: Settings
) -> None:
    request.getfixturevalue(database)
    settings.DISTLOCK = {database: {"OPTIONS": {"using": database, "io_timeout": 4.0}}}
    connections[database].ensure_connection()
    later = rival(database, name)
    with lock(name, using=database, ttl=1, renew=False) as lease:
        with transaction.atomic(using=database):
            lease.guard(using=database)
            eventually(lambda: lease.lost, 5)
            eventually(lambda: locks[database].probe(later) is None, 5, "over for the server too")

            assert isinstance(locks[database].try_acquire(later, queued=False), Busy)
        granted = locks[database].try_acquire(later, queued=False)

        assert isinstance(granted, Grant)
        assert (granted.token or 0) > lease.checked_token()
        with pytest.raises(LockError):
            lease.release()
    locks[database].release(later)


@pytest.mark.parametrize("database", SERVERS)
def test_renewals_and_refusals_are_not_held_up_by_a_guard(
    request: pytest.FixtureRequest, database: str, name: str
) -> None:
    request.getfixturevalue(database)
    late = rival(database, name)

    def refused() -> None:
        assert isinstance(locks[database].try_acquire(late, queued=False), Busy)

    with lock(name, using=database, ttl=3) as lease, transaction.atomic(using=database):
        lease.guard(using=database)
        first = lease.deadline

        in_time(refused, 0, 0.5)
        eventually(lambda: lease.deadline > first, 5)
        lease.extend()
        lease.check()


def test_stale_holder_is_refused(database: str, name: str) -> None:
    later = rival(database, name)
    with lock(name, using=database, ttl=0.2, renew=False) as lease:
        token = lease.checked_token()
        request = lease.request
        eventually(lambda: isinstance(locks[database].try_acquire(later, queued=False), Grant), 5)

        with transaction.atomic(using=database), pytest.raises(StaleFencingToken) as refused:
            backend(database).guard(request, token, database)

        assert refused.value.token == token
        assert refused.value.fence is not None
        assert refused.value.fence > token
        with pytest.raises(LockError):
            lease.release()
    locks[database].release(later)


def test_guarded_write_of_the_valid_holder_is_committed(database: str, name: str) -> None:
    with lock(name, using=database) as lease, transaction.atomic(using=database):
        lease.guard(using=database)


@pytest.mark.parametrize("database", SERVERS)
def test_guard_refuses_a_snapshot_that_is_older_than_the_lock(
    request: pytest.FixtureRequest,
    database: str,
    name: str,
    another: Callable[[str], BaseDatabaseWrapper],
) -> None:
    request.getfixturevalue(database)
    connection = connections[database]
    with lock(name, using=database):
        pass
    with transaction.atomic(using=database):
        with connection.cursor() as cursor:
            begin_snapshot(cursor, database)
        recipe = lock(name, using=database, release="on_commit")
        with recipe as lease, pytest.raises(LockError, match="before lock"):
            lease.guard(using=database)
        transaction.set_rollback(True, using=database)


def begin_snapshot(cursor: object, database: str) -> None:
    """Have the caller's transaction read under REPEATABLE READ."""
    execute = cursor.execute  # type: ignore[attr-defined]
    if database == "postgres":
        execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        execute("SELECT count(*) FROM django_distlock_methodlock")
    else:
        # Django begins the transaction lazily: this one is begun anew, with its snapshot.
        execute("ROLLBACK")
        execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")


@pytest.mark.parametrize("database", SERVERS)
def test_guard_in_a_snapshot_begun_inside_the_lock_is_right(
    request: pytest.FixtureRequest, database: str, name: str
) -> None:
    request.getfixturevalue(database)
    with lock(name, using=database) as lease, transaction.atomic(using=database):
        with connections[database].cursor() as cursor:
            begin_snapshot(cursor, database)
        lease.guard(using=database)


def test_guard_of_a_lost_lease_asks_nobody(database: str, name: str) -> None:
    with lock(name, using=database, ttl=0.1, renew=False) as lease:
        eventually(lambda: lease.lost, 5)

        with transaction.atomic(using=database), pytest.raises(LockError, match="lost"):
            lease.guard(using=database)
        with pytest.raises(LockError):
            lease.release()


def test_guards_of_one_thread_and_acquires_of_others_never_deadlock(
    database: str, name: str, settings: Settings
) -> None:
    settings.DISTLOCK = {database: {"OPTIONS": {"using": database, "io_timeout": 10.0}}}
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                with lock(name, using=database, timeout=30) as lease:
                    with transaction.atomic(using=database):
                        lease.guard(using=database)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)
        finally:
            connections[database].close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
