"""What one waiter sleeps on until another thread rings it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Protocol


class Bell(Protocol):
    """Can be rung from any thread; a ring before the wait is not lost."""

    def ring(self) -> bool:
        """Wake the waiter; return whether it is there to be woken."""


class ThreadBell:
    """A bell for a thread.

    A plain lock, which is free once it has rung: an exception that comes from outside may end the wait
    at any moment, and finds no code of Python's in there that it could leave half done.
    """

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> bool:
        """Wake the waiter."""
        with contextlib.suppress(RuntimeError):  # it has rung already
            self._silence.release()
        return True

    def wait(self, seconds: float | None) -> bool:
        """Sleep until rung or *seconds* are over; return whether it was rung, and be silent again."""
        if seconds is None:
            return self._silence.acquire()
        return self._silence.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))


class TaskBell:
    """A bell for an asyncio task, made in the task's loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def ring(self) -> bool:
        """Wake the waiter; one whose event loop is closed is gone."""
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            return False
        return True

    async def wait(self, seconds: float | None) -> bool:
        """Sleep until rung or *seconds* are over; return whether it was rung, and be silent again."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        finally:
            self._event.clear()
        return True
