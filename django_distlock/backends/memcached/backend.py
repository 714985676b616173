"""CacheMemcachedBackend: a lock is a key that add() makes and cas() changes, on one server."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.cache_alias import (
    cache_class,
    check_clearing,
    check_ttl,
    check_ttl_setting,
    checked_cache,
    own_instance,
    paths,
    plain_key,
    whole_seconds,
)
from django_distlock.engine import clock
from django_distlock.engine.values import Busy, Grant, Release
from django_distlock.engine.waiting import Waiting, Way
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

from .options import MemcachedOptions
from .pool import SOON, Pool
from .record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.core.checks import CheckMessage

    from django_distlock.conf import BackendSettings
    from django_distlock.engine.values import Request

    from .client import Client

MEMCACHED = "django.core.cache.backends.memcached.BaseMemcachedCache"
PYLIBMC = "django.core.cache.backends.memcached.PyLibMCCache"
#: How often a value is looked at anew that a renewal of the same lease has just changed.
LOOKS = 5
#: An expiry that is over: the key is gone with the reply.
AT_ONCE = -1


class CacheMemcachedBackend(BaseLockBackend):
    """The locks of an alias on memcached: best effort, as the server may drop any key at any time."""

    options_class = MemcachedOptions
    options: MemcachedOptions
    kind = "distlock"
    waiting = Waiting(way=Way.LOOK)

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.place = "cache", self.options.cache
        check_ttl_setting(settings)
        self._cache = _memcached(self.options.cache)
        #: Its OPTIONS, as they are given to the driver.
        self._given: dict[str, Any] = self._cache._options  # noqa: SLF001 - there is no other way
        self._is_pylibmc = PYLIBMC in paths(type(self._cache))
        if self._is_pylibmc:
            _check_protocol(self._given)
        self._server = _only_server(self.options, self._cache.client_servers)
        if self._is_pylibmc and isinstance(self._server, str):
            self._server = self._server.removeprefix("unix:")
        self._pool = Pool(self.alias, self._server, self._connect)
        self._released: deque[str] = deque(maxlen=256)

    def check_ttl(self, ttl: float) -> None:
        """Raise ValueError for a ttl that memcached does not keep."""
        check_ttl(ttl)

    def request(self, name: str, **wishes: Any) -> Request:
        """Return a request with the key that the alias makes of the name."""
        request = super().request(name, **wishes)
        key = _client_prefix(self._given) + self._cache.make_key(request.key)
        return replace(request, key=plain_key(key))

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        """Add it; if it is there, look whether it is our own, of a request whose reply was lost."""
        value, lives = self._record(request, request.ttl)
        if self._pool.ask(lambda client: client.add(request.key, value, lives)):
            return Grant(None)
        found = self._look(request)
        if found is None:
            return Busy()
        record, _ = found
        return Grant(None) if record.owner == request.owner else Busy(record.holder)

    def release(self, request: Request) -> Release:
        """Delete it if it is ours, in one step: what was seen is let expire at once."""
        for _ in range(LOOKS):
            found = self._look(request)
            if found is None or found[0].owner != request.owner:
                return self._missed(request, is_there=found is not None)
            if self._delete(request, found[1]):
                return Release.RELEASED
        raise self._restless()

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Let each live on that is still its owner's."""
        return [self._extend(request) for request in requests]

    def probe(self, request: Request) -> Busy | None:
        """Look who has it."""
        found = self._look(request)
        return None if found is None else Busy(found[0].holder)

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        """Warn of what clears the locks."""
        if databases is not None:
            return []
        return check_clearing(self.alias, self.options.cache, server=self.options.server)

    def close(self) -> None:
        """Let connections and threads go."""
        super().close()
        self._pool.close()

    def abandon_after_fork(self) -> None:
        """Drop the parent's connections."""
        self._pool.abandon()

    def _extend(self, request: Request) -> bool:
        for _ in range(LOOKS):
            found = self._look(request)
            if found is None or found[0].owner != request.owner:
                return False
            # Never less than it has: a longer extension was asked for before.
            ttl = max(request.ttl, found[0].ends - clock.lease_time())
            if self._change(request, found[1], *self._record(request, ttl)):
                return True
        raise self._restless()

    def _record(self, request: Request, ttl: float) -> tuple[bytes, int]:
        """Return the value, and for how many seconds the server is asked to keep it."""
        record = Record(request.owner, clock.lease_time() + ttl, request.name, request.holder)
        return record.pack(), whole_seconds(ttl)

    def _look(self, request: Request) -> tuple[Record, Any] | None:
        found = self._pool.ask(lambda client: client.gets(request.key))
        return None if found is None else (Record.unpack(found[0]), found[1])

    def _delete(self, request: Request, unique: Any) -> bool:
        """Delete what *unique* identifies. If the reply is lost, who looks again knows that it was us."""
        began = clock.wait_time()
        try:
            is_deleted = self._change(request, unique, b"", AT_ONCE, twice=False)
        except LockOutcomeUnknown:
            self._released.append(request.owner)
            if clock.wait_time() - began > SOON:
                raise
            return False
        if is_deleted:
            self._released.append(request.owner)
        return is_deleted

    def _change(
        self, request: Request, unique: Any, value: bytes, lives: int, *, twice: bool = True
    ) -> bool:
        return self._pool.ask(
            lambda client: client.cas(request.key, value, unique, lives), twice=twice
        )

    def _missed(self, request: Request, *, is_there: bool) -> Release:
        if request.owner in self._released:
            return Release.RELEASED
        return Release.TAKEN if is_there else Release.GONE

    def _restless(self) -> LockBackendError:
        return LockBackendError(self.alias, f"its value changed at each of {LOOKS} looks")

    def _connect(self) -> Client:
        # Neither driver is needed where the other one is used.
        if self._is_pylibmc:
            from .pylibmc_client import PyLibMCClient

            return PyLibMCClient(self._server, self._given, self.options)
        from .pymemcache_client import PyMemcacheClient

        return PyMemcacheClient(self._server, self._given, self.options)


def _memcached(name: str) -> Any:
    """Return an instance of the alias; ValueError if it is on no memcached."""
    kind = cache_class(checked_cache(name))
    if MEMCACHED not in paths(kind):
        msg = f"'cache' names {name!r}, a {kind.__name__}, which is not on memcached."
        raise ValueError(msg)
    return own_instance(name)


def _client_prefix(given: dict[str, Any]) -> str:
    """Return what the client itself puts before keys: pymemcache's prefix, pylibmc's namespace."""
    behaviors = given.get("behaviors") or {}
    prefix = given.get("key_prefix") or behaviors.get("namespace") or ""
    return prefix.decode("latin-1") if isinstance(prefix, bytes) else str(prefix)


def _check_protocol(given: dict[str, Any]) -> None:
    if given.get("binary") or given.get("username"):
        msg = (
            "the cache uses pylibmc with the binary protocol, in which a lock cannot be compared and "
            "deleted in one step. Give locks an alias without 'binary' and 'username', or pymemcache."
        )
        raise ValueError(msg)


def _only_server(options: MemcachedOptions, servers: Sequence[Any]) -> Any:
    """Return the server: with several, one that fails would have its keys looked for on another."""
    if options.server is None and len(servers) != 1:
        msg = (
            f"the cache {options.cache!r} has {len(servers)} servers. If one fails, the others know "
            "nothing of its locks: name the one that is to keep them all as OPTIONS 'server'."
        )
        raise ValueError(msg)
    return options.server or servers[0]
