"""The OPTIONS of the database backends."""

from __future__ import annotations

from dataclasses import dataclass, fields

from django.db import connections

from django_distlock.conf import seconds

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
class AdvisoryOptions:
    """See SessionOptions.

    fencing: give fencing tokens and tell holders, by a row beside each lock; False: no rows at all.
    """

    using: str = "default"
    max_connections: int = 16
    io_timeout: float = 1.5
    fencing: bool = True

    def __post_init__(self) -> None:
        _check(self)


def _check(options: DatabaseOptions | SessionOptions | AdvisoryOptions) -> None:
    for option in fields(options):
        _check_type(option.name, getattr(options, option.name), type(option.default))
    if options.using not in connections.settings:
        msg = f"'using' names {options.using!r}, but DATABASES has {', '.join(map(repr, connections.settings))}."
        raise ValueError(msg)
    if options.max_connections < 1:
        msg = f"'max_connections' must be 1 or more, not {options.max_connections}."
        raise ValueError(msg)
    seconds(options.io_timeout, "'io_timeout'")


def _check_type(name: str, value: object, kind: type) -> None:
    kinds = (int, float) if kind is float else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        msg = f"{name!r} must be a {kind.__name__}, not {value!r}."
        raise TypeError(msg)
