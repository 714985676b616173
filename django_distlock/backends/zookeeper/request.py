"""A request whose deadline does not outlast the session that keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from django_distlock.conf import LONGEST
from django_distlock.engine.values import Request


@dataclass(frozen=True, slots=True)
class ZooKeeperRequest(Request):
    """*ttl* is cut to *limit*, the session timeout: for no longer is a silent holder's node kept.

    *wished* is the ttl before that: a session that goes on keeps the node for so long, renewed or not.
    """

    limit: float = LONGEST
    wished: float = 0.0

    def __post_init__(self) -> None:
        # What is cut already was wished for longer; replace() comes here as well.
        if self.ttl != self.limit or not self.wished:
            object.__setattr__(self, "wished", self.ttl)
        object.__setattr__(self, "ttl", min(self.ttl, self.limit))


def wished_ttl(request: Request) -> float:
    """Return for how long the holder would keep it without an extension, in seconds."""
    return request.wished if isinstance(request, ZooKeeperRequest) else request.ttl
