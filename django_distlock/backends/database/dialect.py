"""The differences between database servers: the SQL of each verb, one statement if possible."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from django.db.utils import DatabaseError, Error

from django_distlock.engine.values import (
    Busy,
    Grant,
    Release,
    Request,
)
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

#: Seconds for which a position in the queue stays valid after its waiter last looked.
PATIENCE = 2.5
#: Seconds that our statements wait for a row that another statement of this package has locked.
ROW_WAIT = 1.0
LOCK = "django_distlock_methodlock"
COUNTER = "django_distlock_fencingcounter"
WAITER = "django_distlock_lockwaiter"
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - servers return times in UTC, some of them naive

#: How a parameter is written in a statement, and the pattern that finds it.
MARK = "%({})s"
PARAMETER = re.compile(r"%\((\w+)\)s")

# The statements on the rows of leases and positions. Dialect.sql() replaces the braces by the SQL of its server.

# Frees the lock if %(owner)s holds it.
_RELEASE = f"""
UPDATE {LOCK} SET updated_at = {{updated}}, owner = NULL, last_owner = %(owner)s, holder = NULL,
    available_at = CASE WHEN expires_at > {{now}} THEN {{reserved}} ELSE available_at END
WHERE method_name = %(key)s AND owner = %(owner)s
"""

# One row: whether %(owner)s has released it before, whether another owner holds it.
_MISSED = f"""
SELECT CASE WHEN last_owner = %(owner)s THEN 1 ELSE 0 END,
    CASE WHEN owner IS NOT NULL AND expires_at > {{now}} THEN 1 ELSE 0 END
FROM {LOCK} WHERE method_name = %(key)s
"""

# Extends a lease that its owner still holds, and never shortens it. Matches one row, or none.
_EXTEND = f"""
UPDATE {LOCK} SET updated_at = {{now}}, available_at = {{greatest}}(available_at, {{expires}}),
    expires_at = {{greatest}}(expires_at, {{expires}})
WHERE method_name = %(key)s AND owner = %(owner)s AND expires_at > {{now}}
"""

# Gives the lease of %(former)s to %(owner)s. On PostgreSQL the extension that follows makes it durable.
_TAKE_OVER = f"""
UPDATE {LOCK} SET owner = %(owner)s, holder = %(holder)s, expires_at = {{expires}},
    available_at = {{greatest}}({{expires}}, {{reserved}})
WHERE method_name = %(key)s AND owner = %(former)s AND expires_at > {{now}}
"""

# For each row: the holder if the lease is valid, seconds until others can acquire it.
_STATE = f"CASE WHEN expires_at > {{now}} THEN holder END, {{left}} FROM {LOCK} WHERE"
LOOK = f"SELECT {_STATE} method_name = %(key)s"
# The same for several keys, with the key in front. The list of keys follows.
_PROBE = f"SELECT method_name, {_STATE} available_at > {{now}} AND method_name IN "

_ENQUEUE = f"""
INSERT INTO {WAITER} (method_name, owner, channel, expires_at)
VALUES (%(line)s, %(position)s, %(channel)s, {{until}})
"""
_DEQUEUE = f"DELETE FROM {WAITER} WHERE owner = %(position)s"

# For each key: the key, the token, whether the lock is free. The list of keys follows.
_LOOK_AT = (
    f"SELECT method_name, fencing_token, available_at <= {{now}} FROM {LOCK} WHERE method_name IN "
)
# Renews the position for PATIENCE seconds, if less than half of that is left.
_KEEP_POSITION = f"UPDATE {WAITER} SET expires_at = {{until}} WHERE owner = %(position)s AND expires_at < {{soon}}"

# A condition: no valid position in the queue comes before ours.
_TURN = f"""NOT EXISTS (
    SELECT 1 FROM {WAITER} AS w WHERE w.method_name = %(line)s AND w.expires_at > {{now}} AND w.owner <> %(position)s
      AND w.ticket < coalesce((SELECT m.ticket FROM {WAITER} AS m WHERE m.owner = %(position)s), 9223372036854775807))"""

# Insert the rows of a lock at its first use.
CREATE = (
    f"""INSERT INTO {LOCK} (method_name, description, fencing_token, available_at, updated_at)
    VALUES (%(key)s, %(name)s, 0, {{now}}, {{now}})""",
    f"INSERT INTO {COUNTER} (method_name, value) VALUES (%(key)s, 0)",
)

_SCHEMA = {
    "postgresql": f"""SELECT quote_ident(n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = to_regclass('{COUNTER}')""",
    "mysql": "SELECT concat('`', replace(database(), '`', '``'), '`')",
}


class Dialect(ABC):
    """The verbs in the SQL of one kind of server. Each verb gets the cursor() of a connection in autocommit."""

    #: Whether a retry should look, read-only, before it writes.
    looks_before_retry: ClassVar[bool] = True
    #: How the driver writes a parameter.
    parameter: ClassVar[str] = MARK
    #: SQL of the present time, of a time some seconds from now, and of a time some seconds after another time.
    now: ClassVar[str]
    after: ClassVar[str]
    later: ClassVar[str]
    #: SQL of the seconds until others can acquire the lock, and the name of the function for the latest time.
    left: ClassVar[str]
    greatest: ClassVar[str] = "greatest"
    #: The last clauses of the statements that release a lock (returns whether the lease was valid) and enqueue a waiter.
    on_release: ClassVar[str] = "RETURNING expires_at > {now}"
    on_enqueue: ClassVar[str] = (
        "ON CONFLICT (owner) DO UPDATE SET expires_at = excluded.expires_at RETURNING ticket"
    )
    #: The last clause of a deletion that may be lost: it waits neither for the disk nor for a standby.
    on_tidying: ClassVar[str] = ""
    #: How guard() locks the row of a token.
    guard_lock: ClassVar[str] = "FOR UPDATE"
    #: Shortest and longest pause in seconds between two looks of a Watcher; None: no Watcher.
    pauses: ClassVar[Any] = None

    def __init__(self, *, fair: bool) -> None:
        self.fair = fair
        self.release_sql = self.sql(_RELEASE + self.on_release)
        self.missed_sql = self.sql(_MISSED)
        self.extend_sql = self.sql(_EXTEND)
        self.take_over_sql = self.sql(_TAKE_OVER)
        self.probe_sql = self.sql(_PROBE)
        self.enqueue_sql = self.sql(_ENQUEUE + self.on_enqueue)
        self.dequeue_sql = self.sql(_DEQUEUE + self.on_tidying)
        self.look_at_sql = self.sql(_LOOK_AT)
        self.keep_position_sql = self.sql(_KEEP_POSITION)

    def expressions(self) -> dict[str, str]:
        """Return the SQL for each name in braces."""
        return {
            "now": self.now,
            "updated": self.now,
            "expires": self.after.format("%(ttl)s"),
            "reserved": self.later.format("acquired_at", "%(min_hold)s"),
            "until": self.after.format(PATIENCE),
            "soon": self.after.format(PATIENCE / 2),
            "left": self.left,
            "greatest": self.greatest,
        }

    def sql(self, statement: str, **more: str) -> str:
        """Return *statement* in the SQL of this server; *more* are further names in braces, with their SQL."""
        known = self.expressions()
        turn = _TURN.format(**known) if self.fair else "TRUE"
        return PARAMETER.sub(
            self.parameter.format(r"\1"), statement.format(turn=turn, **known, **more)
        )

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """Return the OPTIONS that an own connection needs."""
        return {}

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Set a new connection up."""

    def cursor(self, connection: BaseDatabaseWrapper) -> Any:
        """Return the cursor of a connection for all verbs: the driver's, as it is the fastest."""
        return connection.connection.cursor()

    @abstractmethod
    def is_contention(self, error: Exception) -> bool:
        """Return True if the statement only failed because other clients use the same rows."""

    def is_wait_over(self, error: Exception) -> bool:
        """Return True if the row was still locked at the end of the longest allowed wait."""
        return self.is_contention(error)

    def stands_in_the_way(self, connection: BaseDatabaseWrapper) -> bool:
        """Return True if the caller's transaction on *connection* blocks all other writers."""
        return False

    def is_refusal(self, error: Exception) -> bool:
        """Return True if the server refused the statement: no table, no permission, no transactions."""
        return False

    def try_acquire(self, cursor: Any, request: Request, queued: bool) -> Grant | Busy:
        """Acquire the lock or return its holder. Crowded: the lock is free, but other clients are writing its rows."""
        answer = self.take(cursor, request)
        if queued and isinstance(answer, Grant):
            self.dequeue(cursor, request)
        elif queued:
            cursor.execute(self.keep_position_sql, {"position": request.waiter})
        return answer

    def take(self, cursor: Any, request: Request) -> Grant | Busy:
        """Acquire the lock if it is free; leave the queue as it is."""
        raise NotImplementedError

    def release(self, cursor: Any, request: Request) -> Release:
        cursor.execute(self.release_sql, parameters(request))
        if (row := cursor.fetchone()) is not None:
            return Release.RELEASED if row[0] else Release.GONE
        return self.missed(cursor, request)

    def missed(self, cursor: Any, request: Request) -> Release:
        """Return the result of a release that has freed no lock."""
        cursor.execute(self.missed_sql, {"key": request.key, "owner": request.owner})
        is_ours, is_taken = cursor.fetchone() or (False, False)
        return Release.RELEASED if is_ours else Release.TAKEN if is_taken else Release.GONE

    def extend(self, cursor: Any, requests: Sequence[Request]) -> list[bool]:
        """Extend each lease to its ttl from now; return for each whether it is still held."""
        kept = []
        for request in requests:
            cursor.execute(self.extend_sql, parameters(request))
            kept.append(cursor.rowcount == 1)
        return kept

    def take_over(self, cursor: Any, request: Request, former: str) -> bool:
        cursor.execute(self.take_over_sql, {**parameters(request), "former": former})
        return self.extend(cursor, [request])[0]

    def probe_all(self, cursor: Any, requests: Sequence[Request]) -> list[Busy | None]:
        marks, known = listed((each.key for each in requests), self.parameter)
        cursor.execute(self.probe_sql + marks, known)
        taken = {key: busy(*row) for key, *row in cursor.fetchall()}
        return [taken.get(each.key) for each in requests]

    def version(self, cursor: Any) -> object:
        """Return a value that changes when another connection writes; None if reading it costs as much as a look."""
        return None

    def look_at(self, cursor: Any, keys: Sequence[str]) -> dict[str, tuple[int, bool]]:
        """Return by key, for each of *keys* with a row, the token and whether the lock is free."""
        marks, known = listed(keys, self.parameter)
        cursor.execute(self.look_at_sql + marks, known)
        return {key: (token, bool(is_free)) for key, token, is_free in cursor.fetchall()}

    def enqueue(self, cursor: Any, request: Request, channel: str) -> int:
        """Take a position in the queue and return its ticket; *channel*: the channel for notifications to the waiter."""
        known = {**parameters(request), "channel": channel}
        cursor.execute(self.enqueue_sql, known)
        ticket: int = cursor.fetchone()[0]
        return ticket

    def dequeue(self, cursor: Any, request: Request) -> None:
        """Give up the position in the queue."""
        cursor.execute(self.dequeue_sql, {"position": request.waiter})

    def guard(self, cursor: CursorWrapper, schema: str, key: str, token: int) -> int | None:
        """Lock the row with the token of *key* until the caller's transaction ends; return the present token.

        *cursor* is Django's cursor on the caller's connection. *schema* is the result of schema_of_tables() on a
        connection of our own. Raise StaleSnapshot if the transaction reads data from before the lock was
        acquired, OutOfReach if the connection has no access to the tables.
        """
        cursor.execute(
            f"SELECT value FROM {schema}{COUNTER} WHERE method_name = %(key)s {self.guard_lock}",
            {"key": key},
        )
        row = cursor.fetchone()
        return None if row is None else row[0]

    def is_guarded(self, cursor: CursorWrapper, key: str) -> bool:
        """Return True if a guard() blocks an acquire: only guard() locks the counter's row but not the lock's row."""
        if not cursor.db.features.has_select_for_update_nowait:
            return False
        nowait = cursor.db.ops.for_update_sql(nowait=True)
        has_row = False
        try:
            with short_transaction(cursor):
                for table in (LOCK, COUNTER):
                    statement = f"SELECT id FROM {table} WHERE method_name = %(key)s {nowait}"
                    cursor.execute(statement, {"key": key})
                    has_row = True
                cursor.db.rollback()  # a commit of locked rows would wait for the disk and for a standby
        except DatabaseError as error:
            if not self.is_contention(error):
                raise
            return has_row
        return False


class StaleSnapshot(Exception):
    """The caller's transaction reads data from before the lock was acquired."""


class OutOfReach(Exception):
    """The caller's connection has no access to the tables of the locks."""


def schema_of_tables(cursor: CursorWrapper) -> str:
    """Return the schema in which *cursor* finds our tables, as "schema." for a statement with parameters."""
    ask = _SCHEMA.get(cursor.db.vendor)
    if ask is None:
        return ""
    cursor.execute(ask)
    row = cursor.fetchone()
    return f"{row[0].replace('%', '%%')}." if row else ""


@contextmanager
def short_transaction(cursor: CursorWrapper) -> Iterator[None]:
    """Run the block in one transaction."""
    connection = cursor.db
    # Forced, because SQLite's driver begins a transaction only before some statements.
    connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
    try:
        yield
        connection.commit()
    except BaseException:
        # A connection interrupted in the middle of an answer stays without autocommit, so it is not used again.
        with suppress(Error, OSError):
            connection.rollback()
            connection.set_autocommit(True)
        raise
    connection.set_autocommit(True)


def listed(values: Iterable[Any], mark: str = MARK) -> tuple[str, dict[str, Any]]:
    """Return the SQL of a list of *values* for IN, and its parameters, written like *mark*."""
    known = {f"item{number}": value for number, value in enumerate(values)}
    return f"({', '.join(map(mark.format, known))})", known


def parameters(request: Request) -> dict[str, Any]:
    """Return the parameters of an acquire.

    *taken_for*: seconds until others can acquire an unreleased lock. *position*: that of this process in the queue.
    """
    return {
        "key": request.key,
        "line": request.line,
        "name": stored(request.name),
        "owner": request.owner,
        "position": request.waiter,
        "holder": request.holder.to_json(),
        "ttl": request.ttl,
        "taken_for": max(request.min_hold, request.ttl),
        "min_hold": request.min_hold,
    }


def busy(holder: str | None, remaining: float | None) -> Busy:
    """Return the Busy for *holder* (JSON, None if no lease is valid) and *remaining* seconds.

    A lock that is free by now is refused to those whose turn it is not: nobody knows when the others give up.
    """
    left = None if remaining is None or remaining <= 0 else float(remaining)
    return Busy(Holder.from_json(holder), left, reserved=bool(holder is None and left))


def microseconds(now: datetime) -> int:
    """Return the lowest fencing token that can be issued at *now*, the server's time."""
    utc = now if now.tzinfo is None else now.astimezone(UTC).replace(tzinfo=None)
    return (utc - _EPOCH) // timedelta(microseconds=1)
