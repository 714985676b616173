"""How many votes are enough, how long to wait for one, and for how long a grant is good: arithmetic, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_distlock.engine.clock import drift

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Seconds that a server has for its answer: at most, and at least; and a new connection to it: at most.
LONGEST, SHORTEST, LONGEST_CONNECTING = 0.05, 0.005, 0.25
#: The part of a ttl that a server may take, and that getting a new connection may take.
PART, CONNECTING_PART = 1 / 20, 1 / 4


def majority(servers: int) -> int:
    """Return how many of so many *servers* are more than half."""
    return servers // 2 + 1


def server_timeout(ttl: float, wish: float | None = None) -> float:
    """Return the seconds that one server has for its answer: a small part of the *ttl*, unless *wish* says else."""
    return max(SHORTEST, min(LONGEST, ttl * PART)) if wish is None else wish


def connect_timeout(ttl: float, wish: float | None = None) -> float:
    """Return the seconds that a new connection is waited for. See server_timeout()."""
    return max(SHORTEST, min(LONGEST_CONNECTING, ttl * CONNECTING_PART)) if wish is None else wish


def validity(ttl: float, elapsed: float) -> float:
    """Return how many seconds of a grant are left to its holder, if it took *elapsed* seconds to get it.

    The clock starts before the first question. The same as Holding.grant() reckons.
    """
    return ttl - elapsed - drift(ttl)


def fencing_token(votes: Iterable[int]) -> int:
    """Return the token of a grant: the highest of what those who voted for it have counted to."""
    return max(votes)
