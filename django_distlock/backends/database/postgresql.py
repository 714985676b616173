"""PostgreSQL: one statement for each verb, and waiters woken by NOTIFY. For version 14 and later."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

try:
    from django.db.backends.postgresql.psycopg_any import (
        IsolationLevel,
        is_psycopg3 as _is_psycopg3,
    )
except ImportError:
    if sys.modules.get("psycopg") or sys.modules.get("psycopg2"):
        raise  # a signal handler has interrupted the import, which the next use finds complete
    _is_psycopg3 = False

from django_distlock.engine.values import Busy, Grant, Request, Secret
from django_distlock.exceptions import first_line

from .bounds import LONGEST_SELECT, NoAnswer, wait_for_reply
from .connections import Crowded
from .dialect import (
    COUNTER,
    LOCK,
    PARAMETER,
    PATIENCE,
    ROW_WAIT,
    WAITER,
    Dialect,
    OutOfReach,
    StaleSnapshot,
    busy,
    parameters,
)

#: Whether the driver is psycopg 3, and not psycopg2.
HAS_PSYCOPG3: bool = _is_psycopg3
if HAS_PSYCOPG3:
    from psycopg import generators
    from psycopg.errors import OperationalError, error_from_result
    from psycopg.pq import ExecStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper
    from psycopg.pq.abc import PGresult

MICROSECONDS = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
#: insufficient_privilege, undefined_table
_OUT_OF_REACH = {"42501", "42P01"}
_LATER = "{} + make_interval(secs => {})"
_AFTER = _LATER.format("clock_timestamp()", "{}")
_LEFT = "extract(epoch FROM available_at - clock_timestamp())::float8"
_AVAILABLE = _AFTER.format("%(taken_for)s")
# Comes first in a list of columns: a lease that has expired here has also expired for the later columns.
_HOLDER = "CASE WHEN expires_at > clock_timestamp() THEN holder END"
# Makes the commit wait for the disk: a lease lost in a crash would have two holders. {}: only for this transaction.
_DURABLE = """set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, {})"""

#: For a write that may be lost, if its transaction has no other: it waits neither for the disk nor for a standby.
MAY_BE_LOST = "set_config('synchronous_commit', 'off', true)"

# Acquires the lock for %(owner)s if it is free for this owner, and raises the fencing token.
#
# seen      the row as it is: a refusal ends here and writes nothing, no WAL and no transaction id.
# allowed   whether the lock is ours already, and whether it is free and our turn.
# counter   the counter's row, locked; no row if guard() or another acquire has locked it.
# configured   sets durability and a short lock_timeout for this transaction, instead of the session's.
# granted   decides, on the newest version of the row and by a clock read after any wait for it.
# counted   writes the token where guard() reads it.
# One row: token (null: refused), holder, seconds until others can acquire the lock, whether it was seen free:
# a refusal of a free lock means that the counter is locked.
_ACQUIRE = f"""
WITH seen AS (
    SELECT owner = %(owner)s AS mine, available_at <= clock_timestamp() AS free, {_HOLDER} AS holder,
           {_LEFT} AS remaining
    FROM {LOCK} WHERE method_name = %(key)s
), allowed AS MATERIALIZED (
    SELECT coalesce((SELECT mine FROM seen), false) AS mine,
           coalesce((SELECT free FROM seen), true) AND {{turn}} AS free
), counter AS MATERIALIZED (
    SELECT value FROM {COUNTER}
    WHERE method_name = %(key)s AND (SELECT free AND NOT mine FROM allowed) FOR UPDATE SKIP LOCKED
), configured AS MATERIALIZED (
    SELECT set_config('lock_timeout', '{ROW_WAIT:g}s', true), {_DURABLE.format("true")}
    FROM allowed
    WHERE mine OR (free AND (EXISTS (SELECT FROM counter)
        OR NOT EXISTS (SELECT FROM {COUNTER} WHERE method_name = %(key)s)))
), granted AS (
    INSERT INTO {LOCK} AS l (method_name, description, owner, holder, fencing_token, acquired_at,
                             expires_at, available_at, updated_at)
    SELECT %(key)s, %(name)s, %(owner)s, %(holder)s,
           greatest(coalesce((SELECT value FROM counter), 0) + 1, {MICROSECONDS}), clock_timestamp(),
           {_AFTER.format("%(ttl)s")}, {_AVAILABLE}, clock_timestamp()
    FROM configured
    ON CONFLICT (method_name) DO UPDATE SET
        owner = excluded.owner, holder = excluded.holder,
        fencing_token = CASE WHEN l.owner = %(owner)s THEN l.fencing_token ELSE
            greatest(l.fencing_token + 1, coalesce((SELECT value FROM counter), 0) + 1, {MICROSECONDS}) END,
        acquired_at = CASE WHEN l.owner = %(owner)s THEN l.acquired_at ELSE clock_timestamp() END,
        expires_at = {_AFTER.format("%(ttl)s")},
        available_at = {_AVAILABLE}, updated_at = clock_timestamp()
    WHERE l.owner = %(owner)s OR l.available_at <= clock_timestamp()
    RETURNING fencing_token, holder
), counted AS (
    INSERT INTO {COUNTER} AS c (method_name, value, holder)
    SELECT %(key)s, fencing_token, holder FROM granted
    ON CONFLICT (method_name) DO UPDATE SET value = excluded.value, holder = excluded.holder
    WHERE c.value < excluded.value
){{queue}}
SELECT (SELECT fencing_token FROM granted), (SELECT holder FROM seen), (SELECT remaining FROM seen),
       (SELECT free FROM allowed){{more}}
"""

# A waiter leaves the queue when it gets the lock, and renews its position when it is refused.
_QUEUE = f""", gone AS (
    DELETE FROM {WAITER} WHERE owner = %(position)s AND EXISTS (SELECT FROM granted)
), kept AS (
    UPDATE {WAITER} SET expires_at = {_AFTER.format(PATIENCE)}
    WHERE owner = %(position)s AND NOT EXISTS (SELECT FROM granted)
        AND expires_at < {_AFTER.format(PATIENCE / 2)}
    RETURNING {MAY_BE_LOST}
)"""

# Notifies the first valid waiter. Without a waiter there is no NOTIFY, which would lock the whole server at
# commit.
_RING = f"""
SELECT pg_notify(channel, ticket::text) FROM {WAITER}
WHERE method_name = %(line)s AND expires_at > clock_timestamp() AND channel <> ''{{more}} ORDER BY ticket LIMIT 1"""
RING_NEXT = _RING.format(more="")
#: The statement that a forced release runs after its writes.
AFTER_FORCED_RELEASE = f"SELECT ({RING_NEXT}), {_DURABLE.format('true')}"

# For a place: several places may be free, so each caller that gets one wakes the next waiter.
_OTHERS = " AND owner <> %(position)s AND EXISTS (SELECT FROM granted)"
_QUEUE_OF_PLACES = f"{_QUEUE}, woken AS ({_RING.format(more=_OTHERS)})"

# Extends each lease that its owner still holds, never shortens one, and is as durable as the grant. Returns the owners.
_EXTEND = f"""
WITH configured AS MATERIALIZED (SELECT {_DURABLE.format("true")})
UPDATE {LOCK} AS l SET
    expires_at = greatest(l.expires_at, {_AFTER.format("e.ttl")}),
    available_at = greatest(l.available_at, {_AFTER.format("e.ttl")}),
    updated_at = clock_timestamp()
FROM json_to_recordset(%(leases)s::json) AS e (key text, owner text, ttl float8), configured
WHERE l.method_name = e.key AND l.owner = e.owner AND l.expires_at > clock_timestamp()
RETURNING l.owner
"""

_CONFIGURE = f"""
SELECT set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_read_only', 'off', false), {_DURABLE.format("false")}
"""

#: lock_not_available, serialization_failure, deadlock_detected.
CONTENTION = {"55P03", "40001", "40P01"}
_LOCK_NOT_AVAILABLE = "55P03"
#: Parsers of results by the OIDs of their types: boolean, bigint, integer, double precision.
_READERS: dict[int, Callable[[bytes], Any]] = {16: b"t".__eq__, 20: int, 23: int, 701: float}


class LeanCursor:
    """Executes constant statements through libpq, three times as fast as psycopg 3's own cursor."""

    def __init__(self, connection: BaseDatabaseWrapper, *, prepares: bool) -> None:
        """*prepares*: prepare each statement once, which needs a session that no pooler shares."""
        self._raw: Any = connection.connection
        self._prepares = prepares
        self._known: dict[str, tuple[bytes, list[str]]] = {}

    def execute(self, statement: str, values: dict[str, Any] | None = None) -> None:
        """Send *statement*, with texts and floats as *values*. Without *values*, it may be several statements."""
        if values is None:
            send_all = self._raw.pgconn.send_query
            self._result = result_of(self._raw, send_all, statement.encode())
            return
        known = self._known.get(statement)
        if known is None:
            known = self._numbered(statement, values)
        text, names = known
        texts = [str(values[name]).encode() for name in names]
        if self._prepares:
            self._result = result_of(self._raw, self._raw.pgconn.send_query_prepared, text, texts)
        else:
            kinds = [_kind(values[name]) for name in names]
            send = self._raw.pgconn.send_query_params
            self._result = result_of(self._raw, send, text, texts, kinds)

    @property
    def statusmessage(self) -> str:
        return (self._result.command_status or b"").decode()

    def fetchone(self) -> tuple[Any, ...] | None:
        return self._row(0) if self._result.ntuples else None

    def fetchall(self) -> list[tuple[Any, ...]]:
        return [self._row(number) for number in range(self._result.ntuples)]

    def _row(self, number: int) -> tuple[Any, ...]:
        found = self._result
        values = [
            None
            if (value := found.get_value(number, column)) is None
            else _READERS.get(found.ftype(column), bytes.decode)(value)
            for column in range(found.nfields)
        ]
        return tuple(values)

    def _numbered(self, statement: str, values: dict[str, Any]) -> tuple[bytes, list[str]]:
        """Return the text of *statement*, or its name if it is prepared, and its parameters in order."""
        names = [*dict.fromkeys(PARAMETER.findall(statement))]
        text = PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", statement).encode()
        if self._prepares:
            name = f"distlock_{len(self._known)}".encode()
            kinds = [_kind(values[name]) for name in names]
            result_of(self._raw, self._raw.pgconn.send_prepare, name, text, kinds)
            text = name
        self._known[statement] = text, names
        return text, names


def _kind(value: object) -> int:
    """Return the OID of a parameter's type; 0: the server infers the type."""
    return 701 if isinstance(value, int | float) else 0


def result_of(raw: Any, send: Callable[..., None], *args: Any) -> PGresult:
    """Call *send* of libpq on psycopg 3's connection *raw*, and return the last result."""
    send(*args)
    if raw.distlock_poll is None or raw.pgconn.flush():
        # Wait by psycopg, which first sends the rest, and lets other greenlets run.
        results: list[PGresult] = raw.wait(generators.execute(raw.pgconn))
    else:
        results = _received(raw, raw.pgconn)
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, raw.info.encoding)
    return results[-1]


def _received(raw: Any, server: Any) -> list[PGresult]:
    results: list[PGresult] = []
    seconds = raw.distlock_bound
    bound = None if seconds is None or seconds > LONGEST_SELECT else seconds * 1000
    try:
        while True:
            while server.is_busy():
                if not raw.distlock_poll(bound):
                    raise NoAnswer
                server.consume_input()
            if (result := server.get_result()) is None:
                break
            results.append(result)
    except OperationalError:
        if not results:
            raise  # if there are results, they have the server's reason for ending the connection
    return results


class PostgreSQL(Dialect):
    """The verbs of PostgreSQL: one statement and one round trip each."""

    looks_before_retry = False
    now, after, later, left = "clock_timestamp()", _AFTER, _LATER, _LEFT
    on_release = f"{Dialect.on_release}, ({RING_NEXT}), {_DURABLE.format('true')}"
    on_tidying = f" RETURNING {MAY_BE_LOST}"
    guard_lock = "FOR SHARE"

    def __init__(self, *, fair: bool) -> None:
        super().__init__(fair=fair)
        woken = ", (SELECT count(*) FROM woken)"
        self._acquire = self.sql(_ACQUIRE, queue="", more="")
        self._acquire_queued = self.sql(_ACQUIRE, queue=_QUEUE, more="")
        self._acquire_place_queued = self.sql(_ACQUIRE, queue=_QUEUE_OF_PLACES, more=woken)

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """Return options that find a dead server soon; remove the application's isolation level."""
        options: dict[str, Any] = {
            "connect_timeout": max(2, round(io_timeout)),
            "keepalives": 1,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": round(io_timeout * 1000),
        }
        settings["OPTIONS"].pop("isolation_level", None)
        return {**options, "server_side_binding": True} if HAS_PSYCOPG3 else options

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Set the session up; plan each statement only once, unless a pooler shares the session."""
        is_ours = connection.distlock_is_ours = configure(connection)  # type: ignore[attr-defined]  # our own
        if is_ours:
            with connection.cursor() as cursor:
                cursor.execute("SET plan_cache_mode = force_generic_plan")

    def cursor(self, connection: Any) -> Any:
        """Return a LeanCursor on psycopg 3, else the driver's cursor."""
        if not HAS_PSYCOPG3:
            return super().cursor(connection)
        return LeanCursor(connection, prepares=connection.distlock_is_ours)

    def is_contention(self, error: Exception) -> bool:
        return sqlstate(error) in CONTENTION

    def is_wait_over(self, error: Exception) -> bool:
        return sqlstate(error) == _LOCK_NOT_AVAILABLE

    def is_refusal(self, error: Exception) -> bool:
        return "statement pooling mode" in str(error)  # of PgBouncer

    def try_acquire(self, cursor: Any, request: Request, queued: bool) -> Grant | Busy:
        statement = self._acquire
        if queued:
            has_place = request.place is not None
            statement = self._acquire_place_queued if has_place else self._acquire_queued
        cursor.execute(statement, parameters(request))
        token, holder, remaining, is_free, *_ = cursor.fetchone()
        if token is not None:
            return Grant(token)
        if is_free:
            raise Crowded
        return busy(holder, remaining)

    def extend(self, cursor: Any, requests: Sequence[Request]) -> list[bool]:
        names = ("key", "owner", "ttl")
        leases = [{name: getattr(request, name) for name in names} for request in requests]
        cursor.execute(_EXTEND, {"leases": Secret(json.dumps(leases))})
        kept = {owner for (owner,) in cursor.fetchall()}
        return [request.owner in kept for request in requests]

    def guard(self, cursor: CursorWrapper, schema: str, key: str, token: int) -> int | None:
        """Lock with FOR SHARE: renewals write another row, and the acquire of another caller skips a locked row."""
        try:
            return super().guard(cursor, schema, key, token)
        except Exception as error:
            # Under REPEATABLE READ, the row was written after the snapshot of this transaction.
            if sqlstate(error) == "40001":
                raise StaleSnapshot from error
            if sqlstate(error) in _OUT_OF_REACH:
                raise OutOfReach(first_line(error)) from error
            raise


def notify(cursor: Any, channel: str) -> None:
    cursor.execute("SELECT pg_notify(%(channel)s, '')", {"channel": channel})


def notes(raw: Any, seconds: float) -> Iterable[Any]:
    """Return the next notifications that reach *raw*, the driver's connection, within so many *seconds*."""
    try:
        # Not by the driver's method, which may read a clock that tests stop.
        wait_for_reply(raw.fileno(), seconds)
    except NoAnswer:
        return []
    if HAS_PSYCOPG3:
        found: Iterable[Any] = raw.notifies(timeout=0)
        return found
    raw.poll()
    known, raw.notifies = raw.notifies, []
    return list(known)


def configure(connection: BaseDatabaseWrapper) -> bool:
    """Set READ COMMITTED, writing and durable commits, instead of the role's settings; return True if the session is ours alone.

    A session behind a pooler stays unchanged; statements that fail there because of their isolation are repeated.
    """
    if HAS_PSYCOPG3:
        # psycopg 3 puts it into every BEGIN; psycopg2 would change the session instead.
        connection.connection.isolation_level = IsolationLevel.READ_COMMITTED
    if not is_direct(connection):
        return False
    with connection.cursor() as cursor:
        cursor.execute(_CONFIGURE)
    return True


def is_direct(connection: BaseDatabaseWrapper) -> bool:
    """Return True if one server process runs all statements of *connection*.

    PgBouncer may send each statement to another one. It reports an invented process id, by which it is found.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        found: bool = cursor.fetchone() == (connection.connection.info.backend_pid,)
    return found


def sqlstate(error: Exception) -> str | None:
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
