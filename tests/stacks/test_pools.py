"""An application's pool of connections, of which locks take none."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from django.db import connections

from django_distlock import lock, locks

from .profiles import ALIASES
from .settings import STACK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_django.fixtures import Settings

#: What a session of locks has, and one of the application has not.
OF_LOCKS = {
    "postgresql": "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'distlock%%'",
    "mysql": "SELECT count(*) FROM DUAL WHERE @@session.innodb_lock_wait_timeout"
    " <> @@global.innodb_lock_wait_timeout OR @@session.wait_timeout <> @@global.wait_timeout",
}


@pytest.fixture(params=STACK.aliases)
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """An alias of DISTLOCK whose server runs, with no connection of the application in use."""
    alias = str(request.param)
    request.getfixturevalue(ALIASES[alias])
    connections[ALIASES[alias]].close()
    yield alias
    connections[ALIASES[alias]].close()


def test_locks_leave_all_its_connections_to_the_application(using: str, name: str) -> None:
    with ExitStack() as held:
        for number in range(5):
            held.enter_context(lock(f"{name}-{number}", using=using))

        assert _ask(using, "SELECT 1") == 1


def test_the_application_meets_no_session_of_a_lock(using: str, name: str) -> None:
    with lock(name, using=using):
        pass
    locks.close()

    for _ in range(4):
        assert _ask(using, OF_LOCKS[connections[ALIASES[using]].vendor]) == 0


def test_a_statement_of_the_application_may_take_longer_than_a_request_of_a_lock(
    using: str, name: str, settings: Settings
) -> None:
    written = settings.DISTLOCK[using]
    options = {**written["OPTIONS"], "io_timeout": 1.0}
    settings.DISTLOCK = {"hasty": {**written, "OPTIONS": options}}
    with lock(name, using="hasty"):
        pass
    locks.close()
    sleep = "pg_sleep" if connections[ALIASES[using]].vendor == "postgresql" else "sleep"

    _ask(using, f"SELECT {sleep}(1.7)")


def _ask(using: str, statement: str) -> object:
    """Return what the server answers to the application, whose connection goes back into its pool."""
    try:
        with connections[ALIASES[using]].cursor() as cursor:
            cursor.execute(statement, [])
            (answer,) = cursor.fetchone()
            return answer
    finally:
        connections[ALIASES[using]].close()
