"""SQLite: one statement a verb, which is atomic there; the token stands in the lock's own row."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from django.db.utils import OperationalError

from django_distlock.engine.values import Busy, Grant, Request

from .engine import (
    LOCK,
    PATIENCE,
    WAITER,
    Engine,
    StaleSnapshot,
    busy,
    parameters,
    turn,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

#: Seconds that SQLite itself waits for the file; the backend asks again until its own limit.
SLICE = 0.1

# Instants are text that sorts; 'now' stands still within one statement, after any wait for the file.
_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
_AFTER = "strftime('%Y-%m-%d %H:%M:%f', 'now', ({}) || ' seconds')"
_MICROSECONDS = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000"
_LEFT = "(julianday(available_at) - julianday('now')) * 86400.0"

_TURN = turn(_NOW, ":{}")
_UNTIL = f"{_NOW}, {_AFTER.format(':ttl')}, {_AFTER.format(':taken_for')}"

# Takes the lock for :owner if it is free for it, and raises its fencing token.
# A row with the token, or none: refused. The same owner again gets the same token.
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

_LOOK = f"SELECT CASE WHEN expires_at > {_NOW} THEN holder END, {_LEFT} FROM {LOCK} WHERE method_name = :key"
_PROBE = f"{_LOOK} AND available_at > {_NOW}"

# Frees the lock if :owner has it, but a late one from no lock_delay. A row that tells if it was in time, or none: it was not ours.
_RELEASE = f"""
UPDATE {LOCK} SET owner = NULL, last_owner = :owner, holder = NULL, updated_at = {_NOW},
    available_at = CASE WHEN expires_at > {_NOW}
        THEN strftime('%Y-%m-%d %H:%M:%f', acquired_at, :min_hold || ' seconds')
        ELSE available_at END
WHERE method_name = :key AND owner = :owner RETURNING expires_at > {_NOW}
"""

_MISSED = f"""
SELECT last_owner IS :owner, owner IS NOT NULL AND expires_at > {_NOW}
FROM {LOCK} WHERE method_name = :key
"""

# Gives a lease that is still its owner's more time, never less. Matches one row, or none.
_EXTEND = f"""
UPDATE {LOCK} SET updated_at = {_NOW}, expires_at = max(expires_at, {_AFTER.format(":ttl")}),
    available_at = max(available_at, {_AFTER.format(":ttl + :lock_delay")})
WHERE method_name = :key AND owner = :owner AND expires_at > {_NOW}
"""

# A row if the file has tables of others, too.
_OF_OTHERS = """
SELECT 1 FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'
AND name NOT LIKE 'django_distlock_%' AND name <> 'django_migrations' LIMIT 1
"""

_TAKE_OVER = f"""
UPDATE {LOCK} SET owner = :owner, holder = :holder, expires_at = {_AFTER.format(":ttl")},
    available_at = max({_AFTER.format(":ttl + :lock_delay")},
        strftime('%Y-%m-%d %H:%M:%f', acquired_at, :min_hold || ' seconds'))
WHERE method_name = :key AND owner = :former AND expires_at > {_NOW}
"""

_ENQUEUE = f"""
INSERT INTO {WAITER} (method_name, owner, channel, expires_at)
VALUES (:key, :owner, :channel, {_AFTER.format(PATIENCE)})
ON CONFLICT (owner) DO UPDATE SET expires_at = excluded.expires_at RETURNING ticket
"""


class SQLite(Engine):
    """One statement a verb; the file has one writer at a time, so there is nothing else to lock."""

    parameter = ":{}"
    after = _AFTER
    now = _NOW
    pauses = (0.001, 0.007)
    release_sql, missed_sql, probe_sql, enqueue_sql = _RELEASE, _MISSED, _PROBE, _ENQUEUE
    take_over_sql = _TAKE_OVER

    def __init__(self, *, fair: bool) -> None:
        super().__init__(fair=fair)
        self._acquire = _ACQUIRE.format(turn=_TURN if fair else "true")

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """Wait for the file in slices: this process may itself be what blocks it."""
        return {"timeout": SLICE, "transaction_mode": "IMMEDIATE"}

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Wait for no disk where the file has locks alone: a crash of the machine ends their holders, too."""
        if "init_command" in connection.settings_dict["OPTIONS"]:
            return
        with connection.cursor() as cursor:
            if cursor.execute(_OF_OTHERS).fetchone():
                return
            # Who is at work on the file is not waited for: the next connection tries again.
            with suppress(OperationalError):
                if cursor.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",):
                    cursor.execute("PRAGMA synchronous = NORMAL")

    def is_contention(self, error: Exception) -> bool:
        return "locked" in str(error)

    def stands_in_the_way(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether it has written, or has read and keeps no write-ahead log; no waiting.

        A checkpoint is refused within a transaction that has read or written.
        """
        if (raw := connection.connection) is None:
            return False
        try:
            raw.execute("PRAGMA wal_checkpoint")
        except sqlite3.OperationalError:
            (mode,) = raw.execute("PRAGMA journal_mode").fetchone()
            return mode != "wal" or _has_written(raw)
        return False

    def is_missing_table(self, error: Exception) -> bool:
        return "no such table" in str(error)

    def take(self, cursor: Any, request: Request) -> Grant | Busy:
        cursor.execute(self._acquire, parameters(request))
        row = cursor.fetchone()
        if row is not None:
            return Grant(row[0])
        cursor.execute(_LOOK, {"key": request.key})
        row = cursor.fetchone()
        return Busy() if row is None else busy(*row)

    def extend(self, cursor: Any, requests: Sequence[Request]) -> list[bool]:
        return [cursor.execute(_EXTEND, parameters(each)).rowcount == 1 for each in requests]

    def version(self, cursor: Any) -> object:
        return cursor.execute("PRAGMA data_version").fetchone()[0]

    def guard(self, cursor: CursorWrapper, schema: str, key: str, token: int) -> int | None:
        """Write the token as it is: the caller is the file's one writer until its transaction ends."""
        try:
            cursor.execute(
                f"UPDATE {LOCK} SET fencing_token = fencing_token WHERE method_name = %(key)s",
                {"key": key},
            )
        except Exception as error:
            # A transaction that has read cannot become the writer once another has written.
            if self.is_contention(error):
                raise StaleSnapshot from error
            raise
        cursor.execute(
            f"SELECT fencing_token FROM {LOCK} WHERE method_name = %(key)s", {"key": key}
        )
        row = cursor.fetchone()
        return None if row is None else row[0]


def _has_written(raw: sqlite3.Connection) -> bool:
    """Return whether the open transaction of *raw* has written: then it cannot be copied from."""
    outcomes: list[int] = []

    def stop(status: int, remaining: int, total: int) -> None:
        outcomes.append(status)
        raise _Stop

    with closing(sqlite3.connect(":memory:")) as nowhere, suppress(_Stop):
        raw.backup(nowhere, pages=1, progress=stop)
    return outcomes == [sqlite3.SQLITE_BUSY]


class _Stop(Exception):
    """One page is enough."""
