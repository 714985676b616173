"""CacheBackend: an alias of CACHES; what it is decides the way in which locks are kept there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from django_distlock.conf import checked_options

from .add import AddBackend, is_trusted
from .base import BaseLockBackend
from .cache_alias import cache_class, checked_cache, dotted_path, paths
from .locmem import LocMemBackend
from .memcached import CacheMemcachedBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_distlock.conf import BackendSettings

#: Classes, or the packages that they come from, whose server is a Redis or speaks as one.
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
#: Classes that no option makes fit, and what to use instead.
REFUSED = {
    "django.core.cache.backends.db.DatabaseCache": (
        "it grants an expired lock to two at once, and drops locks that are held when it is full. "
        "Use django_distlock.backends.database.DatabaseBackend, which keeps locks in the same database."
    ),
    "django.core.cache.backends.filebased.FileBasedCache": (
        "it grants a lock to several at once. On one machine, use "
        "django_distlock.backends.database.DatabaseBackend with SQLite."
    ),
    "django.core.cache.backends.dummy.DummyCache": (
        "it grants every lock to everybody. For tests, use "
        "django_distlock.backends.locmem.LocMemBackend or django_distlock.backends.dummy.DummyBackend."
    ),
}


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """OPTIONS of CacheBackend that the choice depends on; the way that is chosen has others.

    cache: the alias in CACHES that the locks are kept in.
    single_process: see SingleProcessOptions.
    trust_add: see AddOptions.
    """

    cache: str = "default"
    single_process: bool = False
    trust_add: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True)
class SingleProcessOptions:
    """OPTIONS for an alias in the memory of one process.

    cache: the alias in CACHES.
    single_process: that no other process needs to be excluded.
    """

    cache: str = "default"
    single_process: bool = False


class SingleProcessBackend(LocMemBackend):
    """Locks of one process, in memory of their own: neither culled nor cleared with the cache."""

    options_class = SingleProcessOptions
    options: SingleProcessOptions


class CacheBackend(BaseLockBackend):
    """Chooses, by what the alias is, the backend that keeps the locks; none of its own is made."""

    options_class = CacheOptions

    @classmethod
    def for_settings(cls, found: BackendSettings) -> BaseLockBackend:
        """Return the backend for the alias; ValueError or TypeError for one that can hold no locks."""
        name = checked_cache(found.options.get("cache", CacheOptions().cache))
        try:
            way = _chosen(name, found)
        except ValueError:
            # A misspelt 'cache' leaves the default alias, which then is not what is wrong.
            checked_options(cls, found)
            raise
        return way.for_settings(found)


def _chosen(name: str, found: BackendSettings) -> type[BaseLockBackend]:
    kind = cache_class(name)
    known = paths(kind)
    for refused, why in REFUSED.items():
        if refused in known:
            raise ValueError(_refusal(name, kind, why))
    if LOCMEM in known:
        return _in_one_process(name, kind, found)
    if any(path.startswith(REDIS) for path in known):
        return _redis()
    if known.intersection(MEMCACHED):
        return CacheMemcachedBackend
    return _trusted(name, kind, found)


def _in_one_process(name: str, kind: type, found: BackendSettings) -> type[BaseLockBackend]:
    if found.options.get("single_process") is True:
        return SingleProcessBackend
    why = (
        "each process has one of its own, so nobody else is excluded. Use an alias on Redis or memcached; "
        "if there is but one process, say so with OPTIONS 'single_process': True."
    )
    raise ValueError(_refusal(name, kind, why))


def _trusted(name: str, kind: type, found: BackendSettings) -> type[BaseLockBackend]:
    if is_trusted(kind, found.options.get("trust_add", ())):
        return AddBackend
    why = (
        "whether its add() has one winner is not known. Use an alias on Redis or memcached, or another "
        "backend; if its add() is atomic on a server that all processes share, and nothing is dropped "
        f"there before its time, say so with OPTIONS 'trust_add': [{dotted_path(kind)!r}]."
    )
    raise ValueError(_refusal(name, kind, why))


def _redis() -> type[BaseLockBackend]:
    try:
        from .redis import CacheRedisBackend
    except ImportError as error:
        msg = f"the cache is on Redis, whose driver is not installed: {error}."
        raise ValueError(msg) from error
    return CacheRedisBackend


def _refusal(name: str, kind: type, why: str) -> str:
    return f"'cache' names {name!r}, a {kind.__name__}, which can hold no locks: {why}"
