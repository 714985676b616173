"""The connections that wake the waiters of this process."""

from __future__ import annotations

import random
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import Error

from django_distlock.engine.background import NoThreadError, start_daemon
from django_distlock.engine.bells import ThreadBell
from django_distlock.exceptions import Contended, LockBackendError
from django_distlock.ground import clock
from django_distlock.ground.mutexes import section
from django_distlock.ground.naming import warn

from .base import SHORT_PAUSE
from .connections import OwnConnections, abandon
from .postgresql import notes, notify

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_distlock.engine.bells import Bell

    from .dialect import Dialect

#: Seconds between two checks for waiters, and until a listener without waiters ends.
TICK, LINGER = 1.0, 5.0
#: Factor by which a watcher's pause grows while nothing changes.
GROWTH = 1.2


class Listener:
    """Wakes the waiters of this process, through one connection while there are waiters.

    Each waiter also looks now and then, so a listener that fails costs time, not correctness.
    """

    def __init__(self, connections: OwnConnections) -> None:
        self._connections = connections
        self.forget()

    def forget(self) -> None:
        """Start without waiters."""
        self._mutex = section()
        #: By owner: the ticket or the keys for which to ring, and the bell.
        self._bells: dict[str, tuple[Any, Bell]] = {}
        self._wanted_until = 0.0
        self._is_running = False
        self._connection: Any = None

    def expect(self, owner: str, called: Any, bell: Bell) -> None:
        """From now on, ring *bell* for *called*, a ticket or keys. A new connection rings all bells once, so none is missed."""
        with self._mutex:
            known, _ = self._bells.get(owner, (None, bell))
            self._bells[owner] = (known if called is None else called, bell)
            was_running, self._is_running = self._is_running, True
        try:
            # Outside the mutex, because an asynchronous exception may block this start for ever in Python 3.11.
            if not was_running:
                start_daemon(self._run, "distlock-listen")
        except NoThreadError as error:
            self._is_running = False
            warn("Waiters poll, as no thread can listen: %s", error, using=self._connections.alias)
        except BaseException:
            self._is_running = False
            raise

    def forget_bell(self, owner: str) -> None:
        if owner in self._bells:
            with self._mutex:
                self._bells.pop(owner, None)
                self._wanted_until = clock.wait_time() + LINGER

    def abandon(self) -> None:
        """In a forked child, leave the connection to the parent."""
        if self._connection is not None:
            abandon(self._connection)
        self.forget()

    def close(self) -> None:
        self._wanted_until = 0.0  # the listener ends without waiters

    def _run(self) -> None:
        while self._is_wanted():
            try:
                connection = self._connection = self._open()
                try:
                    self._listen(connection)
                finally:
                    self._connection = None
                    connection.close()
            except Contended:
                time.sleep(SHORT_PAUSE)
            except (LockBackendError, Error, OSError) as error:
                warn(
                    "Waiters poll, as the database cannot be listened to: %s",
                    error,
                    using=self._connections.alias,
                )
                time.sleep(TICK)

    def _open(self) -> BaseDatabaseWrapper:
        return self._connections.open()

    def _listen(self, connection: Any) -> None:
        """Ring bells when their tickets or keys are called, until _is_wanted() returns False."""
        raise NotImplementedError

    def _is_wanted(self) -> bool:
        with self._mutex:
            self._is_running = bool(self._bells) or clock.wait_time() < self._wanted_until
            return self._is_running


class Notified(Listener):
    """Rings the bells of the tickets in PostgreSQL's notifications."""

    def forget(self) -> None:
        super().forget()
        #: The channel of this process; a forked child makes a new one.
        self.channel = f"distlock_{secrets.token_hex(8)}"
        #: Whether it was logged that notifications do not arrive.
        self._has_told = False

    def is_reached(self) -> bool:
        """Return whether notifications of the server arrive in this process."""
        connection = self._open()
        try:
            with self._connections.translated():
                return self._hears(connection)
        finally:
            connection.close()

    def ring_for(self, owner: str, ticket: int) -> None:
        with self._mutex:
            if owner in self._bells:
                self._bells[owner] = (str(ticket), self._bells[owner][1])

    def _open(self) -> BaseDatabaseWrapper:
        return self._connections.open(bounded=False)

    def _hears(self, connection: Any) -> bool:
        """Listen, and return whether notifications arrive: a pooler may have given the session to another client."""
        with connection.cursor() as cursor:
            cursor.execute(f'LISTEN "{self.channel}"')
        if connection.distlock_is_ours:
            return True
        self._connections.ask(notify, self.channel)
        with connection.wrap_database_errors:
            return any(True for _ in notes(connection.connection, TICK))

    def _listen(self, connection: Any) -> None:
        if not self._hears(connection) and not self._has_told:
            self._has_told = True
            warn(
                "Waiters poll, as the pooler before the database keeps its notifications: set OPTIONS 'listen' to False",
                using=self._connections.alias,
            )
        self._ring(None)
        with connection.wrap_database_errors:
            while self._is_wanted():
                for note in notes(connection.connection, TICK):
                    self._ring(note.payload)

    def _ring(self, called: str | None) -> None:
        """Ring the bell of the ticket *called*; None: ring all bells, as notifications may have been missed."""
        with self._mutex:
            bells = list(self._bells.values())
        for ticket, bell in bells:
            if called in {None, ticket}:
                bell.ring()


class _Seen(NamedTuple):
    """The result of one look at the database: the version of its data, and by key the fencing tokens of the locks."""

    version: object = None
    tokens: Mapping[str, int] = {}


class Watcher(Listener):
    """Rings when a lock is free, on servers that cannot notify, by looking for all waiters of this process at once.

    A watcher looks often while a lock changes its holder, and less and less often while it does not.
    """

    def __init__(self, connections: OwnConnections, dialect: Dialect) -> None:
        self._dialect = dialect
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
        shortest, longest = self._dialect.pauses
        seen, pause = _Seen(), shortest
        with connection.wrap_database_errors:
            while self._is_wanted():
                before = seen
                try:
                    seen = self._look(connection.distlock_cursor, before)
                except Exception as error:
                    # Other clients are using the file; the next look may succeed.
                    if not self._dialect.is_contention(error):
                        raise
                pause = min(longest, pause * GROWTH) if seen.tokens == before.tokens else shortest
                if self._news.wait(pause * random.uniform(0.7, 1.3) if self._bells else TICK):  # noqa: S311 - no secret
                    # A new waiter: look at its lock, even if nothing was written since.
                    seen = _Seen()

    def _look(self, cursor: Any, before: _Seen) -> _Seen:
        """Ring for the locks that are free; return what this look has seen. *before* is what the last look has seen."""
        with self._mutex:
            waiting = list(self._bells.values())
        keys = sorted({key for those, _ in waiting for key in those})
        if not keys:
            return _Seen()
        version = self._dialect.version(cursor)
        if version is not None and version == before.version and before.tokens.keys() == {*keys}:
            return before
        found = self._dialect.look_at(cursor, keys)
        for those, bell in waiting:
            if any(key not in found or found[key][1] for key in those):
                bell.ring()
        return _Seen(version, {key: found.get(key, (0, True))[0] for key in keys})
