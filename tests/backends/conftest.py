"""What the tests of the database backends share: every server, raw connections, counted statements."""

from __future__ import annotations

import threading
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections

from django_distlock import locks
from django_distlock.backends.database.backend import DatabaseBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper

SERVERS = [pytest.param(name, marks=pytest.mark.server) for name in ("postgres", "mariadb")]


@pytest.fixture(params=["default", *SERVERS])
def database(request: pytest.FixtureRequest) -> str:
    """Each database, by its alias, which is also the alias in DISTLOCK."""
    if request.param != "default":
        request.getfixturevalue(request.param)
    return str(request.param)


@pytest.fixture(params=SERVERS)
def server_database(request: pytest.FixtureRequest) -> str:
    """Each database that is a server."""
    request.getfixturevalue(request.param)
    return str(request.param)


@pytest.fixture
def name() -> str:
    """A lock name that no other test uses."""
    return f"test:{uuid.uuid4().hex[:12]}"


@pytest.fixture
def another() -> Iterator[Callable[[str], BaseDatabaseWrapper]]:
    """Make connections beside those of this thread, closed after the test."""
    opened = []

    def connect(alias: str) -> BaseDatabaseWrapper:
        connection = connections.create_connection(alias)
        connection.inc_thread_sharing()
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()


def backend(alias: str) -> DatabaseBackend:
    """Return the backend of *alias* as what it is."""
    found = locks[alias]
    assert isinstance(found, DatabaseBackend)
    return found


@contextmanager
def counted_statements(alias: str) -> Iterator[list[str]]:
    """Collect the statements that the own connections of *alias* send meanwhile.

    But for those of the background, which may still clean up after other tests.
    """
    statements: list[str] = []

    def count(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if threading.current_thread().name != "distlock-io":
            statements.append(sql)
        return execute(sql, params, many, context)

    own = backend(alias)._own
    for _, connection in own._idle:
        connection.execute_wrappers.append(count)
    yield statements
    for _, connection in own._idle:
        connection.execute_wrappers.clear()
