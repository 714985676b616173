"""Connections of our own: never the caller's, whose transaction a lease must not live in."""

from __future__ import annotations

import copy
import os
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, Error, connections
from django.db.utils import InterfaceError, OperationalError, ProgrammingError

from django_distlock import conf
from django_distlock.engine.background import background
from django_distlock.engine.waiting import Wait
from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockError,
    LockOutcomeUnknown,
    first_line,
)

from .bounds import bound_requests, descriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

    from .engine import Engine

_T = TypeVar("_T")
#: Seconds after which an idle connection is closed.
IDLE = 30.0
#: What is raised for an alias of DATABASES that no connection can be made of.
_WRONG_SETTINGS = (TypeError, ValueError, ImproperlyConfigured)
#: Connections of a parent process: kept, as closing them would say goodbye in the parent's name.
_OF_PARENTS: list[BaseDatabaseWrapper] = []


class Unusable(Exception):
    """The server is one, or is in a state, in which it keeps no locks; what an engine finds out."""


class Crowded(Exception):
    """Nobody has the lock, but others are at work on its rows; what an engine finds out."""

    def __str__(self) -> str:
        return "they have locked the rows of a free lock"


class OwnConnections:
    """A few connections to one database, in autocommit, each borrowed for one request."""

    def __init__(
        self, alias: str, database: str, engine: Engine, *, limit: int, io_timeout: float
    ) -> None:
        self.alias = alias
        self._database = database
        self._engine = engine
        self._io_timeout = io_timeout
        self._limit = limit
        self.forget()

    def forget(self) -> None:
        """Begin with no connections."""
        #: Taken from and put back at its end, each a single step that needs no lock.
        self._idle: list[Any] = []
        #: All there are, idle or lent; one counts until it is closed, or lost by an exception from outside.
        self._all: WeakSet[BaseDatabaseWrapper] = WeakSet()
        # A plain lock: an exception from outside finds no code of Python's between its taking and its block.
        self._mutex = threading.Lock()
        self._has_place = threading.Condition(self._mutex)
        self._waiting = 0
        self._closes_idle = False

    def ask(self, verb: Callable[..., _T], *args: Any) -> _T:
        """Return what *verb* returns for the engine's cursor of a connection; database errors become lock errors."""
        connection = self.borrow()
        try:
            answer = verb(connection.distlock_cursor, *args)
        except BaseException:  # noqa: BLE001 - whatever it is, it goes on
            is_sound = False
            try:
                with self.translated(), connection.wrap_database_errors:
                    raise
            except Contended:
                is_sound = connection.get_autocommit()
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
        """Open a connection; a bounded one gives up a request that has no answer in time."""
        connection = connections.create_connection(self._database)
        self._connect(connection, bounded=bounded)
        return connection

    def close(self) -> None:
        with suppress(IndexError):
            while True:
                self._close(self._idle.pop())

    def abandon(self) -> None:
        """In a forked child: drop the parent's connections with no goodbye, and begin anew."""
        for connection in self._idle:
            abandon(connection)
        self.forget()

    def borrow(self) -> Any:
        """Return a connection for one caller alone; LockBackendError if none comes free in time."""
        try:
            if not self._waiting:  # who waits for one comes first
                return self._idle.pop()
        except IndexError:
            pass
        with self._mutex:
            if (connection := self._awaited()) is not None:
                return connection
            connection = connections.create_connection(self._database)
            self._all.add(connection)
        try:
            self._connect(connection)
        except BaseException:
            self._free_place(connection)
            raise
        return connection

    def give_back(self, connection: Any, *, is_sound: bool) -> None:
        """Take a borrowed connection back; one that is not sound is closed, and so are the idle ones.

        While Django's tests run, every one is closed: it would keep a test database from being destroyed.
        """
        if not is_sound or ("django.test.utils" in sys.modules and conf.tests_run()):
            # What broke one connection has broken the idle ones too, mostly: a restarted server.
            self._close(connection)
            self.close()
            return
        connection.distlock_was_used = True
        self._idle.append(connection)
        if self._waiting:
            with self._mutex:
                self._has_place.notify()
        if not self._closes_idle:
            self._closes_idle = True
            background.submit(self.alias, self._close_idle, IDLE)

    def _awaited(self) -> Any:
        """Return a connection that comes free in time; None as soon as another may be opened."""
        wait = Wait(self._io_timeout)
        self._waiting += 1
        try:
            while len(self._all) >= self._limit:
                with suppress(IndexError):
                    return self._idle.pop()
                if wait.is_over:
                    problem = (
                        f"all {self._limit} own connections are in use (OPTIONS 'max_connections')"
                    )
                    raise LockBackendError(self.alias, problem)
                self._has_place.wait(wait.left)
        finally:
            self._waiting -= 1
        return None

    def _connect(self, connection: Any, *, bounded: bool = True) -> None:
        connection.settings_dict = self._settings()
        connection.inc_thread_sharing()
        try:
            connection.ensure_connection()
            bound_requests(connection, self._io_timeout if bounded else None)
            self._engine.prepare(connection)
            connection.distlock_cursor = self._engine.cursor(connection)
        except (DatabaseError, InterfaceError, TimeoutError, *_WRONG_SETTINGS) as error:
            _close_quietly(connection)
            if not isinstance(error, TimeoutError) and self._engine.is_contention(error):
                raise self._contended(error) from error
            problem = f"the database {self._database!r} cannot be reached: {first_line(error)}"
            raise LockBackendError(self.alias, problem) from error
        except BaseException as error:  # an exception from outside, too
            _close_quietly(connection)
            if isinstance(error, Unusable):
                raise LockBackendError(self.alias, str(error)) from error
            raise

    def _close(self, connection: BaseDatabaseWrapper) -> None:
        try:
            _close_quietly(connection)
        finally:
            self._free_place(connection)

    def _free_place(self, connection: BaseDatabaseWrapper) -> None:
        with self._mutex:
            self._all.discard(connection)
            self._has_place.notify()

    def _close_idle(self) -> None:
        """Close those that were not used since the last time."""
        self._closes_idle = False
        with suppress(IndexError):
            for _ in range(len(self._idle)):
                connection = self._idle.pop(0)
                if connection.distlock_was_used:
                    connection.distlock_was_used = False
                    self._idle.append(connection)
                else:
                    self._close(connection)
        if self._idle and not self._closes_idle:
            self._closes_idle = True
            background.submit(self.alias, self._close_idle, IDLE)

    def _settings(self) -> dict[str, Any]:
        # Those of now: each thread has connections of its own, which may be from before they were changed.
        settings: dict[str, Any] = copy.deepcopy(connections.settings[self._database])
        settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False, AUTOCOMMIT=True)
        # An application's pool must not be drained by its locks.
        settings["OPTIONS"].pop("pool", None)
        settings["OPTIONS"].update(self._engine.connection_options(settings, self._io_timeout))
        return settings

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raise lock errors for database errors: Contended, LockOutcomeUnknown, LockBackendError."""
        try:
            yield
        except LockError:
            raise  # LockNotAcquired is a TimeoutError
        except TimeoutError as error:
            raise self._lost(error) from error
        except (DatabaseError, InterfaceError) as error:
            if self._engine.is_contention(error):
                raise self._contended(error) from error
            is_of_server = isinstance(error, (OperationalError, InterfaceError))
            if is_of_server and not self._engine.is_missing_table(error):
                raise self._lost(error) from error
            raise LockBackendError(self.alias, _explained(error, self._database)) from error
        except Crowded as error:
            raise self._contended(error) from error
        except Unusable as error:
            raise LockBackendError(self.alias, str(error)) from error

    def _contended(self, error: Exception) -> Contended:
        problem = f"the database {self._database!r} is busy with other writers: {first_line(error)}"
        return Contended(self.alias, problem)

    def _lost(self, error: Exception) -> LockOutcomeUnknown:
        problem = f"the database {self._database!r} did not answer: {first_line(error)}"
        return LockOutcomeUnknown(self.alias, problem)


def abandon(connection: BaseDatabaseWrapper) -> None:
    """Cut *connection*, inherited over a fork, from its socket, and never close it."""
    _OF_PARENTS.append(connection)
    found = descriptor(connection)
    if found is not None:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, found)
        os.close(nowhere)


def _close_quietly(connection: BaseDatabaseWrapper) -> None:
    # The driver's own: Django's close() refuses to work where an event loop runs.
    driver, connection.connection = connection.connection, None
    with suppress(Error, OSError), connection.wrap_database_errors:
        if driver is not None:
            driver.close()


def _explained(error: Exception, database: str) -> str:
    text = first_line(error)
    if isinstance(error, (ProgrammingError, OperationalError)) and "denied" not in text:
        return f"{text}: is the app migrated? Run manage.py migrate django_distlock --database={database}"
    return text
