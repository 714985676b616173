"""One of the servers, for threads: its connections, idle and in use, and how it gets new ones."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from redis.connection import ConnectionPool
from redis.exceptions import RedisError

from django_distlock.backends.redis.connections import read
from django_distlock.engine import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_distlock.backends.redis.scripts import Call
    from django_distlock.backends.redis.sources import Source

#: What drivers raise when there is no connection, or not any more.
BROKEN = (RedisError, OSError)
#: Threads that connect to one server at a time.
CONNECTORS = 4
#: Seconds after which a connection that still owes answers is given up, and how many it may owe.
DEBT_SECONDS, DEBT = 1.0, 64
#: There is no answer yet.
NOTHING = object()


class Line:
    """A connection. It may owe answers that nobody waits for any more: they come before the next one.

    So what is sent after a question that timed out is carried out after it, whenever that is.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._owed = 0
        self._since = 0.0

    def fileno(self) -> int:
        """Return the number of its socket, for poll()."""
        number: int = self._connection._sock.fileno()  # noqa: SLF001 - redis-py waits for one connection only
        return number

    def ask(self, call: Call) -> None:
        """Send a script."""
        self._connection.send_packed_command(
            self._connection.pack_command(*call.by_text), check_health=False
        )

    def hear(self) -> Any:
        """Return the answer to the last question, if it has arrived; NOTHING if not."""
        while self._connection.can_read(timeout=0):
            answer = read(self._connection)
            if not self._owed:
                return answer
            self._owed -= 1
        return NOTHING

    def forgo(self) -> None:
        """Wait no longer for the answer to the last question."""
        if not self._owed:
            self._since = clock.wait_time()
        self._owed += 1

    @property
    def is_fit(self) -> bool:
        """Whether it can be used: not closed by the other end, and not silent for too long."""
        try:
            while self._connection.can_read(timeout=0):
                if not self._owed:
                    return False
                read(self._connection)
                self._owed -= 1
        except BROKEN:
            return False
        is_patient = self._owed < DEBT and clock.wait_time() - self._since < DEBT_SECONDS
        return not self._owed or is_patient

    def close(self) -> None:
        """Close it."""
        self._connection.disconnect()


class Node:
    """One of the servers."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._pool = ConnectionPool(**source.connection)
        self._mutex = threading.Lock()
        self._idle: list[Line] = []
        # What is given back after close() would be left to the garbage collector, which complains.
        weakref.finalize(self, _close_all, self._idle).atexit = False
        self._connectors: ThreadPoolExecutor | None = None

    def take(self) -> Line | None:
        """Return an idle connection, if there is one; no I/O that blocks."""
        while True:
            with self._mutex:
                line = self._idle.pop() if self._idle else None
            if line is None or line.is_fit:
                return line
            line.close()

    def give_back(self, line: Line) -> None:
        """Take a connection back."""
        with self._mutex:
            self._idle.append(line)

    def connect(self) -> Line:
        """Return a connection, a new one if none is idle: slow."""
        if (line := self.take()) is not None:
            return line
        # Not the pool's: that keeps all it has ever made.
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()
            raise
        return Line(connection)

    def connect_later(self, take: Callable[[Line | Exception], None], until: float) -> None:
        """In a thread, unless it is later than *until*: have *take* take a connection, or why there is none."""

        def job() -> None:
            if clock.wait_time() > until:
                return
            try:
                arrival: Line | Exception = self.connect()
            except BROKEN as error:
                arrival = error
            take(arrival)

        try:
            self._submit(job)
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            job()

    def close(self) -> None:
        """Let idle connections and threads go."""
        with self._mutex:
            idle = self._idle[:]
            self._idle.clear()
            connectors, self._connectors = self._connectors, None
        _close_all(idle)
        if connectors is not None:
            connectors.shutdown(wait=False)

    def _submit(self, job: Callable[[], None]) -> None:
        with self._mutex:
            if self._connectors is None:
                name = f"distlock-connect-{self.source.where}"
                self._connectors = ThreadPoolExecutor(CONNECTORS, thread_name_prefix=name)
            self._connectors.submit(job)


def _close_all(lines: list[Line]) -> None:
    for line in lines:
        line.close()
