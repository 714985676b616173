"""PostgreSQL: one guarded statement a verb, waiters woken by NOTIFY. Written for version 14 and later."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

try:
    from django.db.backends.postgresql.psycopg_any import (
        IsolationLevel,
        is_psycopg3 as _is_psycopg3,
    )
except ImportError:
    _is_psycopg3 = False

from django_distlock.engine.naming import stored
from django_distlock.engine.values import Busy, Grant, Request
from django_distlock.exceptions import first_line

from .bounds import wait_for_reply
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
    turn,
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
_AFTER = "clock_timestamp() + make_interval(secs => {})"
_AVAILABLE = _AFTER.format("%(taken_for)s")
# First in a list: what has ended by then has ended for all that follows.
_HOLDER = "CASE WHEN expires_at > clock_timestamp() THEN holder END"
_TURN = turn("clock_timestamp()", "%({})s")

# Takes the lock for %(owner)s if it is free for it, and raises its fencing token.
#
# seen      what the row says: a refusal ends here and writes nothing, no WAL and no transaction id.
# counter   the counter's row, locked; none if guard() holds it, or another acquire does right now.
# settled   makes this one transaction durable and impatient, whatever the session is set to.
# granted   decides, on the newest version of the row and by a clock read after any wait for it.
# counted   has the token where guard() looks for it.
# One row: token (null: refused), holder, seconds until others may have it, whether the row says that
# it is free: one that is and is refused has its counter locked.
_ACQUIRE = f"""
WITH seen AS (
    SELECT owner = %(owner)s AS mine, available_at <= clock_timestamp() AS free, {_HOLDER} AS holder,
           extract(epoch FROM available_at - clock_timestamp())::float8 AS remaining
    FROM {LOCK} WHERE method_name = %(key)s
), allowed AS MATERIALIZED (
    SELECT coalesce((SELECT mine FROM seen), false) AS mine,
           coalesce((SELECT free FROM seen), true) AND {{turn}} AS free
), counter AS MATERIALIZED (
    SELECT value FROM {COUNTER}
    WHERE method_name = %(key)s AND (SELECT free AND NOT mine FROM allowed) FOR UPDATE SKIP LOCKED
), settled AS MATERIALIZED (
    SELECT set_config('lock_timeout', '{ROW_WAIT:g}s', true),
           set_config('synchronous_commit', CASE current_setting('synchronous_commit')
               WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true)
    FROM allowed
    WHERE mine OR (free AND (EXISTS (SELECT FROM counter)
        OR NOT EXISTS (SELECT FROM {COUNTER} WHERE method_name = %(key)s)))
), granted AS (
    INSERT INTO {LOCK} AS l (method_name, description, owner, holder, fencing_token, acquired_at,
                             expires_at, available_at, updated_at)
    SELECT %(key)s, %(name)s, %(owner)s, %(holder)s,
           greatest(coalesce((SELECT value FROM counter), 0) + 1, {MICROSECONDS}), clock_timestamp(),
           {_AFTER.format("%(ttl)s")}, {_AVAILABLE}, clock_timestamp()
    FROM settled
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
       (SELECT free FROM allowed)
"""

# A waiter that is granted leaves the queue; one that is not keeps its place for some more time.
_QUEUE = f""", gone AS (
    DELETE FROM {WAITER} WHERE owner = %(owner)s AND EXISTS (SELECT FROM granted)
), kept AS (
    UPDATE {WAITER} SET expires_at = {_AFTER.format(PATIENCE)}, callers = %(queued)s::int
    WHERE owner = %(owner)s AND NOT EXISTS (SELECT FROM granted)
        AND (expires_at < {_AFTER.format(PATIENCE / 2)} OR callers <> %(queued)s::int)
)"""

# Frees the lock if %(owner)s has it, but a late one from no lock_delay, and rings the first live waiter, if there is one:
# NOTIFY takes a lock on the whole database at commit, so nobody is not notified.
# One row: whether it was in time; none: it was not ours.
_RELEASE = f"""
UPDATE {LOCK} SET owner = NULL, last_owner = %(owner)s, holder = NULL, updated_at = clock_timestamp(),
    available_at = CASE WHEN expires_at > clock_timestamp()
        THEN acquired_at + make_interval(secs => %(min_hold)s) ELSE available_at END
WHERE method_name = %(key)s AND owner = %(owner)s
RETURNING expires_at > clock_timestamp(), (
    SELECT pg_notify(channel, ticket::text) FROM {WAITER}
    WHERE method_name = %(key)s AND expires_at > clock_timestamp() AND channel <> '' ORDER BY ticket LIMIT 1)
"""

# One row: released by us before, held by another.
_MISSED = f"""
SELECT last_owner = %(owner)s, owner IS NOT NULL AND expires_at > clock_timestamp()
FROM {LOCK} WHERE method_name = %(key)s
"""

# Gives each lease that is still its owner's more time, never less. A row for each that was.
_EXTEND = f"""
UPDATE {LOCK} AS l SET
    expires_at = greatest(l.expires_at, {_AFTER.format("e.ttl")}),
    available_at = greatest(l.available_at, {_AFTER.format("e.ttl + e.lock_delay")}),
    updated_at = clock_timestamp()
FROM json_to_recordset(%(leases)s::json) AS e (key text, owner text, ttl float8, lock_delay float8)
WHERE l.method_name = e.key AND l.owner = e.owner AND l.expires_at > clock_timestamp()
RETURNING l.owner
"""

_TAKE_OVER = f"""
UPDATE {LOCK} SET owner = %(owner)s, holder = %(holder)s, expires_at = {_AFTER.format("%(ttl)s")},
    available_at = greatest({_AFTER.format("%(ttl)s + %(lock_delay)s")},
        acquired_at + make_interval(secs => %(min_hold)s))
WHERE method_name = %(key)s AND owner = %(former)s AND expires_at > clock_timestamp()
"""

_PROBE = f"""
SELECT {_HOLDER}, extract(epoch FROM available_at - clock_timestamp())::float8
FROM {LOCK} WHERE method_name = %(key)s AND available_at > clock_timestamp()
"""

_ENQUEUE = f"""
INSERT INTO {WAITER} (method_name, owner, channel, expires_at)
VALUES (%(key)s, %(owner)s, %(channel)s, {_AFTER.format(PATIENCE)})
ON CONFLICT (owner) DO UPDATE SET expires_at = excluded.expires_at RETURNING ticket
"""

_KEEP_PLACES = f"""
UPDATE {WAITER} SET expires_at = {_AFTER.format(PATIENCE)}
WHERE owner IN (SELECT json_array_elements_text(%(owners)s::json)) AND expires_at < {_AFTER.format(PATIENCE / 2)}
"""

#: lock_not_available, serialization_failure, deadlock_detected.
CONTENTION = {"55P03", "40001", "40P01"}
_LOCK_NOT_AVAILABLE = "55P03"
#: How results are read, by the types that the server tells: boolean, bigint, double precision.
_READERS: dict[int, Callable[[bytes], Any]] = {16: b"t".__eq__, 20: int, 701: float}
_PARAMETER = re.compile(r"%\((\w+)\)s")


class LeanCursor:
    """Executes constant statements as a cursor of psycopg 3 does, by libpq, in a third of its time."""

    def __init__(self, connection: BaseDatabaseWrapper, *, prepares: bool) -> None:
        """*prepares*: have the server parse and plan each statement once, as the session is ours alone."""
        self._raw: Any = connection.connection
        self._prepares = prepares
        self._known: dict[str, tuple[bytes, list[str]]] = {}

    def execute(self, statement: str, values: dict[str, Any] | None = None) -> None:
        """Send *statement*, whose parameters are texts and floating point numbers; without any, it may be several."""
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
        return tuple(
            None
            if (value := found.get_value(number, column)) is None
            else _READERS.get(found.ftype(column), bytes.decode)(value)
            for column in range(found.nfields)
        )

    def _numbered(self, statement: str, values: dict[str, Any]) -> tuple[bytes, list[str]]:
        """Return what is sent for *statement*, its name or its text, and its parameters in order."""
        names = [*dict.fromkeys(_PARAMETER.findall(statement))]
        text = _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", statement).encode()
        if self._prepares:
            name = f"distlock_{len(self._known)}".encode()
            kinds = [_kind(values[name]) for name in names]
            result_of(self._raw, self._raw.pgconn.send_prepare, name, text, kinds)
            text = name
        self._known[statement] = text, names
        return text, names


def _kind(value: object) -> int:
    """Return the type of a parameter: what is unknown is found out by the server."""
    return 701 if isinstance(value, int | float) else 0


def result_of(raw: Any, send: Callable[..., None], *args: Any) -> PGresult:
    """Return the last result of what is sent on *raw* by libpq, which psycopg 3 lends."""
    send(*args)
    if raw.distlock_poll is None or raw.pgconn.flush():
        # As psycopg waits: it lets other greenlets run, or sends the rest first.
        results: list[PGresult] = raw.wait(generators.execute(raw.pgconn))
    else:
        results = _received(raw, raw.pgconn)
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, raw.info.encoding)
    return results[-1]


def _received(raw: Any, server: Any) -> list[PGresult]:
    results: list[PGresult] = []
    try:
        while True:
            while server.is_busy():
                if not raw.distlock_poll(raw.distlock_bound):
                    raise TimeoutError("no answer in time")
                server.consume_input()
            if (result := server.get_result()) is None:
                break
            results.append(result)
    except OperationalError:
        if not results:
            raise  # else the server has said why it ended the connection
    return results


class PostgreSQL(Engine):
    """One statement, one round trip a verb."""

    looks_before_retry = False
    after = _AFTER
    release_sql, missed_sql, probe_sql, enqueue_sql = _RELEASE, _MISSED, _PROBE, _ENQUEUE
    take_over_sql = _TAKE_OVER

    def __init__(self, *, fair: bool) -> None:
        super().__init__(fair=fair)
        turn = _TURN if fair else "true"
        self._acquire = _ACQUIRE.format(turn=turn, queue="")
        self._acquire_queued = _ACQUIRE.format(turn=turn, queue=_QUEUE)

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """Find a dead server soon; read what is committed, whatever the application prefers."""
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
        """Have statements planned once and for all, where the session is ours alone."""
        is_ours = connection.distlock_is_ours = settle(connection)  # type: ignore[attr-defined]  # our own
        if is_ours:
            with connection.cursor() as cursor:
                cursor.execute("SET plan_cache_mode = force_generic_plan")

    def cursor(self, connection: Any) -> Any:
        """Return the driver's, or one that costs less still."""
        if not HAS_PSYCOPG3:
            return super().cursor(connection)
        return LeanCursor(connection, prepares=connection.distlock_is_ours)

    def is_contention(self, error: Exception) -> bool:
        return sqlstate(error) in CONTENTION

    def is_wait_over(self, error: Exception) -> bool:
        return sqlstate(error) == _LOCK_NOT_AVAILABLE

    def try_acquire(self, cursor: Any, request: Request, queued: int) -> Grant | Busy:
        known: dict[str, Any] = {
            "key": request.key,
            "name": stored(request.name),
            "owner": request.owner,
            "holder": request.holder.to_json(),
            "ttl": request.ttl,
            "taken_for": max(request.min_hold, request.ttl + request.lock_delay),
            "queued": int(queued),
        }
        cursor.execute(self._acquire_queued if queued else self._acquire, known)
        token, holder, remaining, is_free = cursor.fetchone()
        if token is not None:
            return Grant(token)
        if is_free:
            raise Crowded
        return busy(holder, remaining)

    def extend(self, cursor: Any, requests: Sequence[Request]) -> list[bool]:
        names = ("key", "owner", "ttl", "lock_delay")
        leases = [{name: getattr(request, name) for name in names} for request in requests]
        cursor.execute(_EXTEND, {"leases": json.dumps(leases)})
        kept = {owner for (owner,) in cursor.fetchall()}
        return [request.owner in kept for request in requests]

    def keep_places(self, cursor: Any, owners: Sequence[str]) -> None:
        cursor.execute(_KEEP_PLACES, {"owners": json.dumps(owners)})

    def guard(self, cursor: CursorWrapper, schema: str, key: str, token: int) -> int | None:
        """FOR SHARE: renewals write another row, an acquire of somebody else skips a locked one."""
        select = f"SELECT value FROM {schema}{COUNTER} WHERE method_name = %(key)s FOR SHARE"
        try:
            cursor.execute(select, {"key": key})
        except Exception as error:
            # Under REPEATABLE READ: the row was written after the snapshot of this transaction.
            if sqlstate(error) == "40001":
                raise StaleSnapshot from error
            if sqlstate(error) in _OUT_OF_REACH:
                raise OutOfReach(first_line(error)) from error
            raise
        row = cursor.fetchone()
        return None if row is None else row[0]


def notes(raw: Any, seconds: float) -> Iterable[Any]:
    """Return what the server notifies *raw*, the driver's connection, of within so many *seconds*."""
    if HAS_PSYCOPG3:
        found: Iterable[Any] = raw.notifies(timeout=seconds)
        return found
    with suppress(TimeoutError):
        wait_for_reply(raw.fileno(), seconds)
        raw.poll()
    known, raw.notifies = raw.notifies, []
    return list(known)


def settle(connection: BaseDatabaseWrapper) -> bool:
    """Read what is committed, whatever the role prefers; tell whether the session is ours alone.

    One of a pooler is left as it is: there, statements that the isolation ends are asked again.
    """
    if HAS_PSYCOPG3:
        # Said by each BEGIN; psycopg2 would set the session instead.
        connection.connection.isolation_level = IsolationLevel.READ_COMMITTED
    if not is_direct(connection):
        return False
    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_isolation = 'read committed'")
    return True


def is_direct(connection: BaseDatabaseWrapper) -> bool:
    """Return whether all statements of *connection* meet one server process.

    Behind PgBouncer the next one may meet another: it reports a process id of its own making.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        found: bool = cursor.fetchone() == (connection.connection.info.backend_pid,)
    return found


def sqlstate(error: Exception) -> str | None:
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
