"""Cancelling the body of an ``async with`` when its lease is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django_distlock.exceptions import LockNotHeld

if TYPE_CHECKING:
    from .lease import Lease


def is_loss(error: BaseException, lease: Lease) -> bool:
    """Return True if *error* is the loss of *lease*, alone or in an exception group with nothing else, as of a TaskGroup."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_loss(each, lease) for each in error.exceptions)
    return isinstance(error, LockNotHeld) and error.name == lease.name and lease.lost


class Cancelling:
    """One block: an ``asyncio.timeout()``, with its rules for cancellation, that ends when the lease does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)

    async def begin(self) -> None:
        """Begin in the task that will run the body; if the body never begins, nothing need be undone."""
        await self._timeout.__aenter__()

    def watch(self, lease: Lease) -> None:
        lease.on_lost(self._on_lost)

    async def end(self, lease: Lease, *error: Any) -> LockNotHeld | None:
        """End the block, whose body has raised *error*; return the loss to raise instead, or None."""
        lease.off_lost(self._on_lost)
        is_ended = isinstance(error[1], BaseExceptionGroup) and is_loss(error[1], lease)
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:
            is_ended = True
        if is_ended:
            try:
                lease.check()
            except LockNotHeld as lost:
                return lost
        return None

    def _on_lost(self, reason: str) -> None:
        """Cancel the body; called by the thread that notices the loss, when the loop may be closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        with suppress(RuntimeError):  # the block has ended
            self._timeout.reschedule(self._loop.time())
