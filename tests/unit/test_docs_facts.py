"""README and documentation: what is listed is all there is, and numbers are those of the code."""

from __future__ import annotations

import ast
import math
import re
import tomllib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from django.dispatch import Signal

import django_distlock
from django_distlock import admin, conf, decorators, operators, signals
from django_distlock.backends import cache, cache_alias, idle
from django_distlock.backends.cache import CacheOptions
from django_distlock.backends.database import (
    backend,
    connections as own_connections,
    dialect,
    purge,
)
from django_distlock.backends.database.backend import DatabaseOptions
from django_distlock.backends.database.base import ConnectionOptions
from django_distlock.backends.database.mysql import MySQL
from django_distlock.backends.database.sqlite import SQLite
from django_distlock.backends.etcd.options import EtcdOptions
from django_distlock.backends.memcached import KEPT, MemcachedOptions
from django_distlock.backends.redis import RedisCacheOptions, connections as redis_connections
from django_distlock.backends.redlock import (
    RedlockOptions,
    backend as redlock_backend,
    votes as redlock_votes,
)
from django_distlock.backends.session.backend import BESIDE
from django_distlock.backends.zookeeper.options import ZooKeeperOptions
from django_distlock.contrib import once
from django_distlock.engine import local_queue, waiting
from django_distlock.lock import LockTerms, Terms
from django_distlock.management.commands.purge_stale_locks import Command as PurgeCommand
from tests.contract.profiles import PROFILES, TRAITS
from tests.fixtures.pages import DOCS, ROOT, prose, table
from tests.fixtures.workers import KINDS

BACKENDS = sorted((DOCS / "reference" / "backends").glob("*.md"))
PACKAGE = ROOT / "django_distlock"
API = DOCS / "reference" / "api.md"
ERRORS = DOCS / "reference" / "errors.md"
NAMES = DOCS / "reference" / "names.md"
SETTINGS = DOCS / "reference" / "settings.md"
PURGE = DOCS / "howto" / "purge.md"
WRITE = DOCS / "howto" / "write-a-backend.md"
CHOOSE = DOCS / "howto" / "choose-a-backend.md"
TUTORIAL, DEPLOY = "docs/tutorial.md", "docs/howto/deploy.md"
GUARANTEES = "docs/explanation/guarantees.md"
DATABASE_PAGE = "docs/reference/backends/database.md"
CACHE_PAGE = "docs/reference/backends/cache.md"
MEMCACHED_PAGE = "docs/reference/backends/memcached.md"


def test_every_public_name_is_in_the_reference() -> None:
    text = API.read_text() + ERRORS.read_text()

    documented = re.findall(
        r"^\.\. (?:auto|data)\w*:: (?!django_distlock\.)(\w+)", text, re.MULTILINE
    )

    assert sorted(documented) == sorted(django_distlock.__all__)


def test_names_of_submodules_are_listed_with_where_they_are() -> None:
    listed = table(NAMES, "## Imports")

    assert {
        columns[0].strip("`"): set(re.findall(r"`(\w+)`", f"`{names}`"))
        for names, columns in listed.items()
    } == {
        f"django_distlock.{module}": set(names)
        for module, names in django_distlock._ELSEWHERE.items()
    }


def test_extras_and_commands_are_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"`([\w-]+)`", "".join(f"`{row}`" for row in table(NAMES, "## Extras")))
    commands = {row.split()[0] for row in table(NAMES, "## Commands")}

    assert sorted(extras) == sorted(project["optional-dependencies"])
    assert commands == {
        path.stem for path in (PACKAGE / "management" / "commands").glob("[a-z]*.py")
    }


def test_terms_are_listed_with_their_defaults() -> None:
    defaults = {term.name: term.default for term in fields(Terms)}
    listed = {name: columns[0].strip("`") for name, columns in table(API, "### Arguments").items()}

    assert list(listed) == list(LockTerms.__annotations__)
    assert (listed.pop("timeout"), listed.pop("ttl")) == (
        "TIMEOUT` of the alias",
        "TTL` of the alias",
    )
    assert listed.pop("release") == '"auto"'
    assert {name: ast.literal_eval(text) for name, text in listed.items()} == {
        name: defaults[name] for name in listed
    }


def defaults_listed(heading: str) -> dict[str, Any]:
    """Return the values of the first column of a table of settings."""
    listed = table(SETTINGS, heading)
    return {key: ast.literal_eval(columns[0].strip("`")) for key, columns in listed.items()}


def test_settings_are_listed_with_their_defaults() -> None:
    settings = conf.BackendSettings(alias="default")
    listed = defaults_listed("## Keys")

    assert tuple(listed) == conf.KEYS
    assert listed == {key: getattr(settings, key.lower()) for key in conf.KEYS}


@pytest.mark.parametrize(
    ("heading", "options"),
    [
        ("database backend", DatabaseOptions),
        ("cache backend", CacheOptions),
        ("cache backend: memcached", MemcachedOptions),
        ("cache backend: Redis", RedisCacheOptions),
        ("ZooKeeper backend", ZooKeeperOptions),
        ("etcd backend", EtcdOptions),
    ],
)
def test_options_are_listed_with_their_defaults(heading: str, options: type) -> None:
    made = options()

    assert defaults_listed(f"## Options of the {heading}") == {
        option.name: getattr(made, option.name) for option in fields(options)
    }


def test_options_of_redlock_are_listed_with_their_defaults() -> None:
    servers = ("redis://a", "redis://b", "redis://c")
    defaults = {**asdict(RedlockOptions(servers=servers)), "servers": ()}
    assert defaults_listed("## Options of the Redlock backend") == defaults
    least, most = redlock_votes.SHORTEST, redlock_votes.LONGEST
    assert f"{most:g}, or a twentieth of the ttl if that is less, but {least:g} at least" in prose(
        SETTINGS
    )
    assert (redlock_votes.PART, redlock_votes.CONNECTING_PART) == (1 / 20, 1 / 4)
    shortest, longest = (1000 * pause for pause in redlock_backend.PAUSE)
    assert f"a random {shortest:g} to {longest:g} milliseconds" in prose(
        DOCS / "reference" / "backends" / "redlock.md"
    )


def test_options_of_the_purge_are_listed_with_their_defaults() -> None:
    parser = PurgeCommand().create_parser("manage.py", "purge_stale_locks")
    known = {action.option_strings[0]: action.default for action in parser._actions}
    listed = {
        key.split()[0]: columns[0].strip("`") for key, columns in table(PURGE, "## Options").items()
    }

    assert set(listed) == {"--using", "--older-than", "--batch-size", "--dry-run", "--json"}
    assert listed["--older-than"] == known["--older-than"]
    assert int(listed["--batch-size"]) == known["--batch-size"]
    assert f"at least {purge.LEAST_AGE:g} seconds" in prose(PURGE)
    assert f"up to {purge.LARGEST_BATCH}" in prose(PURGE)


def test_signals_are_listed() -> None:
    sent = {name for name, value in vars(signals).items() if isinstance(value, Signal)}

    assert set(table(DOCS / "reference" / "signals.md", "## Signals")) == sent


def test_checks_are_listed() -> None:
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    raised = set(re.findall(r"distlock\.[EW]\d{3}", sources))
    page = (DOCS / "reference" / "checks.md").read_text()

    assert set(re.findall(r"^## `(.+)`$", page, re.MULTILINE)) == raised
    assert set(re.findall(r"^\((.+)\)=$", page, re.MULTILINE)) == {
        each.replace(".", "-").lower() for each in raised
    }


def test_what_each_backend_can_do_is_what_it_says() -> None:
    traits = ("shared", "fair", "fencing", "min_hold", "detach", "listing")
    said = table(CHOOSE, "## What each can do")

    assert {Path(page).stem for page in re.findall(r"\((.+)\)", "\n".join(said))} == {
        page.stem for page in BACKENDS
    } - {"cache", "dummy"}
    for name, columns in said.items():
        [page] = re.findall(r"(\w+)\.md", name)
        kinds = [
            kind
            for kind in PROFILES
            if page in f"{kind.name} {kind.settings['BACKEND']}" and kind.name != "toy"
        ]
        for trait, cell in zip(traits, columns[:3] + columns[4:], strict=True):
            can = {trait in kind.traits for kind in kinds}
            # What depends on the OPTIONS or on the server has words of its own.
            assert {"yes": {True}, "no": {False}}.get(cell, {True, False}) == can


def test_each_stack_is_said_to_be_tested_only_if_it_is() -> None:
    parts = re.split(r"^### ", (DOCS / "howto/with-your-stack.md").read_text(), flags=re.MULTILINE)
    said = {part.splitlines()[0]: part.splitlines()[2] for part in parts[1:]}
    servers = {kind.partition("-")[0].lower() for kind in KINDS}
    tested = " ".join(name for name, first in said.items() if first.startswith("Tested")).lower()
    web = said.keys() & {"gunicorn", "uvicorn, hypercorn, daphne", "granian", "waitress", "uWSGI"}

    assert all(re.match(r"Tested|Tried|Not tried|Beat is tested", first) for first in said.values())
    assert servers == {server for name in web for server in name.lower().split(", ")}
    assert [server for server in servers if server not in tested] == []


def test_the_profile_of_the_example_is_that_of_the_contract() -> None:
    profiles = (ROOT / "tests" / "contract" / "profiles.py").read_text()
    [shown] = re.findall(r"^ *(Profile\(.*)$", WRITE.read_text(), re.MULTILINE)

    assert shown in profiles


# Numbers in sentences.


def looks(kind: type[dialect.Dialect]) -> str:
    return " to ".join(f"{seconds * 1000:g}" for seconds in kind.pauses)


TTL, TIMEOUT = conf.DEFAULT_TTL, conf.DEFAULT_TIMEOUT
OPTIONS = DatabaseOptions()
MEMCACHED, DAYS = MemcachedOptions(), cache_alias.LONGEST_TTL / 86_400
SHORTEST, LONGEST = waiting.SHORTEST_POLL / 2 * 1000, waiting.LONGEST_POLL * 1000
FACTS = [
    (
        "README.md",
        f"a ttl of {TTL:g} seconds, and the default timeout for a lock is {TIMEOUT:g} seconds",
    ),
    ("README.md", "Python 3.11 or later and Django 5.2 or later"),
    (TUTORIAL, f"the lock is yours for {TTL:g} seconds"),
    (TUTORIAL, f"in seconds, but at most {decorators.LONGEST_RETRY_AFTER},"),
    (TUTORIAL, f"come free by itself, within {TTL:g} seconds"),
    (
        "docs/howto/coming-from.md",
        f"after a crash, up to {TTL:g} seconds | waits for {TIMEOUT:g} seconds",
    ),
    (DEPLOY, f"at most `max_connections` ({OPTIONS.max_connections}), and one that"),
    (
        DEPLOY,
        f"at most `max_connections` ({ConnectionOptions().max_connections}), and at most {BESIDE} for",
    ),
    (DEPLOY, f"| memcached | at most {KEPT} |"),
    (DEPLOY, f"answered (in asyncio at most {2 * redis_connections.AT_ONCE})"),
    (DEPLOY, f"look again after {SHORTEST:g} to {LONGEST:g} milliseconds"),
    ("docs/howto/free-a-stuck-lock.md", f"frees up to {admin.MOST_AT_ONCE} locks at once"),
    ("docs/howto/free-a-stuck-lock.md", f"have {operators.PATIENCE:g} seconds to answer"),
    (GUARANTEES, f"The ttl is {TTL:g} seconds by default"),
    (GUARANTEES, f"with `fair`, up to {dialect.PATIENCE:g} seconds"),
    (
        GUARANTEES,
        f"an error within {math.ceil(OPTIONS.io_timeout + 2)} seconds (`io_timeout`, and 2 for a new connection)",
    ),
    (GUARANTEES, "1 % of the ttl and 2 milliseconds are taken off"),
    ("docs/reference/settings.md", f"at least {conf.LEAST_TTL:g}."),
    ("docs/reference/settings.md", f"at most {conf.LONGEST:.0f} of them"),
    ("docs/howto/celery.md", f"*lease* is {once.LEASE:,.0f} seconds by default"),
    ("docs/howto/tasks.md", f"*lease* is {once.LEASE:,.0f} seconds by default"),
    ("docs/howto/celery.md", f"up to {2**decorators.LAST_GROWTH} seconds, each"),
    (
        "docs/howto/write-a-backend.md",
        f"tries again after pauses of {SHORTEST:g} to {LONGEST:g} milliseconds",
    ),
    (DATABASE_PAGE, f"a position counts for {dialect.PATIENCE:g} seconds"),
    (DATABASE_PAGE, f"when its position has expired, after {dialect.PATIENCE:g} seconds"),
    (DATABASE_PAGE, f"at most `max_connections` of them ({OPTIONS.max_connections})"),
    (DATABASE_PAGE, f"idle for {own_connections.IDLE:g} seconds"),
    (DATABASE_PAGE, f"given up after `io_timeout` ({OPTIONS.io_timeout:g} seconds)"),
    (DATABASE_PAGE, f"a random pause of {SHORTEST:g} to {LONGEST:g} milliseconds"),
    (DATABASE_PAGE, f"tasks {local_queue.IN_A_ROW} times in a row lets other processes try first"),
    (DATABASE_PAGE, f"one statement extends up to {backend.BATCH} leases"),
    (DATABASE_PAGE, "ends 1 % of the ttl and 2 milliseconds earlier"),
    (DATABASE_PAGE, f"about every {looks(MySQL)} milliseconds"),
    (DATABASE_PAGE, f"about every {looks(SQLite)} milliseconds; it reads"),
    ("docs/reference/backends/redis.md", f"idle for {idle.IDLE:g} seconds"),
    (CACHE_PAGE, f"longer than {cache_alias.LONGEST_KEY} characters"),
    (CACHE_PAGE, f"more than {cache.MARGIN:g} second of its ttl is left"),
    (CACHE_PAGE, f"A ttl is {cache_alias.LEAST_TTL:g} seconds to {DAYS:g} days"),
    (CACHE_PAGE, f"random pauses of {SHORTEST:g} to {LONGEST:g} milliseconds"),
    (MEMCACHED_PAGE, f"random pauses of {SHORTEST:g} to {LONGEST:g} milliseconds"),
    (MEMCACHED_PAGE, f"at least {cache_alias.LEAST_TTL:g} seconds and at most {DAYS:g} days"),
    (MEMCACHED_PAGE, f"is {SHORTEST:g} to {waiting.SHORTEST_POLL * 1000:g} milliseconds while"),
    (MEMCACHED_PAGE, f"after {waiting.YIELDS} times in a row"),
    (MEMCACHED_PAGE, f"keeps up to {KEPT} connections open"),
    (MEMCACHED_PAGE, f"given up after `io_timeout` ({MEMCACHED.io_timeout:g} second)"),
    (MEMCACHED_PAGE, f"after `connect_timeout` ({MEMCACHED.connect_timeout:g} seconds)"),
]


@pytest.mark.parametrize(("page", "sentence"), FACTS)
def test_a_number_in_a_sentence_is_that_of_the_code(page: str, sentence: str) -> None:
    assert sentence in prose(ROOT / page)


def test_traits_of_the_contract_are_explained() -> None:
    listed = {
        row.strip("`") for row in table(ROOT / "CONTRIBUTING.md", "### A test of the contract")
    }

    assert listed == TRAITS
