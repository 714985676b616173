"""What differs between database servers: the SQL of each verb, one statement where it can be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from django_distlock.engine.holder import Holder
from django_distlock.engine.naming import stored
from django_distlock.engine.values import Busy, Grant, Release, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

#: Seconds a place in the queue counts for after its waiter last looked.
PATIENCE = 2.5
#: Seconds our statements wait for a row that another statement of this package has just locked.
ROW_WAIT = 1.0
LOCK = "django_distlock_methodlock"
COUNTER = "django_distlock_fencingcounter"
WAITER = "django_distlock_lockwaiter"

_SCHEMA = {
    "postgresql": f"""SELECT quote_ident(n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = to_regclass('{COUNTER}')""",
    "mysql": "SELECT concat('`', replace(database(), '`', '``'), '`')",
}


class Engine(ABC):
    """The verbs in the SQL of one kind of server. A verb is given the cursor() of a connection in autocommit."""

    #: Whether a retry should look, read-only, before it writes.
    looks_before_retry: ClassVar[bool] = True
    #: How its driver writes a parameter, by name.
    parameter: ClassVar[str] = "%({})s"
    #: The instant so many seconds from now, as SQL.
    after: ClassVar[str]
    #: This instant, as SQL.
    now: ClassVar[str]
    #: Statements that return a row: whether the freed lock was in time; whether this owner has released it
    #: before, and whether another has it; who has it, and for how long; the ticket.
    release_sql: ClassVar[str]
    missed_sql: ClassVar[str]
    probe_sql: ClassVar[str]
    take_over_sql: ClassVar[str]
    enqueue_sql: ClassVar[str]
    #: Seconds between two looks of a watcher: the shortest and the longest pause; None: it cannot be watched.
    pauses: ClassVar[Any] = None

    def __init__(self, *, fair: bool) -> None:
        self.fair = fair

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """Return what the OPTIONS of an own connection must be."""
        return {}

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Set a new connection up."""

    def cursor(self, connection: BaseDatabaseWrapper) -> Any:
        """Return the one cursor of a connection for all verbs: the driver's, which costs least."""
        return connection.connection.cursor()

    @abstractmethod
    def is_contention(self, error: Exception) -> bool:
        """Return whether others at work on the same rows are all that is wrong."""

    def is_wait_over(self, error: Exception) -> bool:
        """Return whether others have the row still, after as long a wait as was allowed."""
        return self.is_contention(error)

    def stands_in_the_way(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether the transaction of *connection*, the caller's, keeps all others from writing."""
        return False

    def is_missing_table(self, error: Exception) -> bool:
        """Return whether the app is not migrated."""
        return False

    def try_acquire(self, cursor: Any, request: Request, queued: int) -> Grant | Busy:
        """Take the lock, or say who has it. Crowded: nobody has it, but others are at work on its rows."""
        answer = self.take(cursor, request)
        if queued and isinstance(answer, Grant):
            self.dequeue(cursor, request)
        elif queued:
            self.keep_places(cursor, [request.owner])
        return answer

    def take(self, cursor: Any, request: Request) -> Grant | Busy:
        """Take the lock if it is free; places in the queue stay as they are."""
        raise NotImplementedError

    def release(self, cursor: Any, request: Request) -> Release:
        known = {"key": request.key, "owner": request.owner, "min_hold": request.min_hold}
        cursor.execute(self.release_sql, known)
        if (row := cursor.fetchone()) is not None:
            return Release.RELEASED if row[0] else Release.GONE
        return self.missed(cursor, request)

    def missed(self, cursor: Any, request: Request) -> Release:
        """Return what a release finds that has freed nothing."""
        cursor.execute(self.missed_sql, {"key": request.key, "owner": request.owner})
        is_ours, is_taken = cursor.fetchone() or (False, False)
        return Release.RELEASED if is_ours else Release.TAKEN if is_taken else Release.GONE

    @abstractmethod
    def extend(self, cursor: Any, requests: Sequence[Request]) -> list[bool]:
        """Let each live for its ttl from now; return whether it is kept."""

    def take_over(self, cursor: Any, request: Request, former: str) -> bool:
        known = {**parameters(request), "min_hold": request.min_hold, "former": former}
        cursor.execute(self.take_over_sql, known)
        return self.extend(cursor, [request])[0]

    def probe(self, cursor: Any, request: Request) -> Busy | None:
        cursor.execute(self.probe_sql, {"key": request.key})
        row = cursor.fetchone()
        return None if row is None else busy(*row)

    def version(self, cursor: Any) -> object:
        """Return what differs once another connection has written anything; None where that costs as much as a look."""
        return None

    def look_at(self, cursor: Any, keys: Sequence[str]) -> dict[str, tuple[int, bool]]:
        """Return for each of *keys* that has a row its token, and whether it is free."""
        known = {f"key{number}": key for number, key in enumerate(keys)}
        marks = ", ".join(map(self.parameter.format, known))
        cursor.execute(
            f"SELECT method_name, fencing_token, available_at <= {self.now} FROM {LOCK} WHERE method_name IN ({marks})",
            known,
        )
        return {key: (token, bool(is_free)) for key, token, is_free in cursor.fetchall()}

    def enqueue(self, cursor: Any, request: Request, channel: str) -> int:
        """Take a place in the queue and return the ticket; *channel* is where to be woken."""
        known = {"key": request.key, "owner": request.owner, "channel": channel}
        cursor.execute(self.enqueue_sql, known)
        ticket: int = cursor.fetchone()[0]
        return ticket

    def keep_places(self, cursor: Any, owners: Sequence[str]) -> None:
        """Have the places of *owners* count for PATIENCE from now, those that have less than half of it left."""
        known: dict[str, Any] = {f"owner{number}": owner for number, owner in enumerate(owners)}
        marks = ", ".join(map(self.parameter.format, known))
        until, soon = self.after.format(PATIENCE), self.after.format(PATIENCE / 2)
        cursor.execute(
            f"UPDATE {WAITER} SET expires_at = {until} WHERE owner IN ({marks}) AND expires_at < {soon}",
            known,
        )

    def dequeue(self, cursor: Any, request: Request) -> None:
        """Give the place up."""
        mark = self.parameter.format("owner")
        cursor.execute(f"DELETE FROM {WAITER} WHERE owner = {mark}", {"owner": request.owner})

    @abstractmethod
    def guard(self, cursor: CursorWrapper, schema: str, key: str, token: int) -> int | None:
        """Lock the token of *key* until the caller's transaction ends; return it as it is now.

        *cursor* is Django's, of the caller's connection. *schema* is what schema_of_tables() said of a
        connection of our own. Raises StaleSnapshot if the transaction reads from before the lock was
        taken, OutOfReach if it may not use the tables.
        """


class StaleSnapshot(Exception):
    """The caller's transaction reads data as it was before the lock was taken."""


class OutOfReach(Exception):
    """The caller's connection may not use the tables of the locks."""


def schema_of_tables(cursor: CursorWrapper) -> str:
    """Return the schema in which *cursor* finds our tables, with its dot, for a statement with parameters."""
    ask = _SCHEMA.get(cursor.db.vendor)
    if ask is None:
        return ""
    cursor.execute(ask)
    row = cursor.fetchone()
    return f"{row[0].replace('%', '%%')}." if row else ""


def turn(clock: str, parameter: str) -> str:
    """Return as SQL that nobody alive stands before us in the queue."""
    key, owner = parameter.format("key"), parameter.format("owner")
    return f"""NOT EXISTS (
        SELECT 1 FROM {WAITER} AS w WHERE w.method_name = {key} AND w.expires_at > {clock} AND w.owner <> {owner}
          AND w.ticket < coalesce((SELECT m.ticket FROM {WAITER} AS m WHERE m.owner = {owner}), 9223372036854775807))"""


def parameters(request: Request) -> dict[str, Any]:
    """Return what an acquire names: texts and seconds; *taken_for*: until others can have it, unless released."""
    return {
        "key": request.key,
        "name": stored(request.name),
        "owner": request.owner,
        "holder": request.holder.to_json(),
        "ttl": request.ttl,
        "lock_delay": request.lock_delay,
        "taken_for": max(request.min_hold, request.ttl + request.lock_delay),
    }


def busy(holder: str | None, remaining: float | None) -> Busy:
    """Return who is busy: *holder* as JSON, None where nobody's lease lives; *remaining* in seconds."""
    left = None if remaining is None else max(0.0, float(remaining))
    return Busy(Holder.from_json(holder), left, reserved=bool(holder is None and left))
