"""Timeouts for requests on own connections, and checks whether a connection was closed by the server."""

from __future__ import annotations

import _socket
import contextlib
import importlib.util
import select
import selectors
import socket
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from django.db import Error

from django_distlock.backends.idle import set_keepalive
from django_distlock.exceptions import LockBackendError
from django_distlock.ground import clock

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


# The unpatched module: gevent's poll() does not report a hang-up, and is only needed for calls that wait.
_select = _own_copy("select")
#: select.poll(); None on Windows.
_poll = getattr(_select, "poll", None)


#: The longest wait in seconds: the kernel counts milliseconds, in 31 bits.
LONGEST_SELECT = 2_000_000.0
#: Seconds within which the server must get the order to end a request.
CANCEL = 10.0
#: Seconds after which the order is repeated if the request has no answer.
CANCEL_AGAIN = 1.0


#: The attributes with the wrapped connection: of wrapt's proxies, which monitoring agents use, and of SQLAlchemy's pools.
_INSIDE = ("__wrapped__", "driver_connection")


class NoAnswer(TimeoutError):
    """The server has not answered in time; a plain TimeoutError may come from a signal handler of the project."""

    def __str__(self) -> str:
        return "no answer in time"


def driver_of(connection: BaseDatabaseWrapper) -> Any:
    """Return the driver's own connection, which monitoring agents and pools put into a proxy.

    Attributes that are set on a proxy may not reach the driver's connection.
    """
    raw: Any = connection.connection
    for name in _INSIDE:
        while (inner := getattr(raw, name, None)) is not None:
            raw = inner
    return raw


def bound_requests(connection: BaseDatabaseWrapper, seconds: float | None) -> None:
    """Set the *seconds* after which a request on *connection* fails; None: never.

    TCP alone does not notice that a server hangs, as the server's kernel still acknowledges. psycopg2 has only
    the limits of TCP: see PostgreSQL.connection_options().
    """
    raw = connection.connection
    if connection.vendor == "postgresql" and hasattr(raw, "wait"):
        _bound_psycopg(raw, seconds)
    elif hasattr(raw, "_read_timeout"):  # PyMySQL
        raw._read_timeout = seconds  # noqa: SLF001 - has no public name
    elif hasattr(raw, "send_query"):
        _bound_mysqlclient(connection, seconds)


@contextmanager
def patient(
    connection: BaseDatabaseWrapper, seconds: float | None, *, usually: float
) -> Iterator[None]:
    """Let requests fail after *seconds* in the block, and after *usually* seconds again after the block."""
    bound_requests(connection, seconds)
    try:
        yield
    finally:
        if connection.connection is not None:
            bound_requests(connection, usually)


@contextmanager
def interruptible(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Allow signals and other greenlets to run during a request on the caller's own connection.

    An exception of theirs cuts the connection: PyMySQL may have sent the request without reading its reply,
    for which the rollback would wait.
    """
    raw = driver_of(connection)
    is_mysqlclient = hasattr(raw, "send_query")
    try:
        if is_mysqlclient:
            _bound_mysqlclient(connection, None)
        yield
    except Error:
        raise
    except BaseException:
        cut(connection)
        raise
    finally:
        if is_mysqlclient:
            for name in _BOUND:
                raw.__dict__.pop(name, None)  # the connection does not support delattr()


def descriptor(connection: BaseDatabaseWrapper) -> int | None:
    """Return the file descriptor of *connection*'s socket; None if it is closed."""
    raw: Any = connection.connection
    if hasattr(raw, "distlock_descriptor"):
        return raw.distlock_descriptor if raw.open else None
    if not hasattr(raw, "fileno"):
        raw = getattr(raw, "_sock", None)
    driver: Any = connection.Database  # type: ignore[attr-defined] # each vendor's class has it
    # Suppress only the driver's errors, not an asynchronous exception such as a time limit.
    try:
        found: int | None = None if raw is None else raw.fileno()
    except (driver.Error, OSError):
        return None
    return found


def is_cut(connection: BaseDatabaseWrapper) -> bool:
    """Return True if the server has closed the connection; no I/O."""
    found = descriptor(connection)
    if found is None or found < 0:
        return True
    if _poll is None:
        return bool(_select.select([found], [], [], 0)[0])
    # Some systems have no POLLRDHUP, which reports a closed connection with unread data.
    hang_up = getattr(_select, "POLLRDHUP", _select.POLLIN)
    poll = _poll()
    poll.register(found, hang_up | _select.POLLHUP | _select.POLLERR)
    return bool(poll.poll(0))


def is_under_way(connection: BaseDatabaseWrapper) -> bool:
    """Return True if the server is running a request that cancel() can end; no I/O.

    False behind a pooler, whose session numbers are not the server's, and after cut(), which the server notices.
    """
    server = getattr(connection.connection, "pgconn", None)
    if server is None:
        return False
    from psycopg.pq import TransactionStatus

    is_active: bool = server.transaction_status == TransactionStatus.ACTIVE
    is_known = getattr(connection, "distlock_is_ours", False) and not is_cut(connection)
    return is_active and (_has_cancel_safe() or is_known)


def cancel(connection: BaseDatabaseWrapper, another: Callable[[], Any]) -> None:
    """Ask the server to end the running request, on *another* connection if needed, until it answers the request.

    This may take longer than a request, as nobody waits for it, and the session must not stay on the server.
    """
    raw: Any = connection.connection
    ends = clock.wait_time() + CANCEL
    without_errors = contextlib.suppress(Error, OSError, LockBackendError)
    with without_errors, connection.wrap_database_errors:  # the connection may be closed meanwhile
        while (left := ends - clock.wait_time()) > 0:
            # The order may fail, and a server that has hung ignores it if it has not read the request yet.
            with without_errors, connection.wrap_database_errors:
                _ask_to_cancel(raw, another, left)
            with contextlib.suppress(NoAnswer):
                if raw.pgconn.is_busy():  # libpq has not read the answer already
                    wait_for_reply(raw.fileno(), min(left, CANCEL_AGAIN))
                return


def _ask_to_cancel(raw: Any, another: Callable[[], Any], seconds: float) -> None:
    if _has_cancel_safe():
        raw.cancel_safe(timeout=seconds)
        return
    # Before libpq 17, cancelling has no time limit, and blocks all threads of the process: use a statement.
    with contextlib.closing(another()) as other:
        other.distlock_cursor.execute(f"SELECT pg_cancel_backend({raw.info.backend_pid})")


def _has_cancel_safe() -> bool:
    from psycopg import capabilities

    return capabilities.has_cancel_safe()


def cut(connection: BaseDatabaseWrapper) -> None:
    """Shut the connection down: a thread that waits for a reply on it gets an error at once."""
    found = descriptor(connection)
    if found is None or found < 0:
        return
    with _copy(found) as sock, contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def keep_alive(connection: BaseDatabaseWrapper) -> None:
    """Set TCP keepalive, so that a dead server machine is noticed within about ten seconds."""
    found = descriptor(connection)
    if found is None:
        return
    with _copy(found) as sock, contextlib.suppress(OSError):  # a Unix socket needs none
        set_keepalive(sock)


@contextmanager
def _copy(number: int) -> Iterator[_socket.socket]:
    # Not socket.socket: that of gevent would make the driver's descriptor non-blocking.
    sock = _socket.socket(fileno=_socket.dup(number))
    try:
        yield sock
    finally:
        sock.close()


def _bound_psycopg(raw: Any, seconds: float | None) -> None:
    #: poll() of this connection's socket, with a timeout in milliseconds; None with gevent.
    if not hasattr(raw, "distlock_poll"):
        raw.distlock_poll = None
        if _poll is not None and isinstance(select.select, BuiltinFunctionType):
            poll = _poll()
            poll.register(raw.fileno(), _select.POLLIN)
            raw.distlock_poll = poll.poll
        raw.wait = partial(_wait, raw)
    raw.distlock_bound = seconds


def _wait(raw: Any, work: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
    """Wait like psycopg, but at most for the time limit of *raw*, the connection."""
    if raw.distlock_bound is not None:
        work = _bounded(work, clock.wait_time() + raw.distlock_bound)
    return raw.__class__.wait(raw, work, *args, **kwargs)


def _bounded(work: Generator[Any, Any, Any], ends: float) -> Generator[Any, Any, Any]:
    try:
        wanted = next(work)
        while True:
            ready = yield wanted
            if not ready and clock.wait_time() >= ends:
                raise NoAnswer
            wanted = work.send(ready)
    except StopIteration as done:
        return done.value


#: Attributes that we set on a connection of mysqlclient: methods that replace C code, and the socket's number.
_BOUND = ("query", "commit", "rollback", "autocommit", "distlock_descriptor")
#: The numbers of errors from the C code: the connection is lost.
_CLIENT_ERRORS = range(2000, 3000)


def _bound_mysqlclient(connection: BaseDatabaseWrapper, seconds: float | None) -> None:
    """Wait for replies in Python: mysqlclient's C code blocks signals and greenlets, and has a fixed timeout."""
    raw = driver_of(connection)
    if not hasattr(raw, "distlock_descriptor"):
        raw.distlock_descriptor = raw.fileno()  # fileno() fails while the connection is busy

    def query(statement: bytes | bytearray | str) -> None:
        try:
            raw.send_query(bytes(statement) if isinstance(statement, bytearray) else statement)
            wait_for_reply(raw.distlock_descriptor, seconds)
            raw.read_query_result()
        except raw.Error as error:
            if error.args and error.args[0] in _CLIENT_ERRORS:
                raw.distlock_descriptor = -1  # closed; the number may be used again
            raise
        except BaseException:
            # Not close(), which would send COM_QUIT: the server would take that as a sign of life, and go on waiting.
            cut(connection)
            raise

    raw.query = query
    raw.commit = lambda: query(b"COMMIT")
    raw.rollback = lambda: query(b"ROLLBACK")
    raw.autocommit = lambda on: query(b"SET autocommit = %d" % on)


def wait_for_reply(descriptor: int, seconds: float | None) -> None:
    """Wait in Python, where signals and greenlets can run, until there is data to read; NoAnswer if late."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        if not selector.select(None if seconds is None else min(seconds, LONGEST_SELECT)):
            raise NoAnswer
