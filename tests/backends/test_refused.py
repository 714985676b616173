"""`manage.py check --database` of servers that run, and refuse: the password, the database, the rights, TLS."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from django.core.checks import Error
from django.db import connections

from django_distlock import locks
from django_distlock.checks import check_servers
from django_distlock.exceptions import DOCS
from tests.fixtures.certificate import tls_server
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import Redis

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_django.fixtures import Settings

    from tests.fixtures.mariadb import MariaDB
    from tests.fixtures.memcached import Memcached
    from tests.fixtures.postgres import PostgreSQL
    from tests.fixtures.zookeeper import Ensemble

    Alias = Callable[..., None]

ROWLOCK = "django_distlock.backends.rowlock.RowLockBackend"
ADVISORY = "django_distlock.backends.advisory.AdvisoryBackend"
REDIS = "django_distlock.backends.redis.RedisBackend"
REDLOCK = "django_distlock.backends.redlock.RedlockBackend"
ZOOKEEPER = "django_distlock.backends.zookeeper.ZooKeeperBackend"
CACHE = "django_distlock.backends.cache.CacheBackend"
LOGIN = "The server refuses the login: correct the user and the password in the settings."
DATABASE = (
    "Create the database, or correct its name in the settings; the user needs the right to use it."
)
RIGHTS = "The server refuses the command: give the user the rights that locks need."
TLS = "Correct the settings for TLS, here or on the server."
SECRET = "hush-hush"


def message(text: str, hint: str) -> Error:
    """Return the one message that is wanted."""
    page = f"{DOCS}reference/checks.html#distlock-e006"
    return Error(text, hint=f"{hint} See {page}", id="distlock.E006")


def found() -> list[Any]:
    """Return what check says, once it is sure that nothing in it is secret."""
    messages = check_servers(databases=["refused"])
    assert SECRET not in str([(each.msg, each.hint) for each in messages])
    return messages


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Iterator[Alias]:
    """Makes the database alias "refused" of another one, and three kinds of locks there."""

    def make(like: str, **changes: Any) -> None:
        with suppress(AttributeError):  # nobody has asked for it before
            del connections["refused"]
        known = {**connections.settings[like], **changes}
        database = connections.configure_settings({"default": {}, "refused": known})["refused"]
        monkeypatch.setitem(connections.settings, "refused", database)
        options = {"OPTIONS": {"using": "refused"}}
        settings.DISTLOCK = {
            "default": options,
            "rows": {"BACKEND": ROWLOCK, **options},
            "advice": {"BACKEND": ADVISORY, **options},
        }

    yield make
    locks.reset()
    with suppress(AttributeError):
        del connections["refused"]


ALL = "DISTLOCK['default'], DISTLOCK['rows'], DISTLOCK['advice']: the database 'refused' cannot be reached"


@pytest.fixture
def strict(postgres: PostgreSQL) -> Iterator[PostgreSQL]:
    """The server, which wants a password from the role "stranger"."""
    rules = postgres.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    with postgres.admin() as admin:
        admin.execute("CREATE ROLE stranger LOGIN PASSWORD 'right'")
        rules.write_text(f"host all stranger 127.0.0.1/32 scram-sha-256\n{before}")
        admin.execute("SELECT pg_reload_conf()")
        yield postgres
        rules.write_text(before)
        admin.execute("SELECT pg_reload_conf()")
        admin.execute("DROP ROLE stranger")


def test_postgresql_refuses_a_wrong_password(strict: PostgreSQL, refused: Alias) -> None:
    refused("postgres", USER="stranger", PASSWORD=SECRET)

    place = f'connection to server at "127.0.0.1", port {strict.port} failed'
    text = f'{ALL}: connection failed: {place}: FATAL:  password authentication failed for user "stranger".'
    assert found() == [message(text, LOGIN)]


def test_postgresql_has_no_such_role_nor_database(postgres: PostgreSQL, refused: Alias) -> None:
    place = f'connection to server at "127.0.0.1", port {postgres.port} failed'
    refused("postgres", USER="nobody-knows", PASSWORD=SECRET)
    text = f'{ALL}: connection failed: {place}: FATAL:  role "nobody-knows" does not exist.'
    assert found() == [message(text, LOGIN)]

    refused("postgres", NAME="nowhere", PASSWORD=SECRET)
    text = f'{ALL}: connection failed: {place}: FATAL:  database "nowhere" does not exist.'
    assert found() == [message(text, DATABASE)]


def test_the_tables_of_all_kinds_are_looked_for_on_postgresql(
    postgres: PostgreSQL, refused: Alias
) -> None:
    refused("postgres")
    assert found() == []

    refused("postgres", NAME="postgres")

    ids = [each.id for each in found()]
    assert ids == ["distlock.E007"] * 2  # locks of sessions need one table less
    assert "has no table django_distlock_methodlock, django_distlock_fencingcounter." in str(
        found()[1]
    )


def test_postgresql_does_not_let_the_user_read_the_tables(
    strict: PostgreSQL, refused: Alias
) -> None:
    refused("postgres", USER="stranger", PASSWORD="right")

    messages = found()

    table = "permission denied for table django_distlock_methodlock"
    assert messages[0] == message(f"DISTLOCK['default'], DISTLOCK['rows']: {table}.", RIGHTS)
    assert [each.hint for each in messages] == [messages[0].hint] * len(messages)


def test_mariadb_refuses_a_wrong_password(mariadb: MariaDB, refused: Alias) -> None:
    refused("mariadb", PASSWORD=SECRET)

    [error] = found()

    assert error == message(error.msg, LOGIN)
    assert error.msg.startswith(ALL)
    assert "Access denied for user 'distlock'@'127.0.0.1' (using password: YES)" in error.msg


# Redis.


@pytest.fixture(scope="module")
def guarded() -> Iterator[Redis]:
    """A server with a password, and a user who may run next to nothing."""
    with Redis(password="right") as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "poor", "on", ">poor", "~*", "+ping", "+info")
            rights = ["on", ">blind", "~*", "+@all", "-info"]
            client.execute_command("ACL", "SETUSER", "blind", *rights)
        yield server


def at(server: Redis, settings: Settings, login: str) -> str:
    """Have two aliases log in like that; return how the one message about them begins."""
    url = f"redis://{login}127.0.0.1:{server.port}"
    alias = {"BACKEND": REDIS, "OPTIONS": {"location": f"{url}/0"}}
    settings.DISTLOCK = {"default": alias, "other": alias}
    return f"DISTLOCK['default'], DISTLOCK['other']: Redis at 127.0.0.1:{server.port} "


@pytest.mark.server
@pytest.mark.caches
class TestRedis:
    def test_it_refuses_a_wrong_password(self, guarded: Redis, settings: Settings) -> None:
        where = at(guarded, settings, f":{SECRET}@")
        reason = "invalid username-password pair or user is disabled"

        assert found() == [message(f"{where}cannot be reached: {reason}.", LOGIN)]

    def test_it_does_not_let_the_user_run_scripts(self, guarded: Redis, settings: Settings) -> None:
        where = at(guarded, settings, "poor:poor@")

        [error] = found()

        assert error == message(error.msg, RIGHTS)
        assert error.msg.startswith(f"{where.partition(' at ')[0]} refused: ")
        assert "'evalsha'" in error.msg

    def test_its_certificate_is_signed_by_nobody_known(
        self, guarded: Redis, certificate: Path, settings: Settings
    ) -> None:
        with Proxy(guarded.port, tls=tls_server(certificate)) as proxy:
            location = f"rediss://:{SECRET}@127.0.0.1:{proxy.port}/0"
            options = {"location": location, "connect_timeout": 5}
            settings.DISTLOCK = {"default": {"BACKEND": REDIS, "OPTIONS": options}}

            [error] = found()

        assert error == message(error.msg, TLS)

    def test_each_of_redlock_refuses_a_wrong_password(self, settings: Settings) -> None:
        with ExitStack() as stack:
            servers = [stack.enter_context(Redis(password="right")) for _ in range(3)]
            urls = [f"redis://:{SECRET}@127.0.0.1:{server.port}" for server in servers]
            urls[2] = urls[2].replace(SECRET, "right")
            alias = {"BACKEND": REDLOCK, "OPTIONS": {"servers": urls}}
            settings.DISTLOCK = {"default": alias, "other": alias}

            reason = "cannot be reached: invalid username-password pair or user is disabled."
            both = "DISTLOCK['default'], DISTLOCK['other']: Redis at 127.0.0.1"
            assert found() == [
                message(f"{both}:{server.port} {reason}", LOGIN) for server in servers[:2]
            ]
            locks.reset()


# Those without passwords, or with credentials of their own.


def test_memcached_that_speaks_no_tls(memcached: Memcached, settings: Settings) -> None:
    context = ssl.create_default_context()
    settings.CACHES = {
        "default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
        "locks": memcached.alias(OPTIONS={"tls_context": context}),
    }
    settings.DISTLOCK = {
        "default": {"BACKEND": CACHE, "OPTIONS": {"cache": "locks", "connect_timeout": 1.0}}
    }

    [error] = found()

    assert error == message(error.msg, error.hint.partition(" See ")[0])
    assert f"memcached at 127.0.0.1:{memcached.port}" in error.msg


def test_zookeeper_refuses_credentials(zookeeper: Ensemble, root: str, settings: Settings) -> None:
    credentials = {"auth": [("no-such-scheme", SECRET)]}
    options = {"hosts": zookeeper.hosts, "root": root, "io_timeout": 9.0, **credentials}
    alias = {"BACKEND": ZOOKEEPER, "OPTIONS": options}
    settings.DISTLOCK = {"default": alias, "other": alias}

    [error] = found()

    assert error == message(error.msg, LOGIN)
    assert error.msg.startswith("DISTLOCK['default'], DISTLOCK['other']: ")
    assert error.msg.endswith(": AuthFailedError.")
