"""The OPTIONS of locks in memcached."""

from __future__ import annotations

from dataclasses import dataclass

from django_distlock.conf import seconds


@dataclass(frozen=True, slots=True)
class MemcachedOptions:
    """OPTIONS for an alias of CACHES on memcached.

    cache: the alias in CACHES.
    server: the one server that the locks live on, written as in LOCATION, where that has several.
    connect_timeout: seconds until a server that lets nobody connect is given up.
    io_timeout: seconds until a request that has no answer is given up.
    """

    cache: str = "default"
    server: str | None = None
    connect_timeout: float = 0.25
    io_timeout: float = 1.0

    def __post_init__(self) -> None:
        server: object = self.server
        if server is not None and not isinstance(server, str):
            msg = f"'server' must be a str, not {server!r}."
            raise TypeError(msg)
        seconds(self.connect_timeout, "'connect_timeout'")
        seconds(self.io_timeout, "'io_timeout'")
