"""What must hold after each step, whatever the order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_distlock.engine.values import Grant, Release

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_distlock.engine.values import Busy, Request

    from .servers import Database, Seen
    from .sessions import Session

#: Seconds of a lease; the server's microseconds.
TTL = 60.0
TTL_US = 60_000_000


class Broken(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Hold:
    """What a session believes to hold."""

    owner: str
    token: int


class Promises:
    """What the sessions have been told so far, compared with what is committed.

    A session tells of an answer by tell(); that is judged after the step, when all sessions stand still.
    """

    def __init__(self, server: Database, key: str) -> None:
        self._server, self._key = server, key
        self._told: list[Callable[[Seen], None]] = []
        self.holds: dict[Session, Hold] = {}
        #: Sessions between guard() and the end of its transaction, and under transaction_lock().
        self.guards: dict[Session, Hold] = {}
        self.inside: set[Session] = set()
        self._highest = self._claimed = self._saved = self._paid = 0
        #: What was committed after each step.
        self.seen = [server.see(key)]
        #: The owners of leases that have ended.
        self._expired: set[str | None] = set()
        #: The step at which the last release began.
        self.released_at = 0
        #: By session: the server's time after which its statement, which waited, was decided.
        self.decided_after: dict[Session, int] = {}
        self.checked: Counter[str] = Counter()

    def tell(self, judge: Callable[[Seen], None]) -> None:
        self._told.append(judge)

    def check(self) -> None:
        """Judge what was told in the last step, and look at what each believes to hold."""
        seen = self._server.see(self._key)
        self.seen.append(seen)
        told, self._told = self._told, []
        for judge in told:
            judge(seen)
        self._that(
            len(self.holds) <= 1, "one holder", f"{len(self.holds)} sessions believe to hold it"
        )
        for session, hold in self.holds.items():
            what = f"session {session.number} holds {hold}, but the row is {seen}"
            is_there = (seen.owner, seen.token) == (hold.owner, hold.token)
            self._that(is_there and seen.expires > seen.now, "the holder has the row", what)
        self._that(len(self.inside) <= 1, "one transaction has the lock", "two are under it")
        self._that(
            seen.balance == self._saved,
            "no claimed write is lost",
            f"{self._saved} were made: {seen}",
        )
        self._that(
            seen.paid == self._paid,
            "no write under a transaction's lock is lost",
            f"{self._paid}: {seen}",
        )
        self._that(seen.fence >= self.seen[-2].fence, "a fence never falls", f"{self.seen[-2:]}")

    def _that(self, holds: bool, promise: str, what: str) -> None:
        self.checked[promise] += 1
        if not holds:
            raise Broken(f"{promise}: {what}")

    def expire(self) -> None:
        """Let the lease end: its holder knows that by its own clock, which is earlier."""
        owner = self._server.expire(self._key)
        self._expired.add(owner)
        for session, hold in [*self.holds.items()]:
            if hold.owner == owner:
                del self.holds[session]

    def releases(self, session: Session) -> Hold | None:
        """Note that it does not believe to hold the lock from now on; return what it held."""
        self.released_at = len(self.seen)
        return self.holds.pop(session, None)

    # The answers.

    def answered(self, session: Session, request: Request, answer: Grant | Busy) -> None:
        self.tell(lambda seen: self._judge_answer(session, request, answer, seen))

    def _judge_answer(
        self, session: Session, request: Request, answer: Grant | Busy, seen: Seen
    ) -> None:
        who = f"session {session.number}"
        if not isinstance(answer, Grant):
            is_own = seen.owner == request.owner
            self._that(
                not is_own, "a lost reply locks nobody out", f"{who} is refused its own lock"
            )
            return
        token, start = answer.token or 0, answer.start or 0.0
        self._that(token > self._highest, "tokens rise", f"{token} for {who} after {self._highest}")
        self._highest = token
        self._that(
            seen.owner == request.owner, "a grant is in the row", f"{who} was granted, row {seen}"
        )
        others = [each for each in self.guards if each is not session]
        self._that(not others, "guard() keeps others out", f"{who} was granted during a guard")
        earliest = max((each.now for each in self.seen if each.read_at <= start), default=0)
        if self.seen[-2].exists:  # a row that is made has the times of before the wait
            earliest = max(earliest, self.decided_after.get(session, 0))
        lives = (seen.expires - earliest + self._server.grain) / TTL_US
        self._that(lives >= 1, "a lease lives its ttl", f"that of {who} lives {lives:.6f} of it")
        self.holds[session] = Hold(request.owner, token)
        self._expired.discard(request.owner)

    def renewed(self, session: Session, is_kept: bool) -> None:
        def judge(seen: Seen) -> None:
            what = f"session {session.number} was told {is_kept}"
            self._that(is_kept == (session in self.holds), "a renewal tells the truth", what)

        self.tell(judge)

    def released(
        self, session: Session, outcome: Release, hold: Hold | None, is_again: bool
    ) -> None:
        """*hold*: what it believed to hold when it asked; *is_again*: the first reply was lost."""

        def judge(seen: Seen) -> None:
            # A repeated release is not recognised once a later holder has released, too.
            is_unknown = is_again and (hold is None or seen.token > hold.token)
            was_held = hold is not None and hold.owner not in self._expired
            is_true = is_unknown or (outcome is Release.RELEASED) == was_held
            what = f"session {session.number}, of {hold}, was told {outcome}, row {seen}"
            self._that(is_true, "a release tells the truth", what)
            is_over = hold is None or seen.owner != hold.owner
            self._that(is_over, "a release frees", what)

        self.tell(judge)

    def guarded(self, session: Session, hold: Hold) -> None:
        def judge(seen: Seen) -> None:
            what = f"session {session.number} guards {hold}, granted was {self._highest}"
            self._that(hold.token == self._highest, "guard() refuses a late holder", what)
            self.guards[session] = hold

        self.tell(judge)

    def claimed(self, session: Session, hold: Hold) -> None:
        def judge(seen: Seen) -> None:
            what = f"session {session.number} claims by {hold.token} after {self._claimed}"
            self._that(hold.token >= self._claimed, "a claim refuses a late holder", what)
            self._claimed = hold.token

        self.tell(judge)

    def saved(self, session: Session, hold: Hold) -> None:
        def judge(seen: Seen) -> None:
            what = (
                f"session {session.number} wrote by {hold.token} after a claim by {self._claimed}"
            )
            self._that(hold.token == self._claimed, "a claimed write refuses a late holder", what)
            self._saved += 1

        self.tell(judge)

    def refused(self, session: Session, hold: Hold) -> None:
        """Judge a StaleFencingToken."""

        def judge(seen: Seen) -> None:
            is_late = max(seen.token, seen.fence) > hold.token
            self._that(
                is_late, "a fence refuses late holders alone", f"session {session.number}: {seen}"
            )

        self.tell(judge)

    def entered(self, session: Session) -> None:
        self.tell(lambda seen: self.inside.add(session))

    def paid(self) -> None:
        def judge(seen: Seen) -> None:
            self._paid += 1

        self.tell(judge)
