"""What the sessions of a schedule do, and who goes on at each of their stops: decided by a seed, or all ways in turn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .acts import Player

LEVELS = ("READ_COMMITTED", "REPEATABLE_READ")
#: What a session may do with the lock. "~": the first reply is lost; "^": the first request is lost.
HOLDS = (
    "acquire release",
    "acquire renew release",
    "acquire~ renew release",
    "acquire^ release",
    "acquire release~",
    "acquire renew~ release",
    "wait release",
    "wait~ renew release",
    "acquire claim save release",
    "wait claim save release",
    "acquire guard release",
)
#: What else happens. A fee is paid under transaction_lock().
OTHERS = ("expire", "expire", "purge", "fee; fee", "latefee; fee")
#: The most often that a session that could go on is stopped for another one.
MOST_PREEMPTIONS = 4

#: Small plans of which all orders are tried.
SMALL = (
    ("acquire release", "acquire release"),
    ("acquire release", "wait release"),
    ("acquire renew release", "expire", "acquire release"),
    ("acquire~ release", "expire", "acquire release"),
    ("acquire release", "purge"),
    ("purge", "purge"),
    ("acquire claim save release", "expire", "acquire claim save release"),
    ("acquire guard release", "expire", "acquire release"),
    ("fee", "latefee"),
)


@dataclass(frozen=True)
class Plan:
    """The scripts of the sessions: what each does, in rounds that are parted by semicolons.

    *level*: the isolation level. *is_old*: whether the lock was last used yesterday, else never.
    """

    scripts: tuple[str, ...]
    level: str
    is_old: bool

    def __str__(self) -> str:
        used = "yesterday" if self.is_old else "never"
        return f"{' | '.join(self.scripts)} ({self.level}, used {used})"


def plan_of(seed: int, *, waits: bool) -> Plan:
    """Return the plan of *seed*; *waits*: whether the server has transaction_lock()."""
    chance = random.Random(f"plan {seed}")
    others = OTHERS if waits else OTHERS[:-2]
    scripts = [
        "; ".join(chance.choices(HOLDS, k=chance.choice((1, 1, 2))))
        for _ in range(chance.choice((1, 2)))
    ]
    scripts += [chance.choice((*HOLDS, *others, *others)) for _ in range(1 + (len(scripts) == 1))]
    scripts = scripts[: chance.choice((2, 3, 3))]
    chance.shuffle(scripts)
    return Plan(tuple(scripts), chance.choice(LEVELS), chance.random() < 1 / 2)


def small_plans(*, waits: bool) -> list[Plan]:
    """Return the plans of which all orders are tried; *waits*: see plan_of()."""
    return [
        Plan(scripts, level, is_old)
        for level in LEVELS
        for scripts in SMALL
        if waits or "fee" not in scripts
        for is_old in (False, True)
    ]


class Chooser(Protocol):
    """Decides who goes on."""

    def choose(self, ready: Sequence[Player], last: Player | None) -> Player: ...


class Walk:
    """At random: the last session goes on, but is preempted a few times."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"walk {seed}")
        self._left = self._chance.randrange(MOST_PREEMPTIONS + 1)

    def choose(self, ready: Sequence[Player], last: Player | None) -> Player:
        if last is None or last not in ready:
            return self._chance.choice(ready)
        others = [each for each in ready if each is not last]
        if not others or not self._left or self._chance.random() < 2 / 3:
            return last
        self._left -= 1
        return self._chance.choice(others)


@dataclass
class Path:
    """One of all orders with at most *bound* preemptions (Musuvathi & Qadeer, PLDI 2007): the *taken* choices, then the first.

    *options*: how many there were at each choice.
    """

    bound: int
    taken: list[int] = field(default_factory=list)
    options: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return "".join(map(str, self.taken))

    def choose(self, ready: Sequence[Player], last: Player | None) -> Player:
        first = [last] if last is not None and last in ready else []
        rest = [each for each in ready if each is not last]
        allowed = first or rest
        if first and self.bound:
            allowed = [*first, *rest]
        at = len(self.options)
        self.options.append(len(allowed))
        if at == len(self.taken):
            self.taken.append(0)
        # On a busy machine a wait may reach its limit on the server, which leaves other choices.
        self.taken[at] = min(self.taken[at], len(allowed) - 1)
        chosen = allowed[self.taken[at]]
        self.bound -= bool(first) and chosen is not last
        return chosen

    def next(self, bound: int) -> Path | None:
        """Return the path after this one; None if it was the last."""
        for at in reversed(range(len(self.options))):
            if self.taken[at] + 1 < self.options[at]:
                return Path(bound, [*self.taken[:at], self.taken[at] + 1])
        return None
