"""Which thread or task of this process took a lock."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from typing import Any

_Dummy = threading._DummyThread  # noqa: SLF001 - there is no other sign of one
_numbers = itertools.count(1)


class _Mark:
    """Stands for one thread and is gone with it: a later thread may have the same ident."""

    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)


class _Here(threading.local):
    """What is known of the running thread, whoever started it.

    threading.current_thread() would invent a thread where it knows none, and take a new one for an
    old one that had its ident.
    """

    def __init__(self) -> None:
        self.mark = _Mark()
        ident = threading.get_ident()
        known = [thread for thread in threading.enumerate() if thread.ident == ident]
        #: None if ``threading`` has not started it; the dummy it may have may be an earlier one's.
        self.thread = next((each for each in known if not isinstance(each, _Dummy)), None)


_here = _Here()


class Caller:
    """The thread, and the asyncio task in it if there is one, that this was made in."""

    __slots__ = ("_mark", "_task")

    def __init__(self) -> None:
        self._mark = weakref.ref(_here.mark)
        task = current_task()
        self._task = None if task is None else weakref.ref(task)

    @property
    def is_current(self) -> bool:
        """Whether the running code is this caller."""
        if self._task is not None:
            task = self._task()
            return task is not None and task is current_task()
        return self._mark() is _here.mark and current_task() is None

    @property
    def is_gone(self) -> bool:
        """Whether the thread has ended, or the task is done or will never be."""
        if self._task is not None:
            task = self._task()
            return task is None or task.done() or task.get_loop().is_closed()
        return self._mark() is None


def current_task() -> asyncio.Task[Any] | None:
    """Return the asyncio task that is running in this thread, or None."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def thread_number() -> int:
    """Return a number for the running thread that no other thread of this process ever has."""
    return _here.mark.number


def thread_name() -> str:
    """Return the name of the running thread; one that ``threading`` has not started has its number only."""
    thread = _here.thread
    return f"thread {threading.get_native_id()}" if thread is None else thread.name
