"""Idle connections, kept to be used again."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django_distlock.ground import clock

if TYPE_CHECKING:
    from collections.abc import Callable


class IdleStack(deque[Any]):
    """Take a connection by pop(), and put it back by append(): single steps, which need no lock.

    As the one that was used last is taken first, those that are not needed stay at the other end.
    """

    def fit_one(self) -> Any:
        """Return a connection that the server has neither closed nor used without a request, or None."""
        while self:
            with suppress(IndexError):  # another thread has taken the last one
                connection = self.pop()
                if not connection.has_news():
                    return connection
                connection.close()
        return None

    def close_all(self, close: Callable[[Any], object]) -> None:
        with suppress(IndexError):
            while True:
                close(self.pop())

    def close_unused(self, close: Callable[[Any], object], seconds: float) -> None:
        """Close the connections whose last use, *used_at* (clock.wait_time()), was so many *seconds* ago."""
        before = clock.wait_time() - seconds
        with suppress(IndexError):
            while (oldest := self.popleft()).used_at < before:
                close(oldest)
            self.appendleft(oldest)
