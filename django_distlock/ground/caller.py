"""The caller that acquires a lock: its thread and task; and callbacks that run in a forked child."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable
from functools import cached_property
from typing import Any

from .mutexes import new_mutex

_Dummy = threading._DummyThread  # noqa: SLF001 - nothing else marks a dummy thread


class Forks:
    """Runs callbacks in each forked child: right after ``os.fork()``, or at its first lock if C code forked (uWSGI)."""

    def __init__(self) -> None:
        self._mutex = new_mutex()
        #: The process in which the callbacks have run.
        self.pid = os.getpid()
        self._callbacks: list[Callable[[], object]] = []

    def in_child(self, callback: Callable[[], object]) -> None:
        self._callbacks.append(callback)

    def notice(self) -> None:
        """Run the callbacks if this is a forked child in which they have not run yet; otherwise only compare pids."""
        if os.getpid() != self.pid:
            with self._mutex:
                if os.getpid() != self.pid:
                    self._start_over()

    def start_over(self) -> None:
        """Run the callbacks in a child that Python itself has forked."""
        # A thread of the parent, which does not exist here, may hold the mutex.
        self._mutex = new_mutex()
        self._start_over()

    def _start_over(self) -> None:
        for callback in self._callbacks:
            callback()
        self.pid = os.getpid()


forks = Forks()
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=forks.start_over)


class _Mark:
    """The identity of the running thread: its ident may be used again by a later thread.

    threading.current_thread() makes a dummy for a thread that it does not know, and returns an old dummy for a
    new thread with the same ident.
    """

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        ident = threading.get_ident()
        known = [thread for thread in threading.enumerate() if thread.ident == ident]
        #: None if ``threading`` has not started the thread; a dummy may belong to an earlier thread.
        self.thread = next((each for each in known if not isinstance(each, _Dummy)), None)


class _Here(threading.local):
    """Keeps the mark of the running thread, and drops it with the thread."""

    def __init__(self) -> None:
        self.mark = _Mark()
        #: The holders of this thread, by purpose.
        self.holders: dict[str, Any] = {}

    @cached_property
    def caller(self) -> Caller:
        return Caller()


here = _Here()


class Caller:
    """The thread, and the asyncio task if there is one, in which this object was made."""

    __slots__ = ("_hash", "_mark", "_task", "ident", "within")

    def __init__(self, within: object = None) -> None:
        #: The executor of async_to_sync(), if the thread waits there for a task and runs this code meanwhile.
        self.within = within
        self._mark = weakref.ref(here.mark)
        #: The ident of the thread.
        self.ident = threading.get_ident()
        task = current_task()
        self._task = None if task is None else weakref.ref(task)
        self._hash = hash((self._mark, self._task))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Caller):
            return NotImplemented
        return self._task == other._task and self._mark == other._mark

    def __hash__(self) -> int:
        return self._hash

    @property
    def task(self) -> asyncio.Task[Any] | None:
        """The task; None if there was none, or it no longer exists."""
        return None if self._task is None else self._task()

    @property
    def is_current(self) -> bool:
        if self._task is not None:
            task = self._task()
            return task is not None and task is current_task()
        return self._mark() is here.mark and current_task() is None

    @property
    def is_gone(self) -> bool:
        if self._task is not None:
            task = self._task()
            return task is None or task.done() or task.get_loop().is_closed()
        mark = self._mark()
        # The thread-locals of greenlets may outlive these.
        return mark is None or (mark.thread is not None and not mark.thread.is_alive())


def current_caller() -> Caller:
    return here.caller if _get_running_loop() is None else Caller()


def current_task() -> asyncio.Task[Any] | None:
    return None if _get_running_loop() is None else asyncio.current_task()


def runs_foreign_tasks() -> bool:
    """Return True if an async library other than asyncio, such as trio, runs tasks in this thread.

    All these tasks look like one caller, the thread.
    """
    sniffio = sys.modules.get("sniffio")
    return sniffio is not None and sniffio.thread_local.name not in {None, "asyncio"}


def thread_name() -> str:
    thread = here.mark.thread
    return f"thread {threading.get_native_id()}" if thread is None else thread.name
