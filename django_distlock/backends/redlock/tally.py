"""What the answers of all servers mean together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from django_distlock.engine.holder import Holder
from django_distlock.engine.values import Busy

from .answers import is_agreed_grant, is_busy, is_grant, is_guarded, is_no, is_yes
from .validity import majority
from .votes import Election, agreed, election

if TYPE_CHECKING:
    from .votes import Count


class Tally:
    """Counts the answers of *total* servers."""

    def __init__(self, total: int) -> None:
        self.total = total
        #: How many are a majority.
        self.most = majority(total)

    def is_elected(self, count: Count) -> bool:
        """Whether it is decided who has the lock, and with which token if we have it."""
        # Asked again after a lost reply: the others may know the token that was agreed on.
        has_agreed = bool(count.where(is_agreed_grant)) and self.agreed_token(count) is None
        is_open = self.election(count) is Election.OPEN
        return not is_open and not (has_agreed and count.pending)

    def agreed_token(self, count: Count) -> int | None:
        """Return the token that a majority wrote down for this very grant."""
        tokens = Counter(count.answers[server][1] for server in count.where(is_agreed_grant))
        token, votes = max(tokens.items(), key=lambda item: item[1], default=(0, 0))
        return token if votes >= self.most else None

    def election(self, count: Count) -> Election:
        """Return how the vote for us stands."""
        return election(
            self.total,
            granted=len(count.where(is_grant)),
            refused=len(count.where(is_busy)),
            failed=len(count.failures) + len(count.where(is_guarded)),
        )

    def written(self, count: Count) -> Election:
        """Return how far a majority has taken note of the token."""
        # Who was not asked cannot agree.
        return election(
            self.total,
            granted=len(count.where(is_yes)),
            refused=len(count.where(is_no)) + self.total - len(count.asked),
            failed=len(count.failures),
        )

    def says_released(self, count: Count) -> bool | None:
        """Whether we had the lock until now; None while it is open."""
        released = len(count.where(is_yes))
        return agreed(self.total, yes=released, no=len(count.answers) - released)

    def says_kept(self, count: Count, place: int) -> bool | None:
        """Whether the lock asked for at *place* is still ours; None while it is open."""
        kept = sum(answer[place] for answer in count.answers.values())
        return agreed(self.total, yes=kept, no=len(count.answers) - kept)

    def says_yes(self, count: Count) -> bool | None:
        """Whether a majority did what it was asked; None while it is open."""
        return agreed(self.total, yes=len(count.where(is_yes)), no=len(count.where(is_no)))

    def has_agreed(self, count: Count) -> bool:
        """Whether a majority did what it was asked, or did not."""
        return self.says_yes(count) is not None

    def is_seen(self, count: Count) -> bool:
        """Whether it is clear if somebody has the lock."""
        votes = self.favourite(count)[1]
        may_be_held = votes + len(count.pending) + len(count.failures) >= self.most
        return votes >= self.most or (not may_be_held and len(count.answers) >= self.most)

    @staticmethod
    def favourite(count: Count) -> tuple[bytes, int]:
        """Return the owner that most of them name, and how many do."""
        owners = Counter(answer[0] for answer in count.answers.values() if answer)
        return max(owners.items(), key=lambda item: item[1], default=(b"", 0))

    def busy(self, count: Count) -> Busy:
        """Return who has the lock, if a majority names him."""
        refusals = [count.answers[server] for server in count.where(is_busy)]
        # By owner and try: the votes of several tries, given at several moments, make no majority.
        tries = Counter((answer[1], answer[4]) for answer in refusals if answer[1])
        best, votes = max(tries.items(), key=lambda item: item[1], default=((b"", b""), 0))
        if votes < self.most:
            return Busy()  # they were split: nobody has it
        his = [answer for answer in refusals if (answer[1], answer[4]) == best]
        return Busy(Holder.from_json(his[0][3]), max(answer[2] for answer in his) / 1e6)
