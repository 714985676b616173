"""A few connections of our own, each lent to one thread for one request."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from django_distlock.engine import clock
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

from .client import Disconnected, Failure, NotCarriedOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from .client import Client

_T = TypeVar("_T")
#: How many connections are kept open.
KEPT = 4
#: Seconds within which an old connection must have been found closed for the request to be sent
#: once more on a new one.
SOON = 0.25


class Pool:
    """Connections to one server, made by *connect*; what breaks one of them is told as lock errors."""

    def __init__(self, alias: str, server: Any, connect: Callable[[], Client]) -> None:
        self._alias = alias
        self._server = server
        self._connect = connect
        self.forget()

    def forget(self) -> None:
        """Begin with no connections."""
        self._mutex = threading.Lock()
        self._idle: list[Client] = []
        # What is given back after close() would be left to the garbage collector, which complains.
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def ask(self, verb: Callable[[Client], _T], *, twice: bool = True) -> _T:
        """Return what *verb* returns; with *twice*, ask again if an old connection is found closed."""
        try:
            return self._ask(verb, twice=twice)
        except NotCarriedOut as error:
            raise LockBackendError(self._alias, self._told(error)) from error
        except Failure as error:
            raise LockOutcomeUnknown(self._alias, self._told(error)) from error

    def close(self) -> None:
        """Close the idle ones."""
        with self._mutex:
            idle = self._idle[:]
            self._idle.clear()
        _close_all(idle)

    def abandon(self) -> None:
        """In a forked child: drop the parent's connections with no goodbye, and begin anew."""
        for client in self._idle:
            client.abandon()
        self._idle.clear()
        self.forget()

    def _ask(self, verb: Callable[[Client], _T], *, twice: bool) -> _T:
        client, began = self._take(), clock.wait_time()
        try:
            return self._lend(client or self._connect(), verb)
        except Disconnected:
            # The idle ones are mostly no better: the server was restarted, or a router was.
            self.close()
            if client is None or not twice or clock.wait_time() - began > SOON:
                raise
        return self._lend(self._connect(), verb)

    def _take(self) -> Client | None:
        with self._mutex:
            return self._idle.pop() if self._idle else None

    def _lend(self, client: Client, verb: Callable[[Client], _T]) -> _T:
        try:
            answer = verb(client)
        except BaseException:
            # Also Ctrl-C in the middle of a reply: its rest would be taken for the next one.
            client.close()
            raise
        self._keep(client)
        return answer

    def _keep(self, client: Client) -> None:
        with self._mutex:
            if len(self._idle) < KEPT:
                self._idle.append(client)
                return
        client.close()

    def _told(self, error: Failure) -> str:
        return f"memcached at {self._server}: {error}"


def _close_all(clients: list[Client]) -> None:
    for client in clients:
        client.close()
