"""What one waiter sleeps on until another thread rings it."""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol


class Bell(Protocol):
    """Can be rung from any thread; a ring before the wait is not lost."""

    def ring(self) -> bool:
        """Wake the waiter; return whether it is there to be woken."""


class ThreadBell:
    """A bell for a thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> bool:
        """Wake the waiter."""
        self._event.set()
        return True

    def wait(self, seconds: float | None) -> bool:
        """Sleep until rung or *seconds* are over; return whether it was rung, and be silent again."""
        rung = self._event.wait(seconds)
        self._event.clear()
        return rung


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
