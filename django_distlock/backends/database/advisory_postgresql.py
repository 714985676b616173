"""Advisory locks of PostgreSQL: no ghosts, and the token in the same statement."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from django.db.utils import OperationalError

from django_distlock.engine import clock
from django_distlock.engine.values import Busy, Grant

from .advisory_server import AdvisoryServer, Fencer
from .engine import COUNTER
from .occupants import PREFIX, Label, Occupant
from .postgresql import MICROSECONDS
from .session_engine import STAY
from .session_postgresql import PostgreSQLSessions, milliseconds

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

    from django_distlock.engine.waiting import Wait

    from .sessions import Session

# Takes the lock %(number)s if it is free; only then lets the server end the session when it is silent
# for %(limit)s ms, labels it, and raises the fencing token. One row: taken, token, who had it last.
_TAKE = f"""
WITH taken AS MATERIALIZED (
    SELECT pg_try_advisory_lock{{shared}}(%(number)s) AS ok
), settled AS MATERIALIZED (
    SELECT set_config('idle_session_timeout', %(limit)s, false), set_config('application_name', %(label)s, false),
           set_config('lock_timeout', %(patience)s, true)
    FROM taken WHERE ok
), counted AS (
    INSERT INTO {COUNTER} AS c (method_name, value, holder) SELECT %(key)s, {MICROSECONDS}, %(holder)s FROM settled
    ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, {MICROSECONDS}), holder = excluded.holder
    RETURNING value
)
SELECT ok, (SELECT value FROM counted), (SELECT holder FROM {COUNTER} WHERE method_name = %(key)s AND NOT ok) FROM taken
"""
_TAKE_BARE = """
WITH taken AS MATERIALIZED (SELECT pg_try_advisory_lock{shared}(%(number)s) AS ok)
SELECT ok, CASE WHEN ok THEN left(set_config('idle_session_timeout', %(limit)s, false)
    || set_config('application_name', %(label)s, false), 0) END, NULL FROM taken
"""
_SET_UP = """
SELECT set_config('lock_timeout', %(patience)s, true), set_config('application_name', %(label)s, true),
       set_config('idle_in_transaction_session_timeout', %(limit)s, true)
"""
_FREE = f"""
SELECT pg_advisory_unlock{{shared}}(%(number)s), set_config('idle_session_timeout', '0', false),
       set_config('application_name', '{PREFIX}', false)
"""
_IS_HELD = """
SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND classid = %(high)s::bigint::oid AND objid = %(low)s::bigint::oid LIMIT 1
"""


class PostgreSQLAdvisory(AdvisoryServer, PostgreSQLSessions):
    """Locks by numbers of 64 bits, in one statement with the token."""

    supports_shared = True

    def take(
        self, backend: Fencer, cursor: CursorWrapper, session: Session, patience: float
    ) -> Grant | Busy:
        """One trip."""
        session.limit = milliseconds(session.request.ttl)
        known = _known(session)
        known |= {"limit": str(session.limit), "patience": str(milliseconds(patience))}
        if backend.options.fencing:
            known["holder"] = Occupant.of(
                session, self.session_number(session.connection)
            ).to_json()
        statement = _TAKE if backend.options.fencing else _TAKE_BARE
        try:
            cursor.execute(statement.format(shared=_shared(session)), known)
        except OperationalError as error:
            if not self.is_wait_over(error):
                raise
            return self._let_go(cursor, session)
        is_taken, token, holder = cursor.fetchone()
        if is_taken:
            return Grant(token if backend.options.fencing else None)
        occupant = Occupant.from_json(holder)
        return Busy(None if occupant is None else occupant.holder)

    def wait(
        self, backend: Fencer, cursor: CursorWrapper, session: Session, wait: Wait
    ) -> Grant | Busy:
        """In a transaction, whose end frees what was granted *and* timed out; then take it for the session."""
        known = _known(session)
        limit = str(milliseconds(session.request.ttl))
        cursor.execute("BEGIN")
        cursor.execute(_SET_UP, {**known, "limit": limit, "patience": str(milliseconds(wait.left))})
        try:
            cursor.execute(f"SELECT pg_advisory_xact_lock{_shared(session)}(%(number)s)", known)
        except OperationalError as error:
            if not self.is_wait_over(error):
                raise
            cursor.execute("ROLLBACK")
            return backend.refused(cursor, session.request.key)
        start = clock.lease_time()
        answer = self.take(
            backend, cursor, session, STAY if wait.left is None else min(STAY, wait.left)
        )
        if isinstance(answer, Busy):
            return answer
        cursor.execute("COMMIT")
        return Grant(answer.token, start)

    def free(self, session: Session) -> bool:
        """The server tells whether it was ours."""
        with session.connection.cursor() as cursor:
            cursor.execute(_FREE.format(shared=_shared(session)), _known(session))
            return bool(cursor.fetchone()[0])

    def keep(self, session: Session, seconds: float) -> None:
        """A word is enough, unless the limit is another."""
        limit = milliseconds(seconds)
        with session.connection.cursor() as cursor:
            if limit == session.limit:
                cursor.execute("SELECT 1")
            else:
                cursor.execute("SELECT set_config('idle_session_timeout', %s, false)", [str(limit)])
        session.limit = limit

    def is_held(self, cursor: CursorWrapper, key: str) -> bool:
        """The server lists them, by halves of their numbers."""
        number = lock_number(key) % 2**64
        cursor.execute(_IS_HELD, {"high": number >> 32, "low": number % 2**32})
        return cursor.fetchone() is not None

    def _let_go(self, cursor: CursorWrapper, session: Session) -> Busy:
        """A guard() holds the token: the statement has failed, and what it had locked is locked still."""
        cursor.execute("ROLLBACK")
        cursor.execute(_FREE.format(shared=_shared(session)), _known(session))
        return Busy()


def lock_number(key: str) -> int:
    """Return 64 bits, with a sign, for *key*: by SHA-256, as other applications number by other means."""
    text = hashlib.sha256(f"django_distlock|{key}".encode()).digest()
    return int.from_bytes(text[:8], "big", signed=True)


def _known(session: Session) -> dict[str, Any]:
    request = session.request
    return {"number": lock_number(request.key), "key": request.key, "label": str(Label.of(session))}


def _shared(session: Session) -> str:
    return "_shared" if session.request.shared else ""
