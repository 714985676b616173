"""Sessions: a connection of our own for each lock that is held or waited for."""

from __future__ import annotations

import secrets
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

from django_distlock.backends.database import bounds
from django_distlock.backends.database.connections import abandon
from django_distlock.engine.caller import current_task, thread_number
from django_distlock.engine.forks import forks
from django_distlock.engine.owners import RecentOwners
from django_distlock.engine.values import Request, digest
from django_distlock.exceptions import LockBackendError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_distlock.backends.database.connections import OwnConnections
    from django_distlock.engine.values import Grant

    from .server import Link, SessionServer


class _Process:
    """What tells this process from all others; another one after a fork."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.secret = secrets.token_hex(8)


_process = _Process()
forks.in_child(_process.renew)
_caller = lru_cache(maxsize=1000)(digest)


def this_caller() -> str:
    """Return a short text for the running thread or task, different from all others anywhere."""
    task = current_task()
    return _caller(f"{_process.secret}:{thread_number()}:{0 if task is None else id(task)}")


@dataclass(frozen=True, slots=True)
class SessionRequest(Request):
    """A request that tells whose it is: who holds what and waits for what makes deadlocks."""

    caller: str = field(default_factory=this_caller)


class Session:
    """One connection, and the one lock that it holds or waits for. Made without one; see Sessions.open()."""

    connection: BaseDatabaseWrapper
    link: Link

    def __init__(self, request: Request) -> None:
        self.request = request
        #: The thread or task that it is for.
        self.caller: str = getattr(request, "caller", "")
        #: Whether its connection came from the pool, and whether the server had closed it at its end.
        self.was_idle = self.was_cut = False
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
        cursor = self.link.cursor
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
        self._links: WeakKeyDictionary[BaseDatabaseWrapper, Link] = WeakKeyDictionary()

    @property
    def in_use(self) -> int:
        """How many locks are held and waited for."""
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
        link = self._links.get(connection)
        session.was_idle = link is not None
        if link is None:
            link = self._links[connection] = self._server.begin(connection)
        session.link = link

    def get(self, owner: str) -> Session | None:
        """Return the session of *owner*, whether it holds or waits."""
        return self._by_owner.get(owner)

    def held(self, owner: str) -> Session | None:
        """Return the session of *owner* if it holds its lock."""
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
        """Close the connections that hold nothing."""
        self._pool.close()

    def abandon(self) -> None:
        """In a forked child: drop the parent's sessions with no goodbye."""
        for session in self._by_owner.values():
            abandon(session.connection)
        self._pool.abandon()
        self._forget()
