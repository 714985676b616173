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

from django_distlock.backends.database import bounds
from django_distlock.engine.caller import current_task, thread_number
from django_distlock.engine.values import Request, digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from django_distlock.backends.database.engine import Engine
    from django_distlock.engine.values import Busy, Grant, Held
    from django_distlock.engine.waiting import Wait

    from .occupants import Counted

    #: Who waits, and who has what it waits for.
    Edge = tuple[str, str]

#: Seconds to wait for a fencing token that a guard() holds: a mere look, and while waiting anyway.
LOOK, STAY = 0.05, 1.0
#: Seconds within which a session that an operator ends is expected to be gone.
ENDS_WITHIN = 1.0


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
    """One connection, and the one lock that it holds or waits for. Made without one; the backend opens it."""

    connection: Any

    def __init__(self, request: Request) -> None:
        self.request = request
        #: The thread or task that it is for.
        self.caller: str = getattr(request, "caller", "")
        self.owner_digest = digest(request.owner)
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


def is_victim(caller: str, waits: Iterable[Edge]) -> bool:
    """Return whether *caller* stands in a circle and is the one to leave it.

    That is the last one of the circle in the order of texts: whoever looks, the answer is one. Who
    waits for itself is none: another thread may release for it.
    """
    ahead: dict[str, set[str]] = {}
    for waiter, holder in waits:
        if waiter != holder and waiter <= caller and holder <= caller:
            ahead.setdefault(waiter, set()).add(holder)
    reached, look = set[str](), list(ahead.get(caller, ()))
    while look:
        found = look.pop()
        if found not in reached:
            reached.add(found)
            look += ahead.get(found, ())
    return caller in reached


class SessionServer(ABC):
    """Its verbs are given a session, or a cursor of another connection, in autocommit."""

    #: Of the connections beside the sessions.
    engine_class: ClassVar[type[Engine]]
    supports_shared: ClassVar[bool] = True
    #: The server's time in microseconds, by which tokens count.
    now_sql: ClassVar[str]
    #: Writes down who reads, unless that is done: %(key)s, %(token)s, %(holder)s.
    note_reader_sql: ClassVar[str]

    def __init__(self, engine: Engine, *, fencing: bool) -> None:
        self.engine = engine
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

    def keep_for_ttl(self, session: Session) -> None:
        """Ask for the ttl of its request, unless its connection was last told the same."""
        if session.connection.distlock_limit != session.request.ttl:
            self.keep(session, session.request.ttl)

    # Beside it, or on it.

    @abstractmethod
    def raise_token(self, cursor: Any, key: str, holder: str, patience: float) -> int:
        """Commit a new fencing token and its holder; an error of contention if a guard() holds it meanwhile."""

    @abstractmethod
    def make_row(self, cursor: Any, key: str, name: str) -> bool:
        """Make the lock's row, with its name, if there is none; tell whether there was none."""

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
