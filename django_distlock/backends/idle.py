"""Idle connections, kept to be used again."""

from __future__ import annotations

import _socket
import socket
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django_distlock.ground import clock

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds after which an idle connection is not used again: routers forget it after some minutes, often silently
#: (Azure after 4, the balancers of AWS after 6).
IDLE = 60.0


def set_keepalive(sock: _socket.socket) -> None:
    """Set TCP keepalive, so that a dead server machine is noticed within about ten seconds."""
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class IdleStack(deque[Any]):
    """Take a connection by pop(), and put it back by keep(): single steps, which need no mutex.

    *used_at* of a connection is the time of its last use (clock.wait_time()). The newest is taken first, so
    connections that are not needed gather at the other end.
    """

    def keep(self, connection: Any) -> None:
        """Keep *connection* for the next request, and close those that are not needed."""
        if self:
            self.close_unused(lambda unused: unused.close(), IDLE)
        connection.used_at = clock.wait_time()
        self.append(connection)

    def fit_one(self) -> Any:
        """Return a connection that was used within IDLE seconds and is still sound, or None.

        A connection is not sound if the server has closed it, or has sent anything without a request.
        """
        while (connection := self.fresh_one()) is not None:
            if not connection.has_news():
                return connection
            connection.close()
        return None

    def fresh_one(self) -> Any:
        """Take a connection that was used within IDLE seconds, or return None; close older ones on the way.

        Not a generator: the exception of a signal that comes while one is closed is lost.
        """
        with suppress(IndexError):
            while True:
                connection = self.pop()
                if clock.wait_time() - connection.used_at < IDLE:
                    return connection
                connection.close()
        return None

    def close_all(self, close: Callable[[Any], object]) -> None:
        with suppress(IndexError):
            while True:
                close(self.pop())

    def close_unused(self, close: Callable[[Any], object], seconds: float) -> None:
        """Close the connections that were not used for so many *seconds*."""
        before = clock.wait_time() - seconds
        with suppress(IndexError):
            while (oldest := self.popleft()).used_at < before:
                close(oldest)
            self.appendleft(oldest)
