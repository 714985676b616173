"""Databases that go away: typed errors, nothing held for ever, nobody locked out."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.db import OperationalError, connections, transaction
from django.db.models import F

from django_distlock import (
    LockBackendError,
    LockOutcomeUnknown,
    lock,
    locks,
)
from django_distlock.backends.database.bounds import cancel
from django_distlock.backends.database.dialect import PATIENCE, short_transaction
from django_distlock.backends.database.postgresql import HAS_PSYCOPG3
from django_distlock.backends.database.records import rows
from django_distlock.engine.bells import ThreadBell
from django_distlock.engine.steps import settled
from django_distlock.engine.values import Busy, Grant, Release
from django_distlock.ground.holder import Holder
from django_distlock.models import FencingCounter, LockWaiter, MethodLock
from tests.backends.conftest import backend, paused
from tests.contract.crew import start, take_and_release, together
from tests.contract.rivals import Rival
from tests.fixtures.child import say
from tests.fixtures.eventually import eventually, never

from .session_tools import NUMBER, end_session_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    import psycopg
    from pytest_django.fixtures import Settings

    from django_distlock.engine.values import Request
    from tests.fixtures.mariadb import MariaDB
    from tests.fixtures.postgres import PostgreSQL
    from tests.fixtures.processes import Spawn
    from tests.fixtures.servers import Server

#: Sessions of locks whose commits wait for a standby.
WAIT_FOR_STANDBY = (
    "SELECT pid, application_name, now() - backend_start, now() - query_start, query FROM pg_stat_activity"
    " WHERE wait_event = 'SyncRep' AND usename = 'away'"
)
SESSIONS = "SELECT pid FROM pg_stat_activity WHERE usename = 'away'"
needs_time_limit = pytest.mark.skipif(
    not HAS_PSYCOPG3, reason="a request of psycopg2 has no time limit"
)


@pytest.fixture
def server(request: pytest.FixtureRequest, server_database: str) -> Server:
    found: Server = request.getfixturevalue(server_database)
    return found


@pytest.mark.usefixtures("is_never_hung")
def test_terminated_idle_connections_are_replaced_unseen(
    server_database: str, server: Server, name: str
) -> None:
    with lock(name, using=server_database):
        kill_all_sessions(server_database)
    with lock(name, using=server_database) as lease:
        lease.check()


def kill_all_sessions(alias: str) -> None:
    """End every session of the ordinary user but the one that asks."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE usename = 'distlock' AND pid <> pg_backend_pid()"
            )
            return
        cursor.execute(
            "SELECT id FROM information_schema.processlist WHERE user = 'distlock' AND id <> connection_id()"
        )
        for (session,) in cursor.fetchall():
            with suppress(OperationalError):  # it has gone by itself
                cursor.execute("KILL %s", [session])


def test_lease_survives_a_restart_of_the_server(
    server_database: str, server: Server, name: str
) -> None:
    with lock(name, using=server_database, ttl=20) as lease:
        connections[server_database].close()
        server.restart()

        lease.extend()
        lease.check()
        assert lock(name, using=server_database).locked()


def test_server_that_is_down_is_an_error_and_never_busy(
    server_database: str, server: Server, name: str
) -> None:
    with lock(name, using=server_database):
        pass
    connections[server_database].close()
    server.stop()
    try:
        with pytest.raises(LockBackendError) as down:
            lock(name, using=server_database, timeout=0).acquire()
        assert down.value.__cause__ is not None
        assert server_database in str(down.value)
    finally:
        server.start()
    with lock(name, using=server_database):
        pass


@needs_time_limit
def test_frozen_server_is_an_error_in_time_and_what_it_granted_is_given_back(
    server_database: str, server: Server, name: str
) -> None:
    with lock(name, using=server_database):
        pass
    with paused(server):
        began = time.monotonic()
        with pytest.raises(LockBackendError):
            lock(name, using=server_database, timeout=0, ttl=60).acquire()
        assert time.monotonic() - began < 10

    eventually(lambda: not lock(name, using=server_database).locked(), 15)
    with lock(name, using=server_database, timeout=5):
        pass


@needs_time_limit
def test_commit_that_hangs_is_an_error_in_time(
    server_database: str, server: Server, settings: Settings
) -> None:
    options = {"using": server_database, "io_timeout": 0.5}
    settings.DISTLOCK = {"default": {"OPTIONS": options}}
    own = backend("default")._own
    try:
        with pytest.raises(LockBackendError), own.cursor() as cursor, short_transaction(cursor):
            cursor.execute("SELECT 1")
            server.pause()
    finally:
        server.resume()


def test_missing_table_tells_to_migrate(
    postgres: PostgreSQL, settings: Settings, name: str
) -> None:
    with postgres.admin() as admin:
        admin.execute("DROP DATABASE IF EXISTS empty")
        admin.execute("CREATE DATABASE empty OWNER distlock")
    connections.settings["empty"] = {**connections["postgres"].settings_dict, "NAME": "empty"}
    settings.DISTLOCK = {"default": {"OPTIONS": {"using": "empty"}}}
    try:
        with pytest.raises(LockBackendError, match="migrate django_distlock --database=empty"):
            lock(name).acquire()
        with pytest.raises(LockBackendError, match="migrate"):
            lock(name).locked()
    finally:
        locks.close()
        del connections.settings["empty"]


def test_a_lease_that_is_asked_for_again_lives_its_ttl_from_then(database: str, name: str) -> None:
    locking = locks[database]
    request = locking.request(name, ttl=5, holder=Holder.current("a caller"))
    first = locking.try_acquire(request, queued=False)

    again = locking.try_acquire(replace(request, ttl=60), queued=False)

    busy = locking.probe(request)
    assert isinstance(first, Grant)
    assert isinstance(again, Grant)
    assert again.token == first.token
    assert busy is not None
    assert (busy.remaining or 0) > 30
    locking.release(request)


@pytest.mark.server
def test_mariadb_that_is_read_only_refuses_and_is_not_asked_again(
    mariadb: MariaDB, settings: Settings, name: str
) -> None:
    settings.DISTLOCK = {"leases": {"OPTIONS": {"using": "mariadb"}}}
    with mariadb.admin() as admin, admin.cursor() as cursor:
        for option, on in {"tx_read_only": "1", "read_only": "1"}.items():
            cursor.execute(f"SET GLOBAL {option} = {on}")
            try:
                with pytest.raises(LockBackendError, match=r"(?i)read.only") as refused:
                    lock(name, using="leases").acquire()
            finally:
                cursor.execute(f"SET GLOBAL {option} = 0")
                locks.close()
            assert not isinstance(refused.value, LockOutcomeUnknown)
            assert "did not answer" not in str(refused.value)
            assert "migrate" not in str(refused.value)


def test_full_pool_is_an_error_that_names_the_option(
    settings: Settings, server_database: str, server: Server, name: str
) -> None:
    options = {"using": server_database, "max_connections": 1, "io_timeout": 0.3}
    settings.DISTLOCK = {"default": {"OPTIONS": options}}

    with backend("default")._own.cursor(), pytest.raises(LockBackendError, match="max_connections"):
        lock(name, timeout=1).acquire()

    with lock(name):
        pass


def test_forked_child_has_a_session_of_its_own_and_its_parent_keeps_its(
    server_database: str, server: Server, name: str, spawn: Spawn, settings: Settings
) -> None:
    aliases = {server_database: settings.DISTLOCK[server_database]}
    acts = f"{__name__}:sessions_around_a_fork"

    parent = spawn(acts, aliases=aliases, name=name, using=server_database)

    forked = parent.expect("forked")["session"]
    before, after = parent.result()
    assert before == after != forked


def sessions_around_a_fork(name: str, using: str) -> list[int]:
    """Return our session before and after a fork; the child says which one it has."""
    with lock(name, using=using):
        pass
    before = own_session(using)
    if (pid := os.fork()) == 0:
        say("forked", session=own_session(using))
        os._exit(0)
    os.waitpid(pid, 0)
    return [before, own_session(using)]


def own_session(using: str) -> int:
    with backend(using)._own.cursor() as cursor:
        cursor.execute(NUMBER[using])
        return int(cursor.fetchone()[0])


def test_waiters_survive_the_loss_of_the_listening_connection(
    postgres: PostgreSQL, name: str
) -> None:
    held = Rival.of(locks["postgres"], name, ttl=30)
    held.takes()
    taking = start(partial(_take, name))
    eventually(lambda: has_waiter(name), 5)
    kill_all_sessions("postgres")

    assert settled(held.leaves) is Release.RELEASED

    # Long before its time is over, when it would look once more anyway.
    assert taking.result(10)


def _take(name: str) -> bool:
    try:
        with lock(name, using="postgres", timeout=20) as lease:
            return lease.held
    finally:
        connections["postgres"].close()


def has_waiter(name: str) -> bool:
    return LockWaiter.objects.using("postgres").filter(method_name=name).exists()


@needs_time_limit
@pytest.mark.usefixtures("pgbouncer")
@pytest.mark.parametrize("level", ["off", "local"])
@pytest.mark.parametrize("way", ["postgres", "pgbouncer"])
def test_every_write_of_a_lease_waits_for_the_standby_though_the_role_does_not(
    postgres: PostgreSQL, name: str, settings: Settings, way: str, level: str
) -> None:
    settings.DISTLOCK = {"leases": {"OPTIONS": {"using": way, "listen": False}}}
    locked = locks["leases"]
    with less_durable(postgres, level):
        held = locked.request(name, ttl=60, holder=Holder.current())
        heir = locked.request(name, ttl=60, holder=Holder.current())
        other = locked.request(f"{name}:other", ttl=60, holder=Holder.current())

        def is_granted() -> bool:
            # PgBouncer may not know yet that its sessions were ended.
            with suppress(LockBackendError):
                return isinstance(locked.try_acquire(held, queued=False), Grant)
            return False

        eventually(is_granted)
        with standby_away(postgres):
            with pytest.raises(LockOutcomeUnknown):
                locked.try_acquire(other, queued=False)
            with pytest.raises(LockOutcomeUnknown):
                locked.extend([held])
            with pytest.raises(LockOutcomeUnknown):
                locked.take_over(heir, held.owner)
        # They were carried out all the same.
        stuck = next(iter(settled(lambda: locked.held(other.key))))
        with standby_away(postgres):
            with pytest.raises(LockBackendError):
                locked.release(heir)
            with pytest.raises(LockBackendError):
                locked.end_holding(stuck.key, stuck.owner_digest)
        for request in (held, heir, other):
            settled(partial(locked.release, request))
    connections[way].close()


@pytest.fixture(
    params=["database.DatabaseBackend", "rowlock.RowLockBackend", "advisory.AdvisoryBackend"]
)
def few(request: pytest.FixtureRequest, settings: Settings, postgres: PostgreSQL) -> Iterator[str]:
    """Each kind of backend on PostgreSQL, with few connections, as the alias "away".

    Its database user is its own, because locks that other tests have left may still be released.
    """
    with postgres.admin() as admin:
        if not admin.execute("SELECT 1 FROM pg_roles WHERE rolname = 'away'").fetchone():
            admin.execute("CREATE ROLE away LOGIN IN ROLE distlock")
    connections.settings["away"] = {**connections.settings["postgres"], "USER": "away"}
    options = {"using": "away", "max_connections": 4, "io_timeout": 0.3}
    backend = f"django_distlock.backends.{request.param}"
    settings.DISTLOCK = {"away": {"BACKEND": backend, "OPTIONS": options}}
    yield str(request.param)
    locks.close()
    connections["away"].close()
    del connections["away"], connections.settings["away"]


@pytest.fixture
def may_cancel(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Without it no server is told that a request was given up."""
    event = threading.Event()

    def cancel_late(*args: Any) -> None:
        event.wait(30)
        cancel(*args)

    monkeypatch.setattr("django_distlock.backends.database.connections.cancel", cancel_late)
    return event


@needs_time_limit
def test_requests_given_up_while_the_standby_is_away_count_as_connections_and_leave_no_sessions(
    postgres: PostgreSQL, name: str, few: str, may_cancel: threading.Event
) -> None:
    most = 4 if few.startswith("database") else 8  # sessions have others beside them
    with postgres.admin() as admin, standby_away(postgres):
        for turn in range(12):
            with pytest.raises(LockBackendError):
                lock(f"{name}:{turn}", using="away", timeout=0, ttl=5).acquire()
        assert 0 < len(admin.execute(WAIT_FOR_STANDBY).fetchall()) <= most

        may_cancel.set()
        no_commit_waits(admin)


@needs_time_limit
def test_server_that_hangs_while_requests_are_given_up_ends_their_sessions_later(
    postgres: PostgreSQL, name: str, few: str, may_cancel: threading.Event
) -> None:
    with postgres.admin() as admin, standby_away(postgres):
        with pytest.raises(LockBackendError):
            lock(name, using="away", timeout=0, ttl=5).acquire()
        with paused(postgres):
            may_cancel.set()
            never(lambda: "distlock-cancel" not in {each.name for each in threading.enumerate()}, 1)

        no_commit_waits(admin)


@needs_time_limit
def test_request_that_the_server_reads_after_the_order_to_end_it_leaves_no_session(
    postgres: PostgreSQL, name: str, few: str
) -> None:
    """A server that hung may come to the order before the request, and ignores the order to end what has not begun."""
    with lock(name, using="away", timeout=0, ttl=5):
        pass
    with postgres.admin() as admin, standby_away(postgres):
        idle = [pid for (pid,) in admin.execute(SESSIONS).fetchall()]
        for pid in idle:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(LockBackendError):
                lock(name, using="away", timeout=0, ttl=5).acquire()
            eventually(lambda: any(map(has_order_to_end, idle)))
        finally:
            for pid in idle:
                os.kill(pid, signal.SIGCONT)

        no_commit_waits(admin, 20)


@needs_time_limit
def test_order_to_end_a_request_that_fails_is_repeated(
    postgres: PostgreSQL, name: str, few: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to an order may be lost, or a server refuse it for a moment."""
    psycopg = pytest.importorskip("psycopg")
    ask_to_cancel = psycopg.Connection.cancel_safe
    orders = []

    def fail_once(*args: Any, **kwargs: Any) -> None:
        orders.append(args)
        if len(orders) == 1:
            raise psycopg.OperationalError("connection reset by peer")
        ask_to_cancel(*args, **kwargs)

    monkeypatch.setattr(psycopg.Connection, "cancel_safe", fail_once)
    with postgres.admin() as admin, standby_away(postgres):
        with pytest.raises(LockBackendError):
            lock(name, using="away", timeout=0, ttl=5).acquire()
        eventually(lambda: len(orders) > 1)
        no_commit_waits(admin)


@pytest.fixture
def patient(settings: Settings, postgres: PostgreSQL) -> None:
    """Each kind of backend on PostgreSQL, patient with a busy machine: "rows", "advisory" and "leases"."""
    kinds = {
        "rows": "rowlock.RowLockBackend",
        "advisory": "advisory.AdvisoryBackend",
        "leases": "database.DatabaseBackend",
    }
    settings.DISTLOCK = {
        alias: {
            "BACKEND": f"django_distlock.backends.{kind}",
            "OPTIONS": {"using": "postgres", "io_timeout": 4.0},
        }
        for alias, kind in kinds.items()
    }


@needs_time_limit
@pytest.mark.usefixtures("patient")
def test_row_lock_is_looked_at_and_released_without_the_standby(
    postgres: PostgreSQL, name: str
) -> None:
    held = lock(name, using="rows", ttl=60)
    held.acquire()
    with standby_away(postgres):
        held.release()
        assert not held.locked()

        # The token of the next holder must last, also on the connection that has looked.
        with pytest.raises(LockBackendError):
            held.acquire()


@needs_time_limit
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("using", ["rows", "advisory"])
def test_a_list_of_locks_forgets_dead_readers_without_the_standby(
    postgres: PostgreSQL, name: str, using: str
) -> None:
    readers = FencingCounter.objects.using("postgres").filter(method_name__startswith="reader|")
    before = readers.count()
    for number in range(3):
        lock(f"{name}:{number}", using=using, ttl=60, shared=True).acquire()
    assert readers.count() == before + 3
    kill_all_sessions("postgres")
    with standby_away(postgres):
        assert not [each for each in locks[using].held() if each.name.startswith(name)]
    assert readers.count() <= before


@needs_time_limit
@pytest.mark.usefixtures("patient")
def test_what_is_no_lease_needs_no_standby(postgres: PostgreSQL, name: str) -> None:
    locked = backend("leases")
    with lock(name, using="leases", ttl=60):
        waiting = locked.request(name, ttl=60, holder=Holder.current())
        locked.enqueue(waiting, ThreadBell())
        position = LockWaiter.objects.using("postgres").filter(owner=waiting.waiter)
        position.update(expires_at=F("expires_at") - timedelta(seconds=PATIENCE))
        with standby_away(postgres):
            assert isinstance(locked.try_acquire(waiting, queued=True), Busy)
            locked.dequeue(waiting)
        assert not position.exists()
    with standby_away(postgres):
        assert not locked._query(locked.dialect.is_guarded, waiting.key)


def no_commit_waits(admin: psycopg.Connection[Any], seconds: float = 10) -> None:
    """Fail, with what is known of them, if commits of locks wait for the standby all the time for *seconds*."""
    try:
        eventually(lambda: not admin.execute(WAIT_FOR_STANDBY).fetchall(), seconds)
    except AssertionError:
        threads = sorted(each.name for each in threading.enumerate())
        pytest.fail(
            f"{admin.execute(WAIT_FOR_STANDBY).fetchall()} wait, beside the threads {threads}"
        )


def has_order_to_end(pid: int) -> bool:
    """Return whether a stopped session of PostgreSQL has a SIGINT to come to."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = next(line for line in status.splitlines() if line.startswith("ShdPnd"))
    return bool(int(pending.split()[1], 16) & 1 << signal.SIGINT - 1)


@contextmanager
def less_durable(postgres: PostgreSQL, level: str) -> Iterator[None]:
    """Have new sessions, also those of a pooler, prefer a synchronous_commit that is less than on."""
    with postgres.admin("distlock") as admin:
        admin.execute(f"ALTER DATABASE distlock SET synchronous_commit = {level}")
        kill_all_sessions("postgres")
        connections["postgres"].close()
        locks.close()
    try:
        yield
    finally:
        with postgres.admin("distlock") as admin:
            admin.execute("ALTER DATABASE distlock RESET synchronous_commit")
        kill_all_sessions("postgres")
        connections["postgres"].close()
        locks.close()


@contextmanager
def standby_away(postgres: PostgreSQL) -> Iterator[None]:
    """Have the server wait for a standby that never answers."""
    wait_for_standby(postgres, "nobody")
    try:
        yield
    finally:
        wait_for_standby(postgres, "")


def wait_for_standby(postgres: PostgreSQL, standby: str) -> None:
    """Name the standby that commits wait for, and return once that is in force."""
    with postgres.admin() as admin:
        admin.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standby}'")
        admin.execute("SELECT pg_reload_conf()")
        ask = "SHOW synchronous_standby_names"
        eventually(lambda: admin.execute(ask).fetchone() == (standby,), 5)
    eventually(lambda: commits_wait(postgres) is bool(standby))


def commits_wait(postgres: PostgreSQL) -> bool:
    """Return whether a commit waits for a standby: the checkpointer says so to all sessions, a moment later."""
    with postgres.admin() as admin, closing(postgres.admin()) as writer:
        pid = writer.info.backend_pid
        writer.pgconn.send_query(b"SELECT pg_logical_emit_message(true, '', '')")

        def outcome() -> str | None:
            if select.select([writer.pgconn.socket], [], [], 0)[0]:
                return "committed"
            statement = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
            return "waits" if admin.execute(statement, [pid]).fetchone() == ("SyncRep",) else None

        try:
            return eventually(outcome) == "waits"
        finally:
            writer.cancel()


def test_first_comers_of_unknown_names_meet_no_error(
    server_database: str, server: Server, name: str, settings: Settings
) -> None:
    # Each goes to the server by itself, as other processes would.
    sites = [f"site{number}" for number in range(8)]
    options = {"using": server_database, "io_timeout": 10.0}
    settings.DISTLOCK = {site: {"OPTIONS": options} for site in sites}

    for turn in range(20):
        together(*(partial(take_and_release, site, f"{name}:{turn}") for site in sites))


def test_of_those_that_waited_for_a_row_one_has_the_lock_and_for_its_full_ttl(
    server_database: str, name: str, settings: Settings
) -> None:
    options = {"using": server_database, "io_timeout": 10.0}
    settings.DISTLOCK = {server_database: {"OPTIONS": options}}
    with lock(name, using=server_database):
        pass

    # Requests that the machine is too slow for are refused: then others wait.
    waited = eventually(lambda: granted_after_a_wait(server_database, name), 30)

    assert waited
    granted, freed = waited
    assert len(granted) == 1
    row = rows(server_database).get(method_name=name)
    assert row.owner == granted[0].owner
    assert row.expires_at is not None
    assert row.expires_at >= freed + timedelta(seconds=granted[0].ttl)
    locks[server_database].release(granted[0])


def granted_after_a_wait(using: str, name: str) -> tuple[list[Request], datetime] | None:
    """Hold the row under two requests; return who was granted and when it came free, None if nobody was."""
    locked = locks[using]
    requests = [locked.request(name, ttl=20, holder=Holder.current()) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        with transaction.atomic(using=using):
            rows(using).select_for_update().get(method_name=name)
            tries = [pool.submit(locked.try_acquire, each, queued=False) for each in requests]
            never(lambda: all(each.done() for each in tries), 0.4)
            freed = rows(using).get(method_name=name).server_now  # type: ignore[attr-defined]  # annotated
        answers = zip(requests, [each.result(10) for each in tries], strict=True)
    granted = [request for request, answer in answers if isinstance(answer, Grant)]
    return (granted, freed) if granted else None


def test_token_rises_though_the_clock_of_the_server_was_put_back(database: str, name: str) -> None:
    with lock(name, using=database):
        pass
    # As if it had been a year ahead.
    last = (time.time_ns() + 365 * 86_400 * 10**9) // 1000
    MethodLock.objects.using(database).filter(method_name=name).update(fencing_token=last)
    FencingCounter.objects.using(database).filter(method_name=name).update(value=last)

    with lock(name, using=database) as lease:
        assert lease.fencing_token == last + 1


def test_an_acquire_interrupted_at_its_grant_reserves_nothing_by_min_hold(
    database: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = locks[database].try_acquire

    def interrupt(*args: Any, **more: Any) -> None:
        assert isinstance(granted(*args, **more), Grant)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(locks[database], "try_acquire", interrupt)
        lock(name, using=database, min_hold=100).acquire()

    eventually(lambda: not lock(name, using=database).locked(), 10)


def test_waiter_that_looks_now_and_then_keeps_its_place(
    database: str, name: str, settings: Settings
) -> None:
    options = {"using": database, "fair": True, "listen": False, "io_timeout": 10.0}
    settings.DISTLOCK = {"default": {"OPTIONS": options}}
    locked = locks["default"]
    holder, first, late = (locked.request(name, ttl=60, holder=Holder.current()) for _ in range(3))
    locked.try_acquire(holder, queued=False)
    locked.enqueue(first, ThreadBell())

    never(lambda: isinstance(locked.try_acquire(first, queued=True), Grant), 1.5 * PATIENCE)
    locked.release(holder)

    assert isinstance(locked.try_acquire(late, queued=False), Busy)
    assert isinstance(locked.try_acquire(first, queued=True), Grant)
    locked.release(first)
    assert isinstance(locked.try_acquire(late, queued=False), Grant)
    locked.release(late)


def test_a_dead_connection_of_the_caller_is_not_used_to_look_or_to_free(
    server_database: str, name: str
) -> None:
    locked = locks[server_database]
    Rival.of(locked, name, ttl=60).takes()
    with closing(connections[server_database]) as own:
        end_session_of(own)

        assert lock(name, using=server_database).locked()
        [held] = [each for each in locked.held() if each.name == name]
        assert list(locked.purge(86_400, dry_run=True))
        assert locked.force_release(held.key, held.owner_digest)
        assert not lock(name, using=server_database).locked()


def test_a_forced_release_survives_the_rollback_of_its_caller(
    server_database: str, name: str
) -> None:
    locked = locks[server_database]
    Rival.of(locked, name, ttl=60).takes()
    [held] = [each for each in locked.held() if each.name == name]

    with transaction.atomic(using=server_database):
        assert locked.force_release(held.key, held.owner_digest)
        transaction.set_rollback(True, using=server_database)

    assert not lock(name, using=server_database).locked()
