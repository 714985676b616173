"""CacheBackend: keeps locks on the server of an alias in CACHES; the class of the alias decides how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django_distlock.conf import BackendSettings, checked_options

from .add import AddBackend, is_trusted
from .base import BaseLockBackend
from .cache_alias import cache_class, dotted_path, paths
from .locmem import LocMemBackend
from .memcached import CacheMemcachedBackend

#: Classes, or their packages, whose server speaks the protocol of Redis.
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


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The OPTIONS by which CacheBackend chooses; the chosen backend has its own."""

    cache: str = "default"
    single_process: bool = False
    trust_add: Sequence[str] = field(default=())


class SingleProcessBackend(LocMemBackend):
    """Locks of one process, in memory but not in the cache, so they are not deleted with it."""

    options_class = CacheOptions
    options: CacheOptions


class CacheBackend(BaseLockBackend):
    """Chooses the backend by the class of the alias; it has no instances itself."""

    options_class = CacheOptions

    @classmethod
    def for_settings(cls, found: BackendSettings) -> BaseLockBackend:
        """Return the backend for the alias; ValueError or TypeError if it cannot keep locks."""
        try:
            chosen = _chosen(found.options.get("cache", CacheOptions().cache), found.options)
        except ValueError:
            # If the option 'cache' is misspelt, the default alias is not the problem: say that first.
            checked_options(cls, found)
            raise
        return chosen.for_settings(found)


def _chosen(name: object, options: dict[str, Any]) -> type[BaseLockBackend]:
    kind = cache_class(name)
    known = paths(kind)
    if any(path.startswith(REDIS) for path in known):
        try:
            from .redis import CacheRedisBackend
        except ImportError as error:
            msg = f"the cache uses Redis, but its driver is not installed: {error}."
            raise ValueError(msg) from error
        return CacheRedisBackend
    if known.intersection(MEMCACHED):
        return CacheMemcachedBackend
    if LOCMEM in known and options.get("single_process") is True:
        return SingleProcessBackend
    why = next((REFUSED[path] for path in REFUSED if path in known), None)
    if why is None and is_trusted(kind, options.get("trust_add", ())):
        return AddBackend
    why = why or UNKNOWN.format(path=dotted_path(kind))
    raise ValueError(f"'cache' names {name!r}, a {kind.__name__}, which cannot keep locks: {why}")
