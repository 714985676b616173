"""The votes of servers: how many are enough, and what the answers mean together. No I/O."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django_distlock.engine.bells import Bell
from django_distlock.engine.values import Busy
from django_distlock.ground.holder import Holder

#: Seconds: the longest and shortest timeout for a server's answer, and the longest one for a new connection.
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


#: What a server answers, or what its answer begins with. See scripts.py.
YES, NO, TAKEN, GUARDED = 1, 0, 2, 2


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


@dataclass(slots=True)
class Count:
    """The answers to one question, by the numbers of the servers; some of *total* servers were *asked*.

    *failures* says why a server gave no answer; *unsure* are those among them that were asked all the
    same. *errors* are what drivers raised.
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

    def take(self, server: int, answer: Any) -> None:
        if isinstance(answer, Exception):
            self.failures[server] = f"it refused: {answer}"
            self.errors.append(answer)
        else:
            self.answers[server] = answer

    def miss(
        self, server: int, cause: str, error: Exception | None = None, *, was_asked: bool
    ) -> None:
        """Take note that no answer will come; without *error*, as it took too long."""
        self.failures[server] = cause
        self.errors.append(error or TimeoutError(cause))
        if was_asked:
            self.unsure.add(server)

    def add_failures(self, other: Count) -> None:
        self.failures |= other.failures
        self.errors += other.errors

    def where(self, answer: int) -> set[int]:
        """Return the servers that gave this *answer*, or one that begins with it. See scripts.py."""
        return {
            server
            for server, each in self.answers.items()
            if (each[0] if isinstance(each, list) else each) == answer
        }

    # Who has the lock.

    def election(self) -> Election:
        granted, refused = len(self.where(YES)), len(self.where(NO))
        failed = len(self.failures) + len(self.where(GUARDED))
        return election(self.total, granted=granted, refused=refused, failed=failed)

    def is_elected(self) -> bool:
        """Whether it is decided who has the lock, and with which token if we have it."""
        if self.election() is Election.OPEN:
            return False
        # If this is asked again after a lost reply, servers that have not answered yet may know the agreed token.
        return not self.pending or self.agreed_token() != 0

    def agreed_token(self) -> int | None:
        """Return the token that a majority has noted for this grant; 0 if only a minority has, None if no server."""
        grants = [self.answers[server] for server in self.where(YES)]
        tokens = Counter(token for _, token, has_agreed in grants if has_agreed)
        token, votes = next(iter(tokens.most_common(1)), (None, 0))
        return token if token is None or votes >= majority(self.total) else 0

    def busy(self) -> Busy:
        refusals = [self.answers[server] for server in self.where(NO)]
        # By owner and try: the votes of several tries, given at several moments, make no majority.
        tries = Counter((owner, sent) for _, owner, _, _, sent in refusals if owner)
        for best, votes in tries.most_common(1):
            if votes >= majority(self.total):
                seen = [answer for answer in refusals if (answer[1], answer[4]) == best]
                return Busy(Holder.from_json(seen[0][3]), max(answer[2] for answer in seen) / 1e6)
        return Busy()  # the votes were split, so it has no holder

    def favourite(self) -> list[list[Any]]:
        """Return the answers to LOOK with the owner that most servers have."""
        seen = [answer for (answer,) in self.answers.values() if answer]
        owner, _ = next(iter(Counter(answer[0] for answer in seen).most_common(1)), (b"", 0))
        return [answer for answer in seen if answer[0] == owner]

    def is_seen(self) -> bool:
        """Whether the answers show if the lock is held."""
        votes, most = len(self.favourite()), majority(self.total)
        may_be_held = votes + len(self.pending) + len(self.failures) >= most
        return votes >= most or (not may_be_held and len(self.answers) >= most)

    # What they did.

    def says_yes(self) -> bool | None:
        """Whether a majority carried the request out; None while that is open."""
        done = len(self.where(YES))
        return agreed(self.total, yes=done, no=len(self.answers) - done)

    def says_kept(self) -> list[bool | None]:
        """For each lock of the request whether it is still ours; None while that is open."""
        answers = [*self.answers.values()]
        return [
            agreed(self.total, yes=sum(kept), no=len(answers) - sum(kept))
            for kept in zip(*answers, strict=True)
        ]


@dataclass(eq=False, slots=True)
class Question:
    """A request to several servers: a packed command by the server's number. It ends when *is_decided*.

    A server has *within* seconds for its answer, and before that *connecting* seconds for a new connection.
    """

    calls: Mapping[int, bytes]
    is_decided: Callable[[Count], bool]
    within: float
    connecting: float
    #: Rings at the end; the count does not change after that.
    bell: Bell = field(init=False)
    count: Count = field(init=False)
    is_over: bool = field(default=False, init=False)

    def end_if_decided(self) -> None:
        try:
            self.is_over = self.is_decided(self.count) or not self.count.pending
        except Exception:  # noqa: BLE001 - the answer makes no sense: the caller gets the error when it counts
            self.is_over = True
        if self.is_over:
            self.bell.ring()
