"""Which thread or task of this process took a lock."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any


class Caller:
    """The thread, and the asyncio task in it if there is one, that this was made in."""

    __slots__ = ("_task", "_thread")

    def __init__(self) -> None:
        self._thread = weakref.ref(threading.current_thread())
        task = current_task()
        self._task = None if task is None else weakref.ref(task)

    @property
    def is_current(self) -> bool:
        """Whether the running code is this caller."""
        if self._task is not None:
            task = self._task()
            return task is not None and task is current_task()
        return self._thread() is threading.current_thread() and current_task() is None

    @property
    def is_gone(self) -> bool:
        """Whether the thread has ended, or the task is done or will never be."""
        if self._task is not None:
            task = self._task()
            return task is None or task.done() or task.get_loop().is_closed()
        thread = self._thread()
        return thread is None or not thread.is_alive()


def current_task() -> asyncio.Task[Any] | None:
    """Return the asyncio task that is running in this thread, or None."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
