"""guard(): inside the user's transaction, no later holder can commit first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError

from django_distlock import (
    LockError,
    NotSupported,
    StaleFencingToken,
    lock,
    locks,
)
from django_distlock.backends.database.dialect import COUNTER
from tests.backends.conftest import SERVERS, apart, backend
from tests.contract.rivals import Rival
from tests.fixtures.eventually import eventually, in_time

from .session_tools import ask

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from tests.fixtures.mariadb import MariaDB


def test_guard_outside_a_transaction_is_an_error(database: str, name: str) -> None:
    with lock(name, using=database) as lease, pytest.raises(LockError, match="inside atomic"):
        lease.guard(using=database)


def test_guard_in_a_broken_transaction_is_django_s_own_error(database: str, name: str) -> None:
    with lock(name, using=database) as lease, transaction.atomic(using=database):
        transaction.set_rollback(True, using=database)
        with pytest.raises(TransactionManagementError, match="end of the 'atomic' block"):
            lease.guard(using=database)


@pytest.mark.server
def test_guard_on_another_database_is_not_supported(postgres: object, name: str) -> None:
    with (
        lock(name, using="postgres") as lease,
        transaction.atomic(using="default"),
        pytest.raises(NotSupported, match="live in 'postgres'"),
    ):
        lease.guard(using="default")


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_later_holder_waits_for_the_guarding_transaction_even_if_the_lease_runs_out(
    database: str, name: str, settings: Settings
) -> None:
    settings.DISTLOCK = {database: {"OPTIONS": {"using": database, "io_timeout": 4.0}}}
    connections[database].ensure_connection()
    later = Rival.of(locks[database], name)
    with lock(name, using=database, ttl=1, renew=False) as lease:
        with transaction.atomic(using=database):
            lease.guard(using=database)
            eventually(lambda: lease.lost, 5)
            is_held = lock(name, using=database).locked
            eventually(lambda: not is_held(), 5, "over for the server too")

            assert not later.tries()
        assert later.tries()

        assert (later.token or 0) > lease.checked_token()
        with pytest.raises(LockError):
            lease.release()
    later.leaves()


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_renewals_and_refusals_are_not_held_up_by_a_guard(database: str, name: str) -> None:
    late = Rival.of(locks[database], name)

    def refused() -> None:
        assert not late.tries()

    with lock(name, using=database, ttl=3) as lease, transaction.atomic(using=database):
        lease.guard(using=database)
        first = lease.deadline

        in_time(refused, 0, 0.5)
        eventually(lambda: lease.deadline > first, 5)
        lease.extend()
        lease.check()


def test_stale_holder_is_refused(database: str, name: str) -> None:
    later = Rival.of(locks[database], name)
    with lock(name, using=database, ttl=0.2, renew=False) as lease:
        token = lease.checked_token()
        request = lease.request
        later.takes()

        with transaction.atomic(using=database), pytest.raises(StaleFencingToken) as refused:
            backend(database).guard(request, token, database)

        assert refused.value.token == token
        assert refused.value.fence is not None
        assert refused.value.fence > token
        with pytest.raises(LockError):
            lease.release()
    later.leaves()


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_guard_refuses_a_snapshot_that_is_older_than_the_lock(database: str, name: str) -> None:
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
        # Django begins the transaction lazily: this one begins again, with its snapshot.
        execute("ROLLBACK")
        execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")


# The caller may look for its tables elsewhere: another tenant's schema, with tables of the same names.


@pytest.mark.parametrize("kind", ["database.DatabaseBackend", "rowlock.RowLockBackend"])
def test_lock_is_listed_and_freed_from_wherever_the_caller_looks_for_its_tables(
    wanderer: str, kind: str, name: str, settings: Settings
) -> None:
    settings.DISTLOCK = {
        wanderer: {"BACKEND": f"django_distlock.backends.{kind}", "OPTIONS": {"using": wanderer}}
    }
    lease = lock(name, using=wanderer).acquire()
    assert lease

    [held] = [held for held in locks[wanderer].held() if held.name == name]
    assert held.token == lease.fencing_token
    assert locks[wanderer].force_release(held.key, held.owner_digest)

    # A server may take a moment to end the session that holds a row.
    eventually(lambda: name not in [held.name for held in locks[wanderer].held()], 5)
    with pytest.raises(LockError):
        lease.release()


@pytest.mark.server
def test_guard_by_a_user_that_may_not_use_the_tables_is_not_supported(
    mariadb: MariaDB, name: str
) -> None:
    admin = mariadb.admin()
    with admin.cursor() as cursor:
        cursor.execute("CREATE USER visitor@'127.0.0.1' IDENTIFIED BY 'visitor'")
        cursor.execute("GRANT SELECT ON distlock.django_content_type TO visitor@'127.0.0.1'")
    connection = connections["mariadb"]
    connection.close()
    user = {"USER": "visitor", "PASSWORD": "visitor"}
    before = {key: connection.settings_dict[key] for key in user}

    with lock(name, using="mariadb") as lease:
        connection.settings_dict.update(user)
        try:
            with (
                transaction.atomic(using="mariadb"),
                pytest.raises(NotSupported, match="command denied"),
            ):
                lease.guard(using="mariadb")
        finally:
            connection.settings_dict.update(before)
            connection.close()

    with admin.cursor() as cursor:
        cursor.execute("DROP USER visitor@'127.0.0.1'")
    admin.close()


# A savepoint.


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_guard_of_the_outer_block_outlives_a_savepoint_that_is_rolled_back(
    database: str, name: str
) -> None:
    token = f"SELECT value FROM {COUNTER} WHERE method_name = %s FOR UPDATE SKIP LOCKED"

    def free_tokens() -> list[tuple[int]]:
        with transaction.atomic(using=database):
            return ask(database, token, lease.request.key)

    with lock(name, using=database) as lease, transaction.atomic(using=database):
        lease.guard(using=database)
        with transaction.atomic(using=database):
            lease.guard(using=database)
            transaction.set_rollback(True, using=database)

        assert apart(database, free_tokens) == [[]]


def test_guards_of_one_thread_and_acquires_of_others_never_deadlock(
    database: str, name: str, settings: Settings
) -> None:
    settings.DISTLOCK = {database: {"OPTIONS": {"using": database, "io_timeout": 10.0}}}

    def work() -> None:
        for _ in range(20):
            with lock(name, using=database, timeout=30) as lease:
                with transaction.atomic(using=database):
                    lease.guard(using=database)

    apart(database, *[work] * 4)
