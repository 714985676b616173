"""PostgreSQL's rows and advisory locks, held by a session: its limits, its label, and what its neighbours do."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from django.db import DatabaseError
from django.db.utils import OperationalError

from django_distlock.backends.database.connections import Unusable
from django_distlock.backends.database.engine import COUNTER, LOCK
from django_distlock.backends.database.postgresql import (
    HAS_PSYCOPG3,
    MICROSECONDS,
    is_direct,
    result_of,
)
from django_distlock.engine import clock
from django_distlock.engine.naming import stored
from django_distlock.engine.values import Busy, Grant, digest

from .occupants import (
    PREFIX,
    Counted,
    Label,
    Occupant,
    as_held,
)
from .sessions import SessionServer, stay

if HAS_PSYCOPG3:
    from psycopg import ClientCursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from psycopg.pq.abc import PGresult

    from django_distlock.engine.values import Held
    from django_distlock.engine.waiting import Wait

    from .deadlocks import Edge
    from .sessions import Session

    Row = Sequence[str | None]

#: The longest time, in milliseconds, that a limit of the server takes; 0 stands for none.
LONGEST = 2**31 - 1

# Lifts the limits that an operator may have set for everybody, none of which a healthy lock may end
# by; has the server find a dead client soon. By name, as not every version has them all.
_SETTLE = """
SELECT set_config(s.name, v.value, false) FROM pg_settings AS s JOIN (VALUES
    ('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'),
    ('idle_in_transaction_session_timeout', '0'), ('idle_session_timeout', '0'),
    ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3'),
    ('default_transaction_isolation', 'read committed'),
    ('default_transaction_read_only', 'off'), ('synchronous_commit',
        CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END)
) AS v (name, value) ON v.name = s.name
"""

# Looks after clients that wait, and died: not every platform can.
_LOOK_AFTER_CLIENT = "SET client_connection_check_interval = '200ms'"

# Raises the fencing token of %(key)s. One row: the token; none before its first use, which is the second one's.
# "settled" makes it durable, and impatient: guard() may hold the row.
_SETTLED = """
WITH settled AS MATERIALIZED (
    SELECT set_config('lock_timeout', %(row_wait)s, true),
           set_config('synchronous_commit', CASE current_setting('synchronous_commit')
               WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true)
)"""
_COUNT = f"""{_SETTLED}
UPDATE {COUNTER} SET value = greatest(value + 1, {MICROSECONDS}), holder = %(holder)s
FROM settled WHERE method_name = %(key)s RETURNING value
"""
_COUNT_FIRST = f"""{_SETTLED}
INSERT INTO {COUNTER} AS c (method_name, value, holder)
SELECT %(key)s, {MICROSECONDS}, %(holder)s FROM settled
ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, {MICROSECONDS}), holder = excluded.holder
RETURNING value
"""

_CREATE = f"""
INSERT INTO {LOCK} (method_name, description, fencing_token, available_at, updated_at)
VALUES (%(key)s, %(name)s, 0, clock_timestamp(), clock_timestamp()) ON CONFLICT (method_name) DO NOTHING
"""

# The sessions of this kind: process id, label, and whom they wait for. Other users' states are hidden.
_NEIGHBOURS = f"""
SELECT pid, application_name, CASE WHEN wait_event_type = 'Lock' OR state IS NULL THEN pg_blocking_pids(pid) END
FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '{PREFIX}%%'
"""

_END = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE %(label)s"
)

# Each session plans its own statements once. Rows: who has them is waited for, or passed by.
_PREPARE_ROWS = "".join(
    f"PREPARE distlock_{mode}{len(how)}(text) AS SELECT 1 FROM {LOCK} WHERE method_name = $1 FOR {mode} {how};"
    for mode in ("update", "share")
    for how in ("", "SKIP LOCKED")
)
_SELECT = f"SELECT 1 FROM {LOCK} WHERE method_name = %(key)s"

# Advisory locks. Take the lock $1 if it is free; only then let the server end the session when it is
# silent for $2 ms, label it $3, and raise the fencing token of $4 for $5, within $6.
# One row, of texts: "" or null if it is not free; the token; who had it last, if it is not free.
_OWN = "set_config('idle_session_timeout', $2, false) || set_config('application_name', $3, false)"
_PREPARE_TAKE = f"""
PREPARE distlock_take{{shared}}(bigint, text, text, text, text, text) AS
WITH taken AS MATERIALIZED (
    SELECT pg_try_advisory_lock{{shared}}($1) AS ok
), settled AS MATERIALIZED (
    SELECT {_OWN} || set_config('lock_timeout', $6, true) FROM taken WHERE ok
), counted AS (
    INSERT INTO {COUNTER} AS c (method_name, value, holder) SELECT $4, {MICROSECONDS}, $5 FROM settled
    ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, {MICROSECONDS}), holder = excluded.holder
    RETURNING value
)
SELECT CASE WHEN ok THEN '' END, (SELECT value FROM counted)::text,
       (SELECT holder FROM {COUNTER} WHERE method_name = $4 AND NOT ok)::text FROM taken;
"""
_PREPARE_BARE = f"""
PREPARE distlock_take{{shared}}(bigint, text, text) AS
SELECT CASE WHEN pg_try_advisory_lock{{shared}}($1) THEN left({_OWN}, 0) END, NULL, NULL;
"""
_PREPARE_FREE = f"""
PREPARE distlock_free{{shared}}(bigint) AS SELECT pg_advisory_unlock{{shared}}($1)::text,
    set_config('idle_session_timeout', '0', false), set_config('application_name', '{PREFIX}', false);
"""
_IS_HELD = """
SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND classid = %(high)s::bigint::oid AND objid = %(low)s::bigint::oid LIMIT 1
"""


class PostgreSQLSessions(SessionServer):
    """What row locks and advisory locks have in common."""

    now_sql = MICROSECONDS
    note_reader_sql = f"""
INSERT INTO {COUNTER} (method_name, value, holder) VALUES (%(key)s, %(token)s, %(holder)s)
ON CONFLICT (method_name) DO NOTHING"""

    #: The server's limit for the silence of who holds.
    silence: ClassVar[str]

    def begin(self, connection: Any) -> None:
        """Refuse a pooler, which would hand the session with its lock to others; lift the limits."""
        if not is_direct(connection):
            problem = (
                f"the database {connection.alias!r} is reached through a pooler such as PgBouncer, where a session "
                "does not stay with its holder: give an alias of DATABASES that is direct (OPTIONS 'using')"
            )
            raise Unusable(problem)
        with connection.cursor() as cursor:
            cursor.execute(_SETTLE)
            with suppress(DatabaseError):
                cursor.execute(_LOOK_AFTER_CLIENT)
        raw: Any = connection.connection
        if HAS_PSYCOPG3:
            # Else it would throw all plans away at each ROLLBACK. Its other cursors send one statement a trip.
            raw.prepare_threshold = None
        own: Any = ClientCursor(raw) if HAS_PSYCOPG3 else raw.cursor()
        with connection.wrap_database_errors:
            own.execute(self.plans())
        connection.distlock_cursor, connection.distlock_limit = own, -1
        connection.distlock_number = raw.info.backend_pid

    @abstractmethod
    def plans(self) -> str:
        """Return what prepares the statements of a session."""

    def limit(self, session: Session, seconds: float) -> bool:
        limit = milliseconds(seconds)
        if limit == session.connection.distlock_limit:
            return False
        session.execute(f"SET {self.silence} = {limit}")
        session.connection.distlock_limit = limit
        return True

    def raise_token(self, cursor: Any, key: str, holder: str, patience: float) -> int:
        known = {"key": key, "holder": holder, "row_wait": f"{milliseconds(patience)}ms"}
        cursor.execute(_COUNT, known)
        row = cursor.fetchone()
        if row is None:
            cursor.execute(_COUNT_FIRST, known)
            row = cursor.fetchone()
        token: int = row[0]
        return token

    @staticmethod
    def make_row(cursor: Any, key: str, name: str) -> bool:
        cursor.execute(_CREATE, {"key": key, "name": stored(name)})
        return bool(cursor.rowcount)

    def waits(self, cursor: Any) -> Iterator[Edge]:
        """The server tells who stands in whose way, the label who they are."""
        neighbours = _neighbours(cursor)
        callers = {pid: label.caller for pid, label, _ in neighbours}
        for _, label, ahead in neighbours:
            for pid in ahead or ():
                if pid in callers:
                    yield label.caller, callers[pid]

    def held(self, cursor: Any, known: dict[str, Counted]) -> Iterator[Held]:
        """Who has a label and waits for nobody, holds."""
        by_digest = {digest(key): counted for key, counted in known.items()}
        neighbours = _neighbours(cursor)
        waiters = Counter(label.key_digest for _, label, ahead in neighbours if ahead)
        for _, label, ahead in neighbours:
            if not ahead and (counted := by_digest.get(label.key_digest)):
                waiting = waiters[label.key_digest]
                yield as_held(counted, label.owner_digest, waiting, shared=label.shared)

    def end(self, cursor: Any, counted: Counted, owner_digest: str) -> bool:
        cursor.execute(_END, {"label": f"{PREFIX}%:{owner_digest}:%"})
        return any(is_ended for (is_ended,) in cursor.fetchall())


class PostgreSQLRows(PostgreSQLSessions):
    """Rows kept locked by SELECT FOR UPDATE: begin and lock are one round trip."""

    silence = "idle_in_transaction_session_timeout"  # one that is in no transaction holds nothing

    def plans(self) -> str:
        return _PREPARE_ROWS

    def take(self, session: Session, patience: float) -> Grant | Busy:
        """SKIP LOCKED: a refusal is no error, for which the server would keep a log."""
        return self._lock(session, "SKIP LOCKED", "")

    def wait(self, session: Session, wait: Wait) -> Grant | Busy:
        return self._lock(session, "", f"SET LOCAL lock_timeout = {milliseconds(wait.left)};")

    def _lock(self, session: Session, how: str, limits: str) -> Grant | Busy:
        request = session.request
        self.limit(session, request.ttl)
        mode = "share" if request.shared else "update"
        # In hexadecimal, the key needs no quotes.
        key = f"convert_from(decode('{request.key.encode().hex()}', 'hex'), 'UTF8')"
        begin = f"BEGIN; SET LOCAL application_name = '{Label.of(session)}'; {limits}"
        try:
            row, _ = _run(session, f"{begin} EXECUTE distlock_{mode}{len(how)}({key})")
        except OperationalError as error:
            if not self.engine.is_wait_over(error):
                raise
            row = None
        if row is not None:
            return Grant(None)
        session.execute("ROLLBACK")
        return Busy()

    def free(self, session: Session) -> bool:
        """A transaction that has failed is rolled back by its commit: its locks were gone before."""
        return _run(session, "COMMIT")[1] == "COMMIT"

    def is_held(self, cursor: Any, key: str) -> bool:
        """Try it for a moment: what is skipped is held."""
        cursor.execute(f"{_SELECT} FOR UPDATE SKIP LOCKED", {"key": key})
        if cursor.fetchone() is not None:
            return False
        cursor.execute(_SELECT, {"key": key})
        return cursor.fetchone() is not None


class PostgreSQLAdvisory(PostgreSQLSessions):
    """Locks by numbers of 64 bits, in one statement with the token."""

    silence = "idle_session_timeout"

    def plans(self) -> str:
        takes = _PREPARE_TAKE if self.fencing else _PREPARE_BARE
        both = ("", "_shared")
        return "".join((takes + _PREPARE_FREE).format(shared=shared) for shared in both)

    def take(self, session: Session, patience: float) -> Grant | Busy:
        request = session.request
        limit = milliseconds(request.ttl)
        values = [str(lock_number(request.key)), str(limit), str(Label.of(session))]
        if self.fencing:
            holder = Occupant.of(session).to_json()
            values += [request.key, holder, str(milliseconds(patience))]
        try:
            taken, token, last = _execute(session, "take", values)
        except OperationalError as error:
            if not self.engine.is_wait_over(error):
                raise
            # A guard() holds the token: the statement has failed, and what it had locked is locked still.
            session.execute("ROLLBACK")
            self.free(session)
            return Busy()
        session.connection.distlock_limit = limit
        if taken is not None:
            return Grant(None if token is None else int(token))
        occupant = Occupant.from_json(last)
        return Busy(None if occupant is None else occupant.holder)

    def wait(self, session: Session, wait: Wait) -> Grant | Busy:
        """In a transaction, whose end frees what was granted *and* timed out; then take it for the session."""
        request = session.request
        suffix = "_shared" if request.shared else ""
        limits = f"""BEGIN; SET LOCAL lock_timeout = {milliseconds(wait.left)};
            SET LOCAL idle_in_transaction_session_timeout = {milliseconds(request.ttl)};
            SET LOCAL application_name = '{Label.of(session)}';"""
        try:
            _run(
                session,
                f"{limits} SELECT pg_advisory_xact_lock{suffix}({lock_number(request.key)})",
            )
        except OperationalError as error:
            if not self.engine.is_wait_over(error):
                raise
            session.execute("ROLLBACK")
            return Busy()
        start = clock.lease_time()
        answer = self.take(session, stay(wait))
        if isinstance(answer, Busy):
            return answer
        _run(session, "COMMIT")
        return Grant(answer.token, start)

    def free(self, session: Session) -> bool:
        return _execute(session, "free", [str(lock_number(session.request.key))])[0] == "true"

    def is_held(self, cursor: Any, key: str) -> bool:
        """The server lists them, by halves of their numbers."""
        number = lock_number(key) % 2**64
        cursor.execute(_IS_HELD, {"high": number >> 32, "low": number % 2**32})
        return cursor.fetchone() is not None


def _run(session: Session, statements: str) -> tuple[Row | None, str]:
    """Send *statements* in one trip; return the row of the last one, None if it has none, and its tag."""
    if not HAS_PSYCOPG3:
        cursor = session.execute(statements)
        return cursor.fetchone() if cursor.description else None, cursor.statusmessage
    raw: Any = session.connection.connection
    result = _result(session, raw.pgconn.send_query, statements.encode())
    return _row(result) if result.ntuples else None, (result.command_status or b"").decode()


def _execute(session: Session, name: str, values: list[str]) -> Row:
    """Return the row that a statement of plans() has for *values*; all are texts."""
    name = f"distlock_{name}{'_shared' if session.request.shared else ''}"
    if not HAS_PSYCOPG3:
        marks = ", ".join(["%s"] * len(values))
        row: Row = session.execute(f"EXECUTE {name}({marks})", values).fetchone()
        return row
    raw: Any = session.connection.connection
    known = [value.encode() for value in values]
    return _row(_result(session, raw.pgconn.send_query_prepared, name.encode(), known))


def _result(session: Session, send: Callable[..., None], *args: Any) -> PGresult:
    with session.connection.wrap_database_errors:
        return result_of(session.connection.connection, send, *args)


def _row(result: PGresult) -> Row:
    found = [result.get_value(0, number) for number in range(result.nfields)]
    return [None if each is None else each.decode() for each in found]


def _neighbours(cursor: Any) -> list[tuple[int, Label, list[int] | None]]:
    cursor.execute(_NEIGHBOURS, {})
    found = [(pid, Label.parse(text), ahead) for pid, text, ahead in cursor.fetchall()]
    return [(pid, label, ahead) for pid, label, ahead in found if label is not None]


def milliseconds(seconds: float | None) -> int:
    """Return a limit as the server takes it, never too short; 0, which is none, for None or too long a time."""
    if seconds is None or seconds * 1000 > LONGEST:
        return 0
    return max(1, math.ceil(seconds * 1000))


@lru_cache(maxsize=1000)
def lock_number(key: str) -> int:
    """Return 64 bits, with a sign, for *key*: by SHA-256, as other applications number by other means."""
    text = hashlib.sha256(f"django_distlock|{key}".encode()).digest()
    return int.from_bytes(text[:8], "big", signed=True)
