"""The network and the servers: messages take time, are held up or lost, and connections break."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from hiredis import Reader as Parser
from redis.connection import DefaultParser
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
    InvalidResponse,
    ResponseError,
    TimeoutError as RedisTimeoutError,
)

from . import world
from .redis_memory import RedisInMemory, to_wire

if TYPE_CHECKING:
    from .processes import Process
    from .world import Strand, World

#: Seconds that a message takes: at least, and at most where nothing is wrong.
SOONEST, LATEST = 5e-5, 2e-3
#: The server looks ten times a second whether a wait by BLPOP is over.
BLPOP_LATE = 0.1


class Server:
    """One Redis."""

    def __init__(self, here: World, number: int, rate: float) -> None:
        self.world, self.number, self.rate = here, number, rate
        self.skew = here.random.uniform(-1.0, 1.0)
        self.is_up = True
        self.hangs_until = 0.0
        self.connections: list[Connection] = []
        self.redis = RedisInMemory(self.clock)
        # As a server that has been up for an hour.
        self.redis.started -= 3_600_000_000

    def clock(self) -> int:
        return int((1_700_000_000 + self.world.now * self.rate + self.skew) * 1_000_000)

    def stop(self) -> None:
        self.is_up = False
        for each in [*self.connections]:
            each.reset()

    def start_again(self, *, keeps_data: bool) -> None:
        self.is_up = True
        self.redis.start(keeps_data=keeps_data)


class Network:
    """How messages travel between the processes and the servers."""

    def __init__(self, here: World) -> None:
        self.world = here
        #: By process and server: until when messages are held up.
        self.cut: dict[tuple[str, int], float] = {}
        #: How likely a connection breaks at a message, and a message is late, and by how much at most.
        self.breaking, self.lateness, self.longest_late = 0.0, 0.0, 0.0
        #: Messages until one is lost; 0: none is.
        self.lost_in = 0

    def arrival(self, process: str, server: Server, *, after: float) -> float:
        """Return when a message that is sent now arrives, not before another one that arrives at *after*."""
        random = self.world.random
        due = self.world.now + random.uniform(SOONEST, LATEST)
        if self.lateness and random.random() < self.lateness:
            due += random.random() * self.longest_late
        due = max(
            due, self.cut.get((process, server.number), 0.0) + random.uniform(SOONEST, LATEST)
        )
        return max(due, after)

    def breaks(self) -> bool:
        if self.lost_in:
            self.lost_in -= 1
            return self.lost_in == 0
        return self.breaking > 0 and self.world.random.random() < self.breaking


class Connection:
    """Both ends of one connection, and what is on its way."""

    def __init__(self, process: Process, server: Server) -> None:
        self.world, self.process, self.server = process.world, process, server
        self.network = process.network
        self.readers: list[Strand] = []
        #: Called when something has arrived.
        self.on_news: Callable[[], object] | None = None
        self.inbox = b""
        self.is_open = False
        #: Whether the server's end is open, and whether a break has arrived at ours.
        self.is_served, self.is_broken = False, False
        self.is_refused = self.is_given_up = False
        self._to_server = self._to_us = 0.0
        #: Parses requests as well: they have the form of answers.
        self._requests = Parser()
        self._queue: list[list[bytes]] = []
        self._is_blocked = False
        self._timeout: float | None = None

    # Our end.

    def ask_to_connect(self) -> None:
        self._send_to_server(self._accept)

    def send(self, data: bytes) -> int:
        self.world.step()
        if self.is_broken or not self.is_open:
            raise ConnectionResetError("Connection reset by peer")
        self._send_to_server(lambda: self._arrive(data))
        self.world.end_call()
        return len(data)

    sendall = send

    def recv(self, size: int) -> bytes:
        self.world.step()
        if not self.has_news() and not self.wait_for_news():
            raise TimeoutError("timed out")
        if self.is_broken:
            raise ConnectionResetError("Connection reset by peer")
        data, self.inbox = self.inbox[:size], self.inbox[size:]
        self.world.end_call()
        return data

    def wait_for_news(self) -> bool:
        me = self.world.running
        assert me is not None
        if self._timeout == 0.0:
            raise BlockingIOError
        self.readers.append(me)
        try:
            me.wait(self._timeout)
        finally:
            self.readers.remove(me)
        return self.has_news()

    def has_news(self) -> bool:
        return bool(self.inbox) or self.is_broken

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setblocking(self, is_blocking: bool) -> None:
        self._timeout = None if is_blocking else 0.0

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            # What was sent before arrives before.
            self._send_to_server(self._hang_up)
        self.is_given_up = True

    # On the way.

    def _send_to_server(self, job: Callable[[], object]) -> None:
        arrival = self.network.arrival(self.process.name, self.server, after=self._to_server)
        self._to_server = arrival
        self.world.after(arrival - self.world.now, lambda: self._at_server(job))

    def _at_server(self, job: Callable[[], object]) -> None:
        if self.server.hangs_until > self.world.now:
            self.world.after(self.server.hangs_until - self.world.now, lambda: self._at_server(job))
        else:
            job()

    def _send_to_us(self, job: Callable[[], object]) -> None:
        arrival = self.network.arrival(self.process.name, self.server, after=self._to_us)
        self._to_us = arrival
        self.world.after(arrival - self.world.now, job)

    def _reach(self, data: bytes) -> None:
        if self.is_open and not self.is_broken:
            self.inbox += data
            self._tell()

    def _tell(self) -> None:
        for each in self.readers:
            each.wake()
        if self.on_news is not None:
            self.on_news()

    # The server's end.

    def _accept(self) -> None:
        if self.server.is_up:
            self.is_served = True
            self.server.connections.append(self)

        def greet() -> None:
            if self.is_given_up:
                self._send_to_server(self._hang_up)
                return
            self.is_open = self.is_served
            self.is_refused = not self.is_served
            self._tell()

        self._send_to_us(greet)

    def _arrive(self, data: bytes) -> None:
        if not self.is_served:
            self.reset()
            return
        if self.network.breaks():
            self.world.note("request lost", self.process.name, self.server.number)
            self.reset()
            return
        self._requests.feed(data)
        while (request := self._requests.gets()) is not False:
            self._queue.append(request)
        self._serve()

    def _serve(self) -> None:
        while self._queue and not self._is_blocked and self.is_served:
            words = self._queue.pop(0)
            redis = self.server.redis
            self.world.note("server", self.server.number, self.process.name, words[0].decode())
            answer = redis.carry_out(words, self.answer)
            if answer is None and words[0] == b"BLPOP":
                self._is_blocked = True
                waiting = (words[1:-1], self._unblock)
                redis.blocked.append(waiting)
                late = self.world.random.random() * BLPOP_LATE
                self.world.after(float(words[-1]) + late, partial(self._give_up, waiting))
            else:
                self.answer(to_wire(answer))

    def _unblock(self, answer: bytes) -> None:
        self._is_blocked = False
        self.answer(answer)
        self._serve()

    def _give_up(self, waiting: Any) -> None:
        if waiting in self.server.redis.blocked:
            self.server.redis.blocked.remove(waiting)
            self._unblock(b"*-1\r\n")

    def answer(self, data: bytes) -> None:
        if not self.is_served:
            return
        if self.network.breaks():
            self.world.note("reply lost", self.process.name, self.server.number)
            self.reset()
            return
        self._send_to_us(lambda: self._reach(data))

    def reset(self) -> None:
        """Break it; what is on its way back is lost."""
        self._hang_up()

        def break_off() -> None:
            if self.is_open:
                self.is_broken = True
                self._tell()

        self._send_to_us(break_off)

    def _hang_up(self) -> None:
        if self.is_served:
            self.is_served = False
            self.server.connections.remove(self)
            for each in (self.answer, self._unblock):
                self.server.redis.forget(each)


class Pipe:
    """An end of socket.socketpair()."""

    def __init__(self) -> None:
        self.readers: list[Strand] = []
        self._inbox = b""
        self.other: Pipe = self

    def setblocking(self, is_blocking: bool) -> None:
        pass

    def send(self, data: bytes) -> None:
        self.other._inbox += data
        for each in self.other.readers:
            each.wake()

    def recv(self, size: int) -> bytes:
        data, self._inbox = self._inbox, b""
        return data

    def has_news(self) -> bool:
        return bool(self._inbox)

    def close(self) -> None:
        pass


class Socket:
    """The module."""

    SOL_SOCKET = SO_RCVTIMEO = SO_SNDTIMEO = 0

    @staticmethod
    def socketpair() -> tuple[Pipe, Pipe]:
        one, two = Pipe(), Pipe()
        one.other, two.other = two, one
        return one, two


class _Driver:
    """What has arrived on a connection, as answers."""

    def __init__(self) -> None:
        self._parser = Parser(InvalidResponse, DefaultParser.parse_error)

    def _next(self) -> Any:
        """Return the next answer, False if it has not arrived yet."""
        answer = self._parser.gets()
        if isinstance(answer, ResponseError):
            raise answer
        return answer


class ThreadDriver(_Driver):
    """A connection of redis-py, for threads."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        running = world.current().running
        assert running is not None
        self._limit, self._patience = settings["socket_connect_timeout"], settings["socket_timeout"]
        process = running.process
        self._sock = Connection(process, process.servers[settings["port"] - 7000])

    def connect(self) -> None:
        sock = self._sock
        sock.settimeout(self._limit)
        me = sock.world.running
        assert me is not None
        sock.readers.append(me)
        try:
            sock.ask_to_connect()
            me.wait(self._limit)
        finally:
            sock.readers.remove(me)
        if not sock.is_open:
            raise (
                ConnectionRefusedError("refused") if sock.is_refused else TimeoutError("timed out")
            )

    def disconnect(self, *args: object) -> None:
        self._sock.close()

    def can_read(self, timeout: float) -> bool:
        return self._sock.has_news()

    def send_packed_command(self, command: list[bytes], *, check_health: bool) -> None:
        with _as_its_own():
            for part in command:
                self._sock.sendall(part)

    def read_response(self) -> Any:
        with _as_its_own():
            while (answer := self._next()) is False:
                self._sock.settimeout(self._patience)
                self._parser.feed(self._sock.recv(65536))
            return answer


@contextmanager
def _as_its_own() -> Iterator[None]:
    """Raise the driver's own errors for those of the socket."""
    try:
        yield
    except TimeoutError as error:
        raise RedisTimeoutError(*error.args) from error
    except OSError as error:
        raise RedisConnectionError(*error.args) from error


async def news(connection: Connection) -> None:
    """Return when something arrives."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        loop.call_soon_threadsafe(_set, arrived)

    connection.on_news = tell
    try:
        await arrived
    finally:
        connection.on_news = None


def _set(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


class TaskDriver(_Driver):
    """A connection of redis-py, for tasks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        running = world.current().running
        assert running is not None
        process = running.process
        self._connection = Connection(process, process.servers[settings["port"] - 7000])

    async def connect(self) -> None:
        self._connection.ask_to_connect()
        await news(self._connection)
        if not self._connection.is_open:
            raise ConnectionRefusedError("refused")

    async def disconnect(self, *, nowait: bool = False) -> None:
        self._connection.close()

    async def can_read(self) -> bool:
        return self._connection.has_news()

    async def send_packed_command(self, command: Sequence[bytes], *, check_health: bool) -> None:
        for part in command:
            self._connection.send(part)

    async def read_response(self, *, disconnect_on_error: bool) -> Any:
        connection = self._connection
        while (answer := self._next()) is False:
            if not connection.has_news():
                await news(connection)
            if connection.is_broken:
                raise ConnectionResetError("Connection reset by peer")
            data, connection.inbox = connection.inbox, b""
            self._parser.feed(data)
        return answer


class DriverPool:
    """A pool of redis-py, which only tells how to make connections."""

    connection_class: type[ThreadDriver | TaskDriver] = ThreadDriver

    def __init__(self, **settings: Any) -> None:
        self.connection_kwargs = settings


class TaskDriverPool(DriverPool):
    connection_class = TaskDriver
