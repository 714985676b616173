"""The way to one Redis, or to the master that Sentinels name, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from redis.asyncio.connection import ConnectionPool as AsyncConnectionPool
from redis.asyncio.sentinel import Sentinel as AsyncSentinel, SentinelConnectionPool as AsyncMaster
from redis.connection import ConnectionPool
from redis.exceptions import ResponseError
from redis.sentinel import Sentinel, SentinelConnectionPool

from django_distlock.engine.bells import timeout
from django_distlock.exceptions import LockBackendError

from .conversation import ask, atalk, talk
from .opened import Opened
from .wire import aread, heard, listening, patience, read, unanswered, unreachable

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from .conversation import Command, Conversation
    from .sources import Source

_T = TypeVar("_T")


class PoolLink:
    """One Redis, or the master that Sentinels name."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._where = source.where
        self._pools = Opened(partial(_sync_pool, source), _close_idle)
        self._pools.take()  # which tells of wrong settings

    def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse()."""
        with self._lent() as connection:
            return talk(conversation, lambda commands: self._exchange(connection, commands))

    def hear(self, bells: Sequence[str], seconds: float) -> str | None:
        """See Link.hear()."""
        with self._lent() as connection, unanswered(self._alias, self._where):
            connection.send_command(*listening(bells, seconds))
            if connection.can_read(timeout=patience(seconds)):
                return heard(self._alias, self._where, read(connection))
            connection.disconnect()
            return None

    def keys(self, pattern: str) -> Iterator[str]:
        """See Link.keys()."""
        cursor = b"0"
        while True:
            answer = self.converse(ask(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)))
            if isinstance(answer, ResponseError):
                raise LockBackendError(self._alias, f"{self._where} refused SCAN: {answer}")
            cursor, found = answer
            yield from (key.decode(errors="backslashreplace") for key in found)
            if cursor == b"0":
                return

    def server_of(self, key: str) -> Hashable:
        """See Link.server_of(): there is but one."""
        return None

    def close(self) -> None:
        """See Link.close()."""
        self._pools.close()

    @contextmanager
    def _lent(self) -> Iterator[Any]:
        pool = self._pools.take()
        with unreachable(self._alias, self._where):
            connection = pool.get_connection()
        try:
            yield connection
        except BaseException:
            # What was asked may still be answered: to nobody.
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
            self._pools.give_back(pool)

    def _exchange(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        with unanswered(self._alias, self._where):
            connection.send_packed_command(connection.pack_commands(commands))
            return [read(connection) for _ in commands]


class AsyncPoolLink:
    """See PoolLink. The time limits are ours: the driver's may swallow a cancellation (Python 3.11)."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._pool = _async_pool(source)

    async def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse()."""
        with unreachable(self._alias, self._source.where):
            async with timeout(self._source.connect_timeout + self._source.io_timeout):
                connection = await self._pool.get_connection()
        try:
            return await atalk(conversation, lambda commands: self._exchange(connection, commands))
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)

    async def hear(self, bells: Sequence[str], seconds: float) -> str | None:
        """See Link.hear()."""
        with suppress(TimeoutError):
            async with timeout(patience(seconds)):
                answer = await self.converse(ask(listening(bells, seconds)))
                return heard(self._alias, self._source.where, answer)
        return None

    async def aclose(self) -> None:
        """See Link.close()."""
        await self._pool.disconnect()
        if isinstance(self._pool, AsyncMaster):
            for sentinel in self._pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    async def _exchange(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        with unanswered(self._alias, self._source.where):
            async with timeout(self._source.io_timeout):
                await connection.send_packed_command(connection.pack_commands(commands))
                return [await aread(connection) for _ in commands]


# Their classes are only half typed.


class _AsyncMaster(AsyncMaster):
    """Asks the Sentinels once for all tasks that connect at the moment: a thousand questions would take too long."""

    _asking: asyncio.Task[Any] | None = None

    async def get_master_address(self) -> Any:
        """See SentinelConnectionPool."""
        if self._asking is None:
            asking: Any = super().get_master_address()  # type: ignore[no-untyped-call] # as said
            self._asking = asyncio.create_task(asking)
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[Any]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()  # those who wait for it are told


def _sync_pool(source: Source) -> Any:
    if not source.sentinels:
        return ConnectionPool(**source.connection)
    settings: Any = source.sentinel_settings
    sentinel: Any = Sentinel(source.sentinels, sentinel_kwargs=settings)  # type: ignore[no-untyped-call] # as above
    return SentinelConnectionPool(source.service, sentinel, **source.connection)  # type: ignore[no-untyped-call] # as above


def _close_idle(pool: Any) -> None:
    # Those to sentinels end with the pool.
    pool.disconnect(inuse_connections=False)


def _async_pool(source: Source) -> Any:
    if not source.sentinels:
        return AsyncConnectionPool(**source.async_connection)
    settings: Any = source.async_sentinel_settings
    sentinel: Any = AsyncSentinel(source.sentinels, sentinel_kwargs=settings)  # type: ignore[no-untyped-call] # as above
    return _AsyncMaster(source.service, sentinel, **source.async_connection)  # type: ignore[no-untyped-call] # as above
