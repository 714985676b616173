"""A connection to one of the servers that all tasks of an event loop share."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.asyncio.connection import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError

from django_distlock.backends.redis.wire import aread

from .nodes import DEBT, DEBT_SECONDS

if TYPE_CHECKING:
    from django_distlock.backends.redis.scripts import Call
    from django_distlock.backends.redis.sources import Source

LOST = "the connection was lost"
#: Rounds of the event loop from the arrival of an answer to its reader, and some more.
STEPS = 5


class TaskLine:
    """Questions are sent as they come, and answered in that order; nobody may be waiting for an answer any more.

    So what is sent after a question that timed out is carried out after it, whenever that is.
    """

    def __init__(self, source: Source) -> None:
        # Whoever asks has a time limit of its own, and is not the one who reads.
        pool: Any = ConnectionPool(**{**source.async_connection, "socket_timeout": None})
        self._connection: Any = pool.make_connection()
        self._limit = source.connect_timeout + source.io_timeout
        self._opening: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()

    async def open(self) -> None:
        """Connect if need be; whoever comes meanwhile waits for the same."""
        if self._opening is None and not await self._is_fit():
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(self._opened)
        if self._opening is not None:
            # One that gives up must not end it for the others.
            await asyncio.shield(self._opening)

    async def ask(self, call: Call, within: float) -> Any:
        """Send a script, and return the answer; TimeoutError if there is none after *within* seconds."""
        async with asyncio.timeout(within):
            future = await self._send(call)
        await asyncio.wait({future}, timeout=within)
        # An event loop that was held up sees that time is over before it has read what has arrived.
        for _ in range(STEPS):
            if future.done():
                return future.result()
            await asyncio.sleep(0)
        raise TimeoutError

    async def _send(self, call: Call) -> asyncio.Future[Any]:
        if not self._connection.is_connected:
            raise RedisConnectionError(LOST)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((loop.time(), future))
        try:
            packed = self._connection.pack_command(*call.by_text)
            await self._connection.send_packed_command(packed, check_health=False)
        except BaseException as error:
            # Which answer belongs to which question is not known any more.
            await self._break(error)
            raise
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        return future

    async def aclose(self) -> None:
        """Close it."""
        for task in (self._opening, self._reading):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._break(None)

    async def _is_fit(self) -> bool:
        if not self._connection.is_connected:
            return False
        # An idle connection that the other end has closed, or one that is silent for too long.
        is_closed = self._connection._reader.at_eof()  # noqa: SLF001 - redis-py's own names for it change
        oldest = self._waiting[0][0] if self._waiting else math.inf
        is_late = asyncio.get_running_loop().time() - oldest > DEBT_SECONDS
        if not (is_closed or is_late or len(self._waiting) > DEBT):
            return True
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        await self._break(None)
        return False

    async def _connect(self) -> None:
        async with asyncio.timeout(self._limit):
            await self._connection.connect()

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # those who waited for it have seen it

    async def _read(self) -> None:
        try:
            while self._waiting:
                answer = await aread(self._connection)
                _, future = self._waiting.popleft()
                if not future.done():
                    future.set_result(answer)
        except Exception as error:  # noqa: BLE001 - who asked is told
            await self._break(error)
        finally:
            if self._reading is asyncio.current_task():
                self._reading = None

    async def _break(self, error: BaseException | None) -> None:
        waiting, self._waiting = self._waiting, deque()
        for _, future in waiting:
            if not future.done():
                lost = RedisConnectionError(LOST)
                lost.__cause__ = error
                future.set_exception(lost)
                future.exception()
        with suppress(Exception):
            await self._connection.disconnect(nowait=True)
