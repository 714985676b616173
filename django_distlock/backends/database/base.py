"""The base class of backends on a database: own connections, guard(), and retries while other writers block."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.apps import apps
from django.core.checks import Error, Warning as CheckWarning
from django.db import connections
from django.utils.version import get_version_tuple

from django_distlock import conf
from django_distlock.backends.base import BaseLockBackend, server_error
from django_distlock.engine.steps import settled
from django_distlock.engine.waiting import Wait
from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockError,
    NotSupported,
    StaleFencingToken,
    UnsupportedDatabase,
)
from django_distlock.ground.naming import printable

from .connections import OwnConnections, how_to_migrate
from .dialect import OutOfReach, StaleSnapshot, schema_of_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django.core.checks import CheckMessage
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_distlock.conf import BackendSettings
    from django_distlock.engine.values import Request

    from .dialect import Dialect

_T = TypeVar("_T")
#: Earlier versions of psycopg wait for ever for a server that hangs.
_LEAST_PSYCOPG = (3, 2, 11)
#: Longest pause in seconds between two tries while other writers block.
SHORT_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """OPTIONS of all backends on a database; row locks and advisory locks keep a connection for each lock.

    using: the alias in DATABASES; row locks and advisory locks must reach the server directly, not through PgBouncer.
    max_connections: most own connections of this process (a few more listen, watch, or run short
        statements beside locks that keep a connection).
    io_timeout: seconds after which a request without an answer fails.
    """

    using: str = "default"
    max_connections: int = 16
    io_timeout: float = 1.5

    def __post_init__(self) -> None:
        conf.check_values(self)
        if self.using not in connections.settings:
            msg = f"'using' names {conf.shown_alias(self.using)}, but DATABASES has {', '.join(map(repr, connections.settings))}."
            raise ValueError(msg)
        limit = self.max_connections
        if type(limit) is not int or limit < 1:
            msg = f"'max_connections' must be a whole number, 1 or more, not {limit!r}."
            raise ValueError(msg)


class BaseDatabaseBackend(BaseLockBackend):
    """Locks in the database ``OPTIONS["using"]``, with fencing tokens beside them."""

    asks_database = True
    #: The kinds of databases that can keep these locks, and their names for people.
    vendors: ClassVar[dict[str, str]] = {"postgresql": "PostgreSQL", "mysql": "MariaDB, MySQL"}

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        connection = connections[self.options.using]
        self.location = location_of(connection)
        vendor = connection.vendor
        if vendor not in self.vendors:
            *others, last = self.vendors.values()
            raise UnsupportedDatabase(
                f"DISTLOCK[{self.alias!r}]: the database {self.options.using!r} is of the kind {vendor!r}; "
                f"these locks need {', '.join(others)} or {last}."
            )
        self.dialect = self.make_dialect(vendor)
        self._own = self.make_pool(self.dialect, self.options.max_connections)

    @cached_property
    def schema(self) -> str:
        """The schema of the tables, as the application's connections may have another search path."""
        return self._query(schema_of_tables)

    def make_dialect(self, vendor: str) -> Dialect:
        """Return the Dialect of this kind of server."""
        raise NotImplementedError

    def make_pool(self, dialect: Dialect, limit: int) -> OwnConnections:
        """Return a pool of own connections, with none open yet."""
        options = self.options
        return OwnConnections(
            self.alias, options.using, dialect, limit=limit, io_timeout=options.io_timeout
        )

    def guard(self, request: Request, token: int, using: str) -> None:
        """Lock the fencing token in the caller's transaction."""
        connection = connections[using]
        if location_of(connections[self.options.using]) != location_of(connection):
            raise NotSupported(
                self.alias, f"guard(using={using!r})", f"Its locks live in {self.options.using!r}."
            )
        if not connection.in_atomic_block:
            msg = f"guard() protects a transaction: call it inside atomic(using={using!r})."
            raise LockError(msg)
        schema = self.schema
        try:
            with self._own.translated(), connection.cursor() as cursor:
                found = self.dialect.guard(cursor, schema, request.key, token)
        except OutOfReach as error:
            raise NotSupported(self.alias, f"guard(using={using!r})", str(error)) from error
        except StaleSnapshot as error:
            msg = f"This transaction reads data from before lock {printable(request.name)!r} was taken: begin it inside the lock."
            raise LockError(msg) from error
        if found != token:
            raise StaleFencingToken(request.name, token, "a later holder has the lock", found)

    def check_tables(self, tables: Sequence[str]) -> list[CheckMessage]:
        """Return an error if the server does not answer, or lacks one of *tables*."""
        using, settings = self.options.using, connections[self.options.using].settings_dict
        address = f"{settings['HOST'] or 'localhost'}:{settings['PORT'] or 'its default port'}"
        try:
            known = self._query(lambda cursor: cursor.db.introspection.table_names(cursor))
        except LockBackendError as error:
            return [server_error(error, address)]
        missing = ", ".join(table for table in tables if table not in known)
        if not missing:
            return self.check_server(address)  # fails without the permission to read the tables
        text = f"DISTLOCK[{self.alias!r}]: the database {using!r} has no table {missing}."
        return [Error(text, hint=f"{how_to_migrate(using)}.", id="distlock.E007")]

    def check_driver(self) -> list[CheckMessage]:
        """Return a warning if the driver is too old to keep the time limits of locks."""
        # Django prefers psycopg to psycopg2, and has imported its driver by now.
        driver = sys.modules.get("psycopg")
        if connections[self.options.using].vendor != "postgresql" or driver is None:
            return []
        if get_version_tuple(driver.__version__) >= _LEAST_PSYCOPG:
            return []
        text = f"DISTLOCK[{self.alias!r}]: psycopg {driver.__version__} waits without end for a server that hangs: no lock keeps its timeout then."
        return [CheckWarning(text, hint="Install psycopg 3.2.11 or later.", id="distlock.W003")]

    def check_installed(self) -> list[CheckMessage]:
        """Return an error if the app, whose migrations make the tables, is not installed."""
        if apps.is_installed("django_distlock"):
            return self._check_shared() if apps.is_installed("django_tenants") else []
        text = f"DISTLOCK[{self.alias!r}]: the app that has its tables is not in INSTALLED_APPS."
        return [Error(text, hint=f"{how_to_migrate(self.options.using)}.", id="distlock.E008")]

    def _check_shared(self) -> list[CheckMessage]:
        """Return an error if django-tenants makes the tables only in tenants' schemas: own connections use the public one."""
        from django_tenants.routers import TenantSyncRouter
        from django_tenants.utils import (
            get_public_schema_name,
            get_tenant_database_alias,
            schema_context,
        )

        using, label = self.options.using, "django_distlock"
        if using != get_tenant_database_alias() or not hasattr(connections[using], "set_schema"):
            return []
        with schema_context(get_public_schema_name()):
            if TenantSyncRouter().allow_migrate(using, label) is not False:
                return []
        text = f"DISTLOCK[{self.alias!r}]: the app that has its tables is not in SHARED_APPS, but locks are kept in the public schema."
        hint = f'Add "{label}" to SHARED_APPS, then run manage.py migrate_schemas --shared.'
        return [Error(text, hint=hint, id="distlock.E009")]

    def close(self) -> None:
        super().close()
        self._own.close()

    def abandon_after_fork(self) -> None:
        self._own.abandon()

    def _ask(self, verb: Callable[..., _T], *args: Any) -> _T:
        with self._own.cursor() as cursor:
            return verb(cursor, *args)

    def _query(self, verb: Callable[..., _T], *args: Any) -> _T:
        """Run *verb* with Django's cursor, and once more if the reply is lost, as on a dead idle connection."""
        return settled(partial(self._query_once, verb, *args), within=math.inf)

    def _query_once(self, verb: Callable[..., _T], *args: Any) -> _T:
        """Run *verb* with Django's cursor; after a lost reply, do not repeat it."""
        answer: _T = self._retry_while_blocked(0.0, self._ask, verb, *args)
        return answer

    def _retry_while_blocked(self, patience: float, ask: Callable[..., _T], *args: Any) -> _T:
        """Call *ask*, and again while other writers block it, for *patience* seconds, but at least io_timeout."""
        try:
            return ask(*args)
        except Contended as error:
            return self._ask_again(error, patience, ask, *args)

    def _ask_again(
        self, error: Contended, patience: float, ask: Callable[..., _T], *args: Any
    ) -> _T:
        """Continue _retry_while_blocked() after the *error* of the first attempt."""
        wait = Wait(max(patience, self.options.io_timeout))
        while True:
            self._own_transaction_must_not_block(error)
            if wait.is_over:
                raise error
            time.sleep(wait.next_pause(longest=SHORT_PAUSE))
            try:
                return ask(*args)
            except Contended as again:
                error = again

    def _own_transaction_must_not_block(self, error: Contended) -> None:
        """Raise LockBackendError if the other writer is the caller's own transaction: it would wait for itself."""
        connection = connections[self.options.using]
        if self.dialect.stands_in_the_way(connection):
            problem = (
                f"the caller's own transaction on {self.options.using!r} has locked the whole file: take and "
                "release locks outside atomic(), or keep them in a database file of their own (OPTIONS 'using')"
            )
            if conf.tests_run():
                problem = (
                    f"the transaction of this test, on {self.options.using!r}, has locked the whole file: keep "
                    "locks in memory (take BACKEND out of the alias's TEST), or use TransactionTestCase"
                )
            raise LockBackendError(self.alias, problem) from error


def location_of(connection: BaseDatabaseWrapper) -> tuple[str, ...]:
    """Return the identity of a database: aliases with the same identity share locks, even with different ENGINEs."""
    settings = connection.settings_dict
    place = [settings[key] for key in ("HOST", "PORT", "NAME")]
    if not settings["HOST"]:
        options = settings.get("OPTIONS") or {}
        place += map(options.get, ("service", "read_default_file", "unix_socket"))
    return (connection.vendor, *map(str, place))
