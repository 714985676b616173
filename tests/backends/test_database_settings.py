"""What a project may write into DATABASES: objects that cannot be copied, and passwords that live for minutes."""

from __future__ import annotations

import ssl
import threading
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections
from django.db.transaction import atomic

from django_distlock import LockBackendError, lock, locks
from django_distlock.conf import DEFAULT_BACKEND
from tests.fixtures.token_engine import tokens

from .session_tools import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_django.fixtures import Settings

    from tests.fixtures.mariadb import MariaDB


class Token:
    """A password that a provider makes at each connection; it can neither be copied nor pickled."""

    def __init__(self, password: str) -> None:
        self._password = password
        self._mutex = threading.Lock()

    def __str__(self) -> str:
        with self._mutex:
            return self._password


@pytest.fixture
def own(settings: Settings) -> Iterator[dict[str, Any]]:
    """The settings of an alias of DATABASES, and of locks in it, to be filled."""
    written = connections.settings["own"] = {}
    settings.DISTLOCK = {"own": {"OPTIONS": {"using": "own"}}}
    yield written
    locks.close()
    if "own" in {each.alias for each in connections.all(initialized_only=True)}:
        connections["own"].close()
        del connections["own"]
    del connections.settings["own"]


SETTINGS = {
    "SSLContext": ("mariadb", "OPTIONS", "ssl", ssl.create_default_context()),
    "token": ("postgres", "", "PASSWORD", Token("distlock")),
    "pool": ("postgres", "OPTIONS", "pool", threading.Lock()),
}


@pytest.mark.server
@pytest.mark.parametrize("setting", SETTINGS)
def test_an_object_that_cannot_be_copied_may_stand_in_the_settings(
    setting: str, own: dict[str, Any], name: str, request: pytest.FixtureRequest
) -> None:
    database, section, key, value = SETTINGS[setting]
    request.getfixturevalue(database)
    own |= connections.settings[database]
    own["OPTIONS"] = {**own["OPTIONS"]}
    (own[section] if section else own)[key] = value

    with lock(name, using="own") as lease:
        assert lease.held
    assert locks["own"].check(["own"]) == []


@pytest.mark.server
@pytest.mark.usefixtures("postgres")
@pytest.mark.parametrize("path", [DEFAULT_BACKEND, *KINDS.values()])
def test_locks_are_kept_where_transactions_only_read_by_default(
    path: str, own: dict[str, Any], settings: Settings, name: str
) -> None:
    own |= connections.settings["postgres"]
    own["OPTIONS"] = {**own["OPTIONS"], "options": "-c default_transaction_read_only=on"}
    settings.DISTLOCK = {"own": {"BACKEND": path, "OPTIONS": {"using": "own"}}}

    with lock(name, using="own"):
        assert lock(name, using="own").locked()

    with connections["own"].cursor() as cursor:
        cursor.execute("SHOW transaction_read_only")
        assert cursor.fetchone() == ("on",)


@pytest.fixture
def rotating(mariadb: MariaDB, own: dict[str, Any]) -> None:
    """An alias whose engine asks for the password at each connection."""
    own |= {**connections.settings["mariadb"], "ENGINE": "tests.fixtures.token_engine"}
    own |= {"USER": "rotating", "PASSWORD": "outdated"}
    _change_password(mariadb, tokens[-1])


def _change_password(mariadb: MariaDB, password: str) -> None:
    with mariadb.admin() as admin, admin.cursor() as cursor:
        cursor.execute("CREATE OR REPLACE USER rotating IDENTIFIED BY %s", [password])
        cursor.execute("GRANT ALL ON distlock.* TO rotating")


@pytest.mark.usefixtures("rotating")
def test_each_connection_asks_the_engine_for_its_password(
    mariadb: MariaDB, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock(name, using="own"):
        pass
    _change_password(mariadb, "next")
    locks.close()  # as connections that are idle are closed
    with pytest.raises(LockBackendError, match="Access denied"):
        lock(name, using="own").acquire()

    monkeypatch.setattr("tests.fixtures.token_engine.tokens", ["next"])

    with lock(name, using="own"):
        pass


@pytest.mark.usefixtures("rotating")
def test_an_engine_that_gets_no_password_is_an_error_of_ours(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fixtures.token_engine.tokens", [])

    with pytest.raises(LockBackendError, match="no connection parameters") as refused:
        lock(name, using="own").acquire()

    assert isinstance(refused.value.__cause__, IndexError)
    [error] = locks["own"].check(["own"])
    assert "no connection parameters" in error.msg


@pytest.mark.usefixtures("rotating")
def test_a_lock_guards_a_transaction_on_an_alias_with_another_engine(name: str) -> None:
    with lock(name, using="own") as lease, atomic(using="mariadb"):
        lease.guard(using="mariadb")
