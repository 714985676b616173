"""SQLite: each verb is one statement, and so atomic; the token is in the lock's own row."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from django.db.utils import OperationalError

from django_distlock.engine.values import Busy, Grant, Request

from .bounds import driver_of
from .dialect import (
    LOCK,
    LOOK,
    Dialect,
    StaleSnapshot,
    busy,
    parameters,
)

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

#: Seconds that SQLite itself waits for the file; the backend repeats the statement until its own limit.
#: Pauses inside SQLite grow, so with longer waits, newer waiters would look more often than old ones, and win.
SLICE = 0.008

# Times are sortable texts. 'now' is the same in all parts of a statement, and read after any wait for the file.
_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
_LATER = "strftime('%Y-%m-%d %H:%M:%f', {}, ({}) || ' seconds')"
_AFTER = _LATER.format("'now'", "{}")
_MICROSECONDS = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000"
_LEFT = "(julianday(available_at) - julianday('now')) * 86400.0"

_UNTIL = f"{_NOW}, {_AFTER.format(':ttl')}, {_AFTER.format(':taken_for')}"

# Acquires the lock for :owner if it is free for this owner, and raises the fencing token.
# One row with the token; no row: refused. The same owner gets the same token again.
_ACQUIRE = f"""
INSERT INTO {LOCK} (method_name, description, owner, holder, fencing_token, acquired_at, expires_at,
                    available_at, updated_at)
SELECT :key, :name, :owner, :holder, {_MICROSECONDS}, {_UNTIL}, {_NOW}
WHERE {{turn}} OR EXISTS (SELECT 1 FROM {LOCK} WHERE method_name = :key AND owner = :owner)
ON CONFLICT (method_name) DO UPDATE SET
    holder = excluded.holder, expires_at = excluded.expires_at,
    available_at = excluded.available_at, updated_at = excluded.updated_at,
    acquired_at = CASE WHEN owner = :owner THEN acquired_at ELSE excluded.acquired_at END,
    fencing_token = CASE WHEN owner = :owner THEN fencing_token
                    ELSE max(fencing_token + 1, excluded.fencing_token) END,
    owner = excluded.owner
WHERE owner = :owner OR available_at <= {_NOW}
RETURNING fencing_token
"""

# One row if the file has tables of other apps.
_OF_OTHERS = """
SELECT 1 FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'
AND name NOT LIKE 'django_distlock_%' AND name <> 'django_migrations' LIMIT 1
"""


class _Opened(sqlite3.Connection):
    """A connection that closes if one of Django's first statements fails, as on a locked file with a newer SQLite.

    Django would leave it open. Later statements have cursors.
    """

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*statement)
        except sqlite3.Error:
            self.close()
            raise


class SQLite(Dialect):
    """The verbs of SQLite, one statement each: the file has one writer at a time, so no row need be locked."""

    parameter = ":{}"
    now, after, later, left = _NOW, _AFTER, _LATER, _LEFT
    greatest = "max"
    pauses = (0.001, 0.007)

    def __init__(self, *, fair: bool) -> None:
        super().__init__(fair=fair)
        self._acquire, self._look = self.sql(_ACQUIRE), self.sql(LOOK)

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """Return a short timeout for a locked file, because this process itself may have locked it."""
        factory = settings["OPTIONS"].get("factory", _Opened)
        return {"timeout": SLICE, "transaction_mode": "IMMEDIATE", "factory": factory}

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Switch a file that has only lock tables to WAL, where commits do not wait for the disk.

        A crash of the machine, which could lose them, ends their holders too. An init_command decides otherwise,
        but not about the time that SQLite waits for the file.
        """
        raw: Any = connection.connection
        raw.execute(f"PRAGMA busy_timeout = {SLICE * 1000:.0f}")
        if connection.settings_dict["OPTIONS"].get("init_command"):
            return
        with connection.cursor() as cursor:
            if cursor.execute(_OF_OTHERS).fetchone():
                return
            # Do not wait while others use the file: the next connection tries again.
            with suppress(OperationalError):
                if cursor.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",):
                    cursor.execute("PRAGMA synchronous = NORMAL")

    def is_contention(self, error: Exception) -> bool:
        return "locked" in str(error)

    def stands_in_the_way(self, connection: BaseDatabaseWrapper) -> bool:
        """Return True if the caller's transaction has written, or has read without WAL. Does not wait.

        A checkpoint is refused in a transaction that has read or written.
        """
        raw = driver_of(connection)
        if raw is None or not raw.in_transaction:
            return False
        try:
            raw.execute("PRAGMA wal_checkpoint")
        except sqlite3.OperationalError:
            (mode,) = raw.execute("PRAGMA journal_mode").fetchone()
            return mode != "wal" or _has_written(raw)
        return False

    def is_refusal(self, error: Exception) -> bool:
        return "no such table" in str(error) or "readonly" in str(error)

    def take(self, cursor: Any, request: Request) -> Grant | Busy:
        cursor.execute(self._acquire, parameters(request))
        row = cursor.fetchone()
        if row is not None:
            return Grant(row[0])
        cursor.execute(self._look, {"key": request.key})
        row = cursor.fetchone()
        return Busy() if row is None else busy(*row)

    def version(self, cursor: Any) -> object:
        return cursor.execute("PRAGMA data_version").fetchone()[0]

    def guard(self, cursor: CursorWrapper, schema: str, key: str, token: int) -> int | None:
        """Write the unchanged token, so that the caller is the file's only writer until its transaction ends."""
        try:
            cursor.execute(
                f"UPDATE {LOCK} SET fencing_token = fencing_token WHERE method_name = %(key)s"
                " RETURNING fencing_token",
                {"key": key},
            )
        except Exception as error:
            # A transaction that has read cannot write once another connection has written.
            code = getattr(error.__cause__, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_BUSY_SNAPSHOT:
                raise StaleSnapshot from error
            raise
        row = cursor.fetchone()
        return None if row is None else row[0]


def _has_written(raw: sqlite3.Connection) -> bool:
    """Return True if the open transaction of *raw* has written: then SQLite refuses a backup."""
    outcomes: list[int] = []

    def stop(status: int, remaining: int, total: int) -> None:
        outcomes.append(status)
        raise _Stop

    # Not by connect(), which returns a proxy if a monitoring agent runs.
    with closing(sqlite3.Connection(":memory:")) as nowhere, suppress(_Stop):
        raw.backup(nowhere, pages=1, progress=stop)
    return outcomes == [sqlite3.SQLITE_BUSY]


class _Stop(Exception):
    """Raised to end the backup after one page."""
