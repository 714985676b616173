"""What the tests of memcached share: aliases on a server, rivals, and what other processes do."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.cache import caches

from django_distlock import lock, locks
from django_distlock.backends.memcached import CacheMemcachedBackend
from django_distlock.conf import BackendSettings
from django_distlock.handler import make_backend
from tests.contract.rivals import Rival
from tests.fixtures.child import hear_word, say

if TYPE_CHECKING:
    from pytest_django import Settings

    from django_distlock.backends.base import BaseLockBackend

BACKEND = "django_distlock.backends.cache.CacheBackend"
#: The drivers, by their classes in Django.
DRIVERS = ("PyMemcacheCache", "PyLibMCCache")


def alias(location: Any, driver: str = "PyMemcacheCache", **more: Any) -> dict[str, Any]:
    """Return settings of an alias in CACHES."""
    backend = f"django.core.cache.backends.memcached.{driver}"
    return {"BACKEND": backend, "LOCATION": location, **more}


def configure(
    settings: Settings, cache: dict[str, Any], *, ttl: float = 30, **options: Any
) -> None:
    """Keep the locks of the alias "locks" in *cache*."""
    settings.CACHES = {**settings.CACHES, "locks": cache}
    chosen = {"cache": "locks", **options}
    settings.DISTLOCK = {"locks": {"BACKEND": BACKEND, "TTL": ttl, "OPTIONS": chosen}}


def backend(using: str = "locks") -> CacheMemcachedBackend:
    """Return the backend of *using* as what it is."""
    found = locks[using]
    assert isinstance(found, CacheMemcachedBackend)
    return found


def another(cache: str, **options: Any) -> BaseLockBackend:
    """Return one more backend, as another process would have it; close it."""
    chosen = {"cache": cache, **options}
    return make_backend(BackendSettings("another", BACKEND, options=chosen))


def rival(name: str, using: str = "locks", ttl: float = 20) -> Rival:
    """Return somebody else who wants the lock, as the server sees them."""
    return Rival.of(locks[using], name, ttl=ttl)


def fork_and_say_nothing(cache: dict[str, Any], name: str) -> list[int]:
    """Fork while the lock is held, let the child end as any process does, and release.

    Return how many connections the server had accepted before and after.
    """
    settings.CACHES = {"locks": cache}
    caches.settings = caches.configure_settings(settings.CACHES)
    settings.DISTLOCK = {"locks": {"BACKEND": BACKEND, "OPTIONS": {"cache": "locks"}}}
    lease = lock(name, using="locks").acquire()
    assert lease
    say("held")
    hear_word("fork")
    if (pid := os.fork()) == 0:
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    say("forked")
    hear_word("release")
    lease.release()
    say("released")
    hear_word("leave")
    return []
