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

from django.core.cache import caches
from django.core.cache.backends.memcached import PyMemcacheCache
from django.core.checks import CheckMessage
from pymemcache.client.base import PooledClient
from pymemcache.exceptions import (
    MemcacheClientError,
    MemcacheError,
    MemcacheServerError,
    MemcacheUnexpectedCloseError,
    MemcacheUnknownCommandError,
    MemcacheUnknownError,
)

from django_distlock.conf import BackendSettings, check_values, must
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
#: How often a value is read again if a renewal of the same lease has changed it since it was read.
LOOKS = 5
#: Seconds: a value whose reply took longer is stored once more, after the server has read its clock. The server may
#: have been stopped meanwhile, and its clock with it: a value stored before the next tick expires early, by the time
#: of the stop.
LATE = 0.05
#: How many connections are kept open.
KEPT = 4
#: A connection remembers the numbers of at most 64 values that it stored, each for a second: a proxy may
#: keep the connection open while the server behind it is restarted.
MOST_KNOWN, FRESH = 64, 1.0
#: The errors that the first word of a reply tells.
_ERRORS = {
    b"ERROR": MemcacheUnknownCommandError,
    b"CLIENT_ERROR": MemcacheClientError,
    b"SERVER_ERROR": MemcacheServerError,
}
#: An expiry in the past: the key is deleted before the reply.
AT_ONCE = -1
#: A waiter appends this to the value, to show the holder that somebody waits; the value stays valid JSON.
MARK = b" "
#: The OPTIONS of the cache alias that are passed to a connection.
CONNECTING = ("socket_keepalive", "socket_module", "tls_context")
#: Parses a value; cached, because waiters read the same value many times.
_record = lru_cache(64)(Record.unpack)


@dataclass(frozen=True, slots=True)
class MemcachedOptions:
    """The OPTIONS for an alias of CACHES on memcached; *cache* None: for a server that CACHES does not name.

    *server*: the server that keeps the locks, written as in LOCATION; required if LOCATION names several servers.
    """

    cache: str | None = "default"
    server: str | None = None
    connect_timeout: float = 0.25
    io_timeout: float = 1.0

    def __post_init__(self) -> None:
        check_values(self)
        must(self.server or self.cache is not None, "'server' is needed with 'cache' None.")
        is_one = not {",", ";"}.intersection(self.server or "")
        must(
            is_one,
            "'server' names several servers of memcached, which do not know each other's locks. Name one.",
        )


class CacheMemcachedBackend(CacheKeyBackend):
    """Keeps locks in memcached: best effort, because the server may delete any key at any time."""

    options_class = MemcachedOptions
    options: MemcachedOptions

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        options = self.options
        if options.cache is None:
            self._use(PyMemcacheCache(str(options.server), {}), {})
            return
        kind = cache_class(options.cache)
        if MEMCACHED not in paths(kind):
            msg = f"'cache' names {options.cache!r}, a {kind.__name__}, which is not on memcached."
            raise ValueError(msg)
        given: dict[str, Any] = caches.settings[options.cache].get("OPTIONS") or {}
        if PYLIBMC in paths(kind) and (given.get("binary") or given.get("username")):
            raise ValueError(
                "the cache uses pylibmc with the binary protocol, which locks do not speak. "
                "Give locks an alias without 'binary' and 'username', or pymemcache."
            )
        self._use(cast("Any", own_instance(options.cache)), given)

    def _use(self, cache: Any, given: dict[str, Any]) -> None:
        """Keep the locks on the server of *cache*, whose OPTIONS are *given*."""
        options, self._cache = self.options, cache
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
        chosen = {option: given[option] for option in CONNECTING if given.get(option)}
        connect = partial(MemcachedConnection, self._server, *seconds, chosen)
        self._pool = Pool(self.alias, self._server, connect)

    def key_of(self, name: str) -> str:
        return plain_key(self._prefix + self._cache.make_key(super().key_of(name)))

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        """Add the key and read it back: a request whose reply was lost may have stored it already."""
        value = self._value(request, request.ttl)
        lives, asked = whole_seconds(request.ttl), clock.lease_time()
        found = self._pool.ask(
            MemcachedConnection.add_and_look, request.key, value, lives, request.owner
        )
        if found == value or (record := _record(found)).owner == request.owner:
            return Grant(None) if self._is_in_time(asked) or self._extend(request) else Busy()
        # With a higher limit, another place may be free.
        waits = left != 0 and request.limit in {None, 1}
        may_mark = waits and request.line not in self.queue.contested.wanted
        if may_mark and found and not found.endswith(MARK):
            # The mark tells the holder, which may never have been refused, to let other processes go first.
            with suppress(LockBackendError):
                self._pool.ask(MemcachedConnection.append, request.key, MARK)
        return record.busy

    def release(self, request: Request) -> Release:
        """Delete the key if it is ours, in one step: set the value that was read to expire at once."""
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
                self.queue.contested.waited_for(request.line, request.ttl - left, clock.wait_time())
            if self._delete(request, MemcachedConnection.cas, b"", number, AT_ONCE):
                return Release.RELEASED
        raise self._restless()

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return [self._extend(request) for request in requests]

    def probe(self, request: Request) -> Busy | None:
        record, _, _ = self._look(request)
        return record.busy if record else None

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        options = self.options
        if databases is None:
            return check_clearing(self.alias, options.cache, server=options.server)
        return self.check_server(str(self._server))

    def close(self) -> None:
        super().close()
        self._pool.close()

    def abandon_after_fork(self) -> None:
        """Close this process's copies of the parent's connections, which stay open in the parent."""
        self._pool.close()

    def _extend(self, request: Request) -> bool:
        was_late = False
        for _ in range(LOOKS):
            record, number, mark = self._look(request)
            if record is None or record.owner != request.owner:
                return False
            # Never shorten the lease: an earlier extension may have been longer.
            ttl = max(request.ttl, record.ends - clock.lease_time())
            value, lives = SecretBytes(self._value(request, ttl) + mark), whole_seconds(ttl)
            asked = clock.lease_time()
            if self._pool.ask(MemcachedConnection.cas, request.key, value, number, lives):
                if was_late or self._is_in_time(asked):
                    return True
                was_late = True
        raise self._restless()

    def _is_in_time(self, asked: float) -> bool:
        """Return whether the reply to a request sent at *asked* came early enough; if not, the server has read its clock since then."""
        if clock.lease_time() - asked <= LATE:
            return True
        self._pool.pass_tick()
        return False

    def _delete(self, request: Request, verb: Callable[..., bool], *args: object) -> bool:
        """Return whether *verb* deleted the key. If the reply is lost, the owner counts as released."""
        try:
            is_deleted = self._pool.ask(verb, request.key, *args)
        except LockOutcomeUnknown:
            self._released.add(request.owner)
            raise
        if is_deleted:
            self._released.add(request.owner)
        return is_deleted

    def _look(self, request: Request) -> tuple[Record | None, bytes, bytes]:
        """Return the record, the number of the value, and MARK if other processes wait for the lock."""
        found, number = self._pool.ask(MemcachedConnection.gets, request.key)
        if found is None:
            return None, b"", b""
        return _record(found), number, MARK if found.endswith(MARK) else b""

    def _value(self, request: Request, ttl: float) -> bytes:
        ends = clock.lease_time() + ttl
        record = Record(request.owner, ends, request.name, request.holder)
        return SecretBytes(record.pack().encode())

    def _restless(self) -> LockBackendError:
        return LockBackendError(self.alias, f"its value changed at each of {LOOKS} looks")


#: pymemcache's own class: a monitoring agent may have put a proxy into the module.
Client: Any = PooledClient.client_class


class MemcachedConnection(Client):  # type: ignore[misc]  # pymemcache has no types
    """pymemcache's client, connected, for one thread at a time; it is closed after its first error.

    The server numbers all values, from 1. An equal number means the same value, unless the server was
    restarted, which also closes the connection.
    """

    #: The host and the port, or the path of a unix socket.
    server: Any

    def __init__(self, server: Any, connect: float, answer: float, options: dict[str, Any]) -> None:
        """Connect within *connect* seconds; each answer must come within *answer* seconds."""
        limits = {"connect_timeout": connect, "timeout": answer}
        super().__init__(server, no_delay=True, default_noreply=False, **limits, **options)
        self._open()
        #: The time of the last use.
        self.used_at = 0.0
        #: Returns whether the server has closed the connection; always False on Windows, which has no poll().
        self.has_news: Callable[[], object] = bool
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            self.has_news = partial(poll.poll, 0)
        #: By owner: the number of the value, and when it was stored.
        self._known: dict[str, tuple[bytes, float]] = {}

    def add_and_look(self, key: str, value: bytes, seconds: int, owner: str) -> bytes | None:
        """Store *value* unless the key has one, and return the key's value, in one round trip."""
        name, size = key.encode(), len(value)
        command = b"add %b 0 %d %d\r\n%b\r\ngets %b\r\n" % (name, seconds, size, value, name)
        self.sock.sendall(command)
        # Not by raw_command(), which loses a reply that comes in several pieces.
        with self.sock.makefile("rb") as reply:
            word, _, text = reply.readline().rstrip().partition(b" ")
            if word in _ERRORS:
                raise _ERRORS[word](text or "add")
            match [word, *reply.readline().split()]:
                case [b"STORED" | b"NOT_STORED", b"END"]:
                    return None
                case [b"STORED" | b"NOT_STORED", b"VALUE", _, _, length, number]:
                    found: bytes = reply.read(int(length))
                    if reply.read(7) == b"\r\nEND\r\n":
                        self._note(owner, number, is_ours=found == value)
                        return found
        raise ValueError("it did not answer to 'add'")

    def _note(self, owner: str, number: bytes, *, is_ours: bool) -> None:
        if is_ours:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[owner] = number, clock.lease_time()

    def delete_known(self, key: str, owner: str) -> bool:
        """Delete the value that *owner* has just added on this connection; False if the value has changed or is gone."""
        number, when = self._known.pop(owner, (b"", 0.0))
        if not number or clock.lease_time() - when > FRESH:
            return False
        return bool(self.cas(key, b"", number, AT_ONCE))

    def _open(self) -> None:
        """Connect to the first address of the server that accepts; pymemcache tries only the first address."""
        addresses = [server := self.server]
        # With TLS, keep the server's name, which is compared with the certificate.
        if isinstance(server, tuple) and not self.tls_context:
            found = self.socket_module.getaddrinfo(*server, type=socket.SOCK_STREAM)
            addresses = [address[:2] for *_, address in found]
        for self.server in addresses:
            try:
                self.set_many({})  # connects, and sends nothing
                break
            except OSError:
                if self.server == addresses[-1]:
                    raise
        if isinstance(server, tuple) and not self.socket_keepalive:
            set_keepalive(self.sock)


class Pool:
    """Connections made by *connect*, each lent to one thread for one request."""

    def __init__(self, alias: str, server: Any, connect: Callable[[], MemcachedConnection]) -> None:
        self._alias = alias
        self._server = server
        self._connect = connect
        self._idle = IdleStack()
        # Close connections that come back after close(), instead of leaving them to the garbage collector.
        weakref.finalize(self, self._idle.close_all, MemcachedConnection.close).atexit = False

    def ask(self, verb: Callable[..., _T], *args: object, on_new: bool = False) -> _T:
        """Call *verb* of a connection, of a new one if *on_new*, and return its result; its errors become lock errors."""
        connection = (None if on_new else self._idle.fit_one()) or self._connected()
        try:
            try:
                answer = verb(connection, *args)
            except BaseException as error:
                # Also after an asynchronous exception: the next request would read the rest of this reply.
                connection.close()
                error.__traceback__ = None  # variables of pymemcache's frames contain the owner
                raise
        except (OSError, ValueError, MemcacheUnexpectedCloseError, MemcacheUnknownError) as error:
            # The idle connections are probably broken, too: a router that forgot one has forgotten all.
            self.close()
            was_idle = connection.used_at > 0
            problem = LockOutcomeUnknown(self._alias, self._told(error), was_idle=was_idle)
            raise problem from root_cause(error)
        except MemcacheError as error:
            raise LockBackendError(self._alias, self._told(error)) from root_cause(error)
        if len(self._idle) < KEPT:
            self._idle.keep(connection)
        else:
            connection.close()
        return answer

    def pass_tick(self) -> None:
        """Return once the server has read its clock, if it was late to do so.

        One thread of memcached accepts connections and reads the clock. It accepts a connection that was opened
        after the reply to another one only after it has done all that was due when it accepted the other one.
        """
        for _ in range(2):
            self.ask(MemcachedConnection.version, on_new=True)

    def close(self) -> None:
        self._idle.close_all(MemcachedConnection.close)

    def _connected(self) -> MemcachedConnection:
        try:
            return self._connect()
        except (OSError, ValueError, MemcacheError) as error:
            told = self._told(error, "it cannot be reached: ")
            raise LockBackendError(self._alias, told) from root_cause(error)

    def _told(self, error: Exception, what: str = "") -> str:
        # The texts of pymemcache's errors need their class to be understood.
        is_known = isinstance(error, MemcacheError)
        text = repr(error) if is_known else str(error) or type(error).__name__
        return f"memcached at {self._server}: {what}{text}"
