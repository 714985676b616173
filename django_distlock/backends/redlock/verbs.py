"""The verbs of a lock in a majority, as polls: what all are asked, and what their answers mean. No I/O."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

from django_distlock import clock
from django_distlock.backends.redis.replies import microseconds
from django_distlock.backends.redis.scripts import Call, Script
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown
from django_distlock.holder import Holder
from django_distlock.naming import printable
from django_distlock.protocol import Busy, Grant, Release, digest

from .scripts import ACQUIRE, EXTEND, FORCE, LOOK, RAISE, RELEASE, TAKE_OVER
from .validity import connect_timeout, fencing_token, majority, server_timeout, validity
from .votes import Count, Election, Question, agreed, election

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from django_distlock.backends.redis.keys import KeySpace
    from django_distlock.protocol import Request

    from .options import RedlockOptions
    from .votes import Poll

#: Locks renewed by one script: others wait while it runs.
BATCH = 250
#: A ttl for which servers have as long for their answers as they ever have.
UNHURRIED = 10.0


class Verbs:
    """What one alias asks of its servers: *places* are their names for people, *spaces* their keys.

    *guard*: seconds that a server must have been up before it may grant; 0 for none.
    """

    def __init__(
        self,
        alias: str,
        places: Sequence[str],
        spaces: Sequence[KeySpace],
        options: RedlockOptions,
        guard: float,
    ) -> None:
        self._alias = alias
        self._places = places
        self._spaces = spaces
        self._options = options
        self._guard = guard
        self._total = len(places)
        self._most = majority(self._total)

    def acquire(self, request: Request) -> Poll[Grant | Busy]:
        """See BaseLockBackend.try_acquire(). What is not won is given back at once."""
        start, count = clock.lease_time(), (yield self._ask_for_votes(request))
        outcome = self._election(count)
        if outcome is Election.WON and not self._options.fencing:
            return Grant(None)
        if outcome is Election.WON:
            return (yield from self._fence(request, count, start))
        yield from self._give_back(request, count.where(_is_grant), count.pending | count.unsure)
        if outcome is Election.UNREACHABLE:
            self._fail(count)
        return self._busy(count)

    def _fence(self, request: Request, votes: Count, start: float) -> Poll[Grant | Busy]:
        """Have a majority take note of the token before anybody uses it: so no later one is lower."""
        if (known := self._agreed_token(votes)) is not None:
            return Grant(known)
        token = fencing_token(votes.answers[server][1] for server in votes.where(_is_grant))
        voters = votes.where(_is_grant) | votes.pending
        count = yield self._write_back(request, token, voters)
        outcome = self._written(count)
        if outcome is Election.WON and validity(request.ttl, clock.lease_time() - start) > 0:
            return Grant(token)
        yield from self._give_back(request, voters, ())
        if outcome is Election.UNREACHABLE:
            self._fail(count)
        return Busy()

    def release(self, request: Request) -> Poll[Release]:
        """See BaseLockBackend.release(); that it was lost takes a majority to say."""
        count = yield self._question(
            request.ttl,
            self._release_calls(request, range(self._total)),
            lambda count: self._says_released(count) is not None,
        )
        if self._says_released(count) is False:
            taken = count.where(lambda answer: answer == 2)
            return Release.TAKEN if taken else Release.GONE
        if len(count.answers) < self._most:
            self._fail(count)
        return Release.RELEASED

    def extend(self, requests: Sequence[Request]) -> Poll[list[bool]]:
        """See BaseLockBackend.extend(); nothing is made anew."""
        kept: list[bool] = []
        for first in range(0, len(requests), BATCH):
            some = requests[first : first + BATCH]
            count = yield self._extension(some)
            said = [self._says_kept(count, place) for place in range(len(some))]
            if None in said:
                self._fail(count)
            kept += [bool(each) for each in said]
        return kept

    def take_over(self, request: Request, former: str) -> Poll[bool]:
        """See BaseLockBackend.take_over(); what it gets of less than a majority is given back."""
        args = former, microseconds(request.ttl), request.holder.to_json(), _sent()
        count = yield self._ask_all(TAKE_OVER, request, *args, is_decided=self._is_agreed)
        said = self._says_yes(count)
        if said:
            return True
        yield from self._give_back(request, count.where(_is_yes), count.pending | count.unsure)
        if said is None:
            self._fail(count)
        return False

    def probe(self, request: Request) -> Poll[Busy | None]:
        """See BaseLockBackend.probe()."""
        count = yield self._ask_all(LOOK, request, is_decided=self._is_seen)
        if len(count.answers) < self._most:
            self._fail(count)
        owner, votes = self._favourite(count)
        # Those who say nothing may be with him.
        if not votes or votes + len(count.failures) < self._most:
            return None
        seen = [answer for answer in count.answers.values() if answer and answer[0] == owner]
        return Busy(Holder.from_json(seen[0][2]), max(answer[1] for answer in seen) / 1e6)

    def force(self, key: str, owner_digest: str) -> Poll[bool]:
        """End the holding that *owner_digest* names; tell whether it was there."""
        everybody = range(self._total)
        looks = {server: self._call(LOOK, key, server) for server in everybody}
        count = yield self._question(UNHURRIED, looks, _never)
        owners = {answer[0] for answer in count.answers.values() if answer}
        ended = 0
        for owner in owners:
            if digest(owner.decode()) == owner_digest:
                calls = {server: self._call(FORCE, key, server, owner) for server in everybody}
                count = yield self._question(UNHURRIED, calls, _never)
                ended += len(count.where(_is_yes))
        if len(count.answers) < self._most:
            self._fail(count)
        return ended > 0

    def look(self, key: str, server: int) -> Call:
        """Return what one server is asked when all that is held is listed."""
        return self._call(LOOK, key, server)

    def not_enough(self, failures: dict[int, str]) -> LockBackendError:
        """Return the error that says why fewer than a majority answered."""
        return LockBackendError(self._alias, self._missing(failures), self._causes(failures))

    # What is asked.

    def _question(
        self, ttl: float, calls: dict[int, Call], is_decided: Callable[[Count], bool]
    ) -> Question:
        options = self._options
        within = server_timeout(ttl, options.server_timeout)
        return Question(calls, is_decided, within, connect_timeout(ttl, options.connect_timeout))

    def _ask_all(
        self, script: Script, request: Request, *args: Any, is_decided: Callable[[Count], bool]
    ) -> Question:
        owner = () if script is LOOK else (request.owner,)
        calls = {
            server: self._call(script, request.key, server, *owner, *args)
            for server in range(self._total)
        }
        return self._question(request.ttl, calls, is_decided)

    def _ask_for_votes(self, request: Request) -> Question:
        return self._ask_all(
            ACQUIRE,
            request,
            _sent(),
            microseconds(request.ttl),
            printable(request.name),
            request.holder.to_json(),
            f"{self._guard:.3f}",
            "1" if self._options.durable else "",
            is_decided=self._is_elected,
        )

    def _write_back(self, request: Request, token: int, voters: Collection[int]) -> Question:
        calls = {
            server: self._call(RAISE, request.key, server, request.owner, token)
            for server in voters
        }
        return self._question(
            request.ttl, calls, lambda count: self._written(count) is not Election.OPEN
        )

    def _give_back(
        self, request: Request, granted: set[int], others: Collection[int]
    ) -> Poll[None]:
        """Give back what *granted* have, and *others* may have yet, when the question reaches them at last."""
        if granted or others:
            yield self._question(
                request.ttl,
                self._release_calls(request, granted.union(others)),
                lambda count: not granted & count.pending,
            )

    def _release_calls(self, request: Request, servers: Collection[int]) -> dict[int, Call]:
        sent = _sent()
        return {
            server: self._call(RELEASE, request.key, server, request.owner, sent)
            for server in servers
        }

    def _extension(self, requests: Sequence[Request]) -> Question:
        args = tuple(
            arg for request in requests for arg in (request.owner, microseconds(request.ttl))
        )
        calls = {
            server: Call(EXTEND, tuple(space.of(request.key).record for request in requests), args)
            for server, space in enumerate(self._spaces)
        }
        places = range(len(requests))
        return self._question(
            min(request.ttl for request in requests),
            calls,
            lambda count: all(self._says_kept(count, place) is not None for place in places),
        )

    def _call(self, script: Script, key: str, server: int, *args: Any) -> Call:
        return Call(script, (self._spaces[server].of(key).record,), args)

    # What it means.

    def _is_elected(self, count: Count) -> bool:
        # Asked again after a lost reply: the others may know the token that was agreed on.
        has_agreed = bool(count.where(_is_agreed_grant)) and self._agreed_token(count) is None
        is_open = self._election(count) is Election.OPEN
        return not is_open and not (has_agreed and count.pending)

    def _agreed_token(self, count: Count) -> int | None:
        """Return the token that a majority wrote down for this very grant."""
        tokens = Counter(count.answers[server][1] for server in count.where(_is_agreed_grant))
        token, votes = max(tokens.items(), key=lambda item: item[1], default=(0, 0))
        return token if votes >= self._most else None

    def _election(self, count: Count) -> Election:
        return election(
            self._total,
            granted=len(count.where(_is_grant)),
            refused=len(count.where(_is_busy)),
            failed=len(count.failures) + len(count.where(_is_guarded)),
        )

    def _written(self, count: Count) -> Election:
        # Who was not asked cannot agree.
        return election(
            self._total,
            granted=len(count.where(_is_yes)),
            refused=len(count.where(_is_no)) + self._total - len(count.asked),
            failed=len(count.failures),
        )

    def _says_released(self, count: Count) -> bool | None:
        released = len(count.where(_is_yes))
        return agreed(self._total, yes=released, no=len(count.answers) - released)

    def _says_kept(self, count: Count, place: int) -> bool | None:
        kept = sum(answer[place] for answer in count.answers.values())
        return agreed(self._total, yes=kept, no=len(count.answers) - kept)

    def _says_yes(self, count: Count) -> bool | None:
        return agreed(self._total, yes=len(count.where(_is_yes)), no=len(count.where(_is_no)))

    def _is_agreed(self, count: Count) -> bool:
        return self._says_yes(count) is not None

    def _is_seen(self, count: Count) -> bool:
        votes = self._favourite(count)[1]
        may_be_held = votes + len(count.pending) + len(count.failures) >= self._most
        return votes >= self._most or (not may_be_held and len(count.answers) >= self._most)

    @staticmethod
    def _favourite(count: Count) -> tuple[bytes, int]:
        owners = Counter(answer[0] for answer in count.answers.values() if answer)
        return max(owners.items(), key=lambda item: item[1], default=(b"", 0))

    def _busy(self, count: Count) -> Busy:
        refusals = [count.answers[server] for server in count.where(_is_busy)]
        # By owner and try: the votes of several tries, given at several moments, make no majority.
        tries = Counter((answer[1], answer[4]) for answer in refusals if answer[1])
        best, votes = max(tries.items(), key=lambda item: item[1], default=((b"", b""), 0))
        if votes < self._most:
            return Busy()  # they were split: nobody has it
        his = [answer for answer in refusals if (answer[1], answer[4]) == best]
        return Busy(Holder.from_json(his[0][3]), max(answer[2] for answer in his) / 1e6)

    def _fail(self, count: Count) -> NoReturn:
        said = {server: _described(answer) for server, answer in count.answers.items()}
        failures = {
            **count.failures,
            **{server: said[server] for server in count.where(_is_guarded)},
        }
        kind = LockOutcomeUnknown if count.unsure else LockBackendError
        error = kind(self._alias, self._missing(failures), self._causes({**said, **failures}))
        raise error from _grouped(count.errors)

    def _missing(self, failures: dict[int, str]) -> str:
        good = self._total - len(failures)
        return f"{good} of {self._total} Redis servers can be used, {self._most} must be"

    def _causes(self, causes: dict[int, str]) -> dict[str, str]:
        nothing = "was not waited for"
        return {place: causes.get(server, nothing) for server, place in enumerate(self._places)}


def _sent() -> int:
    """Return what tells later questions of one owner from earlier ones: all are asked by one machine."""
    return time.monotonic_ns() // 1000


def _is_grant(answer: Any) -> bool:
    return isinstance(answer, list) and answer[0] == 1


def _is_agreed_grant(answer: Any) -> bool:
    return _is_grant(answer) and answer[2] == 1


def _is_busy(answer: Any) -> bool:
    return isinstance(answer, list) and answer[0] == 0


def _is_guarded(answer: Any) -> bool:
    return isinstance(answer, list) and answer[:1] == [2]


def _is_yes(answer: Any) -> bool:
    return isinstance(answer, int) and answer == 1


def _is_no(answer: Any) -> bool:
    return isinstance(answer, int) and answer != 1


def _never(_: Count) -> bool:
    """Wait for each of them."""
    return False


def _grouped(errors: list[Exception]) -> Exception | None:
    return ExceptionGroup("what the servers' drivers say", errors) if errors else None


def _described(answer: Any) -> str:
    if _is_guarded(answer):
        return f"it started lately, and grants nothing for {answer[1]} s more"
    if _is_grant(answer):
        return "it granted the lock, and had it back"
    return "it refused: somebody has the lock" if _is_busy(answer) else "it answered"
