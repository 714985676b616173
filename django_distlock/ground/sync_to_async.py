"""Finds out whether a caller is suspended until the running code is done, by the frames of asgiref and asyncio.

asgiref tells nobody which call runs in which thread, so its local variables are read; see the test of this file.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from types import FrameType
from typing import Any

from asgiref.sync import AsyncToSync, SyncToAsync

from . import clock
from .caller import Caller, current_task

#: The code of a task that awaits a thread, and of that thread: both frames have the call's ``task_context``.
_AWAITS_THREAD = SyncToAsync.__call__.__code__
_RUNS_IN_THREAD = SyncToAsync.thread_handler.__code__
#: The code of a thread that waits for a task, and the variable of its frame that is the task's coroutine.
_AWAITS_TASK = {
    AsyncToSync.__call__.__code__: "awaitable",
    asyncio.Runner.run.__code__: "coro",
}
#: One step of an async generator, as ``anext()`` returns it: the generator is no attribute, but its first referent.
_OF_GENERATOR = {"async_generator_asend", "async_generator_athrow", "anext_awaitable"}
#: Seconds that a running task has to begin to await the thread that it has called, and between two looks.
LATE, PAUSE = 1.0, 0.0005


def waits_for_us(caller: Caller) -> bool:
    """Return True if *caller* is suspended until the running code is done.

    That is known if asgiref, or asyncio.run(), has called us from a task in a thread, or the other way
    round: each side then has a frame with an object of this call among its variables.
    """
    if caller.is_gone:
        return False
    # From our caller on: a function that refers to its own frame makes a cycle.
    here = sys._getframe(1)  # noqa: SLF001
    task = caller.task
    is_here = caller.ident == threading.get_ident()
    top = here if is_here else None if task else _stacks().get(caller.ident)
    work = task.get_coro() if task else _awaited_by_thread(top)
    while work is not None and not _is_run_by_us(work):
        if (call := _awaited_by(work, here)) is None:
            return False
        if (frame := _standing_in(here, call)) is not None and frame.f_code is _RUNS_IN_THREAD:
            return current_task() is None  # in no other task: the call is the running code
        if frame is None:
            # Last, as frames of threads that run change meanwhile.
            others = (_standing_in(top, call) for top in _stacks().values())
            frame = next((found for found in others if found is not None), None)
        if frame is None or frame.f_code is _RUNS_IN_THREAD:
            return False  # another thread runs it, or none has begun it
        work = frame.f_locals.get(_AWAITS_TASK[frame.f_code])
    return work is not None


def _stacks() -> dict[int, FrameType]:
    """Return the innermost frames of all other threads."""
    stacks = sys._current_frames()  # noqa: SLF001
    stacks.pop(threading.get_ident(), None)
    return stacks


def _awaited_by_thread(frame: FrameType | None) -> Any:
    """Return the coroutine that a thread with this innermost *frame* waits for; None if it does not wait."""
    while frame is not None and frame.f_code is not _RUNS_IN_THREAD:
        if frame.f_code in _AWAITS_TASK:
            return frame.f_locals.get(_AWAITS_TASK[frame.f_code])
        frame = frame.f_back
    return None


def _awaited_by(work: Any, here: FrameType) -> Any:
    """Return the identity of the call in a thread that the coroutine *work* awaits, or None.

    *here*: the innermost frame of this thread. If it runs a call, it may have begun before the task awaits it.
    """
    until = clock.wait_time() + LATE
    while True:
        is_running = getattr(work, "cr_running", False)
        if (frame := _suspended_in(work)) is not None:
            return frame.f_locals.get("task_context")
        if not (is_running and _runs_call(here)) or clock.wait_time() >= until:
            return None
        time.sleep(PAUSE)


def _runs_call(here: FrameType) -> bool:
    frame: FrameType | None = here
    while frame is not None and frame.f_code is not _RUNS_IN_THREAD:
        frame = frame.f_back
    return frame is not None


def _suspended_in(work: Any) -> FrameType | None:
    while work is not None:
        if getattr(work, "cr_code", None) is _AWAITS_THREAD:
            return work.cr_frame  # type: ignore[no-any-return]
        work = _inside(work)
    return None


def _inside(work: Any) -> Any:
    """Return what the suspended *work* awaits, or the async generator that it is one step of; None if neither."""
    if type(work).__name__ in _OF_GENERATOR:
        return gc.get_referents(work)[0]
    for attribute in ("cr_await", "gi_yieldfrom", "ag_await"):
        if (inner := getattr(work, attribute, None)) is not None:
            return inner
    return None


def _standing_in(frame: FrameType | None, call: Any) -> FrameType | None:
    """Return a frame of the thread that runs *call*: the one in which it waits for a task, else that of the call."""
    standing = None
    while frame is not None:
        if frame.f_code in _AWAITS_TASK:
            standing = frame
        elif frame.f_code is _RUNS_IN_THREAD and frame.f_locals.get("task_context") is call:
            return standing or frame
        frame = frame.f_back
    return None


def _is_run_by_us(work: Any) -> bool:
    """Return True if the running task runs the coroutine *work*; asgiref may have wrapped it once."""
    task = current_task()
    root: Any = task and task.get_coro()
    is_wrapper = getattr(root, "cr_code", None) in AsyncToSync.__call__.__code__.co_consts
    return root is not None and (
        root is work or (is_wrapper and root.cr_frame.f_locals.get("awaitable") is work)
    )
