"""Sessions: one connection for each lock that is held or waited for; and the interface to the SQL of a server."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from django_distlock.backends.database import bounds
from django_distlock.engine.values import Request, digest
from django_distlock.ground.mutexes import Taken, new_mutex, owned, run_in
from django_distlock.ground.naming import stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from django_distlock.backends.database.dialect import Dialect
    from django_distlock.engine.values import Busy, Grant, Held
    from django_distlock.engine.waiting import Wait

    from .occupants import Counted

#: Seconds to wait for a fencing token that a guard() has locked: for a single try, and for a waiter.
LOOK, STAY = 0.05, 1.0
#: The prefix of labels of sessions.
PREFIX = "distlock:"
#: Most characters of a name in a record.
LONGEST_NAME = 120
_digest_of_key = lru_cache(maxsize=1000)(digest)
#: Texts of the error for a replica: the problem, and the advice.
OWN_LOCKS = "which has locks of its own: callers there and on the primary would hold the same lock"
PRIMARY = "Let OPTIONS 'using' name an alias of DATABASES that connects to the primary."
#: Seconds within which a session that an operator ends is expected to be gone.
ENDS_WITHIN = 1.0


class DatabaseSession:
    """A connection, and the one lock that it holds or waits for. The backend opens the connection later."""

    connection: Any

    def __init__(self, request: Request) -> None:
        self.request = request
        self.owner_digest = digest(request.owner)
        #: The name of the session on the server: mode, owner and lock.
        mode = "r" if request.shared else "w"
        self.label = f"{PREFIX}{mode}:{self.owner_digest}:{_digest_of_key(request.key)}"
        #: Whether the connection is ready for the lock.
        self.is_open = False
        #: Whether the server had closed the connection when the session was closed.
        self.was_cut = False
        #: Held by the thread that makes a request on the connection.
        self.mutex = new_mutex()
        self.grant: Grant | None = None
        #: Until when the server keeps the session at least, on ``clock.lease_time()``.
        self.ends = 0.0
        #: Whether interrupt() has ended the wait, or will when the wait begins.
        self.is_interrupted = False
        #: Whether the session waits on the server now.
        self.is_waiting = False
        self._state = new_mutex()

    def execute(self, statement: str, parameters: Any = None) -> Any:
        """Execute *statement* on the session; return the driver's cursor, with the answer."""
        cursor = self.connection.distlock_cursor
        with self.connection.wrap_database_errors:
            cursor.execute(statement, parameters)
        return cursor

    def record(self) -> str:
        """Return the holder as a short JSON object, in ASCII, for Occupant.from_json()."""
        request = self.request
        known = {
            "name": stored(request.name)[:LONGEST_NAME],
            "owner_digest": self.owner_digest,
            "session": self.connection.distlock_number,
            "shared": request.shared,
        }
        text = json.dumps(known, separators=(",", ":"))
        return f'{text[:-1]},"holder":{request.holder.to_json()}}}'

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Allow interrupt() to end the wait in the block."""
        with self._state:
            self.is_waiting = True
            if self.is_interrupted:
                bounds.cut(self.connection)
        try:
            yield
        finally:
            with self._state:
                self.is_waiting = False

    def interrupt(self) -> None:
        """Make a waiting thread return at once, by cutting its connection; no I/O that blocks."""
        with self._state:
            self.is_interrupted = True
            if self.is_waiting:
                bounds.cut(self.connection)

    @property
    def interrupts_request(self) -> bool:
        """Whether the running code, a signal handler or a finalizer, has interrupted a request on the connection."""
        return owned(self.mutex)

    @property
    def is_over(self) -> bool:
        """Whether the server has closed the connection; False while a request is under way."""
        if self.interrupts_request:
            return False
        try:
            return run_in(self.mutex, lambda: bounds.is_cut(self.connection))
        except Taken:
            return False


class SessionServer(ABC):
    """The SQL of one kind of server for session locks. Methods get a session, or a cursor in autocommit beside it."""

    #: The dialect of the connections outside the sessions.
    dialect_class: ClassVar[type[Dialect]]
    supports_shared: ClassVar[bool] = True
    #: Whether readers wait behind a waiting writer.
    writers_first: ClassVar[bool]
    #: Whether a wait holds a transaction open, during which the server cannot remove old row versions.
    waits_in_transaction: ClassVar[bool] = True
    #: The server's time in microseconds, from which tokens are made.
    now_sql: ClassVar[str]
    #: Inserts the row of a reader unless it exists: %(key)s, %(token)s, %(holder)s.
    note_reader_sql: ClassVar[str]

    def __init__(self, dialect: Dialect, *, fencing: bool) -> None:
        self.dialect = dialect
        self.fencing = fencing

    # On the session itself.

    @abstractmethod
    def begin(self, connection: Any) -> None:
        """Set up a new connection to hold locks; Unusable if the server cannot keep them.

        Set *distlock_number* on the connection: the server's number of the session.
        """

    @abstractmethod
    def take(self, session: DatabaseSession, patience: float) -> Grant | Busy | None:
        """Take the lock if it is free, with a token if one statement can do both; after a refusal, leave no trace.

        None if the lock's row is missing.
        """

    @abstractmethod
    def wait(self, session: DatabaseSession, wait: Wait) -> Grant | Busy | None:
        """Do as take() does, but wait in the server's queue; Busy at the end of *wait*, or up to a second earlier."""

    @abstractmethod
    def free(self, session: DatabaseSession) -> bool:
        """Release the lock; return whether it was still held."""

    @abstractmethod
    def keep(self, session: DatabaseSession, seconds: float) -> None:
        """Let the server end the session after *seconds* of silence; note *seconds* as the connection's *distlock_limit*."""

    # On another connection, or on the session.

    @abstractmethod
    def raise_token(self, cursor: Any, key: str, holder: str, patience: float) -> int:
        """Commit a new fencing token and its holder; an error of contention if a guard() has locked the token."""

    @abstractmethod
    def make_row(self, cursor: Any, key: str, name: str) -> None:
        """Make the lock's row, with its name, if there is none."""

    @abstractmethod
    def is_held(self, cursor: Any, key: str) -> bool:
        """Return True if anybody has the lock."""

    @abstractmethod
    def held(self, cursor: Any, known: dict[str, Counted]) -> Iterable[Held]:
        """Return the held locks among *known*, which are by key."""

    @abstractmethod
    def end(self, cursor: Any, counted: Counted, owner_digest: str) -> bool:
        """End the session that holds the lock for *owner_digest*; return whether there was one."""
