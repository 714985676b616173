"""The three servers as the stage sees them: who waits for whom, what is committed, and time that passes."""

from __future__ import annotations

import re
import sqlite3
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from django.core.management import call_command
from django.db import connections

from django_distlock.backends.database.dialect import COUNTER, LOCK, WAITER
from django_distlock.ground import clock

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.fixtures.mariadb import MariaDB
    from tests.fixtures.postgres import PostgreSQL

#: The name of the database, the begin of that of its alias, and the channel on which waiters are called.
NAME = "interleavings"
ACCOUNT = "testproject_account"
#: The keys of two accounts: one that is claimed, and one behind transaction_lock().
CLAIMED, PAID = 1, 2
#: Microseconds: a row of yesterday, and a lease that has just ended.
DAY, MOMENT = 86_400_000_000, 1_000_000


@dataclass(frozen=True)
class Seen:
    """What is committed. Instants are microseconds of the server's clock; *read_at* is ours, after the answer."""

    now: int
    owner: str | None
    token: int
    expires: int
    available: int
    #: False: the lock has no row.
    exists: bool
    #: Of the account that is claimed, and of the one behind transaction_lock().
    fence: int
    balance: int
    paid: int
    read_at: float

    @property
    def is_free(self) -> bool:
        return not self.exists or self.available <= self.now


class Database(ABC):
    """One database of our own on one server."""

    name: ClassVar[str]
    #: Whether sessions can wait for each other inside the server, and transaction_lock() works.
    waits: ClassVar[bool] = True
    #: Whether a release calls the next waiter; else waiters look.
    calls: ClassVar[bool] = False
    #: SQL: the time, an instant from a number, a number from an instant; how a row is locked or passed by.
    now: ClassVar[str]
    instant: ClassVar[str]
    number: ClassVar[str]
    skip: ClassVar[str] = "FOR UPDATE SKIP LOCKED"
    #: Microseconds by which the server's instants are coarser than its clock.
    grain: ClassVar[int] = 0
    begin: ClassVar[str] = "BEGIN"

    def __init__(self) -> None:
        """Make the database and its tables."""
        self.make()
        self.alias = f"{NAME}_{self.name}"
        connections.settings[self.alias] = self.settings()
        for app in ("django_distlock", "testproject"):
            call_command("migrate", app, database=self.alias, verbosity=0)
        self._eye = self.connect()

    @abstractmethod
    def make(self) -> None:
        """Make it."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return its entry in DATABASES."""

    @abstractmethod
    def connect(self) -> Any:
        """Return a connection in autocommit that may see all."""

    def isolated(self, level: str) -> dict[str, Any]:
        """Return OPTIONS for transactions at the isolation *level*."""
        return {}

    def waiting(self, pids: Collection[int | None]) -> set[int]:
        """Return which of the connections wait for a lock that another one has."""
        return set()

    def called(self) -> set[int]:
        """Return the tickets of waiters that were called since the last look."""
        return set()

    def close(self) -> None:
        self._eye.close()
        forget(self.alias)

    def run(self, statement: str) -> list[Any]:
        cursor = self._eye.cursor()
        cursor.execute(statement)
        rows = [*cursor.fetchall()] if cursor.description else []
        cursor.close()
        return rows

    def see(self, key: str) -> Seen:
        """Return what is committed for the lock with this *key*, and in the account."""
        number = self.number.format
        ((now, exists, owner, token, expires, available, fence, balance, paid),) = self.run(
            f"SELECT {number(self.now)}, l.id IS NOT NULL, l.owner, coalesce(l.fencing_token, 0),"
            f" {number('coalesce(l.expires_at, l.available_at)')}, {number('l.available_at')}, a.fence, a.balance, b.balance"
            f" FROM {ACCOUNT} a JOIN {ACCOUNT} b ON b.id = {PAID} LEFT JOIN {LOCK} l ON l.method_name = '{key}' WHERE a.id = {CLAIMED}"
        )
        return Seen(
            int(now),
            owner,
            int(token),
            int(expires or 0),
            int(available or 0),
            bool(exists),
            int(fence),
            int(balance),
            int(paid),
            clock.lease_time(),
        )

    def reset(self, key: str, *, is_old: bool) -> None:
        """Leave no rows but two new accounts, and with *is_old* those of a lock that was used yesterday."""
        for table in (LOCK, COUNTER, WAITER, ACCOUNT):
            self.run(f"DELETE FROM {table}")
        for account in (CLAIMED, PAID):
            self.run(
                f"INSERT INTO {ACCOUNT} (id, name, opening_balance, balance, fence)"
                f" VALUES ({account}, 'a', 0, 0, 0)"
            )
        if is_old:
            ((now,),) = self.run(f"SELECT {self.number.format(self.now)}")
            token = int(now) - DAY
            then = self.instant.format(token)
            self.run(
                f"INSERT INTO {LOCK} (method_name, description, fencing_token, available_at, updated_at)"
                f" VALUES ('{key}', 'x', {token}, {then}, {then})"
            )
            self.run(f"INSERT INTO {COUNTER} (method_name, value) VALUES ('{key}', {token})")

    def expire(self, key: str) -> str | None:
        """Let the lease end now, unless its row is being written; return whose it was."""
        self.run(self.begin)
        try:
            found = self.run(
                f"SELECT owner, {self.number.format(self.now)} FROM {LOCK}"
                f" WHERE method_name = '{key}' AND owner IS NOT NULL {self.skip}"
            )
            if not found:
                return None
            ((owner, now),) = found
            then = self.instant.format(int(now) - MOMENT)
            self.run(
                f"UPDATE {LOCK} SET expires_at = {then}, available_at = {then} WHERE method_name = '{key}'"
            )
            return str(owner)
        finally:
            self.run("COMMIT")


def forget(alias: str) -> None:
    """Close the connection of this thread, and remove *alias*."""
    connections[alias].close()
    del connections[alias]
    connections.settings.pop(alias)


class OnPostgreSQL(Database):
    """PostgreSQL: pg_blocking_pids() shows who waits, LISTEN who is called."""

    name = "postgres"
    calls = True
    now = "clock_timestamp()"
    instant = "to_timestamp({} / 1000000.0)"
    number = "(extract(epoch FROM {}) * 1000000)::bigint"

    def __init__(self, server: PostgreSQL) -> None:
        self._server = server
        super().__init__()
        self._ear = self.connect()
        self._ear.execute(f"LISTEN {NAME}")

    def make(self) -> None:
        with self._server.admin() as admin:
            admin.execute(f"DROP DATABASE IF EXISTS {NAME}")
            admin.execute(f"CREATE DATABASE {NAME} OWNER distlock")

    def settings(self) -> dict[str, Any]:
        return {**connections.settings["postgres"], "NAME": NAME}

    def connect(self) -> Any:
        return self._server.admin(NAME)

    def isolated(self, level: str) -> dict[str, Any]:
        from psycopg import IsolationLevel

        return {"isolation_level": IsolationLevel[level]}

    def waiting(self, pids: Collection[int | None]) -> set[int]:
        found = self.run(
            f"SELECT pid FROM unnest(ARRAY{[*filter(None, pids)]}::int[]) AS pid"
            " WHERE cardinality(pg_blocking_pids(pid)) > 0"
        )
        return {pid for (pid,) in found}

    def called(self) -> set[int]:
        # Notifications come in the order of their commits, so all are there when our own is.
        self._ear.execute(f"NOTIFY {NAME}, 'end'")
        found = set()
        for note in self._ear.notifies():
            if note.payload == "end":
                break
            found.add(int(note.payload))
        return found

    def close(self) -> None:
        self._ear.close()
        super().close()


class OnMariaDB(Database):
    """MariaDB: the monitor of InnoDB shows who waits; information_schema.innodb_trx shows it up to 0.1 s late."""

    name = "mariadb"
    now = "UTC_TIMESTAMP(6)"
    instant = "(TIMESTAMP'1970-01-01 00:00:00' + INTERVAL {} MICROSECOND)"
    number = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {})"

    def __init__(self, server: MariaDB) -> None:
        self._server = server
        super().__init__()

    def make(self) -> None:
        admin = self._server.admin()
        with admin.cursor() as cursor:
            cursor.execute(f"CREATE OR REPLACE DATABASE {NAME} CHARACTER SET utf8mb4")
            cursor.execute(f"GRANT ALL ON {NAME}.* TO distlock@'127.0.0.1'")
        admin.close()

    def settings(self) -> dict[str, Any]:
        return {**connections.settings["mariadb"], "NAME": NAME}

    def connect(self) -> Any:
        connection = self._server.admin(NAME)
        with connection.cursor() as cursor:
            cursor.execute("SET time_zone = '+00:00'")
        return connection

    def isolated(self, level: str) -> dict[str, Any]:
        return {"isolation_level": level.replace("_", " ").lower()}

    def waiting(self, pids: Collection[int | None]) -> set[int]:
        ((_, _, text),) = self.run("SHOW ENGINE INNODB STATUS")
        transactions = text.split("---TRANSACTION ")[1:]
        found = (
            re.search(r"thread id (\d+)", each) for each in transactions if "\nLOCK WAIT " in each
        )
        return {int(each[1]) for each in found if each}


class OnSQLite(Database):
    """SQLite: nobody waits inside; a statement that finds the file locked fails, and is tried again."""

    name = "sqlite"
    waits = False
    now = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
    instant = "strftime('%Y-%m-%d %H:%M:%f', {} / 1000000.0, 'unixepoch')"
    number = "CAST(round((julianday({}) - 2440587.5) * 86400000) AS INTEGER) * 1000"
    skip = ""
    grain = 2000
    begin = "BEGIN IMMEDIATE"

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/{NAME}.sqlite3"
        super().__init__()

    def make(self) -> None:
        """The file makes itself."""

    def settings(self) -> dict[str, Any]:
        # A caller that finds the file locked is refused at once.
        default = connections.settings["default"]
        return {**default, "NAME": self._path, "OPTIONS": {**default["OPTIONS"], "timeout": 0}}

    def connect(self) -> Any:
        return sqlite3.connect(self._path, isolation_level=None, timeout=0, check_same_thread=False)

    def expire(self, key: str) -> str | None:
        with suppress(sqlite3.OperationalError):  # somebody writes
            return super().expire(key)
        return None
