"""Which way an alias of CACHES gives, which are refused, and the least of the ways: add()."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.core.cache import BaseCache, caches
from django.core.checks import Error, run_checks
from django.utils.module_loading import import_string

from django_distlock import (
    InvalidLockBackend,
    LockLost,
    LockOutcomeUnknown,
    NotSupported,
    lock,
    locks,
)
from django_distlock.backends.cache import MARGIN, AddBackend, SingleProcessBackend
from django_distlock.backends.cache_alias import Record
from django_distlock.backends.memcached import CacheMemcachedBackend
from django_distlock.engine.background import background
from django_distlock.engine.values import Release
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from tests.contract.acts import WIDTH
from tests.contract.crew import elsewhere
from tests.contract.rivals import Rival
from tests.fixtures.eventually import eventually
from tests.fixtures.memcached import Memcached

from .caches import SoundCache
from .memcached_tools import BACKEND, alias

if TYPE_CHECKING:
    from pytest_django import Settings

    from django_distlock.backends.base import BaseLockBackend
    from tests.fixtures.processes import Spawn

DJANGO = "django.core.cache.backends"
AT_REDIS = {"LOCATION": "redis://127.0.0.1:1/0"}
OURS = "tests.backends.caches"


@pytest.fixture(autouse=True)
def closed(settings: Settings) -> Iterator[None]:
    yield
    locks.close()
    # Else a thread that makes its own instance of an alias right now would keep it in the next test.
    eventually(lambda: not background._has_jobs(), 15, "the work on locks is done")
    SoundCache.stored.clear()


#: A default alias, without which `check` warns.
ELSEWHERE = {"default": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"}}


def configure(settings: Settings, cache: str | dict[str, Any], /, **options: Any) -> None:
    """Keep the locks of the alias "locks" in an alias of *cache*, a class or all its settings."""
    known = {"BACKEND": cache, "LOCATION": "nowhere"} if isinstance(cache, str) else cache
    settings.CACHES = {"default": {"BACKEND": f"{DJANGO}.dummy.DummyCache"}, "locks": known}
    chosen = {"cache": "locks", **options}
    settings.DISTLOCK = {**ELSEWHERE, "locks": {"BACKEND": BACKEND, "OPTIONS": chosen}}


def trust(settings: Settings, name: str = "SoundCache") -> BaseLockBackend:
    """Keep the locks in one of the caches of ours, by add()."""
    path = f"{OURS}.{name}"
    configure(settings, path, trust_add=[path])
    return locks["locks"]


def with_whole_keys(backend: BaseLockBackend) -> BaseCache:
    """Return the cache of the locks, which takes a key as it is."""
    assert isinstance(backend, AddBackend)
    return backend._caches["locks"]


# The choice.


@pytest.mark.parametrize(
    ("cache", "backend"),
    [
        (alias("127.0.0.1:1", "PyMemcacheCache"), "CacheMemcachedBackend"),
        (alias("127.0.0.1:1", "PyLibMCCache"), "CacheMemcachedBackend"),
        ({"BACKEND": "django_redis.cache.RedisCache", **AT_REDIS}, "CacheRedisBackend"),
        ({"BACKEND": f"{DJANGO}.redis.RedisCache", **AT_REDIS}, "CacheRedisBackend"),
    ],
)
def test_a_server_is_taken_for_what_it_is(
    settings: Settings, cache: dict[str, Any], backend: str
) -> None:
    configure(settings, cache)

    assert type(locks["locks"]).__name__ == backend


def test_the_default_alias_is_the_default(settings: Settings) -> None:
    settings.CACHES = {"default": alias("127.0.0.1:1")}
    settings.DISTLOCK = {"locks": {"BACKEND": BACKEND}}

    assert isinstance(locks["locks"], CacheMemcachedBackend)


REFUSED = {
    f"{DJANGO}.db.DatabaseCache": "backends.database.DatabaseBackend",
    f"{DJANGO}.filebased.FileBasedCache": "backends.database.DatabaseBackend with SQLite",
    f"{DJANGO}.dummy.DummyCache": "backends.dummy.DummyBackend",
    f"{DJANGO}.locmem.LocMemCache": "'single_process': True",
    f"{OURS}.SoundCache": f"'trust_add': ['{OURS}.SoundCache']",
}


@pytest.mark.parametrize("path", REFUSED)
def test_a_cache_that_can_hold_no_locks_is_refused_with_what_to_use_instead(
    settings: Settings, path: str
) -> None:
    configure(settings, path)

    with pytest.raises(InvalidLockBackend) as caught:
        lock("report", using="locks").acquire()

    text = str(caught.value)
    kind = path.rpartition(".")[2]
    assert text.startswith(
        f"DISTLOCK['locks']: OPTIONS: 'cache' names 'locks', a {kind}, which cannot keep locks: "
    )
    assert REFUSED[path] in text
    [error] = run_checks(tags=["distlock"], databases=[])
    assert error == Error(text, hint=error.hint, id="distlock.E001")


@pytest.mark.parametrize("path", list(REFUSED)[:3])
def test_trust_makes_no_unfit_cache_fit_nor_one_that_is_made_from_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    own = type("Own", (import_string(path),), {})
    monkeypatch.setattr(f"{OURS}.Own", own, raising=False)
    configure(settings, f"{OURS}.Own", trust_add=[f"{OURS}.Own"])

    with pytest.raises(InvalidLockBackend, match="a Own, which cannot keep locks: ") as caught:
        locks["locks"]

    assert REFUSED[path] in str(caught.value)


def test_memory_of_one_process_holds_locks_if_there_is_but_one(settings: Settings) -> None:
    configure(settings, f"{DJANGO}.locmem.LocMemCache", single_process=True)

    with lock("report", using="locks") as lease:
        assert isinstance(lease.backend, SingleProcessBackend)
        assert lease.fencing_token
        for number in range(1_000):
            caches["locks"].set(f"other:{number}", number)
        caches["locks"].clear()
        assert elsewhere(lambda: lock("report", using="locks", timeout=0).acquire()) is None


@pytest.mark.parametrize(
    ("cache", "options", "problem"),
    [
        ({}, {"cache": "missing"}, "'cache' names 'missing', but CACHES has 'default', 'locks'"),
        ({}, {"cache": "missing", "fair": True}, "'cache' names 'missing', but CACHES has"),
        ({}, {"cache": 5}, "'cache' must be a str, not 5"),
        ({"BACKEND": "no.such.Cache"}, {}, "whose BACKEND 'no.such.Cache' cannot be imported"),
        (alias("127.0.0.1:1"), {"fair": True}, "unknown OPTIONS 'fair'. It takes cache, connect"),
        (alias("127.0.0.1:1"), {"trust_add": []}, "unknown OPTIONS 'trust_add'. It takes cache"),
        (alias("127.0.0.1:1"), {"cahce": "locks"}, "unknown OPTIONS 'cahce'"),
        ({"BACKEND": f"{DJANGO}.dummy.DummyCache"}, {"fair": True}, "unknown OPTIONS 'fair'"),
        ({"BACKEND": f"{OURS}.SoundCache"}, {"trust_add": f"{OURS}.SoundCache"}, "must be a list"),
        ({"BACKEND": f"{DJANGO}.locmem.LocMemCache"}, {"single_process": 1}, "has a separate one"),
    ],
)
def test_wrong_settings_are_named(
    settings: Settings, cache: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    configure(settings, cache or alias("127.0.0.1:1"), **options)

    with pytest.raises(InvalidLockBackend) as caught:
        locks["locks"]

    assert str(caught.value).startswith("DISTLOCK['locks']: ")
    assert problem in str(caught.value)


def test_a_way_that_is_chosen_by_hand_looks_at_the_alias_too(settings: Settings) -> None:
    configure(settings, f"{DJANGO}.db.DatabaseCache")
    settings.DISTLOCK["locks"]["BACKEND"] = (
        "django_distlock.backends.memcached.CacheMemcachedBackend"
    )
    locks.reset()

    with pytest.raises(InvalidLockBackend, match=r"DISTLOCK\['locks'\]: OPTIONS: .*DatabaseCache"):
        locks["locks"]


# By add() alone.


def rival(name: str, backend: BaseLockBackend | None = None, ttl: float = 20) -> Rival:
    return Rival.of(backend or locks["locks"], name, ttl=ttl)


def test_processes_with_a_lock_by_add_on_a_real_server_lose_nothing(
    settings: Settings, memcached: Memcached, name: str, spawn: Spawn, tmp_path: Path
) -> None:
    balance = tmp_path / "balance"
    balance.write_text("0" * WIDTH)
    options = {"cache": "pymemcache", "trust_add": [f"{DJANGO}.memcached.PyMemcacheCache"]}
    aliases = {"add": {"BACKEND": "django_distlock.backends.cache.AddBackend", "OPTIONS": options}}
    raising = {"using": "add", "name": name, "path": str(balance), "rounds": 10, "timeout": 30}
    spawned = [
        spawn("tests.contract.acts:raise_balance", aliases=aliases, **raising) for _ in range(3)
    ]

    for each in spawned:
        each.expect("ready")
    for each in spawned:
        each.tell("go")
    for each in spawned:
        each.result(40)

    assert int(balance.read_text()) == 30


def test_who_is_refused_is_told_by_whom(settings: Settings, name: str) -> None:
    trust(settings)
    holder, other = rival(name), rival(name)
    holder.takes()

    assert not other.tries()
    assert other.refused.holder == holder.request.holder
    assert holder.request.owner not in repr(other.refused)


def test_an_acquire_sent_again_gets_the_same_grant_and_a_release_the_same_answer(
    settings: Settings, name: str
) -> None:
    backend = trust(settings)
    holder, other = rival(name), rival(name)
    assert holder.tries()
    assert holder.tries()
    assert not other.tries()
    assert other.leaves() is Release.TAKEN

    assert holder.leaves() is Release.RELEASED
    assert holder.leaves() is Release.RELEASED
    assert other.leaves() is Release.GONE
    assert other.tries()
    assert holder.leaves() is Release.RELEASED
    assert backend.probe(holder.request)


def test_a_lock_with_little_left_is_not_deleted_but_expires(settings: Settings, name: str) -> None:
    """It may be another's by the time of the delete()."""
    backend = trust(settings)
    holder = rival(name, ttl=2)
    holder.takes()
    key = holder.request.key
    ends = clock.lease_time() + MARGIN - 0.01
    late = Record(holder.request.owner, ends, name, Holder.current())
    with_whole_keys(backend).delete(key)
    with_whole_keys(backend).add(key, late.pack(), timeout=2)

    assert holder.leaves() is Release.RELEASED

    assert backend.probe(holder.request)
    rival(name).takes(within=4)


def test_a_lease_is_not_extended_and_ends_with_its_ttl(settings: Settings, name: str) -> None:
    trust(settings)
    lease = lock(name, using="locks", ttl=2).acquire()
    assert lease
    deadline = lease.deadline
    with pytest.raises(NotSupported, match=r"extend\(\)"):
        lease.extend()

    eventually(lambda: lease.lost, 4)

    assert lease.deadline == deadline <= clock.lease_time()
    with pytest.raises(LockLost):
        lease.release()


def test_a_cache_that_hides_that_its_server_is_down_gives_no_lock(
    settings: Settings, name: str
) -> None:
    trust(settings, "SilentCache")

    with pytest.raises(LockOutcomeUnknown, match=r"add\(\) returned None"):
        lock(name, using="locks", timeout=0).acquire()


def test_a_cache_whose_server_is_down_is_never_busy_held_or_free(
    settings: Settings, name: str
) -> None:
    trust(settings, "LoudCache")
    someone = rival(name)

    for ask in (someone.tries, someone.leaves, lock(name, using="locks").locked):
        with pytest.raises(LockOutcomeUnknown):
            ask()
    with pytest.raises(LockOutcomeUnknown):
        lock(name, using="locks", timeout=0).acquire()


def test_a_forked_child_uses_no_connection_of_its_parent(settings: Settings) -> None:
    backend = trust(settings)
    parents = with_whole_keys(backend)

    backend.abandon_after_fork()

    assert with_whole_keys(backend) is not parents
    backend.abandon_after_fork()


def test_it_promises_nothing_that_it_cannot_keep(settings: Settings, name: str) -> None:
    backend = trust(settings)
    flags = [
        flag for flag in dir(backend) if flag.startswith("supports_") and getattr(backend, flag)
    ]

    assert flags == []
    assert not backend.session_bound
    with pytest.raises(NotSupported):
        lock(name, using="locks", shared=True).acquire()
