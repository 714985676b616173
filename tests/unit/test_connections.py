"""Connections of our own to a database: none is left open, and nothing is taken for closed that is not."""

from __future__ import annotations

import gc
import itertools
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_distlock import LockBackendError
from django_distlock.backends.database import connections as own_connections
from django_distlock.backends.database.base import location_of
from django_distlock.backends.database.bounds import is_cut
from django_distlock.backends.database.connections import OwnConnections, Unusable, _close_quietly
from django_distlock.backends.database.sqlite import SQLite
from django_distlock.engine import bells
from tests.contract.crew import start
from tests.fixtures.eventually import eventually, never

pytestmark = pytest.mark.django_db


class Noted(SQLite):
    """Keeps what has been opened."""

    def __init__(self) -> None:
        super().__init__(fair=False)
        self.drivers: list[Any] = []

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        self.drivers.append(connection.connection)


class Unfit(Noted):
    """Fails when its first connection has been opened."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        super().prepare(connection)
        if len(self.drivers) == 1:
            raise self._error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DatabaseError("no"), LockBackendError),
        (Unusable("no"), LockBackendError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_connection_that_cannot_be_used_is_closed_and_frees_its_place(
    error: BaseException, told: type[BaseException]
) -> None:
    dialect = Unfit(error)
    own = OwnConnections("locks", "default", dialect, limit=1, io_timeout=1)

    with pytest.raises(told):
        own.borrow()

    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        dialect.drivers[0].execute("SELECT 1")
    own.give_back(own.borrow(), is_sound=False)


class Slow:
    """A driver's connection that takes its time to close."""

    def __init__(self) -> None:
        self.begins, self.may_end = threading.Event(), threading.Event()

    def close(self) -> None:
        self.begins.set()
        self.may_end.wait(10)


def test_a_connection_counts_until_it_is_closed() -> None:
    own = OwnConnections("locks", "default", SQLite(fair=False), limit=1, io_timeout=10)
    broken, slow = own.borrow(), Slow()
    broken.connection.close()
    broken.connection = slow

    closing = start(lambda: own.give_back(broken, is_sound=False))
    assert slow.begins.wait(10)
    borrowing = start(own.borrow)
    never(borrowing.done, 0.2)
    slow.may_end.set()

    own.give_back(borrowing.result(10), is_sound=False)
    closing.result(10)


def test_callers_that_wait_for_a_connection_get_it_in_the_order_in_which_they_came() -> None:
    own = OwnConnections("locks", "default", SQLite(fair=False), limit=1, io_timeout=10)
    lent, served = own.borrow(), list[int]()

    def use(number: int) -> None:
        connection = own.borrow()
        served.append(number)
        own.give_back(connection, is_sound=True)

    waiting = []
    for number in range(5):
        waiting.append(start(partial(use, number)))
        eventually(lambda: len(own._callers) == len(waiting), 5)
    own.give_back(lent, is_sound=True)
    use(5)

    for each in waiting:
        each.result(10)
    assert served == [0, 1, 2, 3, 4, 5]
    own.close()


@pytest.mark.parametrize("left", [20.0, None])
def test_a_connection_is_waited_for_as_long_as_its_caller_has_time(left: float | None) -> None:
    own = OwnConnections("locks", "default", SQLite(fair=False), limit=1, io_timeout=0.1)
    lent = own.borrow()

    borrowing = start(partial(own.borrow, left))
    never(borrowing.done, 0.5)
    own.give_back(lent, is_sound=True)

    own.give_back(borrowing.result(10), is_sound=False)


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """Raise KeyboardInterrupt as this call of the pool's, or of its locks', begins or ends."""
    left, before = step, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        is_ours = frame.f_code.co_filename in {own_connections.__file__, bells.__file__}
        # Not at lines: a block's end is one, at which Python itself lets nothing in.
        if is_ours and event in {"call", "return"}:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_an_exception_at_any_step_of_waiting_for_a_connection_stops_nobody_else() -> None:
    dialect = Noted()
    own = OwnConnections("locks", "default", dialect, limit=1, io_timeout=5)

    def lend() -> None:
        own.give_back(own.borrow(), is_sound=True)

    def give_back_when_awaited(lent: Any, over: threading.Event) -> None:
        eventually(lambda: own._callers or over.is_set(), 10)
        own.give_back(lent, is_sound=True)

    for step in itertools.count(1):
        over = threading.Event()
        giving = start(partial(give_back_when_awaited, own.borrow(), over))
        is_interrupted = False
        try:
            with interrupted_at(step):
                lend()
        except KeyboardInterrupt:
            is_interrupted = True
        over.set()
        giving.result(10)
        gc.collect()  # a connection that was lost on its way takes a place until then
        start(lend).result(10)
        assert not own._callers
        if not is_interrupted:
            break

    assert step > 8
    own.close()
    for driver in dialect.drivers:
        driver.close()


class Raw:
    """What a driver gives for a connection; its socket cannot be had."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fileno(self) -> int:
        raise self._error

    close = fileno


def with_driver(raw: Raw) -> BaseDatabaseWrapper:
    connection = connections.create_connection("default")
    connection.connection = raw
    return connection


@pytest.mark.parametrize("error", [sqlite3.ProgrammingError("closed"), OSError("gone")])
def test_a_driver_may_say_that_its_connection_is_closed(error: Exception) -> None:
    assert is_cut(with_driver(Raw(error)))
    _close_quietly(with_driver(Raw(error)))


@pytest.mark.parametrize("option", ["service", "read_default_file", "unix_socket"])
def test_servers_that_only_options_tell_apart_have_locks_of_their_own(option: str) -> None:
    def location(host: str, value: str) -> tuple[str, ...]:
        connection = connections.create_connection("default")
        own = {"HOST": host, "OPTIONS": {option: value}}
        connection.settings_dict = {**connection.settings_dict, **own}
        return location_of(connection)

    assert location("", "one") != location("", "two")
    assert location("db", "one") == location("db", "two")
