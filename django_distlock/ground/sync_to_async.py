"""Finds out whether a caller is suspended until the running code is done, by what suspended coroutines await.

The coroutines are read in the thread of their event loop, where none of them can go on meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from concurrent.futures import Future
from contextvars import Context
from functools import partial
from types import CellType, CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from asgiref.current_thread_executor import CurrentThreadExecutor
from asgiref.sync import AsyncToSync, SyncToAsync

from .caller import Caller, current_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Task = asyncio.Task[Any]

#: The code of a coroutine that awaits a call in a thread, and of the function that the thread runs.
_AWAITS_CALL = SyncToAsync.__call__.__code__
_RUNS_CALL = SyncToAsync.thread_handler.__code__
#: The code of the tasks that async_to_sync() begins. Functions inside its code run in a new event loop, and await
#: main_wrap().
_MAIN_WRAP = AsyncToSync.main_wrap.__code__
_BEGUN_BY_ASGIREF = {
    _MAIN_WRAP,
    *(each for each in AsyncToSync.__call__.__code__.co_consts if isinstance(each, CodeType)),
}
#: The types of one step of an async generator, as ``anext()`` returns it: its first referent is the generator.
_OF_GENERATOR = {"async_generator_asend", "async_generator_athrow", "anext_awaitable"}
#: Seconds that a busy event loop has for the answer what its tasks await.
LATE = 2.0


class _Running(NamedTuple):
    """The running code, and the object that connects it with a coroutine that awaits it."""

    #: None in a thread without an event loop.
    task: Task | None
    #: The object that asgiref makes for each call: a list for a call in a thread; for a call in a task, the executor
    #: of the thread that waits.
    call: object

    def thread_before(self, task: Task, within: object = None) -> int | None:
        """Return the ident of the thread that waits for *task* of this thread's event loop; None if no thread does.

        None, too, if the thread now runs the code of a Caller with this *within*.
        """
        if _is_begun_by_asgiref(task):
            executor: Any = self.call if task is self.task else next(_executors_of(task), None)
            if executor is None or executor in _with_outer(within):
                return None
            return executor._work_thread.ident  # type: ignore[no-any-return]  # noqa: SLF001
        callbacks: Any = task._callbacks or ()  # noqa: SLF001
        names = [getattr(callback, "__qualname__", "") for callback, _ in callbacks]
        is_of_run = any("run_until_complete" in name for name in names)  # uvloop's, too
        return threading.get_ident() if is_of_run else None

    def is_awaited_by_caller(self, caller: Caller) -> bool:
        if (task := caller.task) is not None:
            return self.is_awaited_by(task)
        every, thread_before = asyncio.all_tasks(), self.thread_before
        tasks = (each for each in every if thread_before(each, caller.within) == caller.ident)
        return any(map(self.is_awaited_by, tasks))

    def is_awaited_by(self, task: Task) -> bool:
        """Return True if *task* is the running code, or awaits the thread that runs it."""
        if task is self.task:
            return True
        for each in _variables(_suspended_in(task, _AWAITS_CALL)):
            if each is self.call or (isinstance(each, Context) and self.call in _executors(each)):
                return True
            if isinstance(each, list) and any(map(self.is_awaited_by, each)):
                return True
        return False


def waits_for_us(caller: Caller) -> bool:
    """Return True if *caller* is suspended until the running code is done.

    That is so if asgiref or ``asyncio.run()`` has called this code: in a thread for the caller's task, or in a task
    for the caller's thread. TimeoutError in a thread if the event loop is too busy to answer.
    """
    task, (call, loop) = current_task(), _call_here()
    if task is not None and _is_begun_by_asgiref(task):
        call = getattr(AsyncToSync.executors, "current", None)
    us = _Running(task, call)
    if caller.is_gone or (call if task is None else us.thread_before(task)) is None:
        return False
    asked = caller.task or task
    try:
        return _ask(asked.get_loop() if asked else loop, partial(us.is_awaited_by_caller, caller))
    except TimeoutError:
        if task is None:
            raise
        return False


def entering_caller() -> Caller:
    """Return the Caller for running code that enters a lock again."""
    return Caller(getattr(AsyncToSync.executors, "current", None))


def _with_outer(executor: Any) -> Iterator[object]:
    while executor is not None:
        yield executor
        executor = executor._old_executor  # noqa: SLF001


def _call_here() -> tuple[object, Any]:
    """Return asgiref's list for the call that this thread runs, and the call's event loop; None for both without a call."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - what asgiref notes in the thread outlives the call
    while frame is not None and frame.f_code is not _RUNS_CALL:
        frame = frame.f_back
    return (frame.f_locals["task_context"], frame.f_locals["loop"]) if frame else (None, None)


def _ask(loop: asyncio.AbstractEventLoop, look: Callable[[], bool]) -> bool:
    """Call *look* in the thread of *loop*, and return its result; TimeoutError if that takes long."""
    if (task := current_task()) is not None and task.get_loop() is loop:
        return look()
    answer = Future[bool]()
    try:
        loop.call_soon_threadsafe(lambda: answer.set_result(look()))
    except RuntimeError:  # the loop is closed
        return False
    return answer.result(LATE)


def _is_begun_by_asgiref(task: Task) -> bool:
    return getattr(task.get_coro(), "cr_code", None) in _BEGUN_BY_ASGIREF


def _suspended_in(task: Task, code: CodeType) -> Any:
    """Return the coroutine with this *code* in which *task* is suspended, or None."""
    work: Any = task.get_coro()
    while work is not None and getattr(work, "cr_code", None) is not code:
        work = _inside(work)
    return work


def _variables(work: Any) -> Iterator[object]:
    for each in gc.get_referents(work):
        yield each.cell_contents if isinstance(each, CellType) else each


def _executors_of(task: Task) -> Iterator[CurrentThreadExecutor]:
    """Yield the executors of the thread that waits for *task*, a task that asgiref has begun."""
    for each in _variables(_suspended_in(task, _MAIN_WRAP)):
        for context in each if isinstance(each, list) else ():
            if isinstance(context, Context):
                yield from _executors(context)


def _executors(context: Context) -> list[CurrentThreadExecutor]:
    """Return the executors that asgiref keeps in *context*, perhaps in a dict of an object there."""
    values = [*context.values()]
    inside = gc.get_referents(*values)
    found = (*values, *inside, *gc.get_referents(*inside))
    return [each for each in found if isinstance(each, CurrentThreadExecutor)]


def _inside(work: Any) -> Any:
    """Return what the suspended *work* awaits, or for one step of an async generator, the generator; otherwise None."""
    if type(work).__name__ in _OF_GENERATOR:
        return gc.get_referents(work)[0]
    for attribute in ("cr_await", "gi_yieldfrom", "ag_await"):
        if (inner := getattr(work, attribute, None)) is not None:
            return inner
    return None
