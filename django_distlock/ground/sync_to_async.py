"""Finds out whether a caller is suspended until the running code is done, by what suspended coroutines await.

They are read in the thread of their event loop, where none of them can go on meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future
from contextvars import Context, ContextVar
from functools import partial
from types import CellType, CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from asgiref.sync import AsyncToSync, SyncToAsync

from .caller import Caller, current_task

if TYPE_CHECKING:
    from collections.abc import Callable

    Task = asyncio.Task[Any]

#: The code of a coroutine that awaits a call in a thread.
_AWAITS_CALL = SyncToAsync.__call__.__code__
#: The code of the tasks that async_to_sync() begins; those of its constants run in an event loop of their own.
_BEGUN_BY_ASGIREF = {
    AsyncToSync.main_wrap.__code__,
    *(each for each in AsyncToSync.__call__.__code__.co_consts if isinstance(each, CodeType)),
}
#: One step of an async generator, as ``anext()`` returns it: the generator is no attribute, but its first referent.
_OF_GENERATOR = {"async_generator_asend", "async_generator_athrow", "anext_awaitable"}
#: Seconds that a busy event loop has to say what its tasks await.
LATE = 2.0

_sign: ContextVar[object] = ContextVar("distlock_sign")


class _Running(NamedTuple):
    """The running code, and what leads to it from a coroutine that awaits it."""

    #: None in a thread without an event loop.
    task: Task | None
    #: The list that asgiref makes for each call in a thread; that of an inner call stays when this is over.
    call: object
    #: What is in the context of this code, if it is a call in a thread, or of the call that waits for its task.
    sign: object
    #: The ident of the thread that waits in async_to_sync().
    waiting_thread: int | None

    def thread_before(self, task: Task) -> int | None:
        """Return the ident of the thread that waits for *task* of this thread's event loop; None if it is a separate task."""
        if _is_begun_by_asgiref(task):
            return self.waiting_thread
        callbacks: Any = task._callbacks or ()  # noqa: SLF001
        names = [getattr(callback, "__qualname__", "") for callback, _ in callbacks]
        is_of_run = any("run_until_complete" in name for name in names)  # uvloop's, too
        return threading.get_ident() if is_of_run else None

    def is_awaited_by_caller(self, caller: Caller) -> bool:
        if (task := caller.task) is not None:
            return self.is_awaited_by(task)
        tasks = (each for each in asyncio.all_tasks() if self.thread_before(each) == caller.ident)
        return any(map(self.is_awaited_by, tasks))

    def is_awaited_by(self, task: Task) -> bool:
        """Return whether *task* is this code, or awaits it in a thread."""
        if task is self.task:
            return True
        work: Any = task.get_coro()
        while work is not None and getattr(work, "cr_code", None) is not _AWAITS_CALL:
            work = _inside(work)
        # Its local variables: the call's list of tasks and its context.
        for each in gc.get_referents(work):
            variable = each.cell_contents if isinstance(each, CellType) else each
            if variable is self.call or (isinstance(variable, Context) and self._is_in(variable)):
                return True
            if isinstance(variable, list) and any(map(self.is_awaited_by, variable)):
                return True
        return False

    def _is_in(self, context: Context) -> bool:
        values = [*context.values()]
        inside = gc.get_referents(*values)  # asgiref may keep its executor in a dict in an object
        return any(each is self.sign for each in (*values, *inside, *gc.get_referents(*inside)))


def waits_for_us(caller: Caller) -> bool:
    """Return True if *caller* is suspended until the running code is done.

    It is if asgiref, or ``asyncio.run()``, has called this code from its task in a thread, or from its thread in
    a task. TimeoutError in a thread if the event loop is too busy to answer.
    """
    task, call = current_task(), getattr(SyncToAsync.threadlocal, "task_context", None)
    executor, sign = getattr(AsyncToSync.executors, "current", None), object()
    if task is not None and _is_begun_by_asgiref(task):
        call = sign = executor
    us = _Running(task, call, sign, executor and executor._work_thread.ident)  # noqa: SLF001
    if caller.is_gone or (call if task is None else us.thread_before(task)) is None:
        return False
    asked = caller.task or task
    loop = asked.get_loop() if asked else SyncToAsync.threadlocal.main_event_loop
    token = _sign.set(sign)
    try:
        return _ask(loop, partial(us.is_awaited_by_caller, caller))
    except TimeoutError:
        if task is None:
            raise
        return False
    finally:
        _sign.reset(token)


def _ask(loop: asyncio.AbstractEventLoop, look: Callable[[], bool]) -> bool:
    """Return what *look* returns in the thread of *loop*; TimeoutError if that is late."""
    if (task := current_task()) is not None and task.get_loop() is loop:
        return look()
    answer = Future[bool]()
    loop.call_soon_threadsafe(lambda: answer.set_result(look()))
    return answer.result(LATE)


def _is_begun_by_asgiref(task: Task) -> bool:
    return getattr(task.get_coro(), "cr_code", None) in _BEGUN_BY_ASGIREF


def _inside(work: Any) -> Any:
    """Return what the suspended *work* awaits, or the async generator that it is one step of; None if neither."""
    if type(work).__name__ in _OF_GENERATOR:
        return gc.get_referents(work)[0]
    for attribute in ("cr_await", "gi_yieldfrom", "ag_await"):
        if (inner := getattr(work, attribute, None)) is not None:
            return inner
    return None
