"""CacheMemcachedBackend: a lock is a key on one server, created by add() and changed by cas()."""

from __future__ import annotations

import select
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

from django.core.checks import CheckMessage

from django_distlock.conf import BackendSettings, check_values
from django_distlock.engine.values import Busy, Grant, Release, Request, SecretBytes
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, root_cause
from django_distlock.ground import clock

from .cache_alias import (
    CacheKeyBackend,
    Record,
    cache_class,
    check_clearing,
    own_instance,
    paths,
    plain_key,
    whole_seconds,
)
from .idle import IdleStack, set_keepalive

_T = TypeVar("_T")

MEMCACHED = "django.core.cache.backends.memcached.BaseMemcachedCache"
PYLIBMC = "django.core.cache.backends.memcached.PyLibMCCache"
#: How often a value is read again because a renewal of the same lease has just changed it.
LOOKS = 5
#: How many connections are kept open.
KEPT = 4
#: A connection caches the numbers of so many of its own values, for so many seconds only: a proxy may
#: keep the connection open while the server behind it is restarted.
MOST_KNOWN, FRESH = 64, 1.0
#: An expiry in the past: the key is deleted before the reply.
AT_ONCE = -1
#: A waiter appends this to the value, to show the holder that somebody waits; the value stays valid JSON.
MARK = b" "
_LONGEST_LINE = 2048
_AFTER_VALUE = b"\r\nEND\r\n"
_ERRORS = (b"ERROR", b"CLIENT_ERROR", b"SERVER_ERROR")
#: Parses a value; cached, because waiters read the same value many times.
_record = lru_cache(64)(Record.unpack)


@dataclass(frozen=True, slots=True)
class MemcachedOptions:
    """The OPTIONS for an alias of CACHES on memcached; *server*: the only one with locks, as in LOCATION."""

    cache: str = "default"
    server: str | None = None
    connect_timeout: float = 0.25
    io_timeout: float = 1.0

    def __post_init__(self) -> None:
        check_values(self)


class CacheMemcachedBackend(CacheKeyBackend):
    """Keeps locks in memcached: best effort, because the server may delete any key at any time."""

    options_class = MemcachedOptions
    options: MemcachedOptions

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        options, kind = self.options, cache_class(self.options.cache)
        if MEMCACHED not in paths(kind):
            msg = f"'cache' names {options.cache!r}, a {kind.__name__}, which is not on memcached."
            raise ValueError(msg)
        self._cache = cast("Any", own_instance(options.cache))  # django-stubs lacks its attributes
        #: The OPTIONS of the cache alias, as Django passes them to the driver.
        given: dict[str, Any] = self._cache._options  # noqa: SLF001 - there is no other way
        if PYLIBMC in paths(kind) and (given.get("binary") or given.get("username")):
            raise ValueError(
                "the cache uses pylibmc with the binary protocol, which locks do not speak. "
                "Give locks an alias without 'binary' and 'username', or pymemcache."
            )
        prefix = given.get("key_prefix") or (given.get("behaviors") or {}).get("namespace") or ""
        self._prefix = prefix.decode("latin-1") if isinstance(prefix, bytes) else str(prefix)
        servers = self._cache.client_servers
        if options.server is None and len(servers) != 1:
            raise ValueError(
                f"the cache {options.cache!r} has {len(servers)} servers. If one fails, the others know "
                "nothing of its locks: name the one that is to keep them all as OPTIONS 'server'."
            )
        self._server = options.server or servers[0]
        self.location = "cache", options.cache, str(self._server)
        seconds = options.connect_timeout, options.io_timeout
        self._connect = partial(MemcachedConnection, self._server, given, *seconds)
        self._pool = Pool(self.alias, self._server, self._connect)

    def key_of(self, name: str) -> str:
        return plain_key(self._prefix + self._cache.make_key(super().key_of(name)))

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        """Add the key and read it back: it may be ours already, by a request whose reply was lost."""
        value = self._value(request, request.ttl)
        lives = whole_seconds(request.ttl)
        found = self._pool.ask(MemcachedConnection.add, request.key, value, lives, request.owner)
        if found == value:
            return Grant(None)
        record = _record(found)
        if record.owner == request.owner:
            return Grant(None)
        may_mark = left != 0 and request.key not in self.queue.turns.wanted
        if may_mark and found and not found.endswith(MARK):
            # The mark tells a holder that was never refused itself to let others go first.
            with suppress(LockBackendError):
                self._pool.ask(MemcachedConnection.mark, request.key)
        return record.busy

    def release(self, request: Request) -> Release:
        """Delete the key if it is ours, in one step: the value that was read expires at once."""
        if self._delete(request, MemcachedConnection.delete_known, request.owner):
            return Release.RELEASED
        for _ in range(LOOKS):
            record, number, mark = self._look(request)
            if record is None or record.owner != request.owner:
                if request.owner in self._released:
                    return Release.RELEASED
                return Release.TAKEN if record else Release.GONE
            if mark:
                left = record.ends - clock.lease_time()
                self.queue.turns.waited_for(request.key, request.ttl - left, clock.wait_time())
            if self._delete(request, MemcachedConnection.cas, b"", number, AT_ONCE):
                return Release.RELEASED
        raise self._restless()

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return [self._extend(request) for request in requests]

    def probe(self, request: Request) -> Busy | None:
        record, _, _ = self._look(request)
        return record.busy if record else None

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        if databases is None:
            return check_clearing(self.alias, self.options.cache, server=self.options.server)
        return self.check_server(str(self._server))

    def close(self) -> None:
        super().close()
        self._pool.close()

    def abandon_after_fork(self) -> None:
        """Close our copies of the parent's connections, which stay open there."""
        self._pool.close()

    def _extend(self, request: Request) -> bool:
        for _ in range(LOOKS):
            record, number, mark = self._look(request)
            if record is None or record.owner != request.owner:
                return False
            # Never shorten the lease: an earlier extension may have been longer.
            ttl = max(request.ttl, record.ends - clock.lease_time())
            value, lives = SecretBytes(self._value(request, ttl) + mark), whole_seconds(ttl)
            if self._pool.ask(MemcachedConnection.cas, request.key, value, number, lives):
                return True
        raise self._restless()

    def _delete(self, request: Request, verb: Callable[..., bool], *args: object) -> bool:
        """Return whether *verb* deleted the key. If its reply is lost, the owner counts as released."""
        try:
            is_deleted = self._pool.ask(verb, request.key, *args)
        except LockOutcomeUnknown:
            self._released.add(request.owner)
            raise
        if is_deleted:
            self._released.add(request.owner)
        return is_deleted

    def _look(self, request: Request) -> tuple[Record | None, bytes, bytes]:
        """Return the value, its number, and MARK if others wait for the lock."""
        if (found := self._pool.ask(MemcachedConnection.gets, request.key)) is None:
            return None, b"", b""
        return _record(found[0]), found[1], MARK if found[0].endswith(MARK) else b""

    def _value(self, request: Request, ttl: float) -> bytes:
        ends = clock.lease_time() + ttl
        record = Record(request.owner, ends, request.name, request.holder)
        return SecretBytes(record.pack().encode())

    def _restless(self) -> LockBackendError:
        return LockBackendError(self.alias, f"its value changed at each of {LOOKS} looks")


class NotCarriedOut(Exception):
    """The server was not reached, or answered with an error."""


class MemcachedConnection:
    """One connection, for one thread at a time. It speaks the text protocol, which all versions support.

    The server numbers all values, from 1. An equal number means the same value, unless the server was
    restarted; a restart also closes the connection.
    """

    def __init__(self, server: Any, given: dict[str, Any], connect: float, answer: float) -> None:
        """Connect within *connect* seconds; each answer must come within *answer* seconds."""
        try:
            self._socket: socket.socket = _connected(server, given, connect)
        except (OSError, ValueError) as error:
            raise NotCarriedOut(f"it cannot be reached: {error}") from error
        self._socket.settimeout(answer)
        self._replies = self._socket.makefile("rb")
        #: The time of its last use.
        self.used_at = 0.0
        #: Returns whether the server has closed the connection; never under eventlet, which has no poll().
        self.has_news: Callable[[], object] = bool
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            self.has_news = partial(poll.poll, 0)
        #: By owner: the number of the value, and when it was stored.
        self._known: dict[str, tuple[bytes, float]] = {}

    def add(self, key: str, value: bytes, seconds: int, owner: str) -> bytes | None:
        """Store *value* if there is none, and return the value that is stored then, in one round trip."""
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
        """Replace the value if it still has this *number*; return whether it had."""
        command = f"cas {key} 0 {seconds} {len(value)} ".encode()
        self._socket.sendall(b"%b%b\r\n%b\r\n" % (command, number, value))
        if (line := self._line()) not in {b"STORED", b"EXISTS", b"NOT_FOUND"}:
            raise ValueError(f"it answered {line!r} to 'cas'")
        return line == b"STORED"

    def mark(self, key: str) -> None:
        """Append MARK to the value, if there is one; this changes its number."""
        self._socket.sendall(b"append %b 0 0 1\r\n%b\r\n" % (key.encode(), MARK))
        self._line()

    def delete_known(self, key: str, owner: str) -> bool:
        """Delete the value that *owner* has just added on this connection; False if it has changed, or is none."""
        number, when = self._known.pop(owner, (b"", 0.0))
        if not number or clock.lease_time() - when > FRESH:
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
    """Connections made by *connect*, each lent to one thread for one request."""

    def __init__(self, alias: str, server: Any, connect: Callable[[], MemcachedConnection]) -> None:
        self._alias = alias
        self._server = server
        self._connect = connect
        self._idle = IdleStack()
        # Otherwise a connection that is returned after close() would be left to the garbage collector.
        weakref.finalize(self, self._idle.close_all, MemcachedConnection.close).atexit = False

    def ask(self, verb: Callable[..., _T], *args: object) -> _T:
        """Call *verb* of a connection and return its result; its errors become lock errors."""
        try:
            connection = self._idle.fit_one() or self._connect()
            try:
                answer = verb(connection, *args)
            except BaseException:
                # Also after an asynchronous exception: the rest of this reply would be taken for the next one.
                connection.close()
                raise
        except NotCarriedOut as error:
            raise LockBackendError(self._alias, self._told(error)) from root_cause(error)
        except (OSError, ValueError) as error:
            # The idle ones are probably broken too: a router that forgot one has forgotten all of them.
            self.close()
            raise LockOutcomeUnknown(self._alias, self._told(error)) from root_cause(error)
        if len(self._idle) < KEPT:
            self._idle.keep(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        self._idle.close_all(MemcachedConnection.close)

    def _told(self, error: Exception) -> str:
        return f"memcached at {self._server}: {str(error) or type(error).__name__}"


def _connected(server: Any, given: dict[str, Any], timeout: float) -> Any:
    """Return a socket to *server*, with the alias's OPTIONS for connections."""
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
            set_keepalive(link)
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
    # A host with a port, or an IPv6 address without one.
    host, colon, port = server.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = server, "11211"
    return host.strip("[]"), int(port), ""
