"""The OPTIONS of the database backends, and what `manage.py check` says of them."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django.core.checks import Error
from django.db import connections

from django_distlock.conf import check_values

if TYPE_CHECKING:
    from django.core.checks import CheckMessage


ENGINES = ("auto", "portable")


@dataclass(frozen=True, slots=True)
class DatabaseOptions:
    """OPTIONS of DatabaseBackend.

    using: the alias in DATABASES that holds the locks.
    fair: first come, first served, also between processes.
    engine: "auto" takes what is written for the server; "portable" takes SELECT FOR UPDATE.
    max_connections: how many own connections this process opens at most (plus one that listens or watches).
    io_timeout: seconds until a request that has no answer is given up.
    listen: wake waiters by one more connection: LISTEN and NOTIFY on PostgreSQL (not through PgBouncer),
        looks for all of this process on MariaDB, MySQL and SQLite.
    """

    using: str = "default"
    fair: bool = False
    engine: str = "auto"
    max_connections: int = 8
    io_timeout: float = 1.5
    listen: bool = True

    def __post_init__(self) -> None:
        _check(self)
        if self.engine not in ENGINES:
            msg = f"'engine' must be one of {', '.join(map(repr, ENGINES))}, not {self.engine!r}."
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """OPTIONS of RowLockBackend; AdvisoryBackend has one more.

    using: the alias in DATABASES of the server; it must be reached directly, not through PgBouncer.
    max_connections: how many locks this process holds and waits for at most, each on a connection
        of its own (a few more serve short statements).
    io_timeout: seconds until a request that has no answer is given up.
    """

    using: str = "default"
    max_connections: int = 16
    io_timeout: float = 1.5

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class AdvisoryOptions(SessionOptions):
    """See SessionOptions.

    fencing: give fencing tokens and tell holders, by a row beside each lock; False: no rows at all.
    """

    fencing: bool = True


def _check(options: DatabaseOptions | SessionOptions) -> None:
    check_values(options)
    if options.using not in connections.settings:
        msg = f"'using' names {options.using!r}, but DATABASES has {', '.join(map(repr, connections.settings))}."
        raise ValueError(msg)
    limit = options.max_connections
    if type(limit) is not int or limit < 1:
        msg = f"'max_connections' must be a whole number, 1 or more, not {limit!r}."
        raise ValueError(msg)


#: RETURNING came with it.
SQLITE = (3, 35, 0)


def check_settings(alias: str, options: DatabaseOptions) -> list[CheckMessage]:
    """Say why this kind of database keeps no locks."""
    connection = connections[options.using]
    if connection.vendor == "sqlite" and connection.settings_dict["NAME"] == ":memory:":
        text = f"DISTLOCK[{alias!r}]: the database {options.using!r} is in memory, where each connection has its own."
        return [
            Error(text, hint="Use a file, or LocMemBackend within one process.", id="distlock.E002")
        ]
    if not connection.features.has_select_for_update and connection.vendor != "sqlite":
        text = f"DISTLOCK[{alias!r}]: the database {options.using!r} has no SELECT ... FOR UPDATE."
        return [Error(text, hint="Choose another backend or database.", id="distlock.E003")]
    return []


def check_sqlite(alias: str, options: DatabaseOptions) -> list[CheckMessage]:
    """Say whether this SQLite is too old."""
    if connections[options.using].vendor != "sqlite" or sqlite3.sqlite_version_info >= SQLITE:
        return []
    text = f"DISTLOCK[{alias!r}]: SQLite {sqlite3.sqlite_version} has no RETURNING."
    return [Error(text, hint="Install SQLite 3.35 or later.", id="distlock.E004")]
