"""What asyncio code keeps from call to call belongs to its event loop, and ends with it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable


class Closable(Protocol):
    """What an event loop can have one of."""

    async def aclose(self) -> None:
        """Let go of what it holds."""


_C = TypeVar("_C", bound=Closable)


class PerLoop(Generic[_C]):
    """One of what *make* makes for each event loop, closed with it."""

    def __init__(self, make: Callable[[], _C]) -> None:
        self._make = make
        self._made: dict[asyncio.AbstractEventLoop, tuple[_C, AsyncGenerator[None]]] = {}

    async def get(self) -> _C:
        """Return that of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            await self._open(loop)
        return self._made[loop][0]

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        for closed in [each for each in list(self._made) if each.is_closed()]:
            self._made.pop(closed, None)
        made = self._make()
        # The one thing that every event loop ends in order before it is closed: its generators.
        ending = self._close_with(loop, made)
        self._made[loop] = made, ending
        await anext(ending)

    async def _close_with(self, loop: asyncio.AbstractEventLoop, made: _C) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            self._made.pop(loop, None)
            with suppress(Exception):
                await made.aclose()
