"""Who takes a lock: which process, which thread, which task; and what begins anew in a forked child."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import sys
import threading
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable
from functools import cached_property
from types import FrameType
from typing import Any

from asgiref.sync import AsyncToSync, SyncToAsync

#: Frames of a task that awaits a thread, and of that thread: both have the ``task_context`` of the call.
_AWAITS_THREAD = SyncToAsync.__call__.__code__
_RUNS_IN_THREAD = SyncToAsync.thread_handler.__code__
#: Frames of a thread that waits for a task, and which of their variables is what the task runs.
_AWAITS_TASK = {
    AsyncToSync.__call__.__code__: "awaitable",
    asyncio.Runner.run.__code__: "coro",
}
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_GENERATOR
_Dummy = threading._DummyThread  # noqa: SLF001 - there is no other sign of one
_numbers = itertools.count(1)


class Forks:
    """Calls in each forked child what was asked for: at once; or at its first lock, if C code forked, as in uWSGI."""

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


class _Mark:
    """Stands for the running thread, whoever started it: a later one may have the same ident.

    threading.current_thread() would invent a thread where it knows none, and take a new one for an
    old one that had its ident.
    """

    __slots__ = ("__weakref__", "number", "thread")

    def __init__(self) -> None:
        self.number = next(_numbers)
        ident = threading.get_ident()
        known = [thread for thread in threading.enumerate() if thread.ident == ident]
        #: None if ``threading`` has not started it; the dummy it may have may be an earlier one's.
        self.thread = next((each for each in known if not isinstance(each, _Dummy)), None)


class _Here(threading.local):
    """Has the mark of the running thread, which is gone with it."""

    def __init__(self) -> None:
        self.mark = _Mark()
        #: What this thread tells people of itself, by purpose.
        self.holders: dict[str, Any] = {}

    @cached_property
    def caller(self) -> Caller:
        return Caller()


here = _Here()


class Caller:
    """The thread, and the asyncio task in it if there is one, that this was made in."""

    __slots__ = ("_hash", "_ident", "_mark", "_task")

    def __init__(self) -> None:
        self._mark = weakref.ref(here.mark)
        self._ident = threading.get_ident()
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
        # Where threads are greenlets, what is theirs may outlive them.
        return mark is None or (mark.thread is not None and not mark.thread.is_alive())

    @property
    def waits_for_us(self) -> bool:
        """Whether this caller stands still until the running code is done.

        Known where asgiref, or asyncio.run(), has brought us from a task to a thread or back: it
        stands in one frame on each side meanwhile, with an object of this very call among its variables.
        """
        if self.is_gone:
            return False
        # Those of this thread from our caller on: a function that had its own would be a circle.
        stacks = {**sys._current_frames(), threading.get_ident(): sys._getframe(1)}  # noqa: SLF001
        task = self._task and self._task()
        work = task.get_coro() if task else _awaited_by_thread(stacks.get(self._ident))
        while work is not None and not _is_run_by_us(work):
            if (call := _awaited_by(work)) is None:
                return False
            where = ((ident, _standing_in(top, call)) for ident, top in stacks.items())
            ident, frame = next((found for found in where if found[1]), (0, None))
            if frame is None or frame.f_code is _RUNS_IN_THREAD:
                # The call itself runs, or no thread has begun it: here it runs, if there is no task in between.
                is_here = frame is not None and ident == threading.get_ident()
                return is_here and current_task() is None
            work = frame.f_locals.get(_AWAITS_TASK[frame.f_code])
        return work is not None


def _awaited_by_thread(frame: FrameType | None) -> Any:
    """Return what a thread waits for in that innermost *frame* or around it; None if it runs itself."""
    while frame is not None and frame.f_code is not _RUNS_IN_THREAD:
        if frame.f_code in _AWAITS_TASK:
            return frame.f_locals.get(_AWAITS_TASK[frame.f_code])
        frame = frame.f_back
    return None


def _awaited_by(work: Any) -> Any:
    """Return what tells the call of a thread that the coroutine *work* awaits from all others, or None."""
    # The thread may have begun before the task has come to wait for it; then it does so meanwhile.
    frame = _suspended_in(work) or _running_in(work) or _suspended_in(work)
    return None if frame is None else frame.f_locals.get("task_context")


def _suspended_in(work: Any) -> FrameType | None:
    while work is not None:
        if getattr(work, "cr_code", None) is _AWAITS_THREAD:
            return work.cr_frame  # type: ignore[no-any-return]
        work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
    return None


def _running_in(work: Any) -> FrameType | None:
    """Return the frame in which *work* is about to await a thread: only coroutines are between the two."""
    for ident, top in sys._current_frames().items():  # noqa: SLF001
        frame = None if ident == threading.get_ident() else top
        while frame is not None and frame.f_code is not _AWAITS_THREAD:
            frame = frame.f_back
        outer = frame
        while outer is not None and outer.f_code.co_flags & _COROUTINE:
            if outer is work.cr_frame:
                return frame
            outer = outer.f_back
    return None


def _standing_in(frame: FrameType | None, call: Any) -> FrameType | None:
    """Return where the thread stands that runs *call*: in what it awaits itself, else in the call."""
    standing = None
    while frame is not None:
        if frame.f_code in _AWAITS_TASK:
            standing = frame
        elif frame.f_code is _RUNS_IN_THREAD and frame.f_locals.get("task_context") is call:
            return standing or frame
        frame = frame.f_back
    return None


def _is_run_by_us(work: Any) -> bool:
    """Return whether the running task runs the coroutine *work*; asgiref may have wrapped it once."""
    task = current_task()
    root: Any = task and task.get_coro()
    is_wrapper = getattr(root, "cr_code", None) in AsyncToSync.__call__.__code__.co_consts
    return root is not None and (
        root is work or (is_wrapper and root.cr_frame.f_locals.get("awaitable") is work)
    )


def current_caller() -> Caller:
    return here.caller if _get_running_loop() is None else Caller()


def current_task() -> asyncio.Task[Any] | None:
    return None if _get_running_loop() is None else asyncio.current_task()


def thread_number() -> int:
    """Return a number for the running thread that no other thread of this process ever has."""
    return here.mark.number


def thread_name() -> str:
    thread = here.mark.thread
    return f"thread {threading.get_native_id()}" if thread is None else thread.name
