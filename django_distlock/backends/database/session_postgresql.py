"""PostgreSQL, for locks held by a session: its limits, its label, and what its neighbours do."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError

from django_distlock.engine.naming import stored
from django_distlock.engine.values import digest

from .connections import Unusable
from .engine import COUNTER, LOCK
from .occupants import PREFIX, Counted, Label, as_held
from .postgresql import HAS_PSYCOPG3, MICROSECONDS, PostgreSQL, is_direct
from .session_engine import SessionEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

    from django_distlock.engine.values import Held, Request

    from .deadlocks import Edge

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

# Raises the fencing token of %(key)s. One row: the token.
# "settled" makes it durable, and impatient: guard() may hold the row.
_COUNT = f"""
WITH settled AS MATERIALIZED (
    SELECT set_config('lock_timeout', %(row_wait)s, true),
           set_config('synchronous_commit', CASE current_setting('synchronous_commit')
               WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true)
)
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


class PostgreSQLSessions(SessionEngine, PostgreSQL):
    """What row locks and advisory locks have in common."""

    note_reader = f"""
INSERT INTO {COUNTER} (method_name, value, holder) VALUES (%(key)s, %(token)s, %(holder)s)
ON CONFLICT (method_name) DO NOTHING"""

    #: Whether statements are prepared on the server: then several cannot go in one trip.
    prepares = True

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """See PostgreSQL.connection_options()."""
        options = super().connection_options(settings, io_timeout)
        if not self.prepares:
            options.pop("server_side_binding", None)
            settings["OPTIONS"].pop("server_side_binding", None)
        return options

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Refuse a pooler, which would hand the session with its lock to others; lift the limits."""
        if not is_direct(connection):
            connection.close()
            problem = (
                f"the database {connection.alias!r} is reached through a pooler such as PgBouncer, where a session "
                "does not stay with its holder: give an alias of DATABASES that is direct (OPTIONS 'using')"
            )
            raise Unusable(problem)
        super().prepare(connection)
        with connection.cursor() as cursor:
            cursor.execute(_SETTLE)
            with suppress(DatabaseError):
                cursor.execute(_LOOK_AFTER_CLIENT)

    def session_number(self, connection: BaseDatabaseWrapper) -> int:
        """Return the id of the server process."""
        number: int = connection.connection.info.backend_pid
        return number

    def raise_token(
        self, cursor: CursorWrapper, request: Request, holder: str, patience: float
    ) -> int:
        """One statement."""
        known = {"key": request.key, "holder": holder, "row_wait": f"{milliseconds(patience)}ms"}
        cursor.execute(_COUNT, known)
        token: int = cursor.fetchone()[0]
        return token

    def make_row(self, cursor: CursorWrapper, request: Request) -> bool:
        """One statement: a row that is there is not touched."""
        return make_row(cursor, request.key, request.name)

    def waits(self, cursor: CursorWrapper) -> Iterator[Edge]:
        """The server tells who stands in whose way, the label who they are."""
        neighbours = _neighbours(cursor)
        callers = {pid: label.caller for pid, label, _ in neighbours}
        for _, label, ahead in neighbours:
            for pid in ahead or ():
                if pid in callers:
                    yield label.caller, callers[pid]

    def held(self, cursor: CursorWrapper, known: dict[str, Counted]) -> Iterator[Held]:
        """Who has a label and waits for nobody, holds."""
        by_digest = {digest(key): counted for key, counted in known.items()}
        for _, label, ahead in _neighbours(cursor):
            if not ahead and (counted := by_digest.get(label.key_digest)):
                yield as_held(counted, label.owner_digest, shared=label.shared)

    def end(self, cursor: CursorWrapper, counted: Counted, owner_digest: str) -> bool:
        """Terminate the one that has this label."""
        cursor.execute(_END, {"label": f"{PREFIX}%:{owner_digest}:%"})
        return any(is_ended for (is_ended,) in cursor.fetchall())


def _neighbours(cursor: CursorWrapper) -> list[tuple[int, Label, list[int] | None]]:
    cursor.execute(_NEIGHBOURS, {})
    found = [(pid, Label.parse(text), ahead) for pid, text, ahead in cursor.fetchall()]
    return [(pid, label, ahead) for pid, label, ahead in found if label is not None]


def make_row(cursor: CursorWrapper, key: str, name: str) -> bool:
    """See SessionEngine.make_row()."""
    cursor.execute(_CREATE, {"key": key, "name": stored(name)})
    return bool(cursor.rowcount)


def last_result(cursor: CursorWrapper) -> None:
    """Go to the result of the last of several statements; psycopg2 is there already."""
    if HAS_PSYCOPG3:
        while cursor.nextset():
            pass


def milliseconds(seconds: float | None) -> int:
    """Return a limit as the server takes it, never too short; 0, which is none, for None or too long a time."""
    if seconds is None or seconds * 1000 > LONGEST:
        return 0
    return max(1, math.ceil(seconds * 1000))
