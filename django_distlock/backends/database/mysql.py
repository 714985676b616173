"""MariaDB and MySQL: one conditional UPDATE a verb, whose result comes back as LAST_INSERT_ID."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_distlock.engine.values import Busy, Grant, Release, Request
from django_distlock.exceptions import first_line

from .engine import (
    COUNTER,
    LOCK,
    PATIENCE,
    ROW_WAIT,
    WAITER,
    Engine,
    OutOfReach,
    StaleSnapshot,
    busy,
    keep_places,
    missed,
    parameters,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

# SYSDATE is read when it is reached, NOW when the statement began: before a wait for the row.
_AFTER = "SYSDATE(6) + INTERVAL CAST({} * 1000000 AS SIGNED) MICROSECOND"
MICROSECONDS = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"

# Nobody alive stands before us in the queue.
_TURN = f"""NOT EXISTS (
        SELECT 1 FROM {WAITER} AS w
        WHERE w.method_name = %(key)s AND w.expires_at > SYSDATE(6) AND w.owner <> %(owner)s
          AND w.ticket < COALESCE((SELECT m.ticket FROM {WAITER} AS m WHERE m.owner = %(owner)s),
                                  9223372036854775807))"""

# Takes the lock for %(owner)s if it is free, and raises its fencing token.
#
# "free" is read first: so a refused statement writes nothing, and does not lock the counter, which
# guard() may hold. LIMIT keeps the optimizer from merging it into the join, which would lock it.
# MariaDB reads the row of the lock with a shared lock, for this statement: of two that find it free
# at once, one is ended as a deadlock. What decides is the last line, on the row as it is then.
# Each assignment reads but its own old column and the clock of the statement, as their order across
# tables is not defined. LAST_INSERT_ID: the token; 0: refused, or there is no row yet.
_ACQUIRE = f"""
UPDATE (
    SELECT method_name FROM {LOCK} WHERE method_name = %(key)s AND available_at <= SYSDATE(6) AND {{turn}} LIMIT 1
) AS free
STRAIGHT_JOIN {LOCK} AS l ON l.method_name = free.method_name
STRAIGHT_JOIN {COUNTER} AS c ON c.method_name = free.method_name
SET l.owner = %(owner)s, l.holder = %(holder)s,
    l.fencing_token = GREATEST(l.fencing_token + 1, {MICROSECONDS}),
    l.acquired_at = SYSDATE(6), l.updated_at = SYSDATE(6),
    l.expires_at = {_AFTER.format("%(ttl)s")},
    l.available_at = GREATEST({_AFTER.format("%(min_hold)s")}, {_AFTER.format("(%(ttl)s + %(lock_delay)s)")}),
    c.value = LAST_INSERT_ID(GREATEST(c.value + 1, {MICROSECONDS})), c.holder = %(holder)s
WHERE l.available_at <= SYSDATE(6)
"""

# One row: is it ours, its token, who has it, seconds until others may have it.
_LOOK = f"""
SELECT l.owner <=> %(owner)s, c.value, l.holder, TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), l.available_at) / 1e6
FROM {LOCK} AS l JOIN {COUNTER} AS c ON c.method_name = l.method_name WHERE l.method_name = %(key)s
"""

CREATE = (
    f"""INSERT IGNORE INTO {LOCK} (method_name, description, fencing_token, available_at, updated_at)
    VALUES (%(key)s, %(name)s, 0, SYSDATE(6), SYSDATE(6))""",
    f"INSERT IGNORE INTO {COUNTER} (method_name, value) VALUES (%(key)s, 0)",
)

# Frees the lock if %(owner)s has it, but a late one from no lock_delay. LAST_INSERT_ID: 2 in time, 1 late, 0 it was not ours.
_RELEASE = f"""
UPDATE {LOCK} SET
    updated_at = IF(LAST_INSERT_ID(IF(expires_at > SYSDATE(6), 2, 1)), SYSDATE(6), NULL),
    owner = NULL, last_owner = %(owner)s, holder = NULL,
    available_at = IF(expires_at > SYSDATE(6),
        acquired_at + INTERVAL CAST(%(min_hold)s * 1000000 AS SIGNED) MICROSECOND, available_at)
WHERE method_name = %(key)s AND owner = %(owner)s
"""

# One row: released by us before, held by another.
_MISSED = f"""
SELECT last_owner <=> %(owner)s, owner IS NOT NULL AND expires_at > SYSDATE(6)
FROM {LOCK} WHERE method_name = %(key)s
"""

# Gives a lease that is still its owner's more time, never less. Matches one row, or none.
_EXTEND = f"""
UPDATE {LOCK} SET updated_at = SYSDATE(6),
    available_at = GREATEST(available_at, {_AFTER.format("(%(ttl)s + %(lock_delay)s)")}),
    expires_at = GREATEST(expires_at, {_AFTER.format("%(ttl)s")})
WHERE method_name = %(key)s AND owner = %(owner)s AND expires_at > SYSDATE(6)
"""

_PROBE = f"""
SELECT holder, TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), available_at) / 1e6
FROM {LOCK} WHERE method_name = %(key)s AND available_at > SYSDATE(6)
"""

_ENQUEUE = f"""
INSERT INTO {WAITER} (method_name, owner, channel, expires_at)
VALUES (%(key)s, %(owner)s, %(channel)s, {_AFTER.format("%(patience)s")})
ON DUPLICATE KEY UPDATE expires_at = VALUES(expires_at)
"""
_TICKET = f"SELECT ticket FROM {WAITER} WHERE owner = %(owner)s"
_KEEP_PLACE = f"""
UPDATE {WAITER} SET expires_at = {_AFTER.format("%(patience)s")}
WHERE owner = %(owner)s AND expires_at < {_AFTER.format("%(patience)s / 2")}
"""

#: Lock wait timeout, lock not available at once.
_LOCK_NOT_AVAILABLE = {1205, 3572}
#: Those, deadlock, record changed since the snapshot.
_CONTENTION = {*_LOCK_NOT_AVAILABLE, 1213, 1020}
#: Nothing is cut in silence, no quote or empty text means something else.
_SQL_MODE = "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION"
_NO_SUCH_TABLE = 1146
#: ER_DBACCESS_DENIED_ERROR, ER_TABLEACCESS_DENIED_ERROR
_OUT_OF_REACH = {1044, 1142, _NO_SUCH_TABLE}


class MySQL(Engine):
    """One statement a verb where it succeeds; a refused one asks a second time who has it."""

    def __init__(self, *, fair: bool) -> None:
        super().__init__(fair=fair)
        self._acquire = _ACQUIRE.format(turn=_TURN if fair else "TRUE")

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """Give up a server that does not answer; read what is committed."""
        whole = max(1, round(io_timeout))
        timeouts = {"connect_timeout": whole, "read_timeout": whole, "write_timeout": whole}
        return {**timeouts, "isolation_level": "read committed"}

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Have one clock whatever the machine's zone; wait for a row no longer than a moment."""
        settle(connection)
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = %s", [max(1, round(ROW_WAIT))])

    def is_contention(self, error: Exception) -> bool:
        """Return whether it is a wait for a row that took too long, or a deadlock."""
        return code(error) in _CONTENTION

    def is_wait_over(self, error: Exception) -> bool:
        """Return whether it is a wait for a row that took too long."""
        return code(error) in _LOCK_NOT_AVAILABLE

    def is_missing_table(self, error: Exception) -> bool:
        """Return whether the server says that there is no such table."""
        return code(error) == _NO_SUCH_TABLE

    def try_acquire(
        self, cursor: CursorWrapper, request: Request, *, queued: bool
    ) -> Grant | Busy | None:
        """Ask once; the row is made at the first use of a name."""
        known = parameters(request)
        answer = self._take(cursor, known)
        if answer is None:
            for statement in CREATE:
                cursor.execute(statement, known)
            answer = self._take(cursor, known)
        if queued:
            self._mind_place(cursor, known, is_granted=isinstance(answer, Grant))
        return answer

    def release(self, cursor: CursorWrapper, request: Request) -> Release:
        """Give it back."""
        known = parameters(request)
        cursor.execute(_RELEASE, known)
        if cursor.lastrowid:
            return Release.RELEASED if cursor.lastrowid == 2 else Release.GONE
        cursor.execute(_MISSED, known)
        return missed(cursor.fetchone())

    def extend(self, cursor: CursorWrapper, requests: Sequence[Request]) -> list[bool]:
        """Extend each: Django has the server count rows matched, not changed."""
        return [bool(cursor.execute(_EXTEND, parameters(request))) for request in requests]

    def probe(self, cursor: CursorWrapper, request: Request) -> Busy | None:
        """Look."""
        cursor.execute(_PROBE, {"key": request.key})
        row = cursor.fetchone()
        return None if row is None else busy(*row)

    def enqueue(self, cursor: CursorWrapper, request: Request, channel: str) -> int:
        """Take a place, or keep the one that this owner has."""
        known = parameters(request, channel=channel, patience=PATIENCE)
        cursor.execute(_ENQUEUE, known)
        cursor.execute(_TICKET, known)
        ticket: int = cursor.fetchone()[0]
        return ticket

    def keep_places(self, cursor: CursorWrapper, owners: Sequence[str]) -> None:
        """One statement."""
        keep_places(cursor, owners, _AFTER.format("%s"), PATIENCE)

    def guard(self, cursor: CursorWrapper, schema: str, key: str, token: int) -> int | None:
        """Lock in share mode: it reads the newest value, where a plain read gives the snapshot's."""
        select = f"SELECT value FROM {schema}{COUNTER} WHERE method_name = %(key)s"
        try:
            cursor.execute(select, {"key": key})
            seen = cursor.fetchone()
            cursor.execute(f"{select} LOCK IN SHARE MODE", {"key": key})
        except Exception as error:
            if code(error) == 1020:
                raise StaleSnapshot from error
            if code(error) in _OUT_OF_REACH:
                raise OutOfReach(first_line(error)) from error
            raise
        now = cursor.fetchone()
        if now is not None and now[0] == token and seen != now:
            raise StaleSnapshot
        return None if now is None else now[0]

    def _take(self, cursor: CursorWrapper, known: dict[str, Any]) -> Grant | Busy | None:
        """Return the answer, or None if a row is missing."""
        cursor.execute(self._acquire, known)
        if cursor.lastrowid:
            return Grant(cursor.lastrowid)
        cursor.execute(_LOOK, known)
        row = cursor.fetchone()
        if row is None:
            return None
        is_ours, token, holder, remaining = row
        return Grant(token) if is_ours else busy(holder, remaining)

    def _mind_place(
        self, cursor: CursorWrapper, known: dict[str, Any], *, is_granted: bool
    ) -> None:
        cursor.execute(
            f"DELETE FROM {WAITER} WHERE owner = %(owner)s" if is_granted else _KEEP_PLACE, known
        )


def settle(connection: BaseDatabaseWrapper) -> None:
    """Have one clock, one isolation and one reading of SQL, whatever the machine or the project prefers."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION time_zone = '+00:00', sql_mode = '{_SQL_MODE}'")
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")


def code(error: Exception) -> int | None:
    return error.args[0] if error.args and isinstance(error.args[0], int) else None
