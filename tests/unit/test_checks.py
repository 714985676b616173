"""`manage.py check`: what is wrong is told once, by alias, with what to do; one wrong alias stops no other."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import WARNING, CheckMessage, Error, Warning as CheckWarning, run_checks
from django.core.management import call_command, execute_from_command_line
from django.core.management.base import SystemCheckError
from django.core.management.commands import check, migrate
from django.db import connections
from pytest_django.fixtures import Settings

from django_distlock import InvalidLockBackend, distributed_lock, lock, locks, preload
from django_distlock.checks import check_servers, check_settings
from django_distlock.contrib.idempotency import idempotent
from django_distlock.contrib.migrate.apps import check_migrate
from django_distlock.contrib.once import Once
from django_distlock.exceptions import DOCS
from django_distlock.handler import EXTRAS
from django_distlock.management.commands import migrate_locked
from tests.fixtures import tenancy
from tests.integration.aliases import DOWN, MEMORY

from .test_preload import PROJECT

REDLOCK = "django_distlock.backends.redlock.RedlockBackend"
PAGE = f"{DOCS}reference/checks.html"


def found() -> list[Any]:
    return run_checks(tags=["distlock"])


# Decorated functions.


def test_functions_and_tasks_are_told_whose_alias_cannot_do_what_they_want(
    settings: Settings,
) -> None:
    settings.DISTLOCK = {"default": MEMORY, "zk": "zookeeper://localhost"}

    @distributed_lock("a", min_hold=60)
    def fine() -> None: ...

    @distributed_lock("a", using="zk", min_hold=60)
    def nightly() -> None: ...

    @lock("a", using="nowhere")
    async def view() -> None: ...

    task = Once(fine, "a", 60, "zk", is_bound=False)

    scope = f"{fine.__module__}.{fine.__qualname__}".removesuffix("fine")
    hint = f"Give it another alias, or leave out what this one cannot do. See {PAGE}#distlock-e010"
    problems = {
        "fine()": "DISTLOCK['zk'] does not support unique_task(). Its locks cannot be handed over.",
        "nightly()": "DISTLOCK['zk'] does not support min_hold.",
        "view()": "DISTLOCK has no alias 'nowhere'.",
    }
    told = [each for each in found() if each.msg.startswith(scope)]
    assert told == [
        Error(f"{scope}{name}: {problem}", hint=hint, id="distlock.E010")
        for name, problem in problems.items()
    ]
    del task


def test_views_are_told_also_if_nothing_has_imported_them(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = "@distributed_lock('x', using='nowhere')\ndef view(request): ...\n"
    text = f"from django_distlock import distributed_lock\n{view}urlpatterns = []\n"
    (tmp_path / "late_urls.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    settings.ROOT_URLCONF = "late_urls"

    told = [each.msg for each in found() if each.msg.startswith("late_urls.")]

    assert told == ["late_urls.view(): DISTLOCK has no alias 'nowhere'."]


def test_idempotent_views_are_told_whose_cache_forgets_their_answers(settings: Settings) -> None:
    kinds = {
        "fine": "redis.RedisCache",
        "memory": "locmem.LocMemCache",
        "nothing": "dummy.DummyCache",
        "table": "db.DatabaseCache",
        "large": "db.DatabaseCache",
    }
    settings.DISTLOCK = {"default": MEMORY}
    settings.CACHES = {
        alias: {"BACKEND": f"django.core.cache.backends.{kind}"} for alias, kind in kinds.items()
    }
    settings.CACHES["large"]["OPTIONS"] = {"MAX_ENTRIES": 10_000}

    def view(request: object) -> None: ...

    views = [idempotent(cache=alias)(view) for alias in [*kinds, "none"]]

    title, stored = (
        f"{view.__module__}.{view.__qualname__}()",
        "its answers are stored in the cache",
    )
    known = ", ".join(map(repr, kinds))
    assert sorted((each.id, each.msg.removeprefix(f"{title}: ")) for each in found()) == [
        ("distlock.E060", f"'cache' names 'none', but CACHES has {known}."),
        ("distlock.E060", f"{stored} 'nothing', which stores nothing."),
        ("distlock.W060", f"{stored} 'memory', which each process has for itself."),
        (
            "distlock.W060",
            f"{stored} 'table', which deletes answers when it has more than 300 entries.",
        ),
    ]
    del views


# Aliases.


def test_a_typo_in_one_alias_is_the_problem_of_this_alias_alone(settings: Settings) -> None:
    settings.DISTLOCK = {"default": MEMORY, "typo": {**MEMORY, "TLL": 1}}

    with lock("x"), pytest.raises(InvalidLockBackend, match=r"^DISTLOCK\['typo'\]: unknown key"):
        lock("y", using="typo").acquire()
    assert found() == [
        Error(
            "DISTLOCK['typo']: unknown key 'TLL'. It takes BACKEND, TTL, TIMEOUT, KEY_PREFIX, STRICT, OPTIONS, TEST.",
            hint=f"Correct the setting. See {PAGE}#distlock-e001",
            id="distlock.E001",
        )
    ]


def test_no_default_alias_is_a_warning(settings: Settings) -> None:
    settings.DISTLOCK = {"other": MEMORY}

    assert found() == [
        CheckWarning(
            "DISTLOCK has no alias 'default': lock() without using= fails.",
            hint=f"Add DISTLOCK['default'], or give using= everywhere. See {PAGE}#distlock-w001",
            id="distlock.W001",
        )
    ]


# Short names, and drivers that are missing.


MEANT = {
    "database": "database.DatabaseBackend",
    "redis": "redis.RedisBackend",
    "RedisBackend": "redis.RedisBackend",
    "django_distlock.backends.redis": "redis.RedisBackend",
    "django_distlock.backends.redlok.RedlockBackend": "redlock.RedlockBackend",
    "django.core.cache.backends.memcached.PyMemcacheCache": "cache.CacheBackend",
    "django.db.backends.postgresql": "database.DatabaseBackend",
}


def test_a_short_or_wrong_name_of_a_backend_is_answered_with_its_dotted_path(
    settings: Settings,
) -> None:
    settings.DISTLOCK = {name: {"BACKEND": name} for name in MEANT}

    for name, meant in MEANT.items():
        with pytest.raises(InvalidLockBackend) as caught:
            locks[name]
        assert str(caught.value).startswith(f"DISTLOCK[{name!r}]: BACKEND {name!r} ")
        assert str(caught.value).endswith(f". Use 'django_distlock.backends.{meant}'.")


WITHOUT = """
import json, sys
sys.modules.update(dict.fromkeys(["redis", "kazoo", "pymemcache", "psycopg", "psycopg2", "MySQLdb"]))
from django.conf import settings
settings.configure(**json.loads(sys.argv[1]))
import django
django.setup()
from django.core.checks import run_checks
print(json.dumps([[each.id, each.msg] for each in run_checks(tags=["distlock"])]))
"""
DJANGO_CACHES = "django.core.cache.backends"
#: The driver that an alias of PROJECT needs.
NEEDED = {
    "rows": "psycopg2",
    "names": "MySQLdb",
    "redis": "redis",
    "redlock": "redis",
    "memcached": "pymemcache",
    "redis cache": "redis",
    "zookeeper": "kazoo",
}


def test_a_driver_that_is_missing_is_told_with_the_extra_that_installs_it() -> None:
    # Only these: Django 6.1 also asks the servers of aliases whose drivers are there.
    aliases = {alias: PROJECT["DISTLOCK"][alias] for alias in NEEDED}
    project = {**PROJECT, "DISTLOCK": {"default": MEMORY, **aliases}}
    run = [sys.executable, "-c", WITHOUT, json.dumps(project)]

    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    for (number, text), (alias, driver) in zip(
        json.loads(done.stdout), NEEDED.items(), strict=True
    ):
        assert (number, text.partition(":")[0]) == ("distlock.E001", f"DISTLOCK[{alias!r}]")
        extra = f"pip install 'django-distlock[{EXTRAS[driver]}]'"
        assert text.endswith(f" Its driver is missing: {extra}.")


# Servers that are down: nobody listens on port 1.


AddDatabase = Callable[..., None]


@pytest.fixture
def add_database(monkeypatch: pytest.MonkeyPatch) -> Iterator[AddDatabase]:
    """Adds an alias to DATABASES, for one test."""
    added: list[str] = []

    def add(alias: str, engine: str, **more: str) -> None:
        known = {"ENGINE": f"django.db.backends.{engine}", **more}
        database = connections.configure_settings({"default": {}, alias: known})[alias]
        monkeypatch.setitem(connections.settings, alias, database)
        added.append(alias)

    yield add
    locks.reset()
    for alias in added:
        connections[alias].close()
        del connections[alias]


@pytest.fixture
def down(add_database: AddDatabase) -> None:
    """The database alias "pg", where no server is."""
    place = {"HOST": "127.0.0.1", "PORT": "1", "USER": "u", "PASSWORD": "hush", "NAME": "n"}
    add_database("pg", "postgresql", **place)


def test_a_server_that_is_down_is_told_once_for_all_its_aliases(
    settings: Settings, down: None
) -> None:
    settings.DISTLOCK = {
        "default": {"OPTIONS": {"using": "pg"}},
        "rows": "rowlock://pg",
        "cache": "cache://memcached",
        "again": "cache://memcached",
        "redis": "redis://:hush@127.0.0.1:1/0",
        "zoo": "zookeeper://127.0.0.1:1?io_timeout=0.3",
    }
    settings.CACHES = {
        "default": {"BACKEND": f"{DJANGO_CACHES}.locmem.LocMemCache"},
        "memcached": {
            "BACKEND": f"{DJANGO_CACHES}.memcached.PyMemcacheCache",
            "LOCATION": "127.0.0.1:1",
        },
    }

    messages = check_servers(databases=["pg"])

    listens, reaches = (
        f"Start it, or correct the settings: {asked} 127.0.0.1:1? See {PAGE}#distlock-e006"
        for asked in ("is it listening on", "can this machine reach")
    )
    database = 'connection failed: connection to server at "127.0.0.1", port 1 failed'
    told = {
        f"DISTLOCK['default'], DISTLOCK['rows']: the database 'pg' cannot be reached: {database}: Connection refused.": listens,
        "DISTLOCK['cache'], DISTLOCK['again']: memcached at 127.0.0.1:1: it cannot be reached: [Errno 111] Connection refused.": listens,
        "DISTLOCK['redis']: Redis at 127.0.0.1:1 cannot be reached: Error 111 connecting to 127.0.0.1:1. Connection refused.": listens,
        "DISTLOCK['zoo']: no server of 127.0.0.1:1 has answered in time.": reaches,
    }
    assert messages == [Error(text, hint=hint, id="distlock.E006") for text, hint in told.items()]


def test_a_function_for_keys_that_finds_no_tenant_is_told_and_the_next_alias_is_asked(
    settings: Settings,
) -> None:
    settings.DISTLOCK = {"default": {**DOWN, "KEY_PREFIX": tenancy.NO_TENANT}, "next": DOWN}

    first, second = check_servers(databases=["default"])

    assert second.id == "distlock.E006"
    assert first == Error(
        "DISTLOCK['default']: KEY_PREFIX, or the KEY_FUNCTION of its cache, failed: LookupError('no tenant'). "
        "Run this for a tenant, or let the function return a text where there is none.",
        hint=f"Until then, its server is not checked. See {PAGE}#distlock-e011",
        id="distlock.E011",
    )


def test_a_function_for_keys_that_returns_no_text_is_told(settings: Settings) -> None:
    settings.DISTLOCK = {
        "default": {**DOWN, "KEY_PREFIX": tenancy.no_text},
        "memory": {**MEMORY, "KEY_PREFIX": tenancy.no_text},
    }

    [found] = check_servers(databases=["default"])

    assert found.id == "distlock.E011"
    assert found.msg.startswith(
        "DISTLOCK['default'], DISTLOCK['memory']: KEY_PREFIX is the function"
    )
    assert found.msg.endswith("no_text(), which must return a str, not 7.")


@pytest.mark.parametrize(
    ("kind", "location", "written", "is_told"),
    [
        ("redis.RedisCache", "redis://cache:6379/0", "redis://:hush@cache", True),
        ("redis.RedisCache", "redis://cache:6379/0", "redis://cache:6379/1", False),
        ("redis.RedisCache", "redis://first,valkey://cache:6380/2", "redis://cache:6380/2", True),
        ("redis.RedisCache", "redis://cache:6379/0", "redis://another:6379/0", False),
        ("redis.RedisCache", "rediss://cache/2,redis://replica/2", "cache://default", True),
        ("redis.RedisCache", "redis://cache:6379/0", "cache://locks", False),
        ("locmem.LocMemCache", "redis", "redis://cache:6379/0", False),
        ("memcached.PyMemcacheCache", "cache:11211", "redis://cache:6379/0", False),
        ("memcached.PyMemcacheCache", "cache:11211", "memcached://cache:11211", True),
        ("memcached.PyMemcacheCache", "cache:11211", "memcached://locks:11211", False),
    ],
)
def test_locks_that_clearing_the_default_cache_deletes_are_told(
    settings: Settings, kind: str, location: str, written: str, is_told: bool
) -> None:
    default = {"BACKEND": f"{DJANGO_CACHES}.{kind}", "LOCATION": location}
    locks = {"BACKEND": f"{DJANGO_CACHES}.redis.RedisCache", "LOCATION": "redis://cache/1"}
    settings.CACHES = {"default": default, "locks": locks}
    settings.DISTLOCK = {"default": written}

    told = {each.id: each for each in check_settings()}

    assert ("distlock.W010" in told) is is_told
    assert "hush" not in str(told)


def test_a_default_cache_whose_servers_are_no_texts_is_another_one(settings: Settings) -> None:
    servers = [("cache", 6379), Path("cache.sock")]
    settings.CACHES = {
        "default": {"BACKEND": f"{DJANGO_CACHES}.memcached.PyMemcacheCache", "LOCATION": servers}
    }
    settings.DISTLOCK = {"default": "redis://cache"}

    assert "distlock.W010" not in {each.id for each in check_settings()}


def test_a_key_function_that_finds_no_tenant_is_no_wrong_setting(settings: Settings) -> None:
    settings.CACHES = {
        "default": {"BACKEND": f"{DJANGO_CACHES}.locmem.LocMemCache"},
        "redis": {
            "BACKEND": f"{DJANGO_CACHES}.redis.RedisCache",
            "LOCATION": "redis://127.0.0.1:1",
            "KEY_FUNCTION": tenancy.NO_TENANT,
        },
    }
    servers = ["redis", "redis://127.0.0.1:2", "redis://127.0.0.1:3"]
    settings.DISTLOCK = {
        "default": "cache://redis",
        "redlock": {"BACKEND": REDLOCK, "OPTIONS": {"servers": servers}},
    }

    preload()
    # Decorated functions of other tests may be reported as well.
    assert "distlock.E001" not in {each.id for each in check_settings()}


class Deploy(migrate.Command):
    """A command of a project that is built on ``migrate``."""


@pytest.mark.parametrize(
    "command", [migrate.Command, migrate_locked.Command, Deploy], ids=["Django", "ours", "built on"]
)
def test_migrate_asks_no_servers_since_it_makes_the_tables(
    settings: Settings, down: None, command: type[migrate.Command]
) -> None:
    settings.DISTLOCK = {"default": {"OPTIONS": {"using": "pg"}}}

    command().check(databases=["pg"])

    with pytest.raises(SystemCheckError, match=r"distlock\.E006"):
        check.Command().check(databases=["pg"])


@pytest.fixture
def new_database(settings: Settings, add_database: AddDatabase, tmp_path: Any) -> None:
    """The locks are in a database "new" without any table."""
    add_database("new", "sqlite3", NAME=str(tmp_path / "new.sqlite3"))
    settings.DISTLOCK = {"default": {"OPTIONS": {"using": "new"}}}


@pytest.mark.usefixtures("new_database")
def test_code_that_migrates_is_not_refused_for_the_missing_tables() -> None:
    execute_from_command_line(["manage.py", "migrate", "django_distlock", "--database=new", "-v0"])

    assert "django_distlock_methodlock" in connections["new"].introspection.table_names()


OWN = "tests.integration.pods.own"
CONTRIB = "django_distlock.contrib.migrate"


def test_a_migrate_that_takes_no_lock_is_told(settings: Settings) -> None:
    settings.INSTALLED_APPS = [OWN, CONTRIB]

    assert check_migrate() == [
        CheckWarning(
            f"migrate takes no lock: it is the command of {OWN!r}.",
            hint=f"Write {CONTRIB!r} before {OWN!r} in INSTALLED_APPS. See {PAGE}#distlock-w004",
            id="distlock.W004",
        )
    ]
    settings.INSTALLED_APPS = [CONTRIB, OWN]
    assert check_migrate() == []


@pytest.mark.usefixtures("new_database")
def test_a_kind_of_database_that_keeps_no_locks_is_an_error(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, add_database: AddDatabase
) -> None:
    add_database("volatile", "sqlite3", NAME=":memory:")

    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    [too_old] = check_servers(databases=["new"])
    monkeypatch.setattr(connections["new"], "vendor", "oracle")
    locks.reset()
    [unsupported] = check_settings()
    settings.DISTLOCK = {"default": {"OPTIONS": {"using": "volatile"}}}
    [volatile] = check_settings()

    assert (too_old.id, too_old.msg.split("has ")[1]) == ("distlock.E004", "no RETURNING.")
    assert unsupported.id == "distlock.E003"
    assert unsupported.msg == (
        "DISTLOCK['default']: the database 'new' is of the kind 'oracle'; "
        "these locks need PostgreSQL, MariaDB, MySQL or SQLite."
    )
    assert str(unsupported.hint).startswith("Let OPTIONS 'using' name another database, ")
    assert (volatile.id, "'volatile' is in memory" in volatile.msg) == ("distlock.E002", True)


@pytest.mark.parametrize("backend", ["database.DatabaseBackend", "rowlock.RowLockBackend"])
def test_a_driver_that_waits_without_end_is_a_warning(
    settings: Settings, down: None, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    psycopg = pytest.importorskip("psycopg")
    backend = f"django_distlock.backends.{backend}"
    settings.DISTLOCK = {"default": {"BACKEND": backend, "OPTIONS": {"using": "pg"}}}

    def found(version: str) -> list[CheckMessage]:
        monkeypatch.setattr(psycopg, "__version__", version)
        # Other messages are about decorated functions, if their modules have been imported.
        return [each for each in check_settings() if each.id == "distlock.W003"]

    [warned] = found("3.2.9")
    assert warned.level == WARNING
    assert "DISTLOCK['default']: psycopg 3.2.9 waits without end" in warned.msg
    assert found("3.10.0") == []


WITHOUT_THE_APP = """
import sys
import django
from django.conf import settings
from django.core.checks import run_checks

database = {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}
row = {"BACKEND": "django_distlock.backends.rowlock.RowLockBackend", "OPTIONS": {"using": "other"}}
other = {"ENGINE": "django.db.backends.postgresql", "NAME": "x"}
settings.configure(DATABASES={"default": database, "other": other}, DISTLOCK={"default": {}, "row": row})
django.setup()
from django_distlock import LockBackendError, lock

for message in run_checks(tags=["distlock"]):
    if message.id == "distlock.E008":  # Django 6.1 asks the servers, too
        print(message.id, message.msg, message.hint)
try:
    lock("x").acquire()
except LockBackendError as error:
    print(error)
"""


def test_an_app_that_is_not_installed_is_told_by_a_check_and_by_the_first_lock(
    tmp_path: Any,
) -> None:
    file = str(tmp_path / "new.sqlite3")
    command = [sys.executable, "-c", WITHOUT_THE_APP, file]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    leases, row, error = told.splitlines()
    add = 'Add "django_distlock" to INSTALLED_APPS, then run manage.py migrate django_distlock'
    missing = "the app that has its tables is not in INSTALLED_APPS."
    assert leases.startswith(
        f"distlock.E008 DISTLOCK['default']: {missing} {add} --database=default."
    )
    assert row.startswith(f"distlock.E008 DISTLOCK['row']: {missing} {add} --database=other.")
    assert error == (
        "DISTLOCK['default']: no such table: django_distlock_methodlock: is the app migrated? "
        f"{add} --database=default."
    )


@pytest.mark.usefixtures("new_database")
def test_tables_that_are_missing_are_an_error_before_the_first_lock() -> None:
    before = check_servers(databases=["new"])
    call_command("migrate", "django_distlock", database="new", verbosity=0)
    after = check_servers(databases=["new"])

    tables = (
        "django_distlock_methodlock, django_distlock_fencingcounter, django_distlock_lockwaiter"
    )
    assert before == [
        Error(
            f"DISTLOCK['default']: the database 'new' has no table {tables}.",
            hint=f"Run manage.py migrate django_distlock --database=new. See {PAGE}#distlock-e007",
            id="distlock.E007",
        )
    ]
    assert after == []
