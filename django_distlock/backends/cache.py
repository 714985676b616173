"""CacheBackend: keeps locks on the server of an alias in CACHES; the class of the alias decides how.

AddBackend uses add(), get() and delete() of a cache whose add() is trusted to be atomic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.core.cache import BaseCache, CacheHandler, caches
from django.core.checks import CheckMessage

from django_distlock.conf import BackendSettings, checked_options
from django_distlock.engine.values import Busy, Grant, Release, Request
from django_distlock.exceptions import LockOutcomeUnknown, root_cause
from django_distlock.ground import clock
from django_distlock.ground.naming import key_label

from .base import BaseLockBackend
from .cache_alias import (
    LONGEST_KEY,
    CacheKeyBackend,
    Record,
    cache_class,
    check_clearing,
    dotted_path,
    own_instance,
    paths,
    plain_key,
    whole_seconds,
)
from .locmem import LocMemBackend

#: Cache classes, or their packages, whose server speaks the protocol of Redis.
REDIS = (
    "django_redis.cache.RedisCache",
    "django.core.cache.backends.redis.RedisCache",
    "django_valkey.",
)
MEMCACHED = (
    "django.core.cache.backends.memcached.PyMemcacheCache",
    "django.core.cache.backends.memcached.PyLibMCCache",
)
LOCMEM = "django.core.cache.backends.locmem.LocMemCache"
#: Classes that cannot keep locks, and what to use instead.
REFUSED = {
    "django.core.cache.backends.db.DatabaseCache": (
        "it can give an expired lock to two callers at once, and deletes held locks when it is full. "
        "Use django_distlock.backends.database.DatabaseBackend, which keeps locks in the same database."
    ),
    "django.core.cache.backends.filebased.FileBasedCache": (
        "it can give a lock to several callers at once. On one machine, use "
        "django_distlock.backends.database.DatabaseBackend with SQLite."
    ),
    "django.core.cache.backends.dummy.DummyCache": (
        "it gives every lock to everybody. For tests, use "
        "django_distlock.backends.locmem.LocMemBackend or django_distlock.backends.dummy.DummyBackend."
    ),
    LOCMEM: (
        "each process has a separate one, so other processes are not excluded. Use an alias on Redis "
        "or memcached; if there is only one process, set OPTIONS 'single_process': True."
    ),
}
UNKNOWN = (
    "it is not known whether its add() succeeds for one caller only. Use an alias on Redis or memcached, "
    "or another backend; if its add() is atomic on a server that all processes share, and nothing is "
    "deleted there before it expires, set OPTIONS 'trust_add': [{path!r}]."
)
#: Seconds of the ttl that must be left for a delete(); with fewer the lock expires by itself, because another
#: caller could get it between the get() and the delete().
MARGIN = 1.0
#: The parent process's caches, kept because dropping one may close the parent's connection.
_OF_PARENTS: list[CacheHandler] = []


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The OPTIONS by which CacheBackend chooses; backends for Redis and memcached have their own.

    *trust_add* names the cache classes whose add() succeeds for one caller only.
    """

    cache: str = "default"
    single_process: bool = False
    trust_add: Sequence[str] = field(default=())


class _WithoutKeyFunction(CacheHandler):
    """A cache for each thread that uses keys unchanged: a lock keeps its key, also if KEY_FUNCTION returns another later."""

    def create_connection(self, alias: str) -> BaseCache:
        cache: Any = super().create_connection(alias)
        cache.make_key = lambda key, version=None: key
        return cache  # type: ignore[no-any-return]


class SingleProcessBackend(LocMemBackend):
    """Locks of one process, in memory beside the cache, so that clearing the cache does not delete them."""

    options_class = CacheOptions
    options: CacheOptions

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._cache = own_instance(self.options.cache)

    def label(self) -> str:
        return key_label(str(self._cache.make_key("distlock")))


class CacheBackend(BaseLockBackend):
    """Chooses another backend by the cache's class; CacheBackend itself has no instances."""

    options_class = CacheOptions

    @classmethod
    def for_settings(cls, found: BackendSettings) -> BaseLockBackend:
        """Return the backend for the alias; ValueError or TypeError if it cannot keep locks."""
        name = found.options.get("cache", CacheOptions().cache)
        try:
            chosen = _chosen(name, found.options)
        except ValueError as error:
            # A misspelt option comes first, unless the problem is a wrong alias or a missing driver.
            is_found = name in caches.settings and not isinstance(error.__cause__, ImportError)
            if is_found or "cache" not in found.options:
                checked_options(cls, found)
            raise
        return chosen.for_settings(found)


def _chosen(name: object, options: dict[str, Any]) -> type[BaseLockBackend]:
    kind = cache_class(name)
    classes = paths(kind)
    try:
        if any(path.startswith(REDIS) for path in classes):
            from .redis import CacheRedisBackend

            return CacheRedisBackend
        if classes.intersection(MEMCACHED):
            from .memcached import CacheMemcachedBackend

            return CacheMemcachedBackend
    except ImportError as error:
        msg = f"the driver that locks need on the cache's server is not installed: {error}."
        raise ValueError(msg) from error
    if LOCMEM in classes and options.get("single_process") is True:
        return SingleProcessBackend
    why = next((REFUSED[path] for path in REFUSED if path in classes), None)
    if why is None and is_trusted(kind, options.get("trust_add", ())):
        return AddBackend
    why = why or UNKNOWN.format(path=dotted_path(kind))
    raise ValueError(f"'cache' names {name!r}, a {kind.__name__}, which cannot keep locks: {why}")


class AddBackend(CacheKeyBackend):
    """A backend on any cache with an atomic add(): acquires by add(), releases by delete(), never extends."""

    options_class = CacheOptions
    options: CacheOptions
    #: A cache cannot compare and extend in one step, so a lease ends with its ttl.
    supports_extend = False

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._keys = own_instance(self.options.cache)
        self._caches = _WithoutKeyFunction()

    def key_of(self, name: str) -> str:
        room = LONGEST_KEY - len(self._keys.make_key(""))
        return str(self._keys.make_key(plain_key(super().key_of(name), room)))

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        """Add the key; if it exists, it may be our own, from a request whose reply was lost."""
        ends = clock.lease_time() + request.ttl
        value = Record(request.owner, ends, request.name, request.holder).pack()
        answer = self._ask("add", request.key, value, timeout=whole_seconds(request.ttl))
        if answer is not True and answer is not False:  # the cache class hides an error
            raise LockOutcomeUnknown(self.alias, f"add() returned {answer!r}, not True or False")
        found = None if answer else self._look(request)
        is_ours = answer or (found is not None and found.owner == request.owner)
        return Grant(None) if is_ours else found.busy if found else Busy()

    def release(self, request: Request) -> Release:
        """Delete the key if it stays ours for MARGIN seconds; otherwise let it expire."""
        found = self._look(request)
        if found is None or found.owner != request.owner:
            if request.owner in self._released:
                return Release.RELEASED
            return Release.GONE if found is None else Release.TAKEN
        self._released.add(request.owner)
        if found.ends - clock.lease_time() > MARGIN:
            self._ask("delete", request.key)
        return Release.RELEASED

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return [True] * len(requests)  # held until the ttl is over

    def probe(self, request: Request) -> Busy | None:
        found = self._look(request)
        return None if found is None else found.busy

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        if databases is None:
            return check_clearing(self.alias, self.options.cache)
        return self.check_server(f"the LOCATION of the cache {self.options.cache!r}")

    def abandon_after_fork(self) -> None:
        """Leave the parent's connection open, and use new caches."""
        _OF_PARENTS.append(self._caches)
        self._caches = _WithoutKeyFunction()

    def _look(self, request: Request) -> Record | None:
        value = self._ask("get", request.key)
        return None if value is None else Record.unpack(value)

    def _ask(self, verb: str, *args: Any, **options: Any) -> Any:
        """Call the cache of this thread; its errors become LockOutcomeUnknown."""
        try:
            return getattr(self._caches[self.options.cache], verb)(*args, **options)
        except Exception as error:  # noqa: BLE001 - kept as the cause
            problem = f"{verb}() of the cache {self.options.cache!r} failed: {error}"
            raise LockOutcomeUnknown(self.alias, problem) from root_cause(error)


def is_trusted(kind: type, trusted: object) -> bool:
    if not (isinstance(trusted, list | tuple) and all(isinstance(path, str) for path in trusted)):
        raise TypeError(f"'trust_add' must be a list of dotted paths, not {trusted!r}.")
    return dotted_path(kind) in trusted
