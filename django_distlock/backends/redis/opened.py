"""What a link to Redis has open, for threads: made when it is needed, closed with the last that uses it."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class Opened(Generic[_T]):
    """What *make* makes, a client or a pool of connections; *close_idle* closes those that nobody uses."""

    def __init__(self, make: Callable[[], _T], close_idle: Callable[[_T], object]) -> None:
        self._make = make
        self._close_idle = close_idle
        self._mutex = threading.Lock()
        self._now: _T | None = None

    def take(self) -> _T:
        """Return it; give_back() comes after its use."""
        with self._mutex:
            if self._now is None:
                made = self._make()
                # What is used once more after close() would be left to the garbage collector, which complains.
                self._let_go = weakref.finalize(self, self._close_idle, made)
                self._let_go.atexit = False
                self._now = made
            return self._now

    def give_back(self, used: _T) -> None:
        """Close what was in use at close()."""
        if used is not self._now:
            self._close_idle(used)

    def close(self) -> None:
        """Close what nobody uses; the next one to come makes another."""
        now, self._now = self._now, None
        if now is not None:
            self._let_go()
