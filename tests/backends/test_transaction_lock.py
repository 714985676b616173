"""transaction_lock(): free exactly at the end of the caller's transaction, never read past."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError

from django_distlock import (
    LockBackendError,
    LockDeadlock,
    LockError,
    LockNotAcquired,
    lock,
    locks,
    transaction_lock,
)
from django_distlock.backends.database.bounds import wait_for_reply
from django_distlock.backends.rowlock import OnMySQL, _backends
from django_distlock.engine.waiting import Wait
from tests.backends.conftest import SERVERS, apart, isolated
from tests.contract import crew
from tests.fixtures.databases import migrate, reached_by
from tests.fixtures.eventually import eventually, in_time
from tests.fixtures.interruption import TimeLimit, interrupted_by_signals, stop_at_call_of
from tests.fixtures.mariadb import MariaDB

from .session_tools import aliases, ask

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from pytest_django.fixtures import Settings

    from tests.fixtures.processes import Spawn

Another = Callable[[str], "BaseDatabaseWrapper"]
ROUNDS, WORKERS = 20, 4


@pytest.fixture(params=SERVERS)
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each server, with a table of accounts."""
    request.getfixturevalue(request.param)
    with connections[request.param].cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS purse")
        cursor.execute("CREATE TABLE purse (id integer PRIMARY KEY, balance integer NOT NULL)")
        cursor.execute("INSERT INTO purse VALUES (1, 0)")
    yield request.param
    connections[request.param].close()
    with connections[request.param].cursor() as cursor:
        cursor.execute("DROP TABLE purse")


@pytest.fixture
def snapshots(database: str) -> Iterator[None]:
    """Have the application's connections read as of the begin of their transactions."""
    with isolated(database, "repeatable read"):
        yield


def balance(database: str) -> int:
    [(found,)] = ask(database, "SELECT balance FROM purse WHERE id = 1")
    return int(found)


def raise_balance(database: str) -> None:
    found = balance(database)
    time.sleep(0.002)
    with connections[database].cursor() as cursor:
        cursor.execute("UPDATE purse SET balance = %s WHERE id = 1", [found + 1])


def is_free(database: str, name: str) -> bool:
    """Return whether another transaction could have the lock."""

    def look() -> bool:
        try:
            with transaction.atomic(using=database):
                transaction_lock(name, using=database, timeout=0)
        except LockNotAcquired:
            return False
        return True

    [is_ours] = apart(database, look)
    return is_ours


def lost_updates(database: str, update: Callable[[], None]) -> int:
    """Return how many updates are lost when several threads *update* in transactions."""

    def work() -> None:
        for _ in range(ROUNDS):
            with transaction.atomic(using=database):
                update()
                # What an application does between the end of its method and its commit.
                time.sleep(0.002)

    apart(database, *[work] * WORKERS)
    return WORKERS * ROUNDS - balance(database)


# The bug that it is for, and its cure.


@pytest.mark.filterwarnings("ignore::django_distlock.exceptions.ReleasedBeforeCommit")
def test_a_lease_released_before_the_commit_loses_updates(
    database: str, name: str, settings: Settings
) -> None:
    settings.DISTLOCK = {database: {"OPTIONS": {"using": database, "io_timeout": 10.0}}}

    def update() -> None:
        with lock(name, using=database, timeout=30, release="at_exit"):
            raise_balance(database)

    assert lost_updates(database, update) > 0


def test_a_lock_in_the_transaction_loses_none(database: str, name: str) -> None:
    def update() -> None:
        transaction_lock(name, using=database, timeout=None)
        raise_balance(database)

    assert lost_updates(database, update) == 0


# When it is taken, and when it is free.


@pytest.mark.server
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_name_that_has_a_row_uses_up_no_other_id(database: str, name: str) -> None:
    def take() -> list[tuple[Any, ...]]:
        with transaction.atomic(using=database):
            transaction_lock(name, using=database)
        return ask(database, "SELECT last_value FROM django_distlock_methodlock_id_seq")

    assert take() == take()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_it_is_held_to_the_very_end_of_the_outermost_block(
    database: str, name: str, ending: str
) -> None:
    with transaction.atomic(using=database):
        with transaction.atomic(using=database):
            transaction_lock(name, using=database)
        assert not is_free(database, name)
        transaction.set_rollback(ending == "rollback", using=database)

    assert is_free(database, name)


@pytest.mark.server
def test_the_rollback_of_a_savepoint_frees_what_was_taken_inside(
    postgres: object, name: str
) -> None:
    with transaction.atomic(using="postgres"):
        with pytest.raises(ZeroDivisionError), transaction.atomic(using="postgres"):
            transaction_lock(name, using="postgres")
            raise ZeroDivisionError
        assert is_free("postgres", name)


@pytest.mark.parametrize("timeout", [0, 0.3, 1.2])
def test_the_transaction_is_usable_after_a_timeout_which_is_kept(
    database: str, name: str, timeout: float
) -> None:
    def wait() -> None:
        with pytest.raises(LockNotAcquired) as busy:
            transaction_lock(name, using=database, timeout=timeout)
        assert busy.value.waited >= timeout

    with held_elsewhere(database, name), transaction.atomic(using=database):
        raise_balance(database)
        in_time(wait, timeout, timeout + 0.5)
        raise_balance(database)

    assert balance(database) == 2


def test_the_limit_for_the_time_of_a_statement_does_not_end_its_wait(
    database: str, name: str
) -> None:
    limit = {"postgres": "statement_timeout = '300ms'", "mariadb": "max_statement_time = 0.3"}
    ask(database, f"SET {limit[database]}")

    with held_elsewhere(database, name), transaction.atomic(using=database):
        with pytest.raises(LockNotAcquired):
            transaction_lock(name, using=database, timeout=1.5)
        raise_balance(database)

    assert balance(database) == 1


def test_who_comes_first_in_the_queue_late_waits_no_longer_than_it_said(
    database: str, another: Another, name: str
) -> None:
    """PostgreSQL makes it wait once for those before it, and then for the holder."""

    def wait(timeout: float) -> float:
        """Return for how long it waits after its timeout."""
        began = time.monotonic()
        with pytest.raises(LockNotAcquired), transaction.atomic(using=database):
            transaction_lock(name, using=database, timeout=timeout)
        late = time.monotonic() - began - timeout
        assert late >= 0
        return late

    def wait_behind() -> float:
        eventually(lambda: waits_for_a_row(observer))
        return wait(2.5)

    observer = another(database)
    with held_elsewhere(database, name):
        # A busy machine is late now and then.
        eventually(lambda: max(apart(database, partial(wait, 1.5), wait_behind)) < 0.5, 15)


def test_a_broken_transaction_is_told_by_django_s_own_error(database: str, name: str) -> None:
    with transaction.atomic(using=database):
        transaction.set_rollback(True, using=database)
        with pytest.raises(TransactionManagementError, match="end of the 'atomic' block"):
            transaction_lock(name, using=database)


@contextmanager
def held_elsewhere(database: str, name: str) -> Iterator[None]:
    """Have another transaction hold the lock during the block."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic(using=database):
            transaction_lock(name, using=database)
            held.set()
            assert over.wait(30)
        connections[database].close()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(10)
        yield
    finally:
        over.set()
        thread.join(10)


def test_a_greenlet_that_waits_for_it_costs_no_other_its_lease(
    database: str, spawn: Spawn, name: str
) -> None:
    with held_elsewhere(database, name):
        beside = spawn(
            "tests.backends.session_acts:hold_beside_a_waiter",
            on_gevent=True,
            aliases=aliases(database, "rowlock"),
            name=name,
            using="locks",
            transaction_on=database,
        )

        assert beside.result() == {"refused": ["LockNotAcquired"], "held": True}


def test_ctrl_c_ends_the_wait_for_it_and_the_transaction(
    database: str, another: Another, name: str
) -> None:
    began = time.monotonic()
    with held_elsewhere(database, name), ctrl_c_while_waiting(another(database)):
        with transaction.atomic(using=database):
            transaction_lock(name, using=database, timeout=20)

    # Not when the server had answered.
    assert time.monotonic() - began < 15
    # MariaDB finds that the waiter has gone when it gives the row to it.
    eventually(lambda: is_free(database, name), 5)


@pytest.mark.server
@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_ctrl_c_ends_the_wait_as_on_mysql_which_is_told_its_old_limit_after_it(
    database: str, another: Another, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connections[database]
    monkeypatch.setattr(connection, "mysql_is_mariadb", False)
    with held_elsewhere(database, name), ctrl_c_while_waiting(another(database)):
        with transaction.atomic(using=database), connection.cursor() as cursor:
            OnMySQL(connection, name, Wait(20)).lock(cursor)


@pytest.mark.server
@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@pytest.mark.parametrize("is_mariadb", [True, False])
def test_an_exception_between_the_request_and_its_reply_does_not_wait_for_it(
    database: str, name: str, monkeypatch: pytest.MonkeyPatch, is_mariadb: bool
) -> None:
    connection = connections[database]
    monkeypatch.setattr(connection, "mysql_is_mariadb", is_mariadb)
    read_reply: Any = wait_for_reply  # mysqlclient calls it between the two
    if os.environ.get("DISTLOCK_MYSQL_DRIVER") != "mysqlclient":
        read_reply = pymysql.connections.Connection._read_query_result  # type: ignore[attr-defined]  # has no stub

    def stop(execute: Callable[..., object], sql: str, *rest: object) -> object:
        if "FOR UPDATE" in sql:
            stop_at_call_of(read_reply)
        return execute(sql, *rest)

    began = time.monotonic()
    with held_elsewhere(database, name), pytest.raises(TimeLimit):
        with transaction.atomic(using=database), connection.cursor() as cursor:
            with connection.execute_wrapper(stop):
                OnMySQL(connection, name, Wait(20)).lock(cursor)

    assert time.monotonic() - began < 15


# Not on MariaDB: PyMySQL makes it an error of its own.
@pytest.mark.server
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
@pytest.mark.parametrize("waits", ["in a transaction", "for a row lock"])
def test_a_timeout_error_of_a_signal_handler_goes_up_as_it_is(
    database: str, another: Another, name: str, settings: Settings, waits: str
) -> None:
    settings.DISTLOCK = aliases(database, "rowlock")
    observer = another(database)
    with held_elsewhere(database, name), ctrl_c_while_waiting(observer, _stop, TooSlow):
        if waits == "for a row lock":
            lock(name, using="locks", timeout=20).acquire()
        with transaction.atomic(using=database):
            transaction_lock(name, using=database, timeout=20)


class TooSlow(TimeoutError):
    """What the handler of a project's time limit raises."""


def _stop(*args: object) -> None:
    raise TooSlow


@contextmanager
def ctrl_c_while_waiting(
    observer: BaseDatabaseWrapper,
    handler: Callable[..., Any] = signal.default_int_handler,
    raised: type[BaseException] = KeyboardInterrupt,
) -> Iterator[None]:
    """Interrupt the block when the server makes it wait for a row; it must raise what *handler* raises."""
    me = threading.get_ident()

    def press() -> None:
        eventually(lambda: waits_for_a_row(observer))
        signal.pthread_kill(me, signal.SIGINT)

    before = signal.signal(signal.SIGINT, handler)
    try:
        pressed = crew.start(press)
        # Python does not see a signal that comes right before a system call until that ends: another one ends it.
        with interrupted_by_signals(1, longest=30), pytest.raises(raised):
            yield
        pressed.result(10)
    finally:
        signal.signal(signal.SIGINT, before)


def waits_for_a_row(observer: BaseDatabaseWrapper) -> bool:
    """Return whether the server makes anybody wait for a row."""
    statement = {
        "postgresql": "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
        "mysql": "SELECT 1 FROM information_schema.processlist"
        " WHERE info LIKE '%% FOR UPDATE%%' AND id != connection_id()",
    }[observer.vendor]
    with observer.cursor() as cursor:
        cursor.execute(statement, [])
        return cursor.fetchone() is not None


def settings_of(database: str) -> list[tuple[Any, ...]]:
    if database == "postgres":
        return ask(
            database,
            "SELECT current_setting('lock_timeout'), current_setting('statement_timeout'),"
            " current_setting('transaction_isolation')",
        )
    return ask(database, "SELECT @@innodb_lock_wait_timeout, @@tx_isolation, @@autocommit")


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_settings_of_the_callers_connection_are_as_before(
    database: str, name: str, *, is_busy: bool
) -> None:
    with connections[database].cursor() as cursor:
        if database == "postgres":
            cursor.execute("SET lock_timeout = '7s'; SET statement_timeout = '8s'")
    with transaction.atomic(using=database):
        before = settings_of(database)
        if is_busy:
            with held_elsewhere(database, name), pytest.raises(LockNotAcquired):
                transaction_lock(name, using=database, timeout=0.1)
        else:
            transaction_lock(name, using=database, timeout=3)
        assert settings_of(database) == before


def test_two_transactions_in_opposite_order_one_is_told_of_the_deadlock(
    database: str, name: str
) -> None:
    both_hold_one = threading.Barrier(2)

    def cross(first: str, second: str) -> str:
        outcome = "committed"
        try:
            with transaction.atomic(using=database):
                transaction_lock(first, using=database)
                both_hold_one.wait(10)
                transaction_lock(second, using=database, timeout=20)
        except LockDeadlock:
            outcome = "deadlock"
        with transaction.atomic(using=database):
            transaction_lock(f"{first}:after", using=database)
        return outcome

    a, b = f"{name}:a", f"{name}:b"
    outcomes = apart(database, partial(cross, a, b), partial(cross, b, a))
    assert sorted(outcomes) == ["committed", "deadlock"]


def test_a_transaction_and_the_holder_of_a_row_lock_in_opposite_order(
    database: str, name: str, settings: Settings
) -> None:
    settings.DISTLOCK = aliases(database, "rowlock")
    ready = threading.Barrier(2)

    def hold_first() -> str:
        with lock(f"{name}:a", using="locks"), transaction.atomic(using=database):
            ready.wait(10)
            return told(lambda: transaction_lock(f"{name}:b", using=database, timeout=20))

    def lock_first() -> str:
        with transaction.atomic(using=database):
            transaction_lock(f"{name}:b", using=database)
            ready.wait(10)
            return told(lambda: lock(f"{name}:a", using="locks", timeout=20).acquire())

    def told(take: Callable[[], object]) -> str:
        try:
            take()
        except LockDeadlock:
            return "deadlock"
        return "held"

    assert sorted(apart(database, hold_first, lock_first)) == ["deadlock", "held"]


@pytest.mark.timeout(30)
def test_a_caller_does_not_wait_for_its_own_transaction_or_row_lock(
    database: str, name: str, settings: Settings
) -> None:
    settings.DISTLOCK = aliases(database, "rowlock")
    for shared in (False, True):
        with transaction.atomic(using=database):
            transaction_lock(name, using=database)
            with pytest.raises(LockDeadlock, match="would wait for itself"):
                lock(name, using="locks", timeout=None, shared=shared).acquire()
            transaction_lock(name, using=database)

        with lock(name, using="locks", shared=shared), transaction.atomic(using=database):
            with pytest.raises(LockDeadlock, match="would wait for itself"):
                transaction_lock(name, using=database, timeout=None)
            transaction_lock(f"{name}:other", using=database)

        with transaction.atomic(using=database):
            with lock(name, using="locks", shared=shared):
                pass
            with pytest.raises(LockDeadlock, match="would wait for itself"):
                transaction_lock(name, using=database, timeout=None)


def test_what_a_transaction_had_before_its_end_is_in_nobody_s_way(
    database: str, name: str, settings: Settings
) -> None:
    settings.DISTLOCK = aliases(database, "rowlock")
    a, b = f"{name}:a", f"{name}:b"
    gave_back, has_a, has_b = threading.Event(), threading.Event(), threading.Event()

    @transaction.atomic(using=database)
    def in_one_block_of_code(wanted: str) -> str:
        transaction_lock(wanted, using=database, timeout=20)
        return "held"

    def have_b_and_then_a() -> str:
        in_one_block_of_code(b)
        gave_back.set()
        # Its wait for a lets the third thread ask for b, which the second one must have by then.
        assert has_a.wait(10)
        assert has_b.wait(10)
        return in_one_block_of_code(a)

    def have_a_and_then_b() -> str:
        with lock(a, using="locks"):
            has_a.set()
            eventually(lambda: crew.waiting_for(locks["locks"], a))
            with lock(b, using="locks", timeout=20):
                return "held"

    def have_b_meanwhile() -> str:
        assert gave_back.wait(10)
        with lock(b, using="locks"):
            has_b.set()
            eventually(lambda: crew.waiting_for(locks["locks"], b))
            return "held"

    calls = have_b_and_then_a, have_b_meanwhile, have_a_and_then_b
    assert apart(database, *calls) == ["held"] * 3


# Snapshots.


@pytest.mark.usefixtures("snapshots")
def test_in_a_snapshot_that_has_begun_it_is_refused_and_on_postgresql_as_the_first_statement_too(
    database: str, name: str
) -> None:
    told = "needs READ COMMITTED on PostgreSQL"
    with transaction.atomic(using=database):
        if database == "mariadb":
            told = "needs READ COMMITTED, or must be the first statement"
            balance(database)
        with pytest.raises(LockError, match=told):
            transaction_lock(name, using=database)
        raise_balance(database)

    assert balance(database) == 1


@pytest.mark.server
@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@pytest.mark.usefixtures("snapshots")
def test_in_a_snapshot_that_begins_with_it_mariadb_loses_no_update(
    database: str, name: str
) -> None:
    def update() -> None:
        transaction_lock(name, using=database, timeout=50)
        raise_balance(database)

    assert lost_updates(database, update) == 0


@pytest.mark.server
@pytest.mark.parametrize("timeout", [0, 0.4, 1.3])
def test_a_refusal_that_has_ended_the_transaction_is_an_error_that_says_so(
    strict: str, timeout: float, name: str
) -> None:
    """With innodb_rollback_on_timeout, what the block has written is lost."""

    def work() -> None:
        with transaction.atomic(using=strict):
            with pytest.raises(LockBackendError, match="innodb_rollback_on_timeout"):
                transaction_lock(name, using=strict, timeout=timeout)

    with transaction.atomic(using=strict):
        transaction_lock(name, using=strict)
        apart(strict, work)


@pytest.fixture(scope="module")
def strict(mariadb: object) -> Iterator[str]:
    """A server that rolls back the transaction of a statement which has waited for too long."""
    with (
        MariaDB(settings={"innodb-rollback-on-timeout": "ON"}) as server,
        reached_by("strict", "mariadb", server) as alias,
    ):
        migrate(alias)
        yield alias
        _backends.pop(alias).close()
