"""The verbs of a lock in a majority, as polls: what follows from what all are asked. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_distlock.backends.redis.verbs import BATCH
from django_distlock.engine import clock
from django_distlock.engine.holder import Holder
from django_distlock.engine.values import Busy, Grant, Release, digest

from .answers import is_grant, is_yes
from .failures import Failures
from .questions import Questions
from .tally import Tally
from .validity import fencing_token, validity
from .votes import Count, Election

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from django_distlock.backends.redis.scripts import KeySpace
    from django_distlock.engine.values import Request

    from .options import RedlockOptions
    from .votes import Poll


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
        self._is_fencing = options.fencing
        self._tally = Tally(len(places))
        self._ask = Questions(spaces, options, guard, self._tally)
        self._failures = Failures(alias, places)
        self.look = self._ask.look
        self.not_enough = self._failures.not_enough

    def acquire(self, request: Request) -> Poll[Grant | Busy]:
        """See BaseLockBackend.try_acquire(). What is not won is given back at once."""
        start, count = clock.lease_time(), (yield self._ask.for_votes(request))
        outcome = self._tally.election(count)
        if outcome is Election.WON and not self._is_fencing:
            return Grant(None)
        if outcome is Election.WON:
            return (yield from self._fence(request, count, start))
        yield from self._give_back(request, count.where(is_grant), count.pending | count.unsure)
        if outcome is Election.UNREACHABLE:
            self._failures.fail(count)
        return self._tally.busy(count)

    def _fence(self, request: Request, votes: Count, start: float) -> Poll[Grant | Busy]:
        """Have a majority take note of the token before anybody uses it: so no later one is lower."""
        if (known := self._tally.agreed_token(votes)) is not None:
            return Grant(known)
        token = fencing_token(votes.answers[server][1] for server in votes.where(is_grant))
        voters = votes.where(is_grant) | votes.pending
        count = yield self._ask.to_note(request, token, voters)
        outcome = self._tally.written(count)
        if outcome is Election.WON and validity(request.ttl, clock.lease_time() - start) > 0:
            return Grant(token)
        yield from self._give_back(request, voters, ())
        if outcome is Election.UNREACHABLE:
            self._failures.fail(count)
        return Busy()

    def release(self, request: Request) -> Poll[Release]:
        """See BaseLockBackend.release(); that it was lost takes a majority to say."""
        count = yield self._ask.to_release(request)
        if self._tally.says_released(count) is False:
            taken = count.where(lambda answer: answer == 2)
            return Release.TAKEN if taken else Release.GONE
        self._need_most(count)
        return Release.RELEASED

    def extend(self, requests: Sequence[Request]) -> Poll[list[bool]]:
        """See BaseLockBackend.extend(); nothing is made anew."""
        kept: list[bool] = []
        for first in range(0, len(requests), BATCH):
            some = requests[first : first + BATCH]
            count = yield self._ask.to_extend(some)
            said = [self._tally.says_kept(count, place) for place in range(len(some))]
            if None in said:
                self._failures.fail(count)
            kept += [bool(each) for each in said]
        return kept

    def take_over(self, request: Request, former: str) -> Poll[bool]:
        """See BaseLockBackend.take_over(); what it gets of less than a majority is given back."""
        count = yield self._ask.to_take_over(request, former)
        said = self._tally.says_yes(count)
        if said:
            return True
        yield from self._give_back(request, count.where(is_yes), count.pending | count.unsure)
        if said is None:
            self._failures.fail(count)
        return False

    def probe(self, request: Request) -> Poll[Busy | None]:
        """See BaseLockBackend.probe()."""
        count = yield self._ask.who_has(request)
        self._need_most(count)
        owner, votes = self._tally.favourite(count)
        # Those who say nothing may be with him.
        if not votes or votes + len(count.failures) < self._tally.most:
            return None
        seen = [answer for answer in count.answers.values() if answer and answer[0] == owner]
        return Busy(Holder.from_json(seen[0][2]), max(answer[1] for answer in seen) / 1e6)

    def force(self, key: str, owner_digest: str) -> Poll[bool]:
        """End the holding that *owner_digest* names; tell whether it was there."""
        count = yield self._ask.what_each_has(key)
        owners = {answer[0] for answer in count.answers.values() if answer}
        ended = 0
        for owner in owners:
            if digest(owner.decode()) == owner_digest:
                count = yield self._ask.to_force(key, owner)
                ended += len(count.where(is_yes))
        self._need_most(count)
        return ended > 0

    def _give_back(
        self, request: Request, granted: set[int], others: Collection[int]
    ) -> Poll[None]:
        if granted or others:
            yield self._ask.to_give_back(request, granted, others)

    def _need_most(self, count: Count) -> None:
        if len(count.answers) < self._tally.most:
            self._failures.fail(count)
