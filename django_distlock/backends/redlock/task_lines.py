"""A connection to one of the servers that all tasks of an event loop share."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.asyncio.connection import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError

from django_distlock.backends.redis.connections import aread
from django_distlock.engine import clock
from django_distlock.engine.bells import timeout

from .nodes import DEBT, DEBT_SECONDS

if TYPE_CHECKING:
    from django_distlock.backends.redis.scripts import Call
    from django_distlock.backends.redis.sources import Source

LOST = "the connection was lost"
#: Parts in which a time limit is waited for: an event loop that was held up reads what has arrived between them.
PARTS = 5


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
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._heard = 0
        # Answers that nobody waits for any more; whether, and since when, none has come for them.
        self._owed = 0
        self._is_silent = False
        self._since = 0.0

    async def open(self, within: float) -> None:
        """Connect if need be; whoever comes meanwhile waits for the same. TimeoutError after *within* seconds."""
        if self._opening is None and not await self._is_fit():
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(self._opened)
        if (opening := self._opening) is not None:
            # One that gives up must not end it for the others.
            if not await _is_done(opening, within):
                raise TimeoutError
            opening.result()

    async def ask(self, call: Call, within: float) -> Any:
        """Send a script, and return the answer; TimeoutError if there is none after *within* seconds.

        A server that answers others meanwhile is at work: it has a second then.
        """
        future = self._send(call)
        try:
            for _ in range(max(1, round(DEBT_SECONDS / within))):
                heard = self._heard
                if await _is_done(future, within):
                    return future.result()
                if self._heard == heard:
                    break
            raise TimeoutError
        finally:
            if future.cancel():
                self._owe()

    def _send(self, call: Call) -> asyncio.Future[Any]:
        if not self._connection.is_connected:
            raise RedisConnectionError(LOST)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        # Not the connection's own way to send: it waits while others are sending, and whoever gives up
        # meanwhile is not to leave half a question.
        packed = self._connection.pack_command(*call.by_text)
        self._connection._writer.writelines(packed)  # noqa: SLF001 - as above
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
        # An idle connection that the other end has closed, or a server that says nothing any more.
        is_closed = self._connection._reader.at_eof()  # noqa: SLF001 - redis-py's own names for it change
        is_late = clock.wait_time() - self._since > DEBT_SECONDS
        if not (is_closed or (self._is_silent and (is_late or self._owed > DEBT))):
            return True
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        await self._break(None)
        return False

    async def _connect(self) -> None:
        async with timeout(self._limit):
            await self._connection.connect()

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # those who waited for it have seen it

    async def _read(self) -> None:
        try:
            while self._waiting:
                answer = await aread(self._connection)
                future = self._waiting.popleft()
                self._heard += 1
                self._is_silent = False
                if future.done():
                    self._owed -= 1
                else:
                    future.set_result(answer)
        except BaseException as error:
            # Also if a program cancels all tasks. Not if there is another reader, of another connection.
            if self._reading is asyncio.current_task():
                await self._break(error)
            if not isinstance(error, Exception):
                raise
        finally:
            if self._reading is asyncio.current_task():
                self._reading = None

    def _owe(self) -> None:
        if not self._is_silent:
            self._is_silent, self._since = True, clock.wait_time()
        self._owed += 1

    async def _break(self, error: BaseException | None) -> None:
        waiting, self._waiting = self._waiting, deque()
        self._owed, self._is_silent = 0, False
        for future in waiting:
            if not future.done():
                lost = RedisConnectionError(LOST)
                lost.__cause__ = error
                future.set_exception(lost)
                future.exception()
        with suppress(Exception):
            await self._connection.disconnect(nowait=True)


async def _is_done(future: asyncio.Future[Any], seconds: float) -> bool:
    """Wait for *future* for so long; without cancelling it, and longer if the event loop is held up."""
    for _ in range(PARTS):
        if future.done():
            break
        with suppress(TimeoutError):
            async with timeout(seconds / PARTS):
                await asyncio.wait({future})
    return future.done()
