"""Own connections of this package, because a lease must not live in a transaction of the caller's connection."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from django.apps import apps
from django.conf import settings as project
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError
from django.db.utils import InterfaceError, OperationalError, ProgrammingError

from django_distlock import conf
from django_distlock.backends.idle import IdleStack
from django_distlock.engine import steps
from django_distlock.engine.background import NoThreadError, background, start_daemon
from django_distlock.engine.bells import ThreadBell
from django_distlock.engine.waiting import Wait
from django_distlock.exceptions import (
    DOCS,
    Contended,
    LockBackendError,
    LockOutcomeUnknown,
    NotSent,
    first_line,
    root_cause,
)
from django_distlock.ground import clock
from django_distlock.ground.mutexes import section

from .bounds import NoAnswer, bound_requests, cancel, descriptor, driver_of, is_under_way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.backends.utils import CursorWrapper

    from .dialect import Dialect

_T = TypeVar("_T")
#: Seconds after which an idle connection is closed.
IDLE = 30.0
#: The errors for wrong settings of an alias of DATABASES.
_WRONG_SETTINGS = (TypeError, ValueError, ImproperlyConfigured)
#: Matches errors for a missing permission to write; with other errors, tables may be missing.
_NO_RIGHT = re.compile("denied|read.?only", re.IGNORECASE)
#: The first number of the errors that come from the drivers for MariaDB and MySQL, not from the server.
_OF_DRIVERS = 2000
#: The parent process's connections: kept, because closing them would end the parent's sessions.
_OF_PARENTS: list[BaseDatabaseWrapper] = []


class Unusable(Exception):
    """The server cannot keep locks, at least not in its present state. *advice*: what to do."""

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(problem)
        self.advice = advice


class Crowded(Exception):
    """The lock is free, but other statements have locked its rows."""

    def __str__(self) -> str:
        return "they have locked the rows of a free lock"


class OwnConnections:
    """A few connections to one database, in autocommit, each borrowed for one request."""

    def __init__(
        self, alias: str, database: str, dialect: Dialect, *, limit: int, io_timeout: float
    ) -> None:
        self.alias = alias
        self._database = database
        self._dialect = dialect
        self._io_timeout = io_timeout
        self._limit = limit
        self.forget()

    def forget(self) -> None:
        """Start without connections."""
        self._idle = IdleStack()
        #: All connections, idle or borrowed, until they are closed or an asynchronous exception drops them.
        self._all: WeakSet[BaseDatabaseWrapper] = WeakSet()
        self._mutex = section()
        #: The bells of callers that wait for a connection, first come, first served.
        self._callers = deque[ThreadBell]()
        self._closes_idle = False

    def ask(self, verb: Callable[..., _T], *args: Any, left: float | None = 0.0) -> _T:
        """Call *verb* with the dialect's cursor of a connection, and return its result; database errors become lock errors.

        *left*: see borrow().
        """
        connection = self.borrow(left)
        try:
            answer = verb(connection.distlock_cursor, *args)
        except BaseException:  # noqa: BLE001 - it is raised again
            is_sound = False
            try:
                with self.translated(), connection.wrap_database_errors:
                    raise
            except Contended:
                is_sound = connection.get_autocommit()
                raise
            except LockOutcomeUnknown as lost:
                lost.was_idle = hasattr(connection, "used_at")
                raise
            finally:
                self.give_back(connection, is_sound=is_sound)
        self.give_back(connection, is_sound=True)
        return answer

    @contextmanager
    def cursor(self) -> Iterator[CursorWrapper]:
        """Lend Django's cursor on a connection; database errors become lock errors."""
        connection = self.borrow()
        is_sound = False
        try:
            with self.translated(), connection.cursor() as cursor:
                yield cursor
            is_sound = True
        except Contended:
            is_sound = connection.get_autocommit()
            raise
        finally:
            self.give_back(connection, is_sound=is_sound)

    def open(self, *, bounded: bool = True) -> BaseDatabaseWrapper:
        """Open a connection; if *bounded*, a request fails without an answer in time."""
        connection: BaseDatabaseWrapper = self._new()
        self._connect(connection, bounded=bounded)
        return connection

    def close(self) -> None:
        self._idle.close_all(self._close)

    def abandon(self) -> None:
        """In a forked child: drop the parent's connections without closing them, and start again."""
        for connection in self._idle:
            abandon(connection)
        self.forget()

    def borrow(
        self, left: float | None = 0.0, is_given_up: Callable[[], object] = lambda: False
    ) -> Any:
        """Return a connection for one caller alone, first come, first served.

        NotSent if no connection comes free within io_timeout, or within *left* seconds if that is longer (None: no
        limit), or once *is_given_up* returns True, which is called at least once per io_timeout.
        """
        try:
            if not self._callers:
                return self._idle.pop()
        except IndexError:
            pass
        connection = self._next_free(left, is_given_up)
        if connection.connection is None:
            try:
                self._connect(connection)
            except BaseException:
                self._free_slot(connection)
                raise
        return connection

    def give_back(self, connection: Any, *, is_sound: bool) -> None:
        """Take a borrowed connection back; if it is not sound, close it and all idle connections.

        While Django's tests run, every connection is closed, because Django could not destroy the test database.
        """
        if not is_sound or ("django.test.utils" in sys.modules and conf.tests_run()):
            if is_under_way(connection):
                self._cancel(connection)
            else:
                self._close(connection)
            # The idle connections are probably broken, too: the server was restarted.
            self.close()
            return
        connection.used_at = clock.wait_time()
        self._idle.append(connection)
        if self._callers:
            self._ring_first()
        if not self._closes_idle:
            self._closes_idle = True
            background.submit(self.alias, self._close_idle, IDLE)

    def _next_free(self, left: float | None, is_given_up: Callable[[], object]) -> Any:
        """Return an idle connection, or a new unopened one, once no earlier caller waits for one."""
        wait = Wait(None if left is None else max(left, self._io_timeout))
        bell = ThreadBell()
        try:
            self._callers.append(bell)
            while True:
                if self._callers[0] is bell and (found := self._idle_or_new()) is not None:
                    return found
                if wait.is_over or is_given_up():
                    problem = (
                        f"all {self._limit} own connections are in use (OPTIONS 'max_connections')"
                    )
                    raise NotSent(self.alias, problem)
                # Look again from time to time: no bell rings for a connection that an asynchronous exception has dropped.
                bell.wait(wait.bounded(self._io_timeout))
        finally:
            self._callers.remove(bell)
            self._ring_first()  # there may be a connection for the next caller, too

    def _idle_or_new(self) -> Any:
        with suppress(IndexError):
            return self._idle.pop()
        with self._mutex:
            if len(self._all) >= self._limit:
                return None
            connection = self._new()
            self._all.add(connection)
            return connection

    def _new(self) -> Any:
        """Return a new, unopened connection."""
        connection: Any = connections.create_connection(self._database)
        connection.__class__ = _class_of_own(connection.__class__)
        connection.settings_dict = self._settings()
        return connection

    def _ring_first(self) -> None:
        with suppress(IndexError):
            self._callers[0].ring()

    def _connect(self, connection: Any, *, bounded: bool = True) -> None:
        if not project.USE_TZ:
            # Otherwise PostgreSQL would return naive times in TIME_ZONE, but tokens are counted in UTC.
            connection.timezone_name = "UTC"
        connection.inc_thread_sharing()
        began = clock.lease_time()
        try:
            try:
                self._prepare(connection, bounded=bounded)
            except (OperationalError, InterfaceError) as error:
                if is_word_of_server(error) or clock.lease_time() - began > steps.SETTLE:
                    raise
                # The connection broke while it was opened, before any request.
                _close_quietly(connection)
                self._prepare(connection, bounded=bounded)
        except (DatabaseError, InterfaceError, NoAnswer, *_WRONG_SETTINGS) as error:
            _close_quietly(connection)
            if not isinstance(error, NoAnswer) and self._dialect.is_contention(error):
                raise self._contended(error) from error
            problem = f"the database {self._database!r} cannot be reached: {first_line(error)}"
            raise LockBackendError(self.alias, problem) from root_cause(error)
        except BaseException as error:  # also an asynchronous exception
            _close_quietly(connection)
            if isinstance(error, Unusable):
                raise LockBackendError(self.alias, str(error)) from error
            raise

    def _prepare(self, connection: Any, *, bounded: bool) -> None:
        connection.ensure_connection()
        # A database engine that overrides only get_new_connection() may have taken the connection from a pool of
        # SQLAlchemy, which would lend it again.
        if (detach := getattr(connection.connection, "detach", None)) is not None:
            detach()
        connection.connection = driver_of(connection)
        bound_requests(connection, self._io_timeout if bounded else None)
        self._dialect.prepare(connection)
        connection.distlock_cursor = self._dialect.cursor(connection)

    def _cancel(self, connection: BaseDatabaseWrapper) -> None:
        """Ask the server to end the request, then close *connection*, which counts as open until then.

        Without this, a commit that waits for a synchronous standby would keep its session on the server.
        """

        def end() -> None:
            try:
                cancel(connection, self.open)
            finally:
                self._close(connection)

        try:
            start_daemon(end, "distlock-cancel")
        except NoThreadError:
            self._close(connection)

    def _close(self, connection: BaseDatabaseWrapper) -> None:
        try:
            _close_quietly(connection)
        finally:
            self._free_slot(connection)

    def _free_slot(self, connection: BaseDatabaseWrapper) -> None:
        with self._mutex:
            self._all.discard(connection)
        self._ring_first()

    def _close_idle(self) -> None:
        self._closes_idle = False
        self._idle.close_unused(self._close, IDLE)
        if self._idle and not self._closes_idle:
            self._closes_idle = True
            background.submit(self.alias, self._close_idle, IDLE)

    def _settings(self) -> dict[str, Any]:
        # Read the settings again, as they may have changed since this thread's connections were made.
        settings: dict[str, Any] = {**connections.settings[self._database]}
        settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False, AUTOCOMMIT=True)
        # Not a deep copy, which some OPTIONS, such as an SSLContext, do not allow.
        settings["OPTIONS"] = {**settings["OPTIONS"]}
        # No pool, because locks must not drain the application's pool.
        settings["OPTIONS"].pop("pool", None)
        settings["OPTIONS"].update(self._dialect.connection_options(settings, self._io_timeout))
        return settings

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raise lock errors for database errors: Contended, LockOutcomeUnknown, LockBackendError."""
        try:
            yield
        except TransactionManagementError:
            raise  # a DatabaseError, but about the caller's transaction
        except NoAnswer as error:
            raise self._lost(error) from root_cause(error)
        except (DatabaseError, InterfaceError) as error:
            if self._dialect.is_contention(error):
                raise self._contended(error) from root_cause(error)
            is_of_server = isinstance(error, (OperationalError, InterfaceError))
            if is_of_server and not self._dialect.is_refusal(error):
                raise self._lost(error) from root_cause(error)
            raise LockBackendError(self.alias, _explained(error, self._database)) from root_cause(
                error
            )
        except Crowded as error:
            raise self._contended(error) from root_cause(error)
        except Unusable as error:
            raise LockBackendError(self.alias, str(error)) from root_cause(error)

    def _contended(self, error: Exception) -> Contended:
        problem = f"the database {self._database!r} is busy with other writers: {first_line(error)}"
        return Contended(self.alias, problem)

    def _lost(self, error: Exception) -> LockOutcomeUnknown:
        problem = f"the database {self._database!r} did not answer: {first_line(error)}"
        return LockOutcomeUnknown(self.alias, problem)


@cache
def _class_of_own(wrapper: type[BaseDatabaseWrapper]) -> type[BaseDatabaseWrapper]:
    """Return a subclass of *wrapper* for own connections, without the connection pool that *wrapper* may have.

    A pool would lend the sessions of locks, with their settings, to the application, and would soon be empty.
    """

    def get_connection_params(self: BaseDatabaseWrapper) -> dict[str, Any]:
        try:
            return wrapper.get_connection_params(self)
        except Exception as error:  # for example from a project's code for passwords
            msg = f"its ENGINE has no connection parameters: {first_line(error)}"
            raise ImproperlyConfigured(msg) from error

    of_django: Any = next(kind for kind in wrapper.__mro__ if kind.__module__.startswith("django."))
    opens = wrapper.get_new_connection is not of_django.get_new_connection
    closes = any(
        getattr(wrapper, each) is not getattr(of_django, each) for each in ("close", "_close")
    )
    has_pool = opens and closes and of_django is not BaseDatabaseWrapper
    members: dict[str, Any] = {
        name: member
        for kind in (reversed(of_django.__mro__) if has_pool else ())
        for name, member in vars(kind).items()
        if not name.startswith("__")
    }
    if wrapper.get_connection_params is not of_django.get_connection_params:
        members["get_connection_params"] = get_connection_params
    return type(wrapper.__name__, (wrapper,), members)


def abandon(connection: BaseDatabaseWrapper) -> None:
    """Detach *connection*, inherited over a fork, from its socket, and never close it."""
    _OF_PARENTS.append(connection)
    found = descriptor(connection)
    if found is not None:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, found)
        os.close(nowhere)


def is_word_of_server(error: BaseException | None) -> bool:
    """Return True if the server has reported *error*; otherwise the connection broke."""
    while error is not None:
        if any(getattr(error, each, None) for each in ("sqlstate", "pgcode", "sqlite_errorcode")):
            return True
        # If PostgreSQL refuses a connection, drivers pass on only the text of the error.
        if "FATAL:" in str(error):
            return True
        number = error.args[0] if error.args else None
        if isinstance(number, int) and not _OF_DRIVERS <= number < _OF_DRIVERS + 1000:
            return True
        error = error.__cause__
    return False


def _close_quietly(connection: BaseDatabaseWrapper) -> None:
    # By the driver's close(), because Django's raises an error in the thread of an event loop.
    driver, connection.connection = connection.connection, None
    with suppress(Error, OSError), connection.wrap_database_errors:
        if driver is not None:
            driver.close()


def _explained(error: Exception, database: str) -> str:
    text = first_line(error)
    if "pooling mode" in text:
        page = f"{DOCS}howto/with-your-stack.html#stack-poolers"
        return f"{text}: set pool_mode of PgBouncer to transaction or session (see {page})"
    if isinstance(error, (ProgrammingError, OperationalError)) and not _NO_RIGHT.search(text):
        return f"{text}: is the app migrated? {how_to_migrate(database)}"
    return text


def how_to_migrate(database: str) -> str:
    """Return the command that creates the tables of the locks."""
    command = f"manage.py migrate django_distlock --database={database}"
    if apps.is_installed("django_distlock"):
        return f"Run {command}"
    return f'Add "django_distlock" to INSTALLED_APPS, then run {command}'
