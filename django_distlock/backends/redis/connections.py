"""Connections to one Redis, to the master that Sentinels name, or to a cluster, for threads and for asyncio.

redis-py's connections carry them, without its pools and clients, which cost more time than the socket.
No command is sent twice.
"""

from __future__ import annotations

import asyncio
import re
import selectors
import weakref
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Hashable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.asyncio.connection import ConnectionPool as AsyncConnectionPool
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import (
    MasterNotFoundError as AsyncNoMaster,
    Sentinel as AsyncSentinel,
    SentinelConnectionPool as AsyncMaster,
)
from redis.cluster import RedisCluster
from redis.connection import ConnectionPool
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterError,
    ConnectionError as RedisConnectionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError as NoMaster, Sentinel, SentinelConnectionPool

from django_distlock.backends.idle import IdleStack
from django_distlock.engine.bells import timeout
from django_distlock.engine.steps import Steps, arun, run
from django_distlock.engine.waiting import Wait
from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockOutcomeUnknown,
    first_line,
    root_cause,
)
from django_distlock.ground import clock
from django_distlock.ground.mutexes import new_mutex

from .scripts import ENQUEUE, FORCE, LEAVE, LOOK, RELEASE, TAKE_OVER, Call
from .sources import Source

try:
    import hiredis
except ImportError:  # redis-py works without it
    _pack: Any = None
else:
    _pack = hiredis.pack_command

_T = TypeVar("_T")
#: A command to send: its words, or the call of a script that the server should have loaded.
Command = tuple[str | int | bytes, ...] | Call
#: Steps that yield commands to send together, and are sent their answers; an error is an answer.
Conversation = Generator[Sequence[Command], list[Any], _T]

#: How many tries, and how many other requests, the tasks of an event loop may have under way. With thousands, the loop
#: would read answers so late that they seem to be late.
AT_ONCE = 64
#: An event loop that is so many seconds late was held up; then a connect is repeated, up to so many times.
HELD_UP, ROUNDS = 0.05, 3
#: Seconds for which the scripts _PATIENT wait while a cluster moves a lock's slot. Callers repeat the other scripts.
MOVING = 5.0
_PATIENT = frozenset({ENQUEUE, RELEASE, TAKE_OVER, LOOK, FORCE, LEAVE})
#: The errors that drivers raise; UnicodeError for a host whose name no server can have.
BROKEN = (RedisError, RedisClusterException, OSError, UnicodeError)
#: A client of a Sentinel in the text of an error: its host and its port.
_SENTINEL = re.compile(r"<redis\..*?host=([^,]*),port=(\d+).*?(?= - |$)")


class NoAnswer(RedisTimeoutError):
    """The server has not answered in time."""


def ask(command: Command) -> Conversation[Any]:
    (answer,) = yield (command,)
    return answer


def new_selector() -> selectors.BaseSelector:
    """Return a selector that lets other greenlets run: gevent replaces poll()."""
    if selectors.DefaultSelector is getattr(selectors, "EpollSelector", None):
        # Not epoll: forked children would share it.
        return selectors.PollSelector()
    return selectors.DefaultSelector()


def words_of(command: Command) -> tuple[str | int | bytes, ...]:
    """Return the words of *command* to send."""
    return command.by_sha if isinstance(command, Call) else command


def problem(
    alias: str, where: str, error: BaseException, *, was_idle: bool = False
) -> LockBackendError:
    """Return the lock error for an *error* of the driver after a request was sent."""
    text = first_line(error)
    if isinstance(error, BusyLoadingError):
        return LockBackendError(alias, f"{where} is not ready: {text}")
    if isinstance(error, (RedisConnectionError, RedisTimeoutError, OSError)) and not isinstance(
        error, AuthenticationError
    ):
        return LockOutcomeUnknown(alias, f"{where} did not answer: {text}", was_idle=was_idle)
    if _is_on_the_move(error):
        return Contended(alias, f"{where} is moving the lock to another server: {text}")
    return LockBackendError(alias, f"{where} refused: {text}")


def unreachable(alias: str, where: str, error: BaseException) -> LockBackendError:
    """Return the lock error for an *error* of the driver before a request was sent."""
    if isinstance(error, (NoMaster, AsyncNoMaster)):
        # Shorten the text, which has the whole repr() of each client.
        error = NoMaster(_SENTINEL.sub(r"\1:\2", str(error)))
    return LockBackendError(alias, f"{where} cannot be reached: {first_line(error)}")


class _Connection:
    """A connection opened by the driver; the answers to a request are read before the next request is sent."""

    def __init__(self, driver: Any, born: int) -> None:
        self.driver = driver
        #: How many times the link had closed all connections before this one was made; the time of the last use.
        self.born = born
        self.used_at = 0.0
        #: Whether all requests have been answered.
        self.is_whole = True

    def _packed(self, commands: Sequence[Command]) -> Any:
        self.is_whole = False
        words = map(words_of, commands)
        # Three times as fast as the driver, which checks the type of each word.
        return [b"".join(map(_pack, words))] if _pack else self.driver.pack_commands(words)

    def _answer(self, error: ResponseError) -> ResponseError:
        """Return the server's *error* as an answer; RedisConnectionError if the server is no longer the master."""
        if isinstance(error, ReadOnlyError) and self.used_at:
            raise RedisConnectionError("the former master is now a replica") from error
        # With its frames, of which one has the answers, it would keep the lease alive.
        return error.with_traceback(None)


class ThreadConnection(_Connection):
    """A connection, for one thread at a time."""

    def has_news(self) -> bool:
        """Return whether the server has closed the connection, or sent anything without a request."""
        try:
            return bool(self.driver.can_read(0))
        except BROKEN:
            return True

    def close(self) -> None:
        self.driver.disconnect()

    def exchange(self, commands: Sequence[Command], within: float | None = None) -> list[Any]:
        """Send *commands* together, and return their answers; an error from the server is an answer.

        *within*: seconds until the first answer, instead of the driver's timeout.
        """
        driver, answers = self.driver, list[Any]()
        driver.send_packed_command(self._packed(commands), check_health=False)
        if within is not None and not self._is_answered(within):
            raise NoAnswer(f"no answer within {within:g} s")
        for _ in commands:
            try:
                answers.append(driver.read_response())
            except ResponseError as error:
                answers.append(self._answer(error))
        self.is_whole = True
        return answers

    def _is_answered(self, within: float) -> bool:
        """Wait for an answer, not by the driver: it takes an OSError of a signal handler for one of the socket."""
        with new_selector() as selector:
            selector.register(self.driver._sock, selectors.EVENT_READ)  # noqa: SLF001 - as said
            return bool(selector.select(within))


class TaskConnection(_Connection):
    """A connection, for one task at a time. The driver gets no timeouts: with them it may swallow a cancellation (Python 3.11)."""

    async def has_news(self) -> bool:
        try:
            if not hasattr(self.driver, "can_read"):  # redis-py before 8
                return await self.driver.read_response(timeout=0) is not None
            # Writing nothing fails if the connection was reset, which can_read() does not see.
            await self.driver.send_packed_command((), check_health=False)
            return bool(await self.driver.can_read())
        except (*BROKEN, RuntimeError):  # uvloop raises RuntimeError
            return True

    def close(self) -> None:
        # The driver's method is a coroutine, which with *nowait* never awaits.
        with suppress(StopIteration):
            self.driver.disconnect(nowait=True).send(None)

    async def exchange(self, commands: Sequence[Command], *, within: float) -> list[Any]:
        """Do what ThreadConnection.exchange() does; *within*: seconds until the last answer."""
        answers: list[Any] = []
        try:
            async with timeout(within):
                await self.driver.send_packed_command(self._packed(commands), check_health=False)
                await self._read(answers, len(commands))
        except TimeoutError:
            # If the event loop was held up, the answers may have come meanwhile.
            try:
                async with asyncio.timeout(0):
                    await self._read(answers, len(commands))
            except TimeoutError:
                raise NoAnswer(f"no answer within {within:g} s") from None
        return answers

    async def _read(self, answers: list[Any], count: int) -> None:
        """Append to *answers* until there are *count*. May be cancelled and called again."""
        while len(answers) < count:
            try:
                answers.append(await self.driver.read_response(disconnect_on_error=False))
            except ResponseError as error:
                answers.append(self._answer(error))
        self.is_whole = True


class _Link:
    """One Redis, and the idle connections to it, of which the newest is used next. No I/O except closing."""

    def __init__(self, alias: str, source: Source, pool: Any) -> None:
        self._alias = alias
        self._source = source
        self._pool = pool  # only makes connections
        self._master: object = None
        self._idle = IdleStack()
        self._closings = 0

    def _keep(self, connection: Any) -> None:
        """Keep *connection* for the next request, and close those that are not needed."""
        if not connection.is_whole:
            connection.close()
            return
        self._idle.keep(connection)
        if connection.born != self._closings:
            self._idle.close_all(_close)

    def _follow_master(self) -> None:
        """Close the idle connections if the Sentinels have just named another master."""
        if (master := getattr(self._pool, "master_address", None)) != self._master:
            self._master = master
            self._idle.close_all(_close)

    def _fail(self, meaning: Callable[..., Exception], error: BaseException) -> NoReturn:
        """Raise *error*; an error of the driver becomes a lock error."""
        if isinstance(error, BROKEN):
            # The idle connections are probably broken, too: a router that forgot one has forgotten all.
            self._idle.close_all(_close)
            raise meaning(self._alias, self._source.where, error) from root_cause(error)
        raise error


class PoolLink(_Link):
    """One Redis, for threads."""

    def __init__(self, alias: str, source: Source) -> None:
        super().__init__(alias, source, _sync_pool(source))
        # Without this, the garbage collector would warn of connections that were used after close().
        weakref.finalize(self, _close_all, self._idle, self._pool).atexit = False

    def converse(self, conversation: Conversation[_T], within: float | None = None) -> _T:
        """Run *conversation*, sending each command once; return its result. *within*: see ThreadConnection.exchange()."""
        connection = self._idle.fit_one() or self._connected()
        try:
            answer = run(conversation, partial(connection.exchange, within=within))
        except BaseException as error:
            # An answer may still come: the next request must not read it.
            connection.close()
            # An OSError is that of a signal handler: the driver makes its own errors of those of the socket.
            if isinstance(error, OSError):
                raise
            self._fail(partial(problem, was_idle=connection.used_at > 0), error)
        self._keep(connection)
        return answer

    def keys(self, pattern: str) -> Iterator[str]:
        cursor = b"0"
        while True:
            answer = self.converse(ask(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)))
            if isinstance(answer, ResponseError):
                raise LockBackendError(self._alias, f"{self._source.where} refused SCAN: {answer}")
            cursor, found = answer
            yield from (key.decode(errors="backslashreplace") for key in found)
            if cursor == b"0":
                return

    def server_of(self, key: str) -> Hashable:
        """Return the identity of the server that keeps *key*; None, as there is only one."""
        return None

    def close(self) -> None:
        """Close the idle connections now, and those in use when they are returned."""
        self._closings += 1
        _close_all(self._idle, self._pool)

    def _connected(self) -> ThreadConnection:
        born = self._closings
        driver = self._pool.connection_class(**self._pool.connection_kwargs)
        try:
            driver.connect()
        except BaseException as error:  # noqa: BLE001 - raised by _fail()
            driver.disconnect()
            self._fail(unreachable, error)
        self._follow_master()
        return ThreadConnection(driver, born)


def _close(connection: ThreadConnection | TaskConnection) -> None:
    connection.close()


def _close_all(idle: IdleStack, pool: Any) -> None:
    idle.close_all(_close)
    for sentinel in _sentinels(pool):
        sentinel.connection_pool.disconnect(inuse_connections=False)


class AsyncPoolLink(_Link):
    """One Redis, for the tasks of one event loop."""

    def __init__(self, alias: str, source: Source) -> None:
        super().__init__(alias, source, _async_pool(source))
        self.gate_of_tries = asyncio.Semaphore(AT_ONCE)
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def converse(self, conversation: Conversation[_T], within: float | None = None) -> _T:
        # With *within*, this is a try, which has passed gate_of_tries, or a listener, which may take long.
        async with self._gate if within is None else nullcontext():
            connection = await self._fit_one() or await self._connected()
            limit = self._source.answers_within if within is None else within
            try:
                answer = await arun(conversation, partial(connection.exchange, within=limit))
            except BaseException as error:  # noqa: BLE001 - raised by _fail()
                connection.close()
                self._fail(partial(problem, was_idle=connection.used_at > 0), error)
            self._keep(connection)
            return answer

    async def _fit_one(self) -> Any:
        """Return an idle connection as IdleStack.fit_one() does."""
        while (connection := self._idle.fresh_one()) is not None:
            if not await connection.has_news():
                return connection
            connection.close()
        return None

    async def aclose(self) -> None:
        self._closings += 1
        while self._idle:
            await self._idle.pop().driver.disconnect()
        for sentinel in _sentinels(self._pool):
            await sentinel.aclose()

    async def _connected(self) -> TaskConnection:
        born = self._closings
        driver: Any = None

        async def connect() -> None:
            nonlocal driver
            if driver is not None:  # a second call by _in_time()
                await driver.disconnect(nowait=True)
            driver = self._pool.connection_class(**self._pool.connection_kwargs)
            await driver.connect()

        try:
            await _in_time(self._source.connects_within, connect)
        except BaseException as error:  # noqa: BLE001 - raised by _fail()
            await driver.disconnect(nowait=True)
            self._fail(unreachable, error)
        self._follow_master()
        return TaskConnection(driver, born)


async def _in_time(seconds: float, connect: Callable[[], Awaitable[Any]]) -> None:
    """Call *connect* within *seconds*, and again if it was late because the event loop was held up."""
    for again in range(ROUNDS):
        began = clock.wait_time()
        try:
            async with timeout(seconds):
                await connect()
        except TimeoutError:
            if clock.wait_time() - began < seconds + HELD_UP or again == ROUNDS - 1:
                raise
        else:
            return


class PerLoop:
    """The links of the event loops: *make* makes one for each loop, and the link is closed with the loop."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: dict[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[None]]] = {}

    async def get(self) -> Any:
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            for closed in [each for each in list(self._made) if each.is_closed()]:
                self._made.pop(closed, None)
            made = self._make()
            # Async generators are the only objects that every event loop ends before it is closed.
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


# The driver's pools and Sentinels; the driver's classes are only partly typed.


class _AsyncMaster(AsyncMaster):
    """Asks the Sentinels once for all connecting tasks, in a separate task: redis-py may swallow a cancellation."""

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
            task.exception()  # retrieved; the waiting tasks raise it


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


# Redis Cluster: the keys of one lock share a slot, and so a server.


class ClusterLink:
    """A Redis Cluster, for threads; commands are sent one after the other, each to the server of their keys."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._mutex = new_mutex()
        self._client: Any = None

    def converse(self, conversation: Conversation[_T], within: float | None = None) -> _T:
        with self._lent() as client:

            def exchange(commands: Sequence[Command]) -> list[Any]:
                return run(_one_by_one(commands), lambda words: client.execute_command(*words))

            return run(conversation, exchange)

    def keys(self, pattern: str) -> Iterator[str]:
        with self._lent() as client:
            for key in client.scan_iter(match=pattern, count=1000):
                yield key.decode(errors="backslashreplace")

    def server_of(self, key: str) -> Hashable:
        """Return the identity of the server that keeps *key*, as far as the client knows the cluster."""
        try:
            node = self._connected().get_node_from_key(key)
        except BROKEN as error:
            raise unreachable(self._alias, self._source.where, error) from root_cause(error)
        return str(node.name) if node else None

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            _close_idle(client)

    def _connected(self) -> Any:
        if (client := self._client) is not None:
            return client
        try:
            # Not under the mutex, because connecting may hang.
            client = RedisCluster.from_url(self._source.url, **self._source.cluster_settings(Retry))
        except BROKEN as error:
            raise unreachable(self._alias, self._source.where, error) from root_cause(error)
        with self._mutex:
            if (first := self._client) is None:
                # As in PoolLink.
                weakref.finalize(self, _close_idle, client).atexit = False
                self._client = client
                return client
        _close_idle(client)  # another thread was faster
        return first

    @contextmanager
    def _lent(self) -> Iterator[Any]:
        client = self._connected()
        try:
            yield client
        except BROKEN as error:
            raise problem(self._alias, self._source.where, error) from root_cause(error)
        finally:
            if client is not self._client:  # close() was called meanwhile
                _close_idle(client)


class AsyncClusterLink:
    """A Redis Cluster, for asyncio."""

    #: The task that asks which server has which slot, while requests go on.
    _looking: asyncio.Task[None] | None = None

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._client = AsyncRedisCluster.from_url(source.url, **source.cluster_settings(AsyncRetry))
        self.gate_of_tries = asyncio.Semaphore(AT_ONCE)
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def converse(self, conversation: Conversation[_T], within: float | None = None) -> _T:
        try:
            await _in_time(self._source.connects_within, self._client.initialize)
        except BROKEN as error:
            raise unreachable(self._alias, self._source.where, error) from root_cause(error)
        try:
            async with self._gate if within is None else nullcontext():
                return await arun(conversation, self._exchange)
        except BROKEN as error:
            raise problem(self._alias, self._source.where, error) from root_cause(error)

    async def aclose(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self._client.aclose()

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        return await arun(_one_by_one(commands), self._execute)

    async def _execute(self, words: Sequence[Any]) -> Any:
        try:
            async with timeout(self._source.io_timeout):
                return await self._client.execute_command(*words)
        except TimeoutError:
            # The driver looks for the successor of a server that refuses, but not of one that hangs.
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
            raise

    async def _look(self) -> None:
        try:
            async with timeout(self._source.connects_within):
                await self._client.nodes_manager.initialize()
        except BROKEN:
            pass  # the next timeout begins another look
        finally:
            self._looking = None


def _close_idle(client: Any) -> None:
    # The client's own close() does not close pools that were made from a URL.
    for node in client.get_nodes():
        if node.redis_connection:
            node.redis_connection.connection_pool.disconnect(inuse_connections=False)


def _one_by_one(commands: Sequence[Command]) -> Steps[Any, list[Any]]:
    answers: list[Any] = []
    for command in commands:
        try:
            answers.append((yield from _followed(command)))
        except ResponseError as error:
            answers.append(error)
    return answers


def _followed(command: Command) -> Steps[Any, Any]:
    """Run *command* on the server of its slot; the driver follows a moving slot for half a second only."""
    is_patient = isinstance(command, Call) and command.script in _PATIENT
    wait = Wait(MOVING if is_patient else 0.0)
    while True:
        try:
            return (yield words_of(command))
        except ClusterError as error:
            if wait.is_over or not _is_on_the_move(error):
                raise


def _is_on_the_move(error: BaseException) -> bool:
    """Return True if the driver gave up following a slot; errors from servers have other classes."""
    return type(error) is ClusterError
