"""Lease rows, held rows and advisory locks, on the databases."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import Contender, ours
from tests.fixtures.mariadb import MariaDB
from tests.fixtures.postgres import PostgreSQL

if TYPE_CHECKING:
    from collections.abc import Iterator

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
HOLD = ("BEGIN", "SELECT token FROM raw_lease WHERE name = 'x' FOR UPDATE", "COMMIT")
ADVISORY = {
    "postgresql": ("SELECT pg_try_advisory_lock(1)", "SELECT pg_advisory_unlock(1)"),
    "mysql": ("SELECT GET_LOCK('x', 0)", "SELECT RELEASE_LOCK('x')"),
}


@contextmanager
def sqlite() -> Iterator[dict[str, list[Contender]]]:
    """Measure on the file that every project begins with."""
    _migrate("default")
    yield {"SQLite, lease rows": [_raw_lease("default"), ours("default")]}


@contextmanager
def postgres() -> Iterator[dict[str, list[Contender]]]:
    """Start PostgreSQL."""
    with PostgreSQL(int(os.environ["DISTLOCK_POSTGRES_PORT"])):
        _migrate("postgres")
        found = _all_kinds("postgres")
        found["postgres, advisory locks"].append(_by_pglock("postgres"))
        yield found


@contextmanager
def mariadb() -> Iterator[dict[str, list[Contender]]]:
    """Start MariaDB."""
    with MariaDB(int(os.environ["DISTLOCK_MARIADB_PORT"])):
        _migrate("mariadb")
        yield _all_kinds("mariadb")


def _migrate(alias: str) -> None:
    from django.core.management import call_command

    call_command("migrate", database=alias, verbosity=0)


def _all_kinds(alias: str) -> dict[str, list[Contender]]:
    from django.db import connections

    advisory = ADVISORY[connections[alias].vendor]
    return {
        f"{alias}, lease rows": [_raw_lease(alias), ours(alias)],
        f"{alias}, held rows": [_raw(alias, "raw FOR UPDATE", HOLD), ours(f"{alias}-rowlock")],
        f"{alias}, advisory locks": [_raw(alias, "raw", advisory), ours(f"{alias}-advisory")],
    }


def _raw_lease(alias: str) -> Contender:
    from django.db import connections

    connection = connections[alias]
    clocks = CLOCKS[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS raw_lease")
        kinds = "name varchar(50) PRIMARY KEY, owner varchar(50), token bigint"
        moment = "timestamptz" if connection.vendor == "postgresql" else "datetime(6)"
        cursor.execute(f"CREATE TABLE raw_lease ({kinds}, expires_at {moment})")
        cursor.execute("INSERT INTO raw_lease (name, token) VALUES ('x', 0)")
    acquire = UPDATE if connection.vendor == "mysql" else ACQUIRE
    return _raw(alias, "raw upsert, update", (acquire.format(**clocks), FREE))


def _raw(alias: str, name: str, statements: tuple[str, ...]) -> Contender:
    from django.db import connections

    cursor: Any = connections[alias].connection.cursor()

    def cycle() -> None:
        for statement in statements:
            cursor.execute(statement)

    return Contender(name, cycle)


def _by_pglock(alias: str) -> Contender:
    import pglock

    def cycle() -> None:
        with pglock.advisory("benchmark", using=alias):
            pass

    return Contender("django-pglock", cycle)
