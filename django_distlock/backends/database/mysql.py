"""MariaDB and MySQL: each verb is one conditional UPDATE, which returns its result as LAST_INSERT_ID."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_distlock.engine.values import Busy, Grant, Release, Request
from django_distlock.exceptions import first_line

from .connections import Crowded
from .dialect import (
    COUNTER,
    CREATE as CREATE_ROWS,
    LOCK,
    PARAMETER,
    ROW_WAIT,
    Dialect,
    OutOfReach,
    StaleSnapshot,
    busy,
    parameters,
)

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

# SYSDATE is the time of its evaluation, NOW that of the beginning of the statement, before a wait for the row.
_LATER = "{} + INTERVAL CAST({} * 1000000 AS SIGNED) MICROSECOND"
_AFTER = _LATER.format("SYSDATE(6)", "{}")
_LEFT = "TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), available_at) / 1e6"
MICROSECONDS = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"

_TOKEN = f"GREATEST({{}} + 1, {MICROSECONDS})"

# Acquires the lock for %(owner)s if it is free, and raises its fencing token.
#
# The statement locks and reads the lock's row first. It joins the counter's row only if the lock is free, so that a
# refused statement does not lock the counter's row, which guard() may hold. The join compares available_at with the
# begin of the statement, because a key must be known before the rows are read. The last line decides, by
# the time of its evaluation.
# Each assignment reads only its own old column and the clock, as the order of assignments across tables is
# not defined. LAST_INSERT_ID: the token; 0: refused, or there is no row yet.
_ACQUIRE = f"""
UPDATE {LOCK} AS l STRAIGHT_JOIN {COUNTER} AS c
    ON c.method_name = IF(l.available_at <= NOW(6), %(key)s, NULL)
SET l.owner = %(owner)s, l.holder = %(holder)s, l.fencing_token = {_TOKEN.format("l.fencing_token")},
    l.acquired_at = SYSDATE(6), l.updated_at = SYSDATE(6),
    l.expires_at = {_AFTER.format("%(ttl)s")},
    l.available_at = {_AFTER.format("%(taken_for)s")},
    c.value = LAST_INSERT_ID({_TOKEN.format("c.value")}), c.holder = %(holder)s
WHERE l.method_name = %(key)s AND l.available_at <= SYSDATE(6) AND {{turn}}
"""
# Whether the lock is ours, the token, the holder, seconds until others can acquire it, and whether it is our turn.
_LOOK = f"""
SELECT l.owner <=> %(owner)s, c.value, IF(l.expires_at > SYSDATE(6), l.holder, NULL), {_LEFT}, {{turn}}
FROM {LOCK} AS l JOIN {COUNTER} AS c ON c.method_name = l.method_name WHERE l.method_name = %(key)s"""

CREATE = tuple(
    each.format(now="SYSDATE(6)").replace("INSERT", "INSERT IGNORE", 1) for each in CREATE_ROWS
)
#: ER_LOCK_WAIT_TIMEOUT, ER_LOCK_NOWAIT.
_LOCK_NOT_AVAILABLE = {1205, 3572}
#: The same, and ER_LOCK_DEADLOCK, ER_CHECKREAD (the row changed after the snapshot).
CONTENTION = {*_LOCK_NOT_AVAILABLE, 1213, 1020}
#: Too long values are errors, and quotes and empty texts have their usual meaning.
_SQL_MODE = "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION"
_NO_SUCH_TABLE = 1146
#: ER_DBACCESS_DENIED_ERROR, ER_TABLEACCESS_DENIED_ERROR
_OUT_OF_REACH = {1044, 1142, _NO_SUCH_TABLE}
#: The same, and ER_OPTION_PREVENTS_STATEMENT (read_only), ER_CANT_EXECUTE_IN_READ_ONLY_TRANSACTION (tx_read_only)
_REFUSED = {*_OUT_OF_REACH, 1290, 1792}


class MySQL(Dialect):
    """The verbs of MariaDB and MySQL, one statement each; a refused acquire needs a second one to find the holder."""

    now, after, later, left = "SYSDATE(6)", _AFTER, _LATER, _LEFT
    on_release = ""
    on_enqueue = """ON DUPLICATE KEY UPDATE ticket = LAST_INSERT_ID(ticket), expires_at = VALUES(expires_at)"""
    pauses = (0.002, 0.01)

    def __init__(self, *, fair: bool) -> None:
        super().__init__(fair=fair)
        self._acquire, self._look_sql = self.sql(_ACQUIRE), self.sql(_LOOK)

    def expressions(self) -> dict[str, str]:
        """Let a release return by LAST_INSERT_ID: 2 released, 1 expired before, 0 not ours."""
        updated = "IF(LAST_INSERT_ID(IF(expires_at > SYSDATE(6), 2, 1)), SYSDATE(6), NULL)"
        return {**super().expressions(), "updated": updated}

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """Return timeouts against a server that does not answer, and the isolation level READ COMMITTED."""
        whole = max(1, round(io_timeout))
        timeouts = {"connect_timeout": whole, "read_timeout": whole, "write_timeout": whole}
        return {**timeouts, "isolation_level": "read committed"}

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Set time zone, SQL mode and isolation level, and a short timeout for locked rows."""
        configure(connection)
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = %s", [max(1, round(ROW_WAIT))])

    def cursor(self, connection: Any) -> Any:
        """Return the driver's cursor, which prepares our statements on MariaDB, where EXECUTE takes values."""
        cursor = super().cursor(connection)
        cursor.distlock_prepared = {} if connection.mysql_is_mariadb else None
        return cursor

    def is_contention(self, error: Exception) -> bool:
        return code(error) in CONTENTION

    def is_wait_over(self, error: Exception) -> bool:
        return code(error) in _LOCK_NOT_AVAILABLE

    def is_refusal(self, error: Exception) -> bool:
        return code(error) in _REFUSED

    def take(self, cursor: Any, request: Request) -> Grant | Busy:
        known = parameters(request)
        for is_again in (False, True, True):
            if is_again and (answer := self._look(cursor, request)) is not None:
                return answer
            _run(cursor, self._acquire, known)
            if token := cursor.lastrowid:
                return Grant(token)
        raise Crowded

    def _look(self, cursor: Any, request: Request) -> Grant | Busy | None:
        """Return why an acquire was refused; None if the lock is free by now. Insert the lock's rows if they are missing."""
        known = parameters(request)
        cursor.execute(self._look_sql, known)
        if (row := cursor.fetchone()) is None:
            for statement in CREATE:
                cursor.execute(statement, known)
            return None
        is_ours, token, holder, left, is_our_turn = row
        if is_ours and holder is not None:
            # The reply to a grant was lost: extend the lease from now, on the server, too. It may have just ended.
            return Grant(token) if self.extend(cursor, [request])[0] else None
        return None if left <= 0 and is_our_turn else busy(holder, left)

    def release(self, cursor: Any, request: Request) -> Release:
        _run(cursor, self.release_sql, parameters(request))
        if cursor.lastrowid:
            return Release.RELEASED if cursor.lastrowid == 2 else Release.GONE
        return self.missed(cursor, request)

    def enqueue(self, cursor: Any, request: Request, channel: str) -> int:
        known = {**parameters(request), "channel": channel}
        cursor.execute(self.enqueue_sql, known)
        ticket: int = cursor.lastrowid
        return ticket

    def guard(self, cursor: CursorWrapper, schema: str, key: str, token: int) -> int | None:
        """Lock in share mode, which reads the newest value; a plain read would return the snapshot's."""
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
    """Execute a constant *statement*; on MariaDB, prepare it once for each connection."""
    if cursor.distlock_prepared is None:
        cursor.execute(statement, values)
        return
    known = cursor.distlock_prepared.get(statement)
    if known is None:
        names, name = PARAMETER.findall(statement), f"distlock_{len(cursor.distlock_prepared)}"
        cursor.execute(f"PREPARE {name} FROM %s", [PARAMETER.sub("?", statement)])
        known = f"EXECUTE {name} USING {', '.join(['%s'] * len(names))}", names
        cursor.distlock_prepared[statement] = known
    call, names = known
    cursor.execute(call, [values[name] for name in names])


def configure(connection: BaseDatabaseWrapper) -> None:
    """Set time zone, SQL mode and isolation level, instead of the machine's and the project's."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION time_zone = '+00:00', sql_mode = '{_SQL_MODE}'")
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")


def code(error: Exception) -> int | None:
    return error.args[0] if error.args and isinstance(error.args[0], int) else None
