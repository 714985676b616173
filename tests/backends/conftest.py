"""What the tests of the database backends share: every server, raw connections, counted statements; and those of etcd."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from django.db import connections
from django.db.backends.postgresql.psycopg_any import IsolationLevel
from django.db.backends.utils import CursorWrapper

from django_distlock import lock, locks
from django_distlock.backends.database.backend import DatabaseBackend
from django_distlock.backends.database.dialect import COUNTER, LOCK
from django_distlock.backends.etcd.gateway import below
from django_distlock.engine import waiting
from testproject.models import Account

from .etcd_tools import aliases, log_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper
    from pytest_django.fixtures import Settings

    from django_distlock import Lease
    from tests.fixtures.etcd import Cluster
    from tests.fixtures.servers import Server

_T = TypeVar("_T")
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
def account(database: str) -> Iterator[Account]:
    """A customer of the database, with money."""
    made = Account.objects.using(database).create(
        name=uuid.uuid4().hex, balance=100, opening_balance=100
    )
    yield made
    Account.objects.using(database).filter(pk=made.pk).delete()


@pytest.fixture
def name() -> str:
    """A lock name that no other test uses."""
    return f"test:{uuid.uuid4().hex[:12]}"


@pytest.fixture
def holders(settings: Settings, name: str) -> Iterator[tuple[Lease, Lease]]:
    """A late holder, who does not know that it is late, and the next one.

    What the data sees of them is their tokens: here they hold two locks, one after the other.
    """
    settings.DISTLOCK = {
        "default": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend", "TTL": 600}
    }
    with lock(f"{name}:late", renew=False) as late, lock(f"{name}:next", renew=False) as next_one:
        assert late.checked_token() < next_one.checked_token()
        yield late, next_one


@pytest.fixture
def etcd_aliases(etcd: Cluster, namespace: str, settings: Settings) -> None:
    """The aliases "locks" and "elsewhere", in a namespace of their own."""
    settings.DISTLOCK = aliases(etcd, namespace)


@pytest.fixture
def closed(own_cluster: Cluster, settings: Settings, namespace: str) -> Iterator[Cluster]:
    """A cluster that asks for a login: of "shop", who may use the namespace, or of "guest", who may not."""
    member = own_cluster.members[0]
    for user in ("root", "shop", "guest"):
        member.asks("/v3/auth/user/add", name=user, password="hush")
    for role, user in (("root", "root"), ("locks", "shop")):
        member.asks("/v3/auth/role/add", name=role)
        member.asks("/v3/auth/user/grant", user=user, role=role)
    permission = {"permType": "READWRITE", **below(namespace)}
    member.asks("/v3/auth/role/grant", name="locks", perm=permission)
    member.asks("/v3/auth/enable")
    login = {"user": "shop", "password": "hush"}
    settings.DISTLOCK = aliases(own_cluster, namespace, **login)
    yield own_cluster
    locks.close()
    member.asks("/v3/auth/disable", log_in(member, "root", "hush"))
    for user in ("root", "shop", "guest"):
        member.asks("/v3/auth/user/delete", name=user)
    for role in ("root", "locks"):
        member.asks("/v3/auth/role/delete", role=role)


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


@pytest.fixture
def patient_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not woken sleeps for so long that it is seen."""
    for pause in ("SHORTEST_PAUSE", "LONGEST_WAKEABLE_PAUSE", "SHORTEST_POLL", "LONGEST_POLL"):
        monkeypatch.setattr(waiting, pause, 10.0)


@pytest.fixture(params=SERVERS)
def wanderer(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database in whose "elsewhere" are the same tables, empty, and where this thread looks first."""
    server = request.getfixturevalue(request.param)
    if request.param == "postgres":
        make, leave = (
            "CREATE SCHEMA elsewhere AUTHORIZATION distlock",
            "DROP SCHEMA elsewhere CASCADE",
        )
        look = "SET search_path = elsewhere, public"
        copy = "CREATE TABLE elsewhere.{0} (LIKE public.{0} INCLUDING ALL)"
        admin = server.admin("distlock")
    else:
        make, leave, look = "CREATE DATABASE elsewhere", "DROP DATABASE elsewhere", "USE elsewhere"
        copy = "CREATE TABLE elsewhere.{0} LIKE distlock.{0}"
        admin = server.admin()
    run = admin.cursor().execute
    run(make)
    if request.param == "mariadb":
        run("GRANT ALL ON elsewhere.* TO distlock@'127.0.0.1'")
    for table in (COUNTER, LOCK):
        run(copy.format(table))
    if request.param == "postgres":
        run("GRANT ALL ON ALL TABLES IN SCHEMA elsewhere TO distlock")
    connection = connections[request.param]
    connection.close()
    with connection.cursor() as cursor:
        cursor.execute(look)
    yield request.param
    connection.close()
    run(leave)
    admin.close()


@contextmanager
def paused(*servers: Server) -> Iterator[None]:
    """Pause *servers* during the block, so that they answer nobody."""
    for server in servers:
        server.pause()
    try:
        yield
    finally:
        for server in servers:
            server.resume()


def backend(alias: str) -> DatabaseBackend:
    """Return the backend of *alias* as what it is."""
    found = locks[alias]
    assert isinstance(found, DatabaseBackend)
    return found


@contextmanager
def isolated(alias: str, level: str) -> Iterator[str]:
    """Have the connections of the application be of an isolation level, such as "repeatable read"."""
    connection = connections[alias]
    options, is_postgres = connection.settings_dict["OPTIONS"], connection.vendor == "postgresql"
    known = IsolationLevel[level.upper().replace(" ", "_")] if is_postgres else level
    options["isolation_level"] = known
    connection.close()
    try:
        yield alias
    finally:
        del options["isolation_level"]
        connection.close()


def apart(alias: str, *calls: Callable[[], _T]) -> list[_T]:
    """Return what each of *calls* returns in another thread, whose own connection is closed at the end."""

    def run(call: Callable[[], _T]) -> _T:
        try:
            return call()
        finally:
            connections[alias].close()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@contextmanager
def counted_statements(alias: str) -> Iterator[list[str]]:
    """Collect the statements that the own connections of *alias* send meanwhile.

    But for those of the background, which may still clean up after other tests.
    """
    statements: list[str] = []

    def note(statement: str) -> None:
        if threading.current_thread().name != "distlock-io":
            statements.append(statement)

    def count(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        note(sql)
        return execute(sql, params, many, context)

    before = []
    for connection in backend(alias)._own._idle:
        connection.execute_wrappers.append(count)
        before.append((connection, connection.distlock_cursor))
        if not isinstance(before[-1][1], CursorWrapper):
            connection.distlock_cursor = Counted(before[-1][1], note)
    yield statements
    for connection, cursor in before:
        connection.execute_wrappers.clear()
        connection.distlock_cursor = cursor


class Counted:
    """A driver's cursor that notes its statements."""

    def __init__(self, cursor: Any, note: Callable[[str], None]) -> None:
        self._cursor = cursor
        self._note = note

    def execute(self, statement: str, *args: Any, **kwargs: Any) -> Any:
        self._note(statement)
        return self._cursor.execute(statement, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)
