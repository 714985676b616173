"""The backends that the contract is run over. A new backend is one more Profile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.environment import etcd_endpoints, own_folder, zookeeper_hosts

DATABASE = "django_distlock.backends.database.DatabaseBackend"
ROWLOCK = "django_distlock.backends.rowlock.RowLockBackend"
ADVISORY = "django_distlock.backends.advisory.AdvisoryBackend"
CACHE = "django_distlock.backends.redis.CacheRedisBackend"
LOCMEM = "django_distlock.backends.locmem.LocMemBackend"
REDLOCK = "django_distlock.backends.redlock.RedlockBackend"
BY_CACHE = "django_distlock.backends.cache.CacheBackend"
ZOOKEEPER = "django_distlock.backends.zookeeper.ZooKeeperBackend"
ETCD = "django_distlock.backends.etcd.EtcdBackend"
TOY = {"BACKEND": "testproject.directory.DirectoryBackend", "OPTIONS": {"directory": own_folder()}}

FOLDER = Path(__file__).parent

#: Traits that are flags of the backend: test_traits.py compares what is declared here with them.
FLAGS = {
    "fencing": "supports_fencing",
    "shared": "supports_shared",
    "listing": "supports_listing",
    "purge": "supports_purge",
    "detach": "supports_detach",
    "session_bound": "session_bound",
    "min_hold": "supports_min_hold",
}
#: CONTRIBUTING.md says what each of them means.
TRAITS = {
    *FLAGS,
    "wakes_waiters",
    "cross_process",
    "leased",
    "fair",
    "spares_writers",
    "lists_readers",
    "names_holder",
    "counts_waiters",
    "hides_end",
    "hides_age",
    "whole_seconds",
    "variant",
    "typical",
}


@dataclass(frozen=True)
class Profile:
    """A backend as a project would configure it, and what it declares that it can do.

    *settings* is an alias of DISTLOCK. *fixtures* start what it needs. *tick* is the shortest time
    in seconds that can be told apart on it: every wait and every ttl of the tests is a multiple.
    A variant of another profile runs the *chapters* that its option changes: `test_*.py` of this folder.
    """

    name: str
    settings: dict[str, Any]
    traits: frozenset[str]
    fixtures: tuple[str, ...] = ()
    needs_server: bool = False
    tick: float = 0.1
    marks: tuple[pytest.MarkDecorator, ...] = field(default=())
    chapters: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = self.traits - TRAITS
        assert not unknown, f"profile {self.name}: unknown traits {unknown}"
        absent = [one for one in self.chapters if not (FOLDER / f"test_{one}.py").exists()]
        assert not absent, f"profile {self.name}: unknown chapters {absent}"

    @property
    def names_holder(self) -> bool:
        """Whether who is refused is told who has it."""
        return not self.traits.isdisjoint({"listing", "names_holder"})

    @property
    def tells_end(self) -> bool:
        """Whether who is refused is told for how long still."""
        return "leased" in self.traits and "hides_end" not in self.traits

    @property
    def shortest_ttl(self) -> float:
        """The shortest ttl that it takes and the tests can wait for, in seconds."""
        return 2.0 if "whole_seconds" in self.traits else self.tick


def needs(*traits: str) -> pytest.MarkDecorator:
    """Run a test over the profiles that declare all of *traits*: for functions, classes and modules, not parameters."""
    assert set(traits) <= TRAITS, f"unknown traits {set(traits) - TRAITS}"
    return pytest.mark.needs(*traits)


def lacks(*traits: str) -> pytest.MarkDecorator:
    """Run a test over the profiles that declare none of *traits*."""
    assert set(traits) <= TRAITS, f"unknown traits {set(traits) - TRAITS}"
    return pytest.mark.lacks(*traits)


#: The servers share a busy machine: only one that is gone gives no answer for so long.
PATIENT = {"io_timeout": 5.0}
PATIENT_REDLOCK = {"server_timeout": 5.0, "connect_timeout": 5.0, "restart_guard": False}

LEASED = frozenset({"fencing", "listing", "detach", "leased", "min_hold"})
READERS = frozenset({"shared", "spares_writers", "lists_readers"})
ROWS = LEASED | {"purge", "cross_process"}
QUEUED = ROWS | {"counts_waiters"}
NOTIFIED = QUEUED | {"wakes_waiters"}
MEMCACHED = frozenset({"cross_process", "leased", "names_holder", "hides_end", "whole_seconds"})
REDIS = LEASED | READERS | {"cross_process", "wakes_waiters", "counts_waiters"}
TRANSACTIONS = frozenset({"fencing", "leased", "cross_process", "names_holder"})
MAJORITY = frozenset(
    {"listing", "detach", "leased", "cross_process", "wakes_waiters", "counts_waiters"}
)
BARE = frozenset({"session_bound", "cross_process"})
SESSION = BARE | {"fencing", "listing", "counts_waiters"}


def _database(
    name: str, using: str, traits: frozenset[str], fixture: str = "", **options: object
) -> Profile:
    settings = {"BACKEND": DATABASE, "OPTIONS": {"using": using, **PATIENT, **options}}
    return Profile(name, settings, traits, (fixture,) if fixture else (), bool(fixture))


def _session(
    name: str,
    backend: str,
    using: str,
    traits: frozenset[str],
    tick: float = 0.1,
    **options: object,
) -> Profile:
    # Some tests hold forty locks at once, each of which takes a connection.
    options = {"using": using, "max_connections": 50, **PATIENT, **options}
    settings = {"BACKEND": backend, "OPTIONS": options}
    return Profile(name, settings, traits, (using,), needs_server=True, tick=tick)


def _redis(
    name: str, cache: str, traits: frozenset[str] = REDIS, fixture: str = "redis", **options: object
) -> Profile:
    patient = {**PATIENT, "connect_timeout": 5.0}
    settings = {"BACKEND": CACHE, "OPTIONS": {"cache": cache, **patient, **options}}
    return Profile(name, settings, traits, (fixture,), needs_server=True)


def _redlock(name: str, traits: frozenset[str], **options: object) -> Profile:
    servers = [f"redis_{number}" for number in ("one", "two", "three", "four", "five")]
    options = {"servers": servers, **PATIENT_REDLOCK, **options}
    settings = {"BACKEND": REDLOCK, "OPTIONS": options}
    return Profile(name, settings, traits, ("redis_five",), needs_server=True)


def _memcached(cache: str, traits: frozenset[str]) -> Profile:
    options = {"cache": cache, **PATIENT, "connect_timeout": 5.0}
    settings = {"BACKEND": BY_CACHE, "OPTIONS": options}
    return Profile(f"memcached-{cache}", settings, traits, ("memcached",), needs_server=True)


def _zookeeper() -> Profile:
    # Three servers and all clients share one machine, which may be busy.
    options = {"hosts": zookeeper_hosts(), "session_timeout": 6.0, "io_timeout": 5.0}
    settings = {"BACKEND": ZOOKEEPER, "OPTIONS": options}
    traits = SESSION | READERS | {"fair", "purge", "wakes_waiters", "typical"}
    return Profile("zookeeper", settings, traits, ("zookeeper",), needs_server=True, tick=0.4)


def _etcd() -> Profile:
    options = {"endpoints": etcd_endpoints(), "session_timeout": 6.0, "io_timeout": 5.0}
    settings = {"BACKEND": ETCD, "OPTIONS": options}
    traits = SESSION | READERS | {"fair", "wakes_waiters", "hides_age"}
    return Profile("etcd", settings, traits, ("etcd",), needs_server=True, tick=0.4)


def _variant(profile: Profile, chapters: str) -> Profile:
    traits = profile.traits | {"variant"}
    return replace(profile, traits=traits, chapters=frozenset(chapters.split()))


FAIR = (
    "exclusion order waiting wake_up first_caller timeouts cancellation death shared limit traits"
)
POOLED = "exclusion release timeouts fencing errors death listing traits"
KEYED = "exclusion release names errors fencing shared limit wake_up traits"
OTHER_DRIVER = "exclusion release names errors timeouts interruption traits"

PROFILES = (
    Profile(
        "locmem",
        {"BACKEND": LOCMEM},
        LEASED | READERS | {"fair", "wakes_waiters", "counts_waiters", "typical"},
    ),
    _database("sqlite", "default", ROWS),
    _variant(_database("sqlite-fair", "default", QUEUED | {"fair"}, fair=True), FAIR),
    _database("postgres", "postgres", NOTIFIED | {"typical"}, "postgres"),
    _variant(
        _database("postgres-fair", "postgres", NOTIFIED | {"fair"}, "postgres", fair=True), FAIR
    ),
    _variant(_database("postgres-pgbouncer", "pgbouncer", ROWS, "pgbouncer", listen=False), POOLED),
    _database("mariadb", "mariadb", ROWS, "mariadb"),
    _variant(_database("mariadb-fair", "mariadb", QUEUED | {"fair"}, "mariadb", fair=True), FAIR),
    _session(
        "postgres-rowlock",
        ROWLOCK,
        "postgres",
        SESSION | {"shared", "lists_readers", "typical"},
    ),
    _session(
        "mariadb-rowlock",
        ROWLOCK,
        "mariadb",
        SESSION | {"shared", "spares_writers", "lists_readers"},
        tick=0.3,
    ),
    _session(
        "postgres-advisory",
        ADVISORY,
        "postgres",
        SESSION | {"shared", "lists_readers", "spares_writers"},
    ),
    _session(
        "postgres-advisory-bare",
        ADVISORY,
        "postgres",
        BARE | {"shared", "spares_writers"},
        fencing=False,
    ),
    _session("mariadb-advisory", ADVISORY, "mariadb", SESSION),
    _redis("redis", "django_redis", REDIS | {"typical"}),
    _variant(_redis("redis-fair", "redis_cache", REDIS | {"fair"}, fair=True), FAIR),
    _redis("redis-transactions", "redis_cache", TRANSACTIONS, scripting=False),
    _variant(_redis("redis-sentinel", "redis_sentinel", REDIS, "redis_sentinel"), KEYED),
    _variant(_redis("redis-cluster", "redis_cluster", REDIS, "redis_cluster", cluster=True), KEYED),
    _memcached("pymemcache", MEMCACHED),
    _variant(_memcached("pylibmc", MEMCACHED), OTHER_DRIVER),
    _redlock("redlock", MAJORITY),
    _variant(
        _redlock("redlock-fencing", MAJORITY | {"fencing"}, fencing=True),
        "exclusion release fencing traits",
    ),
    _zookeeper(),
    _etcd(),
    # The example of docs/howto/write-a-backend.md.
    Profile("toy", TOY, LEASED - {"min_hold"} | {"cross_process"}),
)
BY_NAME = {profile.name: profile for profile in PROFILES}
