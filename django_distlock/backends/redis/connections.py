"""Connections to one Redis, the master that Sentinels name, or a cluster, for threads and for asyncio.

redis-py makes and greets them; what is asked goes past its pools and parsers, which cost more than the
socket. Idle connections stand in a stack: who takes or gives back needs no lock, and the oldest are
those that nobody needs. Nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, TypeVar

from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.asyncio.connection import ConnectionPool as AsyncConnectionPool
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel, SentinelConnectionPool as AsyncMaster
from redis.cluster import RedisCluster
from redis.connection import ConnectionPool
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError as RedisConnectionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from django_distlock.engine import clock
from django_distlock.engine.bells import timeout
from django_distlock.engine.steps import Steps, arun, run
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, first_line

from .scripts import Call
from .sources import Source

_T = TypeVar("_T")
#: What is sent: words, or a script that the server is expected to know.
Command = tuple[str | int | bytes, ...] | Call
#: Steps that send commands, all of one yield in one go, and are sent their answers; an error is an answer.
Conversation = Generator[Sequence[Command], list[Any], _T]

#: Seconds after which an idle connection is closed if there are others.
IDLE = 60.0
#: What drivers raise.
BROKEN = (RedisError, RedisClusterException, OSError)
_CHUNK = 65536
_NUMBER, _TEXT, _ERROR = b":$-"


# What is said, without I/O.


def ask(command: Command) -> Conversation[Any]:
    (answer,) = yield (command,)
    return answer


def packed(commands: Sequence[Command]) -> bytes:
    parts: list[bytes] = []
    for command in commands:
        if isinstance(command, Call):
            count = 3 + len(command.keys) + len(command.args)
            parts += (
                b"*%d\r\n" % count,
                _head(command.script.sha, command.keys),
                _words(command.args),
            )
        else:
            parts += b"*%d\r\n" % len(command), _words(command)
    return b"".join(parts)


def _words(words: Iterable[str | int | bytes]) -> bytes:
    texts = [word if type(word) is bytes else str(word).encode() for word in words]
    return b"".join([b"$%d\r\n%b\r\n" % (len(text), text) for text in texts])


@lru_cache(1024)
def _head(sha: str, keys: tuple[str, ...]) -> bytes:
    return _words(("EVALSHA", sha, len(keys), *keys))


def parsed(data: bytes, at: int, error: Callable[[str], Exception]) -> tuple[Any, int]:
    """Return the answer (RESP 2) that begins in *data* at *at*, and where it ends; IndexError if there is more to come."""
    if (end := data.find(b"\r\n", at)) < 0:
        raise IndexError
    kind, value, end = data[at], data[at + 1 : end], end + 2
    if kind in b":$*":
        number = int(value)
        if kind == _NUMBER:
            return number, end
        if number < 0:
            return None, end
        if kind == _TEXT:
            if len(data) < end + number + 2:
                raise IndexError
            return data[end : end + number], end + number + 2
        answers = []
        for _ in range(number):
            answer, end = parsed(data, end, error)
            answers.append(answer)
        return answers, end
    return error(value.decode(errors="replace")) if kind == _ERROR else value, end


def problem(alias: str, where: str, error: BaseException) -> LockBackendError:
    """Return what to raise for an *error* of the driver once something was asked."""
    text = first_line(error)
    if isinstance(error, BusyLoadingError):
        return LockBackendError(alias, f"{where} is not ready: {text}")
    if isinstance(error, (RedisConnectionError, RedisTimeoutError, OSError)) and not isinstance(
        error, AuthenticationError
    ):
        return LockOutcomeUnknown(alias, f"{where} did not answer: {text}")
    return LockBackendError(alias, f"{where} refused: {text}")


def unreachable(alias: str, where: str, error: BaseException) -> LockBackendError:
    """Return what to raise for an *error* of the driver before anything was asked."""
    return LockBackendError(alias, f"{where} cannot be reached: {first_line(error)}")


class _Conversing:
    """A connection that the driver made and greeted, and what has arrived on it."""

    def __init__(self, driver: Any, born: int) -> None:
        self.driver = driver
        #: How often all had been closed before it was made, and when it was used last.
        self.born = born
        self.used_at = 0.0
        #: Whether all that was asked has been answered.
        self.is_whole = True
        self._error = driver._parser.parse_error  # noqa: SLF001 - only the driver knows which error a text stands for
        self._knows_master = hasattr(driver, "connection_pool")
        self._data = b""

    def _read(self, data: bytes, answers: list[Any], count: int) -> bool:
        """Take in *data*, add to *answers* those that are all here, and return whether all *count* of them are."""
        if not data:
            raise RedisConnectionError("Connection closed by server.")
        data, at = self._data + data, 0
        try:
            while len(answers) < count:
                answer, at = parsed(data, at, self._error)
                if isinstance(answer, RedisConnectionError):
                    raise answer
                if self._knows_master and isinstance(answer, ReadOnlyError):
                    raise RedisConnectionError("the former master is now a replica") from answer
                answers.append(answer)
            self.is_whole = True
        except IndexError:
            pass
        self._data = data[at:]
        return self.is_whole


# For threads.


class Connection(_Conversing):
    """A connection, for one thread at a time."""

    def __init__(self, driver: Any, born: int, limit: float) -> None:
        super().__init__(driver, born)
        self._limit = limit
        self._socket = driver._sock  # noqa: SLF001 - the driver's own ways to it are what costs so much
        # Not TLS, nor what gevent and eventlet make of a socket: what the kernel does itself costs less.
        self._is_plain = sys.platform == "linux" and type(self._socket).__module__ == "socket"
        #: Tells whether something has arrived, be it the end.
        self._has_news: Callable[[int], object] = driver.can_read
        if self._is_plain:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            self._has_news = poll.poll
            self._socket.settimeout(None)
        self._limit_to(limit)

    def is_fit(self) -> bool:
        """Return whether nothing has arrived that nobody asked for, nor has the other end closed it."""
        try:
            return not self._has_news(0)
        except BROKEN:
            return False

    def exchange(self, commands: Sequence[Command], within: float | None = None) -> list[Any]:
        """Send *commands* in one go, and return their answers; an error answered is an answer.

        *within*: seconds that each part of them may take, if not as long as usual.
        """
        self.is_whole, answers = False, list[Any]()
        if within is not None:
            self._limit_to(within)
        try:
            self._socket.sendall(packed(commands))
            while not self._read(self._socket.recv(_CHUNK), answers, len(commands)):
                pass
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        if within is not None:
            self._limit_to(self._limit)
        return answers

    def _limit_to(self, seconds: float) -> None:
        if not self._is_plain:
            self._socket.settimeout(seconds)
            return
        # 0 would be no limit.
        limit = struct.pack("ll", *divmod(max(1, int(seconds * 1_000_000)), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class PoolLink:
    """One Redis, for threads."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._where = source.where
        self._io_timeout = source.io_timeout
        self._pool = _sync_pool(source)  # which makes connections, and keeps none
        self._master: object = None
        self._idle: deque[Connection] = deque()
        self._closings = 0
        # What is used once more after close() would be left to the garbage collector, which complains.
        weakref.finalize(self, _close_all, self._idle, self._pool).atexit = False

    def converse(self, conversation: Conversation[_T], within: float | None = None) -> _T:
        """Send what it yields, each in one go and once, and return its result. *within*: see Connection.exchange()."""
        connection = self._taken()
        exchange = connection.exchange
        try:
            answer = run(
                conversation, exchange if within is None else partial(exchange, within=within)
            )
        except BaseException as error:
            # What was asked may still be answered: to nobody.
            connection.driver.disconnect()
            if isinstance(error, BROKEN):
                raise problem(self._alias, self._where, error) from error
            raise
        if not connection.is_whole:
            connection.driver.disconnect()
            return answer
        connection.used_at = now = clock.wait_time()
        self._idle.append(connection)
        if connection.born != self._closings:
            self.close()
        elif len(self._idle) > 1:
            self._close_unneeded(now - IDLE)
        return answer

    def keys(self, pattern: str) -> Iterator[str]:
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
        """Tell apart the servers that keep keys: there is but one."""
        return None

    def close(self) -> None:
        """Close what is idle now, and what is in use when it is given back."""
        self._closings += 1
        _close_all(self._idle, self._pool)

    def _taken(self) -> Connection:
        while self._idle:
            with suppress(IndexError):
                connection = self._idle.pop()
                if connection.is_fit():
                    return connection
                connection.driver.disconnect()
        born = self._closings
        driver = self._pool.connection_class(**self._pool.connection_kwargs)
        try:
            driver.connect()
        except BaseException as error:
            driver.disconnect()
            if isinstance(error, BROKEN):
                raise unreachable(self._alias, self._where, error) from error
            raise
        if (master := getattr(self._pool, "master_address", None)) != self._master:
            self._master = master
            _close_all(self._idle)
        return Connection(driver, born, self._io_timeout)

    def _close_unneeded(self, before: float) -> None:
        with suppress(IndexError):
            while (oldest := self._idle.popleft()).used_at < before:
                oldest.driver.disconnect()
            self._idle.appendleft(oldest)


def _close_all(idle: deque[Connection], pool: Any = None) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().driver.disconnect()
    for sentinel in _sentinels(pool):
        sentinel.connection_pool.disconnect(inuse_connections=False)


# For asyncio: connections belong to an event loop, and end with it.


class AsyncConnection(_Conversing):
    """A connection, for one task at a time. The time limits are ours: the driver's may swallow a cancellation (Python 3.11)."""

    def is_fit(self) -> bool:
        reader = self.driver._reader  # noqa: SLF001 - as for threads
        return not (reader.at_eof() or reader._buffer)  # noqa: SLF001 - what nobody asked for

    async def exchange(self, commands: Sequence[Command], *, within: float) -> list[Any]:
        """See Connection.exchange(); all of it takes so many seconds at most."""
        self.is_whole, answers = False, list[Any]()
        reader, writer = self.driver._reader, self.driver._writer  # noqa: SLF001 - as for threads
        async with timeout(within):
            writer.write(packed(commands))
            while not self._read(await reader.read(_CHUNK), answers, len(commands)):
                pass
        return answers


class AsyncPoolLink:
    """See PoolLink."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._pool = _async_pool(source)
        self._idle: deque[AsyncConnection] = deque()
        self._closings = 0

    async def converse(self, conversation: Conversation[_T], within: float | None = None) -> _T:
        connection = await self._taken()
        limit = self._source.io_timeout if within is None else within
        try:
            answer = await arun(conversation, partial(connection.exchange, within=limit))
        except BaseException as error:
            await connection.driver.disconnect(nowait=True)
            if isinstance(error, BROKEN):
                raise problem(self._alias, self._source.where, error) from error
            raise
        if not connection.is_whole:
            await connection.driver.disconnect(nowait=True)
            return answer
        connection.used_at = now = clock.wait_time()
        self._idle.append(connection)
        if connection.born != self._closings:
            await self.aclose()
        elif self._idle[0].used_at < now - IDLE:
            await self._idle.popleft().driver.disconnect(nowait=True)
        return answer

    async def aclose(self) -> None:
        self._closings += 1
        while self._idle:
            await self._idle.pop().driver.disconnect()
        for sentinel in _sentinels(self._pool):
            await sentinel.aclose()

    async def _taken(self) -> AsyncConnection:
        while self._idle:
            if (connection := self._idle.pop()).is_fit():
                return connection
            await connection.driver.disconnect(nowait=True)
        born = self._closings
        driver = self._pool.connection_class(**self._pool.connection_kwargs)
        try:
            async with timeout(self._source.connect_timeout + self._source.io_timeout):
                await driver.connect()
        except BaseException as error:
            await driver.disconnect(nowait=True)
            if isinstance(error, BROKEN):
                raise unreachable(self._alias, self._source.where, error) from error
            raise
        return AsyncConnection(driver, born)


class PerLoop:
    """One link that *make* makes for each event loop, closed with it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: dict[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[None]]] = {}

    async def get(self) -> Any:
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            for closed in [each for each in list(self._made) if each.is_closed()]:
                self._made.pop(closed, None)
            made = self._make()
            # The one thing that every event loop ends in order before it is closed: its generators.
            ending = self._close_with(loop, made)
            self._made[loop] = made, ending
            await anext(ending)
        return self._made[loop][0]

    async def _close_with(self, loop: asyncio.AbstractEventLoop, made: Any) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            self._made.pop(loop, None)
            with suppress(Exception):
                await made.aclose()


# What the driver makes connections by. Its classes are only half typed.


class _AsyncMaster(AsyncMaster):
    """Asks the Sentinels once for all tasks that connect at the moment: a thousand questions would take too long."""

    _asking: asyncio.Task[Any] | None = None

    async def get_master_address(self) -> Any:
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
    settings: Any = source.sentinel_settings(Retry)
    sentinel: Any = Sentinel(source.sentinels, sentinel_kwargs=settings)  # type: ignore[no-untyped-call] # as said
    return SentinelConnectionPool(source.service, sentinel, **source.connection)  # type: ignore[no-untyped-call] # as said


def _async_pool(source: Source) -> Any:
    if not source.sentinels:
        return AsyncConnectionPool(**source.async_connection)
    settings: Any = source.sentinel_settings(AsyncRetry)
    sentinel: Any = AsyncSentinel(source.sentinels, sentinel_kwargs=settings)  # type: ignore[no-untyped-call] # as said
    return _AsyncMaster(source.service, sentinel, **source.async_connection)  # type: ignore[no-untyped-call] # as said


def _sentinels(pool: Any) -> Sequence[Any]:
    return pool.sentinel_manager.sentinels if hasattr(pool, "sentinel_manager") else ()


# The way to a Redis Cluster: the keys of one lock share a slot, and so one server.


class ClusterLink:
    """See PoolLink; commands go one after the other, each to the server of its keys."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._mutex = threading.Lock()
        self._client: Any = None

    def converse(self, conversation: Conversation[_T], within: float | None = None) -> _T:
        client = self._connected()

        def exchange(commands: Sequence[Command]) -> list[Any]:
            return run(_one_by_one(commands), lambda words: client.execute_command(*words))

        try:
            return run(conversation, exchange)
        except BROKEN as error:
            raise problem(self._alias, self._source.where, error) from error
        finally:
            self._give_back(client)

    def keys(self, pattern: str) -> Iterator[str]:
        client = self._connected()
        try:
            for key in client.scan_iter(match=pattern, count=1000):
                yield key.decode(errors="backslashreplace")
        except BROKEN as error:
            raise problem(self._alias, self._source.where, error) from error
        finally:
            self._give_back(client)

    def server_of(self, key: str) -> Hashable:
        """See PoolLink.server_of(); by what the client knows of the cluster."""
        try:
            node = self._connected().get_node_from_key(key)
        except BROKEN as error:
            raise unreachable(self._alias, self._source.where, error) from error
        return str(node.name) if node else None

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            _close_idle(client)

    def _connected(self) -> Any:
        with self._mutex:
            if (client := self._client) is None:
                try:
                    # Asks a server for the others, at once.
                    client = RedisCluster.from_url(
                        self._source.url, **self._source.cluster_settings(Retry)
                    )
                except BROKEN as error:
                    raise unreachable(self._alias, self._source.where, error) from error
                # What is used once more after close() would be left to the garbage collector, which complains.
                weakref.finalize(self, _close_idle, client).atexit = False
                self._client = client
            return client

    def _give_back(self, client: Any) -> None:
        if client is not self._client:  # all were closed meanwhile
            _close_idle(client)


class AsyncClusterLink:
    """See ClusterLink."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._client = AsyncRedisCluster.from_url(source.url, **source.cluster_settings(AsyncRetry))

    async def converse(self, conversation: Conversation[_T], within: float | None = None) -> _T:
        try:
            async with timeout(self._source.connect_timeout + self._source.io_timeout):
                await self._client.initialize()
        except BROKEN as error:
            raise unreachable(self._alias, self._source.where, error) from error
        try:
            return await arun(conversation, self._exchange)
        except BROKEN as error:
            raise problem(self._alias, self._source.where, error) from error

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        async with timeout(self._source.io_timeout):
            return await arun(
                _one_by_one(commands), lambda words: self._client.execute_command(*words)
            )


def _close_idle(client: Any) -> None:
    # Its own close() leaves the connections of the pools open that it makes for a URL.
    for node in client.get_nodes():
        if node.redis_connection:
            node.redis_connection.connection_pool.disconnect(inuse_connections=False)


def _one_by_one(commands: Sequence[Command]) -> Steps[Any, list[Any]]:
    answers = list[Any]()
    for command in commands:
        try:
            answers.append((yield command.by_sha if isinstance(command, Call) else command))
        except ResponseError as error:
            answers.append(error)
    return answers
