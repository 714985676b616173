"""The waiters of this process: what wakes them, and the places that they have in the server's queues."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import Error

from django_distlock.engine import clock
from django_distlock.engine.background import NoThreadError, start_daemon
from django_distlock.engine.bells import ThreadBell
from django_distlock.engine.naming import log_fields, printable
from django_distlock.exceptions import LockBackendError

from .connections import OwnConnections, abandon
from .postgresql import notes

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_distlock.engine.bells import Bell
    from django_distlock.engine.values import Request

    from .engine import Engine

logger = logging.getLogger("django_distlock")

#: Seconds between two looks whether anybody waits still, and until a listener with nobody to ring ends.
TICK, LINGER = 1.0, 5.0
#: Seconds between two times that the places of those who do not look themselves are kept.
KEEP = 0.5
#: By how much a watcher's pause grows where nothing changes.
GROWTH = 1.2


class Listener:
    """Wakes the waiters of this process, by one connection while there are any; each also looks now and then.

    One that cannot listen costs time, not correctness.
    """

    def __init__(self, connections: OwnConnections) -> None:
        self._connections = connections
        self.forget()

    def forget(self) -> None:
        """Begin anew with nobody waiting."""
        self._mutex = threading.Lock()
        #: By owner, with what it is called by.
        self._bells: dict[str, tuple[Any, Bell]] = {}
        self._wanted_until = 0.0
        self._is_running = False
        self._connection: Any = None

    def expect(self, owner: str, called: Any, bell: Bell) -> None:
        """Ring *bell* from now on when it is *called*. Once there is a connection all are rung: no call is missed."""
        with self._mutex:
            self._bells[owner] = (called, bell)
            was_running, self._is_running = self._is_running, True
        try:
            # An exception that is set on this thread may stop the start for ever in Python 3.11: nobody else waits for it.
            if not was_running:
                start_daemon(self._run, "distlock-listen")
        except NoThreadError as error:
            self._is_running = False
            logger.warning(
                "Waiters poll, as no thread can listen: %s",
                printable(error),
                extra=log_fields(None, self._connections.alias),
            )
        except BaseException:
            self._is_running = False
            raise

    def forget_bell(self, owner: str) -> None:
        if owner in self._bells:
            with self._mutex:
                self._bells.pop(owner, None)
                self._wanted_until = clock.wait_time() + LINGER

    def abandon(self) -> None:
        """In a forked child: leave the connection to the parent."""
        if self._connection is not None:
            abandon(self._connection)
        self.forget()

    def close(self) -> None:
        self._wanted_until = 0.0  # ends as soon as nobody waits

    def _run(self) -> None:
        while self._is_wanted():
            try:
                connection = self._connection = self._open()
                try:
                    self._listen(connection)
                finally:
                    self._connection = None
                    connection.close()
            except (LockBackendError, Error, OSError) as error:
                logger.warning(
                    "Waiters poll, as the database cannot be listened to: %s",
                    printable(error),
                    extra=log_fields(None, self._connections.alias),
                )
                time.sleep(TICK)

    def _open(self) -> BaseDatabaseWrapper:
        return self._connections.open()

    def _listen(self, connection: Any) -> None:
        """Ring who is called, until _is_wanted() says that nobody waits."""
        raise NotImplementedError

    def _is_wanted(self) -> bool:
        with self._mutex:
            self._is_running = bool(self._bells) or clock.wait_time() < self._wanted_until
            return self._is_running


class Notified(Listener):
    """Rings for those whose ticket PostgreSQL notifies."""

    def forget(self) -> None:
        super().forget()
        #: Where this process is reached; made anew in a forked child.
        self.channel = f"distlock_{secrets.token_hex(8)}"

    def ring_for(self, owner: str, ticket: int) -> None:
        with self._mutex:
            if owner in self._bells:
                self._bells[owner] = (str(ticket), self._bells[owner][1])

    def _open(self) -> BaseDatabaseWrapper:
        return self._connections.open(bounded=False)

    def _listen(self, connection: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f'LISTEN "{self.channel}"')
        self._ring(None)
        with connection.wrap_database_errors:
            while self._is_wanted():
                for note in notes(connection.connection, TICK):
                    self._ring(note.payload)

    def _ring(self, called: str | None) -> None:
        """Ring whose ticket is *called*; all of them after a time when calls were not heard."""
        with self._mutex:
            bells = list(self._bells.values())
        for ticket, bell in bells:
            if called in {None, ticket}:
                bell.ring()


class Watcher(Listener):
    """Rings for those whose lock has come free, where the server wakes nobody: one look for all of them.

    It looks often while a lock changes hands, and less and less often while it does not.
    """

    def __init__(self, connections: OwnConnections, engine: Engine) -> None:
        self._engine = engine
        super().__init__(connections)

    def forget(self) -> None:
        super().forget()
        self._news = ThreadBell()

    def expect(self, owner: str, called: Any, bell: Bell) -> None:
        is_new = owner not in self._bells
        super().expect(owner, called, bell)
        if is_new:
            self._news.ring()

    def close(self) -> None:
        super().close()
        self._news.ring()

    def _listen(self, connection: Any) -> None:
        cursor, engine = connection.distlock_cursor, self._engine
        shortest, longest = engine.pauses
        pause, version = shortest, None
        tokens: dict[str, int] = {}
        with connection.wrap_database_errors:
            while self._is_wanted():
                with self._mutex:
                    waiting = list(self._bells.values())
                keys = sorted({key for key, _ in waiting})
                seen = engine.version(cursor) if keys else None
                if keys and (seen is None or seen != version or tokens.keys() != set(keys)):
                    found = engine.look_at(cursor, keys)
                    for key, bell in waiting:
                        if key not in found or found[key][1]:
                            bell.ring()
                    before, tokens = tokens, {key: found.get(key, (0, True))[0] for key in keys}
                    if any(before.get(key) != token for key, token in tokens.items()):
                        pause = shortest
                version = seen
                if self._news.wait(TICK if not keys else pause * random.uniform(0.7, 1.3)):  # noqa: S311 - no secret
                    pause = shortest
                pause = min(longest, pause * GROWTH)


class _Place(NamedTuple):
    ticket: int
    owner: str
    bell: Bell


@dataclass
class _Line:
    places: list[_Place] = field(default_factory=list)
    kept_at: float = field(default_factory=clock.wait_time)


class Places:
    """By lock, in the order of their tickets: nobody is served before the first one of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew with nobody waiting."""
        self._mutex = threading.Lock()
        self._lines: dict[str, _Line] = {}

    def add(self, request: Request, ticket: int, bell: Bell) -> None:
        with self._mutex:
            line = self._lines.setdefault(request.key, _Line())
            line.places = [place for place in line.places if place.owner != request.owner]
            insort(line.places, _Place(ticket, request.owner, bell), key=attrgetter("ticket"))

    def drop(self, request: Request) -> None:
        """Forget a place; who is the first one now looks from now on."""
        with self._mutex:
            line = self._lines.get(request.key)
            if line is None:
                return
            was_first = line.places[0].owner == request.owner
            line.places = [place for place in line.places if place.owner != request.owner]
            if was_first:
                self._ring_first(request.key, line)

    def ring_first(self, key: str) -> None:
        with self._mutex:
            if line := self._lines.get(key):
                self._ring_first(key, line)

    def is_behind(self, request: Request) -> bool:
        with self._mutex:
            line = self._lines.get(request.key)
            owners = [place.owner for place in line.places] if line else []
            return request.owner in owners[1:]

    def to_keep(self, request: Request) -> list[str]:
        """Return whose places are to be kept now, if *request* is the first one."""
        with self._mutex:
            line = self._lines.get(request.key)
            if line is None or line.places[0].owner != request.owner:
                return []
            if clock.wait_time() - line.kept_at < KEEP:
                return []
            line.kept_at = clock.wait_time()
            return [place.owner for place in line.places[1:]]

    def _ring_first(self, key: str, line: _Line) -> None:
        # One whose event loop is gone is no more there.
        while line.places and not line.places[0].bell.ring():
            del line.places[0]
        if not line.places:
            del self._lines[key]
