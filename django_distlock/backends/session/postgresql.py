"""Row locks and advisory locks of PostgreSQL, held by a session."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from django.db import DatabaseError
from django.db.utils import OperationalError

from django_distlock.backends.database.bounds import is_cut
from django_distlock.backends.database.connections import Unusable
from django_distlock.backends.database.dialect import COUNTER, CREATE, LOCK
from django_distlock.backends.database.postgresql import (
    MAY_BE_LOST,
    MICROSECONDS,
    PostgreSQL,
    sqlstate,
)
from django_distlock.engine.values import Busy, Grant, digest
from django_distlock.exceptions import DOCS
from django_distlock.ground.naming import stored

from .occupants import Occupant, as_held, busy
from .sessions import ENDS_WITHIN, OWN_LOCKS, PREFIX, PRIMARY, STAY, SessionServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_distlock.engine.values import Held
    from django_distlock.engine.waiting import Wait

    from .occupants import Counted
    from .sessions import DatabaseSession

#: The longest time limit, in milliseconds, that the server accepts; 0 means no limit.
LONGEST = 2**31 - 1
_QUERY_CANCELED = "57014"

# Lifts the time limits that an operator may have set for all sessions, because they would end a healthy lock, and
# makes the server notice a dead client soon. Not every version has all these settings, so they are joined by name.
_LIFT_LIMITS = """
SELECT set_config(s.name, v.value, false) FROM pg_settings AS s JOIN (VALUES
    ('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'),
    ('idle_in_transaction_session_timeout', '0'), ('idle_session_timeout', '0'),
    ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3')
) AS v (name, value) ON v.name = s.name
"""

# Makes the server notice that a waiting client has died; not every platform can.
_LOOK_AFTER_CLIENT = "SET client_connection_check_interval = '200ms'"

# Raises the fencing token of %(key)s for %(holder)s. One row: the token. "configured" comes first.
_RAISE = f"""
    INSERT INTO {COUNTER} AS c (method_name, value, holder) SELECT %(key)s, {MICROSECONDS}, %(holder)s FROM configured
    ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, {MICROSECONDS}), holder = excluded.holder
    RETURNING value
"""
# On another connection: "configured" sets a short lock_timeout, as a guard() may have locked the row.
_COUNT = f"""
WITH configured AS MATERIALIZED (SELECT set_config('lock_timeout', %(patience)s, true)){_RAISE}"""
# On the session itself, after its wait: waits for STAY seconds at most, until $3 ms after the transaction began.
_REST = f"greatest(1, least({STAY * 1000:g}, $3 - extract(epoch FROM clock_timestamp() - now()) * 1000))::int::text"
_COUNT_HERE = _COUNT % {"key": "$1", "holder": "$2", "patience": _REST}
_PREPARE_COUNT = f"PREPARE distlock_count(text, text, int) AS {_COUNT_HERE}"

_CREATE = f"{CREATE[0].format(now='clock_timestamp()')} ON CONFLICT (method_name) DO NOTHING"

# Each session with one of our labels: whether it holds a lock, the sessions that it waits for, the label. The server
# hides other users' states. A waiter has the label before it blocks, a refused session until its ROLLBACK.
_NEIGHBOURS = f"""
SELECT {{holds}}, CASE WHEN wait_event_type = 'Lock' OR state IS NULL THEN pg_blocking_pids(pid) END, application_name
FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '{PREFIX}%%'
"""

# Ends a session by its label, and waits up to %(patience)s ms until it is gone.
_END = """
SELECT pg_terminate_backend(pid, %(patience)s) FROM pg_stat_activity WHERE application_name LIKE %(label)s
"""

# Part of the statement that waits for a row: changes the limit of later statements, not that of the present one.
# lock_timeout cannot limit the wait, because it begins again with each transaction that is waited for.
UNLIMITED = "set_config('statement_timeout', %s, true)"
# The next statement of the same request: one row if the lock was granted. A timeout that fires just after the grant
# ends this statement, and not the first statement of the new holder.
_IS_LOCKED = "SELECT 1 WHERE current_setting('statement_timeout') = '0'"
# A session commits nothing that must last: without this, a release would wait for the disk and for a synchronous standby.
_NOTHING_LASTS = "SET synchronous_commit = off;"
# Prepared once for each session: the reads of the last holder, and the locking of the row, with or without a wait.
_PREPARE_ROWS = (
    f"PREPARE distlock_row(text) AS SELECT c.holder FROM {LOCK} AS l LEFT JOIN {COUNTER} AS c"
    " ON c.method_name = l.method_name WHERE l.method_name = $1;"
    + "".join(
        f"PREPARE distlock_{mode}{len(how)}(text) AS SELECT {what} FROM {LOCK} WHERE method_name = $1 FOR {mode} {how};"
        for mode in ("update", "share")
        for how, what in (("", UNLIMITED % "'0'"), ("SKIP LOCKED", "1"))
    )
)
_SELECT = f"SELECT 1 FROM {LOCK} WHERE method_name = %(key)s"
# The server counts the locking of a row as a write.
_LOOK = f"SELECT {MAY_BE_LOST} FROM {LOCK} WHERE method_name = %(key)s FOR UPDATE SKIP LOCKED"


def _both(statement: str) -> dict[bool, str]:
    """Return *statement* for an exclusive lock (False) and for a shared one (True)."""
    return {False: statement.format(shared=""), True: statement.format(shared="_shared")}


# Advisory locks. Take the lock %(number)s if it is free; only then let the server end the session when it is
# silent for %(silence)s ms, label it, and raise the fencing token of %(key)s for %(holder)s, within %(patience)s ms.
# One row: whether the lock is ours; the token; if the lock is busy, its last holder.
_OWN = "set_config('idle_session_timeout', %(silence)s, false) || set_config('application_name', %(label)s, false)"
_TAKE = _both(f"""
WITH taken AS MATERIALIZED (
    SELECT pg_try_advisory_lock{{shared}}(%(number)s::bigint) AS ok
), configured AS MATERIALIZED (
    SELECT {_OWN} || set_config('lock_timeout', %(patience)s, true) FROM taken WHERE ok
), counted AS ({_RAISE})
SELECT ok, (SELECT value FROM counted), (SELECT holder FROM {COUNTER} WHERE method_name = %(key)s AND NOT ok) FROM taken
""")
_TAKE_BARE = _both(f"""
SELECT CASE WHEN pg_try_advisory_lock{{shared}}(%(number)s::bigint) THEN ({_OWN}) IS NOT NULL ELSE false END, NULL::bigint, NULL
""")
# Waits for the lock %(number)s for %(patience)s ms, in a session that is set up as by _TAKE before that.
_WAIT = _both(f"""
SELECT CASE WHEN set_config('lock_timeout', %(patience)s, true) || {_OWN} IS NOT NULL THEN pg_advisory_lock{{shared}}(%(number)s::bigint) END
""")
_FREE = _both(f"""
SELECT pg_advisory_unlock{{shared}}(%(number)s::bigint),
    set_config('idle_session_timeout', '0', false), set_config('application_name', '{PREFIX}', false)
""")
_IS_HELD = """
SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND classid = %(high)s::bigint::oid AND objid = %(low)s::bigint::oid LIMIT 1
"""


class PostgreSQLSessions(SessionServer):
    """The common part of row locks and advisory locks."""

    dialect_class = PostgreSQL
    now_sql = MICROSECONDS
    note_reader_sql = f"""
INSERT INTO {COUNTER} (method_name, value, holder) VALUES (%(key)s, %(token)s, %(holder)s)
ON CONFLICT (method_name) DO NOTHING"""

    #: The server's setting that limits the silence of a holder.
    silence: ClassVar[str]
    #: SQL: whether a labelled session in pg_stat_activity holds its lock.
    holds: ClassVar[str]

    def begin(self, connection: Any) -> None:
        """Refuse a pooler, which would lend the session with its lock to other clients, and a standby; lift the limits."""
        if not connection.distlock_is_ours:
            problem = (
                f"the database {connection.alias!r} is reached through a pooler such as PgBouncer, where a session "
                "does not stay with its holder: give an alias of DATABASES that is direct (OPTIONS 'using'; see "
                f"{DOCS}howto/with-your-stack.html#stack-poolers)"
            )
            advice = "Let OPTIONS 'using' name an alias of DATABASES that connects to the server directly."
            raise Unusable(problem, advice)
        if connection.connection.info.parameter_status("in_hot_standby") == "on":
            problem = f"the database {connection.alias!r} is a standby, {OWN_LOCKS}"
            raise Unusable(problem, PRIMARY)
        with connection.cursor() as cursor:
            cursor.execute(_LIFT_LIMITS)
            try:
                cursor.execute(_LOOK_AFTER_CLIENT)
            except DatabaseError:
                if is_cut(connection):
                    raise
        connection.distlock_number = connection.connection.info.backend_pid

    def keep(self, session: DatabaseSession, seconds: float) -> None:
        session.execute(f"SET {self.silence} = {milliseconds(seconds)}")
        session.connection.distlock_limit = seconds

    def raise_token(self, cursor: Any, key: str, holder: str, patience: float) -> int:
        known = {"key": key, "holder": holder, "patience": str(milliseconds(patience))}
        cursor.execute(_COUNT, known)
        token: int = cursor.fetchone()[0]
        return token

    def make_row(self, cursor: Any, key: str, name: str) -> None:
        cursor.execute(_CREATE, {"key": key, "name": stored(name)})

    def held(self, cursor: Any, known: dict[str, Counted]) -> Iterator[Held]:
        by_digest = {digest(key): counted for key, counted in known.items()}
        neighbours = _neighbours(cursor, self.holds)
        waiters = Counter(each.key_digest for each in neighbours if each.ahead)
        for each in neighbours:
            if each.holds and (counted := by_digest.get(each.key_digest)):
                waiting, is_shared = waiters[each.key_digest], each.mode == "r"
                yield as_held(counted, each.owner_digest, waiting, shared=is_shared)

    def end(self, cursor: Any, counted: Counted, owner_digest: str) -> bool:
        label = f"{PREFIX}%:{owner_digest}:%"
        cursor.execute(_END, {"label": label, "patience": milliseconds(ENDS_WITHIN)})
        return any(is_ended for (is_ended,) in cursor.fetchall())


class PostgreSQLRows(PostgreSQLSessions):
    """Rows kept locked by SELECT FOR UPDATE: begin and lock are one round trip."""

    silence = (
        "idle_in_transaction_session_timeout"  # outside a transaction, a session holds no lock
    )
    holds = "backend_xid IS NOT NULL"  # locking a row gives the transaction a number
    writers_first = False

    def begin(self, connection: Any) -> None:
        super().begin(connection)
        with connection.wrap_database_errors:
            connection.distlock_cursor.execute(_NOTHING_LASTS + _PREPARE_ROWS)

    def take(
        self, session: DatabaseSession, patience: float, wait: Wait | None = None
    ) -> Grant | Busy | None:
        """Lock the row. SKIP LOCKED, because the server would log the error of a refused NOWAIT."""
        how, limits, ends = ("SKIP LOCKED", "", "") if wait is None else _limited(wait)
        request, connection = session.request, session.connection
        if connection.distlock_limit != request.ttl:
            self.keep(session, request.ttl)
        mode = "share" if request.shared else "update"
        key = literal(request.key)
        begin = f"BEGIN; SET LOCAL application_name = '{session.label}'; {limits}"
        look = f"ROLLBACK; EXECUTE distlock_row({key})"
        try:
            answer = session.execute(f"{begin} EXECUTE distlock_{mode}{len(how)}({key}){ends}")
            if answer.statusmessage == "SELECT 1":
                return Grant(None)
            # The limit counts until the ROLLBACK has ended.
            row = session.execute(look).fetchone()
        except OperationalError as error:
            if wait is None or not is_limit_over(error, wait):
                raise
            row = session.execute(look).fetchone()
        return None if row is None else busy(Occupant.from_json(row[0]))

    def wait(self, session: DatabaseSession, wait: Wait) -> Grant | Busy | None:
        return self.take(session, 0.0, wait)

    def free(self, session: DatabaseSession) -> bool:
        """Release the lock by COMMIT; of a failed transaction, which had lost the lock before, it is a ROLLBACK."""
        return bool(session.execute("COMMIT").statusmessage == "COMMIT")

    def is_held(self, cursor: Any, key: str) -> bool:
        """Return True if the row is locked: then SKIP LOCKED finds no row."""
        cursor.execute(_LOOK, {"key": key})
        if cursor.fetchone() is not None:
            return False
        cursor.execute(_SELECT, {"key": key})
        return cursor.fetchone() is not None


class PostgreSQLAdvisory(PostgreSQLSessions):
    """Advisory locks: numbers of 64 bits, locked in one statement with the token."""

    silence = "idle_session_timeout"
    holds = "pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted)"
    writers_first = True

    def begin(self, connection: Any) -> None:
        super().begin(connection)
        if self.fencing:
            with connection.wrap_database_errors:
                connection.distlock_cursor.execute(_PREPARE_COUNT)

    def take(self, session: DatabaseSession, patience: float) -> Grant | Busy:
        request = session.request
        known = _known(session, patience)
        if self.fencing:
            known |= {"key": request.key, "holder": session.record()}
        statement = (_TAKE if self.fencing else _TAKE_BARE)[request.shared]
        try:
            is_taken, token, last = session.execute(statement, known).fetchone()
        except OperationalError as error:
            if not self.dialect.is_wait_over(error):
                raise
            # A guard() has locked the token. The statement has failed, but the session has taken the advisory lock.
            self.free(session)
            return Busy()
        if is_taken:
            return Grant(token)
        return busy(Occupant.from_json(last))

    def wait(self, session: DatabaseSession, wait: Wait) -> Grant | Busy:
        """Let the server end the session when it is silent, wait for the lock, and raise the token in the time left.

        These are two statements, because a single one would lock the table of the tokens during the wait.
        """
        request, known = session.request, _known(session, wait.left)
        statement = _WAIT[request.shared]
        try:
            if not self.fencing:
                session.execute(statement, known)
                return Grant(None)
            first = statement % {name: f"'{value}'" for name, value in known.items()}
            left = milliseconds(wait.left) or LONGEST
            count = f"distlock_count({literal(request.key)}, {literal(session.record())}, {left})"
            return Grant(session.execute(f"{first}; EXECUTE {count}").fetchone()[0])
        except OperationalError as error:
            if not self.dialect.is_wait_over(error):
                raise
            # The lock may have been granted just then, or a guard() has locked its token. The error has restored the limits.
            session.execute("SELECT pg_advisory_unlock_all()")
            return Busy()

    def free(self, session: DatabaseSession) -> bool:
        number = {"number": str(lock_number(session.request.key))}
        return bool(session.execute(_FREE[session.request.shared], number).fetchone()[0])

    def is_held(self, cursor: Any, key: str) -> bool:
        """Return True if the server lists the lock, by the two halves of its number."""
        number = lock_number(key) % 2**64
        cursor.execute(_IS_HELD, {"high": number >> 32, "low": number % 2**32})
        return cursor.fetchone() is not None


def _known(session: DatabaseSession, patience: float | None) -> dict[str, str]:
    """Return the parameters of _TAKE and _WAIT."""
    return {
        "number": str(lock_number(session.request.key)),
        "silence": str(milliseconds(session.request.ttl)),
        "label": session.label,
        "patience": str(milliseconds(patience)),
    }


class Neighbour(NamedTuple):
    """A session that holds a lock or waits for it: the sessions that it waits for, and the parts of its label."""

    holds: bool
    ahead: list[int] | None
    mode: str
    owner_digest: str
    key_digest: str


def _neighbours(cursor: Any, holds: str) -> list[Neighbour]:
    cursor.execute(_NEIGHBOURS.format(holds=holds), {})
    found = [(*known, *label.split(":")[1:]) for *known, label in cursor.fetchall()]
    return [Neighbour(*each) for each in found if len(each) == len(Neighbour._fields)]


def is_limit_over(error: Exception, wait: Wait) -> bool:
    """Return True if statement_timeout has ended *wait*, and not an operator, whose cancellation has the same *error*."""
    # A second left still counts, as the server's clock may be a little faster than ours.
    return sqlstate(error) == _QUERY_CANCELED and wait.left is not None and wait.left < 1


def _limited(wait: Wait) -> tuple[str, str, str]:
    """Return how rows are locked after *wait*, and the statements before and after that limit it."""
    limit = milliseconds(wait.left) or LONGEST
    return "", f"SET LOCAL statement_timeout = {limit};", f"; {_IS_LOCKED}"


def literal(text: str) -> str:
    """Return the SQL of *text*, in hexadecimal, which needs no quoting."""
    return f"convert_from(decode('{text.encode().hex()}', 'hex'), 'UTF8')"


@lru_cache(maxsize=1000)
def milliseconds(seconds: float | None) -> int:
    """Return *seconds* in milliseconds, rounded up; 0 (no limit) for None or a longer time than the server accepts."""
    if seconds is None or seconds * 1000 > LONGEST:
        return 0
    return max(1, math.ceil(seconds * 1000))


@lru_cache(maxsize=1000)
def lock_number(key: str) -> int:
    """Return a signed number of 64 bits for *key*, made by SHA-256, so that other applications do not use it."""
    text = hashlib.sha256(f"django_distlock|{key}".encode()).digest()
    return int.from_bytes(text[:8], "big", signed=True)
