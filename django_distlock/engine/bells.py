"""Bells: a waiter sleeps on its bell until another thread rings it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from django_distlock.ground import clock

#: Most seconds by which the clock of an event loop may differ from ours.
SAME = 1.0


class Bell(Protocol):
    """A waiter sleeps on it until any thread rings it; a ring before the wait is not lost."""

    #: Whether other code may keep the waiter from going on, by blocking its event loop.
    may_stall: bool

    def ring(self) -> bool:
        """Wake the waiter; return False if it no longer exists."""


class ThreadBell:
    """A bell for a thread.

    The bell is a plain lock, which is free after a ring. Locks are written in C, so an asynchronous exception
    can end the wait at any moment without leaving it half done.
    """

    may_stall = False

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> bool:
        with contextlib.suppress(RuntimeError):  # the bell has rung already
            self._silence.release()
        return True

    def wait(self, seconds: float | None) -> bool:
        """Sleep until rung, at most *seconds*; return whether it was rung, and reset the bell."""
        if seconds is None:
            return self._silence.acquire()
        return self._silence.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))


class TaskBell:
    """A bell for an asyncio task, made in the task's loop."""

    may_stall = True

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def ring(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            return False
        return True

    async def wait(self, seconds: float | None) -> bool:
        """Sleep until rung, at most *seconds*; return whether it was rung, and reset the bell."""
        try:
            async with timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            # A late event loop may have found the ring and the timeout at once.
            return self._event.is_set()
        finally:
            self._event.clear()
        return True


def timeout(seconds: float | None) -> AbstractAsyncContextManager[object]:
    """Return an asyncio.timeout() by our clock, which also works if a test has frozen the event loop's clock."""
    if seconds is None or abs(asyncio.get_running_loop().time() - clock.wait_time()) < SAME:
        return asyncio.timeout(seconds)
    return _timeout_by_thread(seconds)


@contextlib.asynccontextmanager
async def _timeout_by_thread(seconds: float) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as scope:
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), _ring_in, [loop, scope])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _ring_in(loop: asyncio.AbstractEventLoop, scope: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_end, scope)


def _end(scope: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # the block has already ended
        scope.reschedule(-1.0)
