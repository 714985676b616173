"""KEY_FUNCTION of a cache asks for the tenant: so do locks in the cache, each time, as Django does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import current_lease, force_release, lock, locks
from django_distlock.operators import holdings, look_up
from tests.contract.profiles import BY_CACHE, PATIENT, PATIENT_REDLOCK, REDLOCK
from tests.contract.rivals import Rival
from tests.fixtures.tenancy import KEY_FUNCTION, tenant

from .caches import SoundCache

if TYPE_CHECKING:
    from pytest_django import Settings

    from django_distlock.backends.base import BaseLockBackend

SOUND = "tests.backends.caches.SoundCache"
FIVE = [f"redis_{number}" for number in ("one", "two", "three", "four", "five")]
#: The aliases of DISTLOCK, and the fixtures and marks of each.
SERVERS: dict[str, tuple[str, ...]] = {
    "redis": ("redis",),
    "redis-by-django-redis": ("redis",),
    "memcached": ("memcached",),
    "redlock": ("redis_five",),
    "redlock-unlike": ("redis_five",),
    "add": (),
    "one-process": (),
}
LISTS = [alias for alias in SERVERS if alias.startswith("red") or alias == "one-process"]


def on(*aliases: str) -> pytest.MarkDecorator:
    marked = [
        pytest.param(alias, marks=[pytest.mark.server] if SERVERS[alias] else [])
        for alias in aliases
    ]
    return pytest.mark.parametrize("using", marked)


@pytest.fixture(autouse=True)
def configured(
    using: str, request: pytest.FixtureRequest, settings: Settings
) -> Iterator[BaseLockBackend]:
    for fixture in SERVERS[using]:
        request.getfixturevalue(fixture)
    known = {"redis_two": {}, "redis_three": {"LOCATION": ""}, **settings.CACHES}
    settings.CACHES = {
        **known,
        **{each: {**known[each], "KEY_FUNCTION": KEY_FUNCTION} for each in known},
        "sound": {"BACKEND": SOUND, "KEY_FUNCTION": KEY_FUNCTION},
        "memory": {
            "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
            "KEY_FUNCTION": KEY_FUNCTION,
        },
        "unlike": {**known["redis_two"], "KEY_FUNCTION": KEY_FUNCTION, "KEY_PREFIX": "un like|"},
    }
    settings.DISTLOCK = {
        "redis": _cached("redis_cache", **PATIENT),
        "redis-by-django-redis": _cached("django_redis", **PATIENT),
        "memcached": _cached("pymemcache", **PATIENT),
        "redlock": _redlock(FIVE),
        "redlock-unlike": _redlock(["redis_one", "unlike", known["redis_three"]["LOCATION"]]),
        "add": _cached("sound", trust_add=[SOUND]),
        "one-process": _cached("memory", single_process=True),
    }
    with tenant("first"), lock("warm-up", using=using):
        pass
    yield locks[using]
    locks.close()
    SoundCache.stored.clear()


def _cached(cache: str, **options: Any) -> dict[str, Any]:
    return {"BACKEND": BY_CACHE, "OPTIONS": {"cache": cache, **options}}


def _redlock(servers: list[str]) -> dict[str, Any]:
    return {"BACKEND": REDLOCK, "OPTIONS": {"servers": servers, **PATIENT_REDLOCK}}


@on(*SERVERS)
def test_each_tenant_has_a_lock_of_its_own(using: str, name: str) -> None:
    with tenant("a"), lock(name, using=using, timeout=0) as of_a:
        assert not Rival.of(locks[using], name).tries()
        with tenant("b"):
            assert not lock(name, using=using).locked()
            with lock(name, using=using, timeout=0) as of_b:
                assert of_b is not of_a
                assert current_lease(name) is of_b
                with tenant("a"), lock(name, using=using, timeout=0) as again:
                    assert again is of_a
    with tenant("a"):
        assert not lock(name, using=using).locked()


@on(*SERVERS)
def test_a_lease_is_kept_and_released_under_its_own_key(using: str, name: str) -> None:
    with tenant("a"):
        lease = lock(name, using=using, ttl=10).acquire()
        place = lock(name, using=using, ttl=10, limit=1).acquire()
    assert lease
    assert place

    with tenant("b"):
        assert locks[using].extend([lease.request, place.request]) == [True, True]
    with tenant("a"):
        rivals = [Rival.of(locks[using], name), Rival.of(locks[using], name, limit=1)]
    with tenant("b"):
        assert not any(rival.tries() for rival in rivals)
        lease.release()
        place.release()
        assert all(rival.tries() for rival in rivals)
        for rival in rivals:
            rival.leaves()


@on(*LISTS)
def test_a_tenant_lists_and_frees_its_own_locks(using: str, name: str) -> None:
    with tenant("a"):
        lease = lock(name, using=using).acquire()
        place = lock(name, using=using, limit=2).acquire()
    assert lease
    assert place
    keys = {lease.request.key, place.request.key}

    with tenant("b"):
        assert holdings(using) == holdings(using, name) == []
        assert look_up({using: keys}) == ([], {})
        assert force_release(name, using=using) == 0
    with tenant("a"):
        assert {held.key for held in holdings(using)} == keys
        assert {row.held.key for row in look_up({using: keys})[0]} == keys
        assert force_release(name, using=using) == 1
    assert lease.lost
    place.release()
