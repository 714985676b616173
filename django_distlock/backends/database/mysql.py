"""MariaDB and MySQL: one conditional UPDATE a verb, whose result comes back as LAST_INSERT_ID."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from django_distlock.engine.values import Busy, Grant, Release, Request
from django_distlock.exceptions import first_line

from .connections import Crowded
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
    parameters,
    turn,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

# SYSDATE is read when it is reached, NOW when the statement began: before a wait for the row.
_AFTER = "SYSDATE(6) + INTERVAL CAST({} * 1000000 AS SIGNED) MICROSECOND"
_TURN = turn("SYSDATE(6)", "%({})s")
MICROSECONDS = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"

# Takes the lock for %(owner)s if it is free, and raises its fencing token.
#
# The row of the lock is locked and read first. Only if it is free is there a row of the counter to join,
# so that a refused statement does not lock that one, which guard() may hold. Until when the lock is taken
# is compared with the begin of the statement there, as a key must be known before the rows are read; what
# decides is the last line, by the clock as it is then.
# Each assignment reads but its own old column and the clock, as their order across tables is not
# defined. LAST_INSERT_ID: the token; 0: refused, or there is no row yet.
_ACQUIRE = f"""
UPDATE {LOCK} AS l STRAIGHT_JOIN {COUNTER} AS c
    ON c.method_name = IF(l.available_at <= NOW(6), %(key)s, NULL)
SET l.owner = %(owner)s, l.holder = %(holder)s,
    l.fencing_token = GREATEST(l.fencing_token + 1, {MICROSECONDS}),
    l.acquired_at = SYSDATE(6), l.updated_at = SYSDATE(6),
    l.expires_at = {_AFTER.format("%(ttl)s")},
    l.available_at = {_AFTER.format("%(taken_for)s")},
    c.value = LAST_INSERT_ID(GREATEST(c.value + 1, {MICROSECONDS})), c.holder = %(holder)s
WHERE l.method_name = %(key)s AND l.available_at <= SYSDATE(6) AND {{turn}}
"""

# One row: is it ours, its token, who has it, seconds until others may have it.
_LOOK = f"""
SELECT l.owner <=> %(owner)s, c.value, IF(l.expires_at > SYSDATE(6), l.holder, NULL), TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), l.available_at) / 1e6
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

_TAKE_OVER = f"""
UPDATE {LOCK} SET owner = %(owner)s, holder = %(holder)s, expires_at = {_AFTER.format("%(ttl)s")},
    available_at = GREATEST({_AFTER.format("(%(ttl)s + %(lock_delay)s)")},
        acquired_at + INTERVAL CAST(%(min_hold)s * 1000000 AS SIGNED) MICROSECOND)
WHERE method_name = %(key)s AND owner = %(former)s AND expires_at > SYSDATE(6)
"""

_PROBE = f"""
SELECT IF(expires_at > SYSDATE(6), holder, NULL), TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), available_at) / 1e6
FROM {LOCK} WHERE method_name = %(key)s AND available_at > SYSDATE(6)
"""

_ENQUEUE = f"""
INSERT INTO {WAITER} (method_name, owner, channel, expires_at)
VALUES (%(key)s, %(owner)s, %(channel)s, {_AFTER.format(PATIENCE)})
ON DUPLICATE KEY UPDATE ticket = LAST_INSERT_ID(ticket), expires_at = VALUES(expires_at)
"""
#: Lock wait timeout, lock not available at once.
_LOCK_NOT_AVAILABLE = {1205, 3572}
#: Those, deadlock, row changed since the snapshot.
CONTENTION = {*_LOCK_NOT_AVAILABLE, 1213, 1020}
#: Nothing is cut in silence, no quote or empty text means something else.
_SQL_MODE = "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION"
_NO_SUCH_TABLE = 1146
_PARAMETER = re.compile(r"%\((\w+)\)s")
#: ER_DBACCESS_DENIED_ERROR, ER_TABLEACCESS_DENIED_ERROR
_OUT_OF_REACH = {1044, 1142, _NO_SUCH_TABLE}


class MySQL(Engine):
    """One statement a verb where it succeeds; a refused one asks a second time who has it."""

    after = _AFTER
    now = "SYSDATE(6)"
    pauses = (0.002, 0.01)
    missed_sql, probe_sql, take_over_sql = _MISSED, _PROBE, _TAKE_OVER

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

    def cursor(self, connection: Any) -> Any:
        """Return the driver's. MariaDB can be given values with EXECUTE, and so parses our statements once."""
        cursor = super().cursor(connection)
        cursor.distlock_prepared = {} if connection.mysql_is_mariadb else None
        return cursor

    def is_contention(self, error: Exception) -> bool:
        return code(error) in CONTENTION

    def is_wait_over(self, error: Exception) -> bool:
        return code(error) in _LOCK_NOT_AVAILABLE

    def is_missing_table(self, error: Exception) -> bool:
        return code(error) == _NO_SUCH_TABLE

    def take(self, cursor: Any, request: Request) -> Grant | Busy:
        known = parameters(request)
        _run(cursor, self._acquire, known)
        if cursor.lastrowid:
            return Grant(cursor.lastrowid)
        # If nobody has it, it came free meanwhile, or has no rows yet.
        for _ in range(2):
            cursor.execute(_LOOK, known)
            row = cursor.fetchone()
            if row is not None:
                is_ours, token, holder, remaining = row
                if is_ours:
                    return Grant(token)
                if remaining > 0 or self.fair:
                    return busy(holder, remaining)
            else:
                for statement in CREATE:
                    cursor.execute(statement, known)
            _run(cursor, self._acquire, known)
            if cursor.lastrowid:
                return Grant(cursor.lastrowid)
        raise Crowded

    def release(self, cursor: Any, request: Request) -> Release:
        known = {"key": request.key, "owner": request.owner, "min_hold": request.min_hold}
        _run(cursor, _RELEASE, known)
        if cursor.lastrowid:
            return Release.RELEASED if cursor.lastrowid == 2 else Release.GONE
        return self.missed(cursor, request)

    def extend(self, cursor: Any, requests: Sequence[Request]) -> list[bool]:
        # Django has the server count rows matched, not changed.
        return [bool(cursor.execute(_EXTEND, parameters(request))) for request in requests]

    def enqueue(self, cursor: Any, request: Request, channel: str) -> int:
        known = {"key": request.key, "owner": request.owner, "channel": channel}
        cursor.execute(_ENQUEUE, known)
        ticket: int = cursor.lastrowid
        return ticket

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


def _run(cursor: Any, statement: str, values: dict[str, Any]) -> None:
    """Execute a constant *statement*, prepared once a connection where the server can."""
    if cursor.distlock_prepared is None:
        cursor.execute(statement, values)
        return
    known = cursor.distlock_prepared.get(statement)
    if known is None:
        names, name = _PARAMETER.findall(statement), f"distlock_{len(cursor.distlock_prepared)}"
        cursor.execute(f"PREPARE {name} FROM %s", [_PARAMETER.sub("?", statement)])
        known = f"EXECUTE {name} USING {', '.join(['%s'] * len(names))}", names
        cursor.distlock_prepared[statement] = known
    call, names = known
    cursor.execute(call, [values[name] for name in names])


def settle(connection: BaseDatabaseWrapper) -> None:
    """Have one clock, one isolation and one reading of SQL, whatever the machine or the project prefers."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION time_zone = '+00:00', sql_mode = '{_SQL_MODE}'")
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")


def code(error: Exception) -> int | None:
    return error.args[0] if error.args and isinstance(error.args[0], int) else None
