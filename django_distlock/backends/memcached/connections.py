"""Connections to one memcached server: the commands that locks need, and their errors."""

from __future__ import annotations

import select
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from django_distlock.engine import clock
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

_T = TypeVar("_T")

#: How many connections are kept open.
KEPT = 4
#: An old connection that turns out to be closed within this many seconds is replaced, and asked again.
SOON = 0.25
#: A connection knows the numbers of so many of its own values, for so many seconds: a proxy may keep
#: it open while the server behind it is restarted.
MOST_KNOWN, FRESH = 64, 1.0
#: An expiry that is over: the key is gone with the reply.
AT_ONCE = -1
#: What a waiter appends to the value, so that its holder sees that it is waited for: JSON may end so.
MARK = b" "
_LONGEST_LINE = 2048
_AFTER_VALUE = b"\r\nEND\r\n"
_ERRORS = (b"ERROR", b"CLIENT_ERROR", b"SERVER_ERROR")


class NotCarriedOut(Exception):
    """The server was not reached, or has refused the request in words."""


class Connection:
    """One connection, for one thread at a time. It speaks the text protocol, which all versions know.

    The server numbers all values, from 1: the same number is the same value, unless the server was
    restarted. Then the connection is closed, too.
    """

    def __init__(self, server: Any, given: dict[str, Any], connect: float, answer: float) -> None:
        """Connect within *connect* seconds; each answer must come within *answer* seconds."""
        try:
            self._socket: socket.socket = _connected(server, given, connect)
        except (OSError, ValueError) as error:
            raise NotCarriedOut(f"it cannot be reached: {error}") from error
        self._socket.settimeout(answer)
        self._replies = self._socket.makefile("rb")
        #: Reports that the server has closed it; eventlet has none.
        self._poll: Any = select.poll() if hasattr(select, "poll") else None
        if self._poll:
            self._poll.register(self._socket, select.POLLIN)
        #: By owner: the number of the value, and when it was stored.
        self._known: dict[str, tuple[bytes, float]] = {}

    def add(self, key: str, value: bytes, seconds: int, owner: str) -> bytes | None:
        """Store *value* unless there is one, and return the value that is there then, in one round trip."""
        command = f"add {key} 0 {seconds} {len(value)}\r\n".encode()
        self._socket.sendall(b"%b%b\r\ngets %b\r\n" % (command, value, key.encode()))
        if (line := self._line()) not in {b"STORED", b"NOT_STORED"}:
            raise ValueError(f"it answered {line!r} to 'add'")
        found = self._value()
        if found is None:
            return None
        if found[0] == value:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[owner] = found[1], clock.lease_time()
        return found[0]

    def gets(self, key: str) -> tuple[bytes, bytes] | None:
        self._socket.sendall(b"gets %b\r\n" % key.encode())
        return self._value()

    def cas(self, key: str, value: bytes, number: bytes, seconds: int) -> bool:
        """Replace the value with this number; False if it does not exist any more."""
        command = f"cas {key} 0 {seconds} {len(value)} ".encode()
        self._socket.sendall(b"%b%b\r\n%b\r\n" % (command, number, value))
        if (line := self._line()) not in {b"STORED", b"EXISTS", b"NOT_FOUND"}:
            raise ValueError(f"it answered {line!r} to 'cas'")
        return line == b"STORED"

    def mark(self, key: str) -> None:
        """Append MARK to the value, if there is one; it has another number then."""
        self._socket.sendall(b"append %b 0 0 1\r\n%b\r\n" % (key.encode(), MARK))
        self._line()

    def delete_known(self, key: str, owner: str) -> bool:
        """Delete what *owner* has just added by this connection; False if it did not, or it has changed."""
        number, when = self._known.pop(owner, (b"", 0.0))
        if not number or clock.lease_time() - when > FRESH or (self._poll and self._poll.poll(0)):
            return False
        return self.cas(key, b"", number, AT_ONCE)

    def close(self) -> None:
        self._replies.close()
        self._socket.close()

    def _value(self) -> tuple[bytes, bytes] | None:
        line = self._line()
        if line == b"END":
            return None
        words = line.split()  # VALUE, key, flags, size, number
        if len(words) == 5 and words[0] == b"VALUE":
            found = self._replies.read(int(words[3]) + len(_AFTER_VALUE))
            if found.endswith(_AFTER_VALUE):
                return found[: -len(_AFTER_VALUE)], words[4]
        raise ValueError(f"it answered {line!r} to 'gets', and does not show it")

    def _line(self) -> bytes:
        line: bytes = self._replies.readline(_LONGEST_LINE)
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("the connection was closed")
        if line.startswith(_ERRORS):
            raise NotCarriedOut(f"it answered with an error: {line.decode(errors='replace')}")
        return line[:-2]


class Pool:
    """Connections made by *connect*, each lent to one thread for one request.

    The idle ones are in a list, whose append() and pop() need no lock.
    """

    def __init__(self, alias: str, server: Any, connect: Callable[[], Connection]) -> None:
        self._alias = alias
        self._server = server
        self._connect = connect
        self._idle: list[Connection] = []
        # Without this, a connection that comes back after close() would be left to the garbage collector.
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def ask(self, verb: Callable[..., _T], *args: object, twice: bool = True) -> _T:
        """Return what *verb* of a connection returns; its errors become lock errors.

        With *twice*, it is called once more on a new connection if an old one is closed.
        """
        began = clock.wait_time()
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._lend(self._connect(), verb, *args)
            try:
                return self._lend(connection, verb, *args)
            except ConnectionError:
                # The other idle ones are probably closed, too: the server or a router was restarted.
                self.close()
                if twice and clock.wait_time() - began <= SOON:
                    with suppress(NotCarriedOut):
                        return self._lend(self._connect(), verb, *args)
                raise
        except NotCarriedOut as error:
            raise LockBackendError(self._alias, self._told(error)) from error
        except (OSError, ValueError) as error:
            raise LockOutcomeUnknown(self._alias, self._told(error)) from error

    def close(self) -> None:
        _close_all(self._idle)

    def _lend(self, connection: Connection, verb: Callable[..., _T], *args: object) -> _T:
        try:
            answer = verb(connection, *args)
        except BaseException:
            # Also Ctrl-C in the middle of a reply: its rest would be taken for the next one.
            connection.close()
            raise
        if len(self._idle) < KEPT:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _told(self, error: Exception) -> str:
        return f"memcached at {self._server}: {str(error) or type(error).__name__}"


def _close_all(idle: list[Connection]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().close()


def _connected(server: Any, given: dict[str, Any], timeout: float) -> Any:
    """Return a socket to *server*, with those OPTIONS of the alias that are for connections."""
    module, context = given.get("socket_module") or socket, given.get("tls_context")
    host, port, path = _place(server)
    if path:
        link = module.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        link = module.create_connection((host, port), timeout)
    try:
        link.settimeout(timeout)
        if path:
            link.connect(path)
        else:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if alive := given.get("socket_keepalive"):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, alive.idle)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, alive.intvl)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, alive.cnt)
        return context.wrap_socket(link, server_hostname=host) if context else link
    except BaseException:
        link.close()
        raise


def _place(server: Any) -> tuple[str, int, str]:
    if not isinstance(server, str):
        return str(server[0]), int(server[1]), ""
    if (path := server.removeprefix("unix:")).startswith("/"):
        return "", 0, path
    # With a port, or an IPv6 address alone.
    host, colon, port = server.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = server, "11211"
    return host.strip("[]"), int(port), ""
