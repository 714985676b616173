"""CacheMemcachedBackend: a lock is a key that add() makes and cas() changes, on one server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.core.checks import CheckMessage

from django_distlock.backends import cache_alias
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.cache_alias import Record
from django_distlock.conf import BackendSettings, check_values
from django_distlock.engine import clock
from django_distlock.engine.values import Busy, Grant, RecentOwners, Release, Request
from django_distlock.engine.waiting import Waiting, Way
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

from .connections import AT_ONCE, MARK, SOON, Connection, Pool

MEMCACHED = "django.core.cache.backends.memcached.BaseMemcachedCache"
PYLIBMC = "django.core.cache.backends.memcached.PyLibMCCache"
#: How often a value is read again because a renewal of the same lease has just changed it.
LOOKS = 5
#: Parses a value; waiters read the same one again and again.
_record = lru_cache(64)(Record.unpack)


@dataclass(frozen=True, slots=True)
class MemcachedOptions:
    """The OPTIONS for an alias of CACHES on memcached; *server*: the only one with locks, as in LOCATION."""

    cache: str = "default"
    server: str | None = None
    connect_timeout: float = 0.25
    io_timeout: float = 1.0

    def __post_init__(self) -> None:
        server: object = self.server
        if server is not None and not isinstance(server, str):
            raise TypeError(f"'server' must be a str, not {server!r}.")
        check_values(self)


class CacheMemcachedBackend(BaseLockBackend):
    """Keeps locks in memcached: best effort, because the server may delete any key at any time."""

    options_class = MemcachedOptions
    options: MemcachedOptions
    kind = "distlock"
    waiting = Waiting(way=Way.LOOK)

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.place = "cache", self.options.cache
        cache_alias.check_ttl_setting(settings)
        self._cache = _memcached(self.options.cache)
        #: Its OPTIONS, as they are given to the driver.
        self._given: dict[str, Any] = self._cache._options  # noqa: SLF001 - there is no other way
        if PYLIBMC in cache_alias.paths(type(self._cache)):
            _check_protocol(self._given)
        self._prefix = _client_prefix(self._given)
        self._server = _only_server(self.options, self._cache.client_servers)
        self._pool = Pool(self.alias, self._server, self._connect)
        self._released = RecentOwners()

    def check_ttl(self, ttl: float) -> None:
        cache_alias.check_ttl(ttl)

    def request(self, name: str, **wishes: Any) -> Request:
        key = self._cache.make_key(self.key_of(name))
        return Request(name, cache_alias.plain_key(self._prefix + key), **wishes)

    def try_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
    ) -> Grant | Busy:
        """Add the key and read it: the lock may be ours already, by a request whose reply was lost."""
        value = self._value(request, request.ttl)
        lives = cache_alias.whole_seconds(request.ttl)
        found = self._pool.ask(Connection.add, request.key, value, lives, request.owner)
        if found == value:
            return Grant(None)
        record = _record(found)
        if record.owner == request.owner:
            return Grant(None)
        if left != 0 and found and not found.endswith(MARK) and request.key not in self.queue.turns:
            # A holder that was never refused itself learns only by this to let others go first.
            with suppress(LockBackendError):
                self._pool.ask(Connection.mark, request.key)
        return _busy(record)

    def release(self, request: Request) -> Release:
        """Delete the key if it is ours, in one step: the value that was read expires at once."""
        if self._delete(request, Connection.delete_known, request.owner):
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
            if self._delete(request, Connection.cas, b"", number, AT_ONCE):
                return Release.RELEASED
        raise self._restless()

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return [self._extend(request) for request in requests]

    def probe(self, request: Request) -> Busy | None:
        record, _, _ = self._look(request)
        return _busy(record) if record else None

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        if databases is None:
            return cache_alias.check_clearing(
                self.alias, self.options.cache, server=self.options.server
            )
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
            # Never less than it has: a longer extension was asked for before.
            ttl = max(request.ttl, record.ends - clock.lease_time())
            value, lives = self._value(request, ttl) + mark, cache_alias.whole_seconds(ttl)
            if self._pool.ask(Connection.cas, request.key, value, number, lives):
                return True
        raise self._restless()

    def _delete(self, request: Request, verb: Callable[..., bool], *args: object) -> bool:
        """Return whether *verb* deleted the key. If its reply is lost, the owner counts as released: it may be."""
        began = clock.wait_time()
        try:
            is_deleted = self._pool.ask(verb, request.key, *args, twice=False)
        except LockOutcomeUnknown:
            self._released.add(request.owner)
            if clock.wait_time() - began > SOON:
                raise
            return False
        if is_deleted:
            self._released.add(request.owner)
        return is_deleted

    def _look(self, request: Request) -> tuple[Record | None, bytes, bytes]:
        """Return the value, its number, and MARK if others wait for the lock."""
        if (found := self._pool.ask(Connection.gets, request.key)) is None:
            return None, b"", b""
        return _record(found[0]), found[1], MARK if found[0].endswith(MARK) else b""

    def _value(self, request: Request, ttl: float) -> bytes:
        ends = clock.lease_time() + ttl
        return Record(request.owner, ends, request.name, request.holder).pack().encode()

    def _restless(self) -> LockBackendError:
        return LockBackendError(self.alias, f"its value changed at each of {LOOKS} looks")

    def _connect(self) -> Connection:
        options = self.options
        return Connection(self._server, self._given, options.connect_timeout, options.io_timeout)


def _busy(record: Record) -> Busy:
    return Busy(record.holder, mark=record.owner)


def _memcached(name: str) -> Any:
    kind = cache_alias.cache_class(cache_alias.checked_cache(name))
    if MEMCACHED not in cache_alias.paths(kind):
        raise ValueError(f"'cache' names {name!r}, a {kind.__name__}, which is not on memcached.")
    return cache_alias.own_instance(name)


def _client_prefix(given: dict[str, Any]) -> str:
    behaviors = given.get("behaviors") or {}
    prefix = given.get("key_prefix") or behaviors.get("namespace") or ""
    return prefix.decode("latin-1") if isinstance(prefix, bytes) else str(prefix)


def _check_protocol(given: dict[str, Any]) -> None:
    if given.get("binary") or given.get("username"):
        raise ValueError(
            "the cache uses pylibmc with the binary protocol, which locks do not speak. "
            "Give locks an alias without 'binary' and 'username', or pymemcache."
        )


def _only_server(options: MemcachedOptions, servers: Sequence[Any]) -> Any:
    """Return the server: with several, one that fails would have its keys looked for on another."""
    if options.server is None and len(servers) != 1:
        raise ValueError(
            f"the cache {options.cache!r} has {len(servers)} servers. If one fails, the others know "
            "nothing of its locks: name the one that is to keep them all as OPTIONS 'server'."
        )
    return options.server or servers[0]
