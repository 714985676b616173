"""What begins anew in a forked child, also where C code forked and told Python nothing, as in uWSGI."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Forks:
    """Calls in each forked child what was asked for: at once, or at the first use of a lock."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        #: The process that knows that it began anew.
        self.pid = os.getpid()
        self._callbacks: list[Callable[[], object]] = []

    def in_child(self, callback: Callable[[], object]) -> None:
        self._callbacks.append(callback)

    def notice(self) -> None:
        """Call them now, if this is a child in which nobody has: a look at the process's number."""
        if os.getpid() != self.pid:
            with self._mutex:
                if os.getpid() != self.pid:
                    self._begin_anew()

    def begin_anew(self) -> None:
        """In a child that Python knows of: call them."""
        # A thread that is not here may have it.
        self._mutex = threading.Lock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        for callback in self._callbacks:
            callback()
        self.pid = os.getpid()


forks = Forks()
os.register_at_fork(after_in_child=forks.begin_anew)
