"""How long a request on an own connection may take before it is given up, and whether the line is cut."""

from __future__ import annotations

import _socket
import contextlib
import importlib.util
import os
import select
import selectors
import socket
import sys
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from django.db import Error

from django_distlock.engine import clock
from django_distlock.engine.background import Alarm

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper


def _own_copy(name: str) -> Any:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.loader is not None
    copy = importlib.util.module_from_spec(found)
    found.loader.exec_module(copy)
    return copy


# As Python made it: gevent puts a poll() of its own there, which knows no hang-up, and eventlet none.
# A look that takes no time needs none of theirs.
_select = _own_copy("select")
#: Not everywhere; it tells that the server has said its last word, however much of it is unread.
_HANGUP = getattr(_select, "POLLRDHUP", _select.POLLIN) | _select.POLLHUP | _select.POLLERR


#: Seconds: the kernel counts milliseconds, in 31 bits.
LONGEST_SELECT = 2_000_000.0


def bound_requests(connection: BaseDatabaseWrapper, seconds: float | None) -> None:
    """Give up each request of *connection* after so many seconds; None: never.

    TCP alone does not tell that a server hangs: its kernel goes on to acknowledge.
    """
    raw = connection.connection
    if connection.vendor == "postgresql" and hasattr(raw, "wait"):
        _bound_psycopg(raw, seconds)
    elif connection.vendor == "postgresql":
        _bound_psycopg2(connection, seconds)
    elif hasattr(raw, "_read_timeout"):  # PyMySQL
        raw._read_timeout = seconds  # noqa: SLF001 - has no public name
    elif hasattr(raw, "send_query"):
        _bound_mysqlclient(connection, seconds)


@contextmanager
def patient(
    connection: BaseDatabaseWrapper, seconds: float | None, *, usually: float
) -> Iterator[None]:
    """Give up requests after *seconds* meanwhile, and after the *usual* time from then on."""
    bound_requests(connection, seconds)
    try:
        yield
    finally:
        if connection.connection is not None:
            bound_requests(connection, usually)


@contextmanager
def interruptible(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Have signals, and other greenlets, come through while the caller's own connection waits."""
    raw: Any = connection.connection
    if not hasattr(raw, "send_query"):
        yield
        return
    _bound_mysqlclient(connection, None)
    try:
        yield
    finally:
        for name in _BOUND:
            del raw.__dict__[name]  # which has no delattr()


def descriptor(connection: BaseDatabaseWrapper) -> int | None:
    """Return the socket of *connection*: psycopg and mysqlclient tell, PyMySQL keeps it. None if it is closed."""
    raw: Any = connection.connection
    if hasattr(raw, "distlock_descriptor"):
        return raw.distlock_descriptor if raw.open else None
    if not hasattr(raw, "fileno"):
        raw = getattr(raw, "_sock", None)
    # No more than that: a time limit that a signal raises here is not the driver's.
    with contextlib.suppress(Error, OSError), connection.wrap_database_errors:
        found: int | None = None if raw is None else raw.fileno()
        return found
    return None


def is_cut(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the server has closed its end; no I/O."""
    found = descriptor(connection)
    if found is None or found < 0:
        return True
    poll = _select.poll()
    poll.register(found, _HANGUP)
    return bool(poll.poll(0))


def cut(connection: BaseDatabaseWrapper) -> None:
    """End the connection under a thread that waits for its reply: it gets an error at once."""
    found = descriptor(connection)
    if found is None or found < 0:
        return
    with _line(found) as line, contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def keep_alive(connection: BaseDatabaseWrapper) -> None:
    """Have the kernel find out within some ten seconds that the server's machine is gone."""
    found = descriptor(connection)
    if found is None or not hasattr(socket, "TCP_KEEPIDLE"):
        return
    with _line(found) as line, contextlib.suppress(OSError):  # a Unix socket needs none
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


@contextmanager
def _line(number: int) -> Iterator[_socket.socket]:
    # Not socket.socket: that of gevent and of eventlet makes the driver's own descriptor non-blocking.
    line = _socket.socket(fileno=os.dup(number))
    try:
        yield line
    finally:
        line.close()


def _bound_psycopg(raw: Any, seconds: float | None) -> None:
    #: What waits for news without turns, for so many milliseconds at most; none where others take turns.
    if not hasattr(raw, "distlock_poll"):
        poll = _select.poll()
        poll.register(raw.fileno(), _select.POLLIN)
        raw.distlock_poll = poll.poll if isinstance(select.select, BuiltinFunctionType) else None
    raw.distlock_bound = None
    if seconds is not None and seconds <= LONGEST_SELECT:
        raw.distlock_bound = seconds * 1000
    raw.__dict__.pop("wait", None)
    if _is_eventlet_at_work():
        raw.wait = partial(_wait_in_turn, raw)
    if seconds is None:
        return
    wait = raw.wait

    def bounded_wait(work: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        return wait(_bounded(work, clock.wait_time() + seconds), *args, **kwargs)

    raw.wait = bounded_wait


def _is_eventlet_at_work() -> bool:
    eventlet = sys.modules.get("eventlet.patcher")
    return eventlet is not None and bool(eventlet.is_monkey_patched("select"))


def _wait_in_turn(
    raw: Any, work: Generator[Any, Any, Any], interval: float = 0.1, **kwargs: Any
) -> Any:
    """Wait as psycopg does, but let other greenlets run: its own way, in C, knows gevent only."""
    from psycopg import waiting

    return waiting.wait_selector(work, raw.pgconn.socket, interval, **kwargs)


def _bounded(work: Generator[Any, Any, Any], ends: float) -> Generator[Any, Any, Any]:
    try:
        wanted = next(work)
        while True:
            ready = yield wanted
            if not ready and clock.wait_time() >= ends:
                msg = "no answer in time"
                raise TimeoutError(msg)
            wanted = work.send(ready)
    except StopIteration as done:
        return done.value


class _Watch:
    """Cuts a connection whose driver would wait without end, when an answer is overdue."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._alarm = Alarm(self._look)
        #: For how long to wait, and until when the request that is under way may take: lease time.
        self.seconds: float | None = None
        self._ends: float | None = None

    def __enter__(self) -> None:
        if self.seconds is not None:
            self._ends = clock.lease_time() + self.seconds
            self._alarm.at(self._ends)

    def __exit__(self, *_: object) -> None:
        self._ends = None

    def watched(self, request: Callable[[], None]) -> Callable[[], None]:
        def bounded() -> None:
            with self:
                request()

        return bounded

    def _look(self) -> None:
        if (ends := self._ends) is None:
            return
        if ends <= clock.lease_time():
            cut(self._connection)
        else:
            self._alarm.at(ends)


def _bound_psycopg2(connection: Any, seconds: float | None) -> None:
    if not hasattr(connection, "distlock_watch"):
        from psycopg2.extensions import cursor

        watch = connection.distlock_watch = _Watch(connection)

        class WatchedCursor(cursor):  # type: ignore[misc]  # it has no types
            def execute(self, *args: Any) -> None:
                with watch:
                    super().execute(*args)

        connection.connection.cursor_factory = WatchedCursor
        connection._commit = watch.watched(connection._commit)  # noqa: SLF001 - those of the driver have no room
        connection._rollback = watch.watched(connection._rollback)  # noqa: SLF001 - as above
    connection.distlock_watch.seconds = seconds


#: What a connection of mysqlclient does here and not in its C code, and the socket that it is on.
_BOUND = ("query", "commit", "rollback", "autocommit", "distlock_descriptor")
#: The numbers of errors that its C code finds itself: the connection is lost.
_CLIENT_ERRORS = range(2000, 3000)


def _bound_mysqlclient(connection: BaseDatabaseWrapper, seconds: float | None) -> None:
    """Wait for replies in Python: no signal, greenlet or change of the limit gets through to its C code."""
    raw: Any = connection.connection
    if not hasattr(raw, "distlock_descriptor"):
        raw.distlock_descriptor = raw.fileno()  # which it does not tell while it is busy

    def query(statement: bytes | bytearray | str) -> None:
        try:
            raw.send_query(bytes(statement) if isinstance(statement, bytearray) else statement)
            wait_for_reply(raw.distlock_descriptor, seconds)
            raw.read_query_result()
        except raw.Error as error:
            if error.args and error.args[0] in _CLIENT_ERRORS:
                raw.distlock_descriptor = -1  # closed, and soon somebody else's
            raise
        except BaseException:
            # The driver would say goodbye, which the server takes for a sign of life of who waits.
            cut(connection)
            raise

    raw.query = query
    raw.commit = lambda: query(b"COMMIT")
    raw.rollback = lambda: query(b"ROLLBACK")
    raw.autocommit = lambda on: query(b"SET autocommit = %d" % on)


def wait_for_reply(descriptor: int, seconds: float | None) -> None:
    """Wait in Python until there is something to read, where signals and greenlets get through; else TimeoutError."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        if not selector.select(None if seconds is None else min(seconds, LONGEST_SELECT)):
            msg = "no answer in time"
            raise TimeoutError(msg)
