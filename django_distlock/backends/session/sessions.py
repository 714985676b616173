"""Sessions: a connection of our own for each lock that is held or waited for, and what its server must do."""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

from django_distlock.backends.database import bounds
from django_distlock.backends.database.connections import abandon
from django_distlock.engine.caller import current_task, thread_number
from django_distlock.engine.values import RecentOwners, Request, digest
from django_distlock.exceptions import LockBackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from django_distlock.backends.database.connections import OwnConnections
    from django_distlock.backends.database.engine import Engine
    from django_distlock.engine.values import Busy, Grant, Held
    from django_distlock.engine.waiting import Wait

    from .deadlocks import Edge
    from .occupants import Counted


#: Seconds to wait for a fencing token that a guard() holds: a mere look, and while waiting anyway.
LOOK, STAY = 0.05, 1.0


def look(request: Request) -> float:
    """Return how long a mere look may take: of several readers each waits for the others' tokens."""
    return STAY if request.shared else LOOK


def stay(wait: Wait) -> float:
    """Return how long to wait for a token at the end of *wait*."""
    return STAY if wait.left is None else min(STAY, wait.left)


#: With its number, it tells this process from all others.
_SECRET = secrets.token_hex(8)
_caller = lru_cache(maxsize=1000)(digest)


def this_caller() -> str:
    """Return a short text for the running thread or task, different from all others anywhere."""
    task = current_task()
    return _caller(f"{_SECRET}:{os.getpid()}:{thread_number()}:{0 if task is None else id(task)}")


@dataclass(frozen=True, slots=True)
class SessionRequest(Request):
    """A request that tells whose it is: who holds what and waits for what makes deadlocks."""

    caller: str = field(default_factory=this_caller)


class Session:
    """One connection, and the one lock that it holds or waits for. Made without one; see Sessions.open()."""

    connection: Any

    def __init__(self, request: Request) -> None:
        self.request = request
        #: The thread or task that it is for.
        self.caller: str = getattr(request, "caller", "")
        #: Whether the server had closed its connection at its end.
        self.was_cut = False
        #: Held by whoever makes a request on the connection.
        self.mutex = threading.Lock()
        self.grant: Grant | None = None
        #: Until when the server keeps it at least, on ``clock.lease_time()``.
        self.ends = 0.0
        #: Set by who ends the wait; why, if that is for people.
        self.is_interrupted = False
        self.deadlock = ""
        #: Whether the server makes it wait now.
        self.is_waiting = False
        self._state = threading.Lock()

    def execute(self, statement: str, parameters: Any = None) -> Any:
        """Execute *statement* on the session; return the driver's cursor, with the answer."""
        cursor = self.connection.distlock_cursor
        with self.connection.wrap_database_errors:
            cursor.execute(statement, parameters)
        return cursor

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let interrupt() end what is done inside."""
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
        """Have a waiting thread return at once, by cutting its connection; no I/O that blocks."""
        with self._state:
            self.is_interrupted = True
            if self.is_waiting:
                bounds.cut(self.connection)

    @property
    def is_over(self) -> bool:
        """Whether the server has closed the connection; False while a request is under way."""
        if not self.mutex.acquire(blocking=False):
            return False
        try:
            return bounds.is_cut(self.connection)
        finally:
            self.mutex.release()


class Sessions:
    """The sessions of one backend by owner, and the pool that their connections come from."""

    everywhere: ClassVar[WeakSet[Sessions]] = WeakSet()

    def __init__(self, pool: OwnConnections, server: SessionServer) -> None:
        self._pool = pool
        self._server = server
        self.translated = pool.translated
        self._forget()
        self.everywhere.add(self)

    def _forget(self) -> None:
        self._mutex = threading.Lock()
        self._by_owner: dict[str, Session] = {}
        self.released, self._interrupted = RecentOwners(), RecentOwners()

    @property
    def in_use(self) -> int:
        return len(self._by_owner)

    def open(self, session: Session, *, to_wait: bool) -> None:
        """Give *session* its connection; LockBackendError if there is none for it. close() takes it back.

        Whoever is *to_wait* gets none that died while it was idle: else that is found out by asking.
        """
        try:
            connection = self._pool.borrow()
        except LockBackendError:
            # Sessions that the server has ended are nobody's any more, and take places.
            ended = [each for each in list(self._by_owner.values()) if each.is_over]
            for each in ended:
                self.close(each, is_sound=False)
            if not ended:
                raise
            connection = self._pool.borrow()
        while to_wait and bounds.is_cut(connection):
            self._pool.give_back(connection, is_sound=False)
            connection = self._pool.borrow()
        session.connection = connection
        owner = session.request.owner
        with self._mutex:
            self._by_owner[owner] = session
            # It may have been interrupted before it began; one that was released may ask again.
            self.released.discard(owner)
            if self._interrupted.discard(owner):
                session.is_interrupted = True
        if not hasattr(connection, "distlock_number"):
            #: For how many seconds the server was told to bear the session's silence.
            connection.distlock_limit = None
            self._server.begin(connection)

    def get(self, owner: str) -> Session | None:
        return self._by_owner.get(owner)

    def held(self, owner: str) -> Session | None:
        session = self._by_owner.get(owner)
        return session if session is not None and session.grant is not None else None

    def close(self, session: Session, *, is_sound: bool) -> None:
        """Forget *session*; its connection is used again if it *is_sound*, else closed."""
        with self._mutex:
            if self._by_owner.get(session.request.owner) is not session:
                return
            del self._by_owner[session.request.owner]
        session.was_cut = not is_sound and bounds.is_cut(session.connection)
        self._pool.give_back(session.connection, is_sound=is_sound)

    def interrupt(self, owner: str) -> None:
        """End the wait of *owner*, which may only be about to begin."""
        session = self._by_owner.get(owner)
        if session is not None:
            session.interrupt()
        elif owner not in self.released:
            self._interrupted.add(owner)

    @classmethod
    def holds_any(cls, caller: str) -> bool:
        """Return whether *caller* holds a lock by any backend of this kind: else it cannot deadlock."""
        return any(
            session.caller == caller and session.grant is not None
            for sessions in list(cls.everywhere)
            for session in list(sessions._by_owner.values())  # noqa: SLF001 - our own
        )

    def close_idle(self) -> None:
        self._pool.close()

    def abandon(self) -> None:
        """In a forked child: drop the parent's sessions with no goodbye."""
        for session in self._by_owner.values():
            abandon(session.connection)
        self._pool.abandon()
        self._forget()


class SessionServer(ABC):
    """Its verbs are given a session, or a cursor of another connection, in autocommit."""

    supports_shared: ClassVar[bool] = True
    #: The server's time in microseconds, by which tokens count.
    now_sql: ClassVar[str]
    #: Writes down who reads, unless that is done: %(key)s, %(token)s, %(holder)s.
    note_reader_sql: ClassVar[str]

    def __init__(self, engine: Engine, name: Callable[[], str], *, fencing: bool) -> None:
        """*engine*: of its own connections; *name*: what tells the name of the database."""
        self.engine = engine
        self.name = name
        self.fencing = fencing

    # On the session itself.

    @abstractmethod
    def begin(self, connection: Any) -> None:
        """Set up a new connection to hold locks; Unusable where it cannot.

        It is given its *distlock_number*, by which the server knows the session.
        """

    @abstractmethod
    def take(self, session: Session, patience: float) -> Grant | Busy:
        """Take the lock if it is free, with the token if that is one statement; else leave nothing behind."""

    @abstractmethod
    def wait(self, session: Session, wait: Wait) -> Grant | Busy:
        """Do as take() does, but stand in the server's queue."""

    @abstractmethod
    def free(self, session: Session) -> bool:
        """Give the lock back; return whether it was still held."""

    @abstractmethod
    def keep(self, session: Session, seconds: float) -> None:
        """Have the server end the session once it has been silent for *seconds*, from now on; note them on the connection."""

    # Beside it, or on it.

    @abstractmethod
    def raise_token(self, cursor: Any, key: str, holder: str, patience: float) -> int:
        """Commit a new fencing token and its holder; an error of contention if a guard() holds it meanwhile."""

    @staticmethod
    @abstractmethod
    def make_row(cursor: Any, key: str, name: str) -> bool:
        """Make the lock's row, with its name, if there is none; tell whether there was none."""

    def note_reader(self, cursor: Any, known: dict[str, Any]) -> None:
        """Write a reader down: its key, token and holder; for the second time, nothing."""
        cursor.execute(self.note_reader_sql, known)

    @abstractmethod
    def is_held(self, cursor: Any, key: str) -> bool:
        """Return whether anybody has the lock."""

    @abstractmethod
    def held(self, cursor: Any, known: dict[str, Counted]) -> Iterable[Held]:
        """Tell which of the *known* locks, by key, are held."""

    @abstractmethod
    def waits(self, cursor: Any) -> Iterable[Edge]:
        """Tell which caller waits for which."""

    @abstractmethod
    def end(self, cursor: Any, counted: Counted, owner_digest: str) -> bool:
        """End the session that holds the lock as *owner_digest* says; tell whether there was one."""
