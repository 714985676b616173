"""The one connection of this process that PostgreSQL's NOTIFY reaches its waiters by."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING

from django.db import DatabaseError

from django_distlock.engine import clock
from django_distlock.engine.background import NoThreadError, start_daemon
from django_distlock.engine.naming import printable
from django_distlock.exceptions import LockBackendError

from .connections import OwnConnections, abandon

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_distlock.engine.bells import Bell

logger = logging.getLogger("django_distlock")

#: Seconds between two looks whether anybody waits still, and until a listener with nobody to ring ends.
TICK, LINGER = 1.0, 5.0


class Listener:
    """Listens while somebody waits. One that cannot listen costs time, not correctness."""

    def __init__(self, connections: OwnConnections) -> None:
        self._connections = connections
        self.forget()

    def forget(self) -> None:
        """Begin anew with nobody waiting."""
        #: Where this process is reached; made anew in a forked child.
        self.channel = f"distlock_{secrets.token_hex(8)}"
        self._mutex = threading.Lock()
        self._bells: dict[str, tuple[int | None, Bell]] = {}
        self._wanted_until = 0.0
        self._is_running = False
        self._connection: BaseDatabaseWrapper | None = None

    def expect(self, owner: str, bell: Bell) -> None:
        """Listen for *owner*. Once the connection is there every bell is rung: no call is missed."""
        with self._mutex:
            self._bells[owner] = (None, bell)
            if not self._is_running:
                self._begin()

    def ring_for(self, owner: str, ticket: int) -> None:
        """Ring the bell of *owner* when *ticket* is called."""
        with self._mutex:
            if owner in self._bells:
                self._bells[owner] = (ticket, self._bells[owner][1])

    def forget_bell(self, owner: str) -> None:
        """Ring no more for *owner*."""
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
        """Stop listening as soon as nobody waits."""
        self._wanted_until = 0.0

    def _begin(self) -> None:
        try:
            start_daemon(self._run, "distlock-listen")
            self._is_running = True
        except NoThreadError as error:
            logger.warning(
                "Waiters poll, as no thread can listen to PostgreSQL: %s", printable(error)
            )

    def _run(self) -> None:
        while self._is_wanted():
            try:
                self._listen()
            except (LockBackendError, DatabaseError, OSError) as error:
                logger.warning(
                    "Waiters poll, as PostgreSQL cannot be listened to: %s", printable(error)
                )
                time.sleep(TICK)

    def _is_wanted(self) -> bool:
        with self._mutex:
            self._is_running = bool(self._bells) or clock.wait_time() < self._wanted_until
            return self._is_running

    def _listen(self) -> None:
        self._connection = connection = self._connections.open(bounded=False)
        try:
            with connection.cursor() as cursor:
                cursor.execute(f'LISTEN "{self.channel}"')
            self._ring()
            with connection.wrap_database_errors:
                while self._is_wanted():
                    for note in connection.connection.notifies(timeout=TICK):
                        self._ring(note.payload)
        finally:
            self._connection = None
            connection.close()

    def _ring(self, called: str | None = None) -> None:
        """Ring whose ticket is *called*; all of them after a time when calls were not heard."""
        with self._mutex:
            bells = list(self._bells.values())
        for ticket, bell in bells:
            if called in {None, str(ticket)}:
                bell.ring()
