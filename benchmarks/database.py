"""What a lock costs, beside the raw statements it stands for and what one would pick instead.

Run: python -m benchmarks.database [--rounds N]. It starts servers of its own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.measures import handoff, microseconds, ours
from tests.fixtures.environment import free_port
from tests.fixtures.mariadb import MariaDB
from tests.fixtures.postgres import PostgreSQL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
for port in ("DISTLOCK_POSTGRES_PORT", "DISTLOCK_MARIADB_PORT"):
    # Chosen before Django reads its settings; the processes of the hand-off inherit them.
    os.environ.setdefault(port, str(free_port()))
os.environ.setdefault(
    "DISTLOCK_SQLITE_PATH", str(Path(tempfile.mkdtemp(prefix="distlock-")) / "db.sqlite3")
)
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


def raw_lease(alias: str) -> Callable[[], None]:
    """Return one acquire and release by the two statements a lease row needs at least."""
    from django.db import connections

    connection = connections[alias]
    clocks = CLOCKS[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS raw_lease")
        kinds = "name varchar(50) PRIMARY KEY, owner varchar(50), token bigint"
        moment = "timestamptz" if connection.vendor == "postgresql" else "datetime(6)"
        cursor.execute(f"CREATE TABLE raw_lease ({kinds}, expires_at {moment})")
        if connection.vendor == "mysql":
            cursor.execute("INSERT INTO raw_lease (name, token) VALUES ('x', 0)")
    acquire = (UPDATE if connection.vendor == "mysql" else ACQUIRE).format(**clocks)
    raw = connection.connection.cursor()

    def cycle() -> None:
        raw.execute(acquire)
        raw.execute(FREE)

    return cycle


def by_pglock(alias: str) -> Callable[[], None]:
    """Return the same by django-pglock's advisory lock."""
    import pglock

    def cycle() -> None:
        with pglock.advisory("benchmark", using=alias):
            pass

    return cycle


@contextmanager
def servers() -> Iterator[list[str]]:
    """Start the servers and make the tables."""
    import django

    with ExitStack() as stack:
        stack.enter_context(PostgreSQL(int(os.environ["DISTLOCK_POSTGRES_PORT"])))
        stack.enter_context(MariaDB(int(os.environ["DISTLOCK_MARIADB_PORT"])))
        django.setup()
        from django.core.management import call_command

        aliases = ["default", "postgres", "mariadb"]
        for alias in aliases:
            call_command("migrate", database=alias, verbosity=0)
        yield aliases


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    table = Table("database", "raw, µs", "ours, µs", "ratio", "django-pglock, µs", "hand-off, ms")
    with servers() as aliases:
        for alias in aliases:
            raw, own = microseconds(raw_lease(alias), rounds), microseconds(ours(alias), rounds)
            peer = _peer(alias, rounds)
            table.add_row(
                alias, f"{raw:.0f}", f"{own:.0f}", f"{own / raw:.2f}", peer, f"{handoff(alias):.1f}"
            )
        Console().print(table)


def _peer(alias: str, rounds: int) -> str:
    return f"{microseconds(by_pglock(alias), rounds):.0f}" if alias == "postgres" else "-"


if __name__ == "__main__":
    main()
