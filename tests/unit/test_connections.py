"""Connections of our own to a database: one that cannot be used is not left open."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper

from django_distlock import LockBackendError
from django_distlock.backends.database.connections import OwnConnections, Unusable
from django_distlock.backends.database.sqlite import SQLite


class Unfit(SQLite):
    """Fails when its first connection has been opened, and keeps what that was."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(fair=False)
        self._error = error
        self.drivers: list[Any] = []

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        self.drivers.append(connection.connection)
        if len(self.drivers) == 1:
            raise self._error


@pytest.mark.django_db
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
    engine = Unfit(error)
    own = OwnConnections("locks", "default", engine, limit=1, io_timeout=1)

    with pytest.raises(told):
        own.borrow()

    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        engine.drivers[0].execute("SELECT 1")
    own.give_back(own.borrow(), is_sound=False)
