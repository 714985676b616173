"""Lease rows, held rows and advisory locks, on the databases; memory, and no lock at all."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import Contender, ours, peer, polled
from django_distlock import locks
from django_distlock.ground.holder import Holder
from tests.fixtures.mariadb import MariaDB
from tests.fixtures.postgres import PostgreSQL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.contenders import Act, Field

ACQUIRE = """
INSERT INTO raw_lease (name, owner, expires_at, token) VALUES ('x', 'o', {later}, 1)
ON CONFLICT (name) DO UPDATE SET owner = 'o', expires_at = {later}, token = raw_lease.token + 1
WHERE raw_lease.owner IS NULL OR raw_lease.expires_at < {now} RETURNING token
"""
UPDATE = """
UPDATE raw_lease SET owner = 'o', expires_at = {later}, token = LAST_INSERT_ID(token + 1)
WHERE name = 'x' AND (owner IS NULL OR expires_at < {now})
"""
FREE = "UPDATE raw_lease SET owner = NULL WHERE name = 'x' AND owner = 'o'"
CLOCKS = {
    "postgresql": {"now": "clock_timestamp()", "later": "clock_timestamp() + interval '30 s'"},
    "mysql": {"now": "SYSDATE(6)", "later": "SYSDATE(6) + INTERVAL 30 SECOND"},
    "sqlite": {"now": "datetime('now')", "later": "datetime('now', '+30 seconds')"},
}
HOLD = ("BEGIN", "SELECT token FROM raw_lease WHERE name = 'x' FOR UPDATE")
ADVISORY = {
    "postgresql": (
        "SELECT pg_try_advisory_lock(1)",
        "SELECT pg_advisory_unlock(1)",
        "SELECT pg_advisory_lock(1)",
    ),
    "mysql": ("SELECT GET_LOCK('x', 0)", "SELECT RELEASE_LOCK('x')", "SELECT GET_LOCK('x', 60)"),
}


#: The servers' defaults: each commit waits for the disk. In the tests, and by --no-disk, they do not.
DURABLE = {"postgres": {"fsync": "on"}, "mariadb": {"innodb-flush-log-at-trx-commit": "1"}}
#: Where there is no other process to wait for.
ALONE = "no server"


@contextmanager
def memory() -> Iterator[None]:
    """Start nothing."""
    yield


@cache
def memory_field() -> Field:
    """Return the backends that ask nobody: what they cost is the way to any other."""
    return {ALONE: [ours("dummy"), ours("locmem")]}


@contextmanager
def sqlite() -> Iterator[None]:
    """Measure on the file that every project begins with."""
    _prepare("sqlite")
    yield


@cache
def sqlite_field() -> Field:
    """Return who is measured there."""
    own = [ours("sqlite"), ours("sqlite", limit=1)]
    return {"SQLite, lease rows": [_raw_lease("sqlite"), _our_statements("sqlite"), *own]}


@contextmanager
def postgres() -> Iterator[None]:
    """Start PostgreSQL."""
    with PostgreSQL(int(os.environ["DISTLOCK_POSTGRES_PORT"]), _settings("postgres")):
        _prepare("postgres")
        _prepare("default")
        yield


@cache
def postgres_field() -> Field:
    """Return who is measured there."""
    import pglock

    found = _all_kinds("postgres")
    found["postgres, lease rows"].insert(1, peer("django-db-mutex", _db_mutex, waits=False))
    advisory = peer("django-pglock", lambda: pglock.advisory("benchmark", using="postgres"))
    found["postgres, advisory locks"].insert(1, advisory)
    return found


@contextmanager
def mariadb() -> Iterator[None]:
    """Start MariaDB."""
    with MariaDB(int(os.environ["DISTLOCK_MARIADB_PORT"]), _settings("mariadb")):
        _prepare("mariadb")
        yield


@cache
def mariadb_field() -> Field:
    """Return who is measured there."""
    return _all_kinds("mariadb")


def _settings(server: str) -> dict[str, str]:
    return DURABLE[server] if os.environ["DISTLOCK_BENCH_DISK"] else {}


def _prepare(alias: str) -> None:
    from django.core.management import call_command
    from django.db import connections

    # Not all apps: a migration of django-tasks-db updates a table of "default", where there is none.
    for app in ("django_distlock", "db_mutex"):
        call_command("migrate", app, database=alias, verbosity=0)
    vendor = connections[alias].vendor
    with connections[alias].cursor() as cursor:
        kinds = "name varchar(50) PRIMARY KEY, owner varchar(50), token bigint"
        moment = "timestamptz" if vendor == "postgresql" else "datetime(6)"
        cursor.execute("DROP TABLE IF EXISTS raw_lease")
        cursor.execute(f"CREATE TABLE raw_lease ({kinds}, expires_at {moment})")
        cursor.execute("INSERT INTO raw_lease (name, token) VALUES ('x', 0)")


def _all_kinds(alias: str) -> Field:
    from django.db import connections

    advisory = ADVISORY[connections[alias].vendor]
    return {
        f"{alias}, lease rows": [
            _raw_lease(alias),
            _our_statements(alias),
            ours(alias),
            ours(alias, limit=1),
        ],
        f"{alias}, held rows": [
            _raw(alias, "raw FOR UPDATE", HOLD, "COMMIT"),
            ours(f"{alias}-rowlock"),
        ],
        f"{alias}, advisory locks": [
            _raw(alias, "raw", advisory[:1], advisory[1], wait=advisory[2]),
            ours(f"{alias}-bare"),
            ours(f"{alias}-advisory"),
        ],
    }


def _db_mutex() -> Any:
    from db_mutex.db_mutex import db_mutex

    return db_mutex("benchmark")


def _raw_lease(alias: str) -> Contender:
    cursor, vendor = _cursor(alias)
    statement = (UPDATE if vendor == "mysql" else ACQUIRE).format(**CLOCKS[vendor])

    def take() -> bool:
        cursor.execute(statement)
        return bool(cursor.rowcount if vendor == "mysql" else cursor.fetchall())

    wait, free = polled(take), lambda: cursor.execute(FREE)
    return Contender("raw upsert, update", take, free, wait)


def _our_statements(alias: str) -> Contender:
    """Return what our statements cost alone: they keep a holder, a token and more instants than the raw ones do."""
    backend: Any = locks[alias]
    request = backend.request("alone", ttl=30, holder=Holder.current())
    cursor, dialect = backend._own.borrow().distlock_cursor, backend.dialect  # noqa: SLF001 - nobody lends it
    take = partial(dialect.try_acquire, cursor, request, queued=False)
    return Contender("our statements alone", take, partial(dialect.release, cursor, request))


def _raw(
    alias: str, name: str, take: tuple[str, ...], free: str, *, wait: str | None = None
) -> Contender:
    cursor, _ = _cursor(alias)

    def executed(*statements: str) -> Act:
        def execute() -> None:
            for statement in statements:
                cursor.execute(statement)

        return execute

    waiting = executed(*take) if wait is None else executed(wait)
    return Contender(name, executed(*take), executed(free), waiting)


def _cursor(alias: str) -> tuple[Any, str]:
    """Return a cursor of the driver, and what kind of database it is."""
    from django.db import connections

    connections[alias].ensure_connection()
    return connections[alias].connection.cursor(), connections[alias].vendor
