"""The votes of servers: how many are a majority, and what the answers mean together. No I/O."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django_distlock.backends.redis.connections import Conversation
from django_distlock.engine.bells import Bell
from django_distlock.engine.values import Busy, Grant, Release

#: The longest and shortest timeout for a server's answer, and the longest for a new connection, in seconds.
LONGEST, SHORTEST, LONGEST_CONNECTING = 0.05, 0.005, 0.25
#: The share of a ttl for a server's answer, and for a new connection.
PART, CONNECTING_PART = 1 / 20, 1 / 4


def majority(servers: int) -> int:
    return servers // 2 + 1


def server_timeout(ttl: float, wish: float | None = None) -> float:
    """Return the seconds that a server has for its answer: *wish*, or a small part of the *ttl*."""
    return max(SHORTEST, min(LONGEST, ttl * PART)) if wish is None else wish


def connect_timeout(ttl: float, wish: float | None = None) -> float:
    """Return the seconds for a new connection: *wish*, or a part of the *ttl*."""
    return max(SHORTEST, min(LONGEST_CONNECTING, ttl * CONNECTING_PART)) if wish is None else wish


#: The answers of a server that has carried out a request.
DONE = (True, Release.RELEASED)


class Election(enum.Enum):
    """The outcome of a request for a lock."""

    OPEN = "open"
    WON = "won"
    BUSY = "busy"
    UNREACHABLE = "unreachable"


def election(servers: int, *, granted: int, refused: int, failed: int) -> Election:
    needed = majority(servers)
    if granted >= needed:
        return Election.WON
    if servers - refused - failed >= needed:
        return Election.OPEN
    if granted + refused >= needed:
        return Election.BUSY
    return Election.UNREACHABLE if servers - failed < needed else Election.OPEN


def agreed(servers: int, *, yes: int, no: int) -> bool | None:
    if yes >= majority(servers):
        return True
    return False if no >= majority(servers) else None


def longest(refusals: Sequence[Busy]) -> Busy:
    """Return the Busy of the lease that ends last."""
    return max(refusals, key=lambda busy: busy.remaining or 0.0)


@dataclass(slots=True)
class Count:
    """The answers to one question, by the numbers of the servers; some of *total* servers were *asked*.

    *failures* says why a server gave no answer; *unsure* are the servers among them that may have got the
    request. *errors* are the drivers' errors.
    """

    total: int
    asked: frozenset[int]
    answers: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    unsure: set[int] = field(default_factory=set)
    errors: list[Exception] = field(default_factory=list)

    @property
    def pending(self) -> frozenset[int]:
        return self.asked - self.answers.keys() - self.failures.keys()

    def miss(
        self, server: int, cause: str, error: Exception | None = None, *, was_asked: bool
    ) -> None:
        """Note that no answer will come; without *error*, the server took too long."""
        self.failures[server] = cause
        self.errors.append(error or TimeoutError(cause))
        if was_asked:
            self.unsure.add(server)

    def of(self, kind: type[Grant | Busy]) -> set[int]:
        """Return the servers with an answer of this *kind*."""
        return {server for server, each in self.answers.items() if isinstance(each, kind)}

    # Who has the lock.

    def election(self) -> Election:
        refused = len(self.of(Busy))
        granted = len(self.answers) - refused
        return election(self.total, granted=granted, refused=refused, failed=len(self.failures))

    def is_elected(self) -> bool:
        """Return True if the answers decide who has the lock."""
        return self.election() is not Election.OPEN

    def busy(self) -> Busy:
        """Return the holder that a majority names; a Busy without holder if the votes were split."""
        seen = self.favourite()
        return longest(seen) if len(seen) >= majority(self.total) else Busy()

    def favourite(self) -> list[Busy]:
        """Return the refusals that name the most frequent holder."""
        seen = [answer for answer in self.answers.values() if isinstance(answer, Busy)]
        holder, _ = next(iter(Counter(each.holder for each in seen).most_common(1)), (None, 0))
        return [each for each in seen if each.holder == holder]

    def is_seen(self) -> bool:
        """Return True if the answers decide whether the lock is held."""
        votes, most = len(self.favourite()), majority(self.total)
        may_be_held = votes + len(self.pending) + len(self.failures) >= most
        return votes >= most or (not may_be_held and len(self.answers) >= most)

    # What they did.

    def says_yes(self) -> bool | None:
        """Return whether a majority carried out the request; None while that is open."""
        done = sum(answer in DONE for answer in self.answers.values())
        return agreed(self.total, yes=done, no=len(self.answers) - done)

    def says_kept(self) -> list[bool | None]:
        """Return for each lock of the request whether it is still ours; None while that is open."""
        answers = [*self.answers.values()]
        return [
            agreed(self.total, yes=sum(kept), no=len(answers) - sum(kept))
            for kept in zip(*answers, strict=True)
        ]


@dataclass(eq=False, slots=True)
class Question:
    """Conversations with several servers, by the server's number. The question ends when *is_decided* returns True.

    A server has *within* seconds for each answer, and before that *connecting* seconds for a new connection.
    *least_uptime*: for how many seconds a server must have been up to be asked.
    """

    conversations: Mapping[int, Conversation[Any]]
    is_decided: Callable[[Count], bool]
    within: float
    connecting: float
    least_uptime: float = 0.0
    #: Rings at the end of the question, after which the count does not change.
    bell: Bell = field(init=False)
    count: Count = field(init=False)
    is_over: bool = field(default=False, init=False)
    #: How many commands were answered: a listing sends many, one after the other.
    answered: int = field(default=0, init=False)

    def end_if_decided(self) -> None:
        try:
            self.is_over = self.is_decided(self.count) or not self.count.pending
        except Exception:  # noqa: BLE001 - for an answer that makes no sense, the caller gets the same error
            self.is_over = True
        if self.is_over:
            self.bell.ring()
