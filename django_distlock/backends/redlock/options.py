"""The OPTIONS of locks in a majority of Redis servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from django_distlock.conf import checked_ttl, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class RedlockOptions:
    """*servers* are URLs, which may hold passwords, or aliases of CACHES. Times are seconds."""

    servers: Sequence[str] = field(default=(), repr=False)
    fencing: bool = False
    restart_guard: bool = True
    longest_ttl: float | None = None
    durable: bool = False
    server_timeout: float | None = None
    connect_timeout: float | None = None
    allow_eviction: bool = False

    def __post_init__(self) -> None:
        self._check_servers()
        for name in ("fencing", "restart_guard", "durable", "allow_eviction"):
            if not isinstance(getattr(self, name), bool):
                msg = f"{name!r} must be True or False, not {getattr(self, name)!r}."
                raise TypeError(msg)
        for name in ("server_timeout", "connect_timeout"):
            if getattr(self, name) is not None:
                seconds(getattr(self, name), f"{name!r}")
        if self.longest_ttl is not None:
            checked_ttl(self.longest_ttl, "'longest_ttl'")

    def _check_servers(self) -> None:
        is_list = isinstance(self.servers, (list, tuple))
        if not is_list or not all(isinstance(server, str) for server in self.servers):
            msg = "'servers' must be a list of URLs or of aliases of CACHES."
            raise TypeError(msg)
        number = len(self.servers)
        if number < FEWEST or number % 2 == 0:
            msg = f"'servers' must be {FEWEST}, 5 or another odd number of servers, not {number}."
            raise ValueError(msg)
