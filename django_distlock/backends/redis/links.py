"""Ways to a Redis, for threads and for asyncio: one connection for one conversation; nothing is sent twice.

A conversation is a generator that does no I/O: it yields commands, is sent their answers, and returns a result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.asyncio.connection import ConnectionPool as AsyncConnectionPool
from redis.asyncio.sentinel import Sentinel as AsyncSentinel, SentinelConnectionPool as AsyncMaster
from redis.cluster import RedisCluster
from redis.connection import ConnectionPool
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError as RedisConnectionError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
)
from redis.sentinel import Sentinel, SentinelConnectionPool

from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, first_line

from .loops import PerLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from .sources import Source

Command = tuple[str | int | float | bytes, ...]
_T = TypeVar("_T")
Conversation = Generator[tuple[Command, ...], list[Any], _T]

#: Seconds for which a waiter listens without a look: less than half its patience.
LISTEN = 0.2
#: What drivers raise when no answer came: it may have been carried out.
_UNANSWERED = (RedisConnectionError, RedisTimeoutError, OSError)


class Link(Protocol):
    """One Redis, or a cluster of them, for threads."""

    def converse(self, conversation: Conversation[_T]) -> _T:
        """Send what it yields, each in one go and once, and return its result; an error answered is an answer."""

    def hear(self, bell: str, seconds: float) -> None:
        """Wait for up to *seconds* until something is pushed to the list *bell*.

        LockOutcomeUnknown if the connection breaks.
        """

    def keys(self, pattern: str) -> Iterator[str]:
        """Go over the keys that match."""

    def close(self) -> None:
        """Let idle connections go."""


class AsyncLink(Protocol):
    """See Link; for the tasks of one event loop."""

    async def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse()."""

    async def hear(self, bell: str, seconds: float) -> None:
        """See Link.hear()."""

    async def aclose(self) -> None:
        """See Link.close()."""


def open_link(alias: str, source: Source) -> Link:
    """Return the way to *source*; it connects when it is first used."""
    return ClusterLink(alias, source) if source.is_cluster else PoolLink(alias, source)


def open_async_link(alias: str, source: Source) -> AsyncLink:
    """See open_link()."""
    return AsyncClusterLink(alias, source) if source.is_cluster else AsyncPoolLink(alias, source)


class PoolLink:
    """One Redis, or the master that Sentinels name."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._where = source.where
        self._pool = _sync_pool(source)

    def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse()."""
        with self._lent() as connection:
            return _talk(conversation, lambda commands: self._exchange(connection, commands))

    def hear(self, bell: str, seconds: float) -> None:
        """See Link.hear()."""
        with self._lent() as connection, _unanswered(self._alias, self._where):
            connection.send_command(*_listening(bell, seconds))
            if connection.can_read(timeout=_patience(seconds)):
                _check_heard(self._alias, self._where, read(connection))
            else:
                connection.disconnect()

    def keys(self, pattern: str) -> Iterator[str]:
        """See Link.keys()."""
        cursor = b"0"
        while True:
            answer = self.converse(_ask(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)))
            if isinstance(answer, ResponseError):
                raise LockBackendError(self._alias, f"{self._where} refused SCAN: {answer}")
            cursor, found = answer
            yield from (key.decode() for key in found)
            if cursor == b"0":
                return

    def close(self) -> None:
        """See Link.close()."""
        self._pool.disconnect(inuse_connections=False)

    @contextmanager
    def _lent(self) -> Iterator[Any]:
        with _unreachable(self._alias, self._where):
            connection = self._pool.get_connection()
        try:
            yield connection
        except BaseException:
            # What was asked may still be answered: to nobody.
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    def _exchange(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        with _unanswered(self._alias, self._where):
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
        with _unreachable(self._alias, self._source.where):
            async with asyncio.timeout(self._source.connect_timeout + self._source.io_timeout):
                connection = await self._pool.get_connection()
        try:
            return await _atalk(conversation, lambda commands: self._exchange(connection, commands))
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)

    async def hear(self, bell: str, seconds: float) -> None:
        """See Link.hear()."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_patience(seconds)):
                answer = await self.converse(_ask(_listening(bell, seconds)))
                _check_heard(self._alias, self._source.where, answer)

    async def aclose(self) -> None:
        """See Link.close()."""
        await self._pool.disconnect()
        if isinstance(self._pool, AsyncMaster):
            for sentinel in self._pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    async def _exchange(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        with _unanswered(self._alias, self._source.where):
            async with asyncio.timeout(self._source.io_timeout):
                await connection.send_packed_command(connection.pack_commands(commands))
                return [await aread(connection) for _ in commands]


class ClusterLink:
    """A Redis Cluster; the keys of one lock share a slot, and so one server."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._opened: Any = None

    def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse(); one command after the other: each goes to the server of its keys."""
        client = self._client()
        return _talk(conversation, lambda commands: self._exchange(client, commands))

    def hear(self, bell: str, seconds: float) -> None:
        """See Link.hear(); it may take a little longer."""
        answer = self.converse(_ask(_listening(bell, seconds)))
        _check_heard(self._alias, self._source.where, answer)

    def keys(self, pattern: str) -> Iterator[str]:
        """See Link.keys(); on every primary."""
        with _unanswered(self._alias, self._source.where):
            for key in self._client().scan_iter(match=pattern, count=1000):
                yield key.decode()

    def close(self) -> None:
        """See Link.close()."""
        client, self._opened = self._opened, None
        if client is not None:
            client.close()

    def _client(self) -> Any:
        with _unreachable(self._alias, self._source.where):
            # Asks a server for the others, at once.
            if self._opened is None:
                settings = self._source.cluster_settings
                self._opened = RedisCluster.from_url(self._source.url, **settings)
            return self._opened

    def _exchange(self, client: Any, commands: Sequence[Command]) -> list[Any]:
        with _unanswered(self._alias, self._source.where):
            return [_execute(client, command) for command in commands]


class AsyncClusterLink:
    """See ClusterLink."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._client = AsyncRedisCluster.from_url(source.url, **source.async_cluster_settings)

    async def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse()."""
        with _unreachable(self._alias, self._source.where):
            async with asyncio.timeout(self._source.connect_timeout + self._source.io_timeout):
                await self._client.initialize()
        return await _atalk(conversation, self._exchange)

    async def hear(self, bell: str, seconds: float) -> None:
        """See ClusterLink.hear()."""
        answer = await self.converse(_ask(_listening(bell, seconds)))
        _check_heard(self._alias, self._source.where, answer)

    async def aclose(self) -> None:
        """See Link.close()."""
        await self._client.aclose()

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        with _unanswered(self._alias, self._source.where):
            async with asyncio.timeout(self._source.io_timeout):
                return [await _aexecute(self._client, command) for command in commands]


class LoopLinks:
    """An AsyncLink for each event loop, closed with it."""

    def __init__(self, alias: str, source: Source) -> None:
        self._links = PerLoop(partial(open_async_link, alias, source))

    async def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse()."""
        return await (await self._links.get()).converse(conversation)

    async def hear(self, bell: str, seconds: float) -> None:
        """See Link.hear()."""
        await (await self._links.get()).hear(bell, seconds)


def _talk(conversation: Conversation[_T], exchange: Callable[[Sequence[Command]], list[Any]]) -> _T:
    try:
        commands = next(conversation)
        while True:
            commands = conversation.send(exchange(commands))
    except StopIteration as end:
        result: _T = end.value
        return result


async def _atalk(
    conversation: Conversation[_T], exchange: Callable[[Sequence[Command]], Awaitable[list[Any]]]
) -> _T:
    try:
        commands = next(conversation)
        while True:
            commands = conversation.send(await exchange(commands))
    except StopIteration as end:
        result: _T = end.value
        return result


@contextmanager
def _unreachable(alias: str, where: str) -> Iterator[None]:
    """Nothing has been asked yet: LockBackendError for what goes wrong."""
    try:
        yield
    except (RedisError, OSError, RedisClusterException) as error:
        problem = f"{where} cannot be reached: {first_line(error)}"
        raise LockBackendError(alias, problem) from error


@contextmanager
def _unanswered(alias: str, where: str) -> Iterator[None]:
    """Something has been asked: LockOutcomeUnknown where no answer came."""
    try:
        yield
    except BusyLoadingError as error:
        raise LockBackendError(alias, f"{where} is not ready: {first_line(error)}") from error
    except AuthenticationError as error:
        raise LockBackendError(alias, f"{where} refused: {first_line(error)}") from error
    except _UNANSWERED as error:
        raise LockOutcomeUnknown(alias, f"{where} did not answer: {first_line(error)}") from error
    except (RedisError, RedisClusterException) as error:
        raise LockBackendError(alias, f"{where} refused: {first_line(error)}") from error


def _listening(bell: str, seconds: float) -> Command:
    return ("BLPOP", bell, f"{max(seconds, 0.001):.3f}")


def _patience(seconds: float) -> float:
    """Return how long to listen: the server, which looks ten times a second, may be a bit late.

    It may be, unless what is waited for is a deadline; the connection is then given up.
    """
    return seconds + 0.3 if seconds >= LISTEN else seconds


def _check_heard(alias: str, where: str, answer: Any) -> None:
    """LockBackendError if it may not be listened to; not if the server has just become a replica."""
    if isinstance(answer, ResponseError) and not str(answer).startswith("UNBLOCKED"):
        raise LockBackendError(alias, f"{where} refused BLPOP: {answer}") from answer


def _ask(command: Command) -> Conversation[Any]:
    (answer,) = yield (command,)
    return answer


def _execute(client: Any, command: Command) -> Any:
    try:
        return client.execute_command(*command)
    except ResponseError as error:
        return error


async def _aexecute(client: Any, command: Command) -> Any:
    try:
        return await client.execute_command(*command)
    except ResponseError as error:
        return error


def read(connection: Any) -> Any:
    """Return the next answer; an error answered is an answer."""
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


async def aread(connection: Any) -> Any:
    """See read()."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


# Their classes are only half typed.


def _sync_pool(source: Source) -> Any:
    if not source.sentinels:
        return ConnectionPool(**source.connection)
    settings: Any = source.sentinel_settings
    sentinel: Any = Sentinel(source.sentinels, sentinel_kwargs=settings)  # type: ignore[no-untyped-call] # as above
    return SentinelConnectionPool(source.service, sentinel, **source.connection)  # type: ignore[no-untyped-call] # as above


def _async_pool(source: Source) -> Any:
    if not source.sentinels:
        return AsyncConnectionPool(**source.async_connection)
    settings: Any = source.async_sentinel_settings
    sentinel: Any = AsyncSentinel(source.sentinels, sentinel_kwargs=settings)  # type: ignore[no-untyped-call] # as above
    return AsyncMaster(source.service, sentinel, **source.async_connection)  # type: ignore[no-untyped-call] # as above
