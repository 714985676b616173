"""How long to pause between two looks where nothing wakes a waiter, and when to let others go first: arithmetic."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Seconds: between these two a pause is about a tenth of the time that the same holder was seen for.
SHORTEST, LONGEST = 0.01, 0.25
SHARE = 0.1
#: How often in a row a process lets others go first that it has seen once.
TURNS = 16
#: Of how many locks it is known that others want them.
MOST_KNOWN = 1000


def pause(seen: float) -> float:
    """Return a pause for a lock that the same holder was seen to hold for so many seconds.

    Drawn by chance, so that of those who wait equally long each is first equally often.
    """
    return random.uniform(0.5, 1.0) * min(LONGEST, max(SHORTEST, seen * SHARE))  # noqa: S311


class Pauses:
    """The pauses of one wait: short at first, longer for a lock that stays with its holder."""

    def __init__(self) -> None:
        self._holder: object = self  # nobody that was seen
        self._since = 0.0

    def next(self, now: float, holder: object) -> float:
        """Return the next pause; *holder* is what tells this holding from the next, None if it is not known."""
        if holder != self._holder:
            self._holder, self._since = holder, now
        return pause(now - self._since)


@dataclass(slots=True)
class _Wanted:
    left: int
    #: Since when this process has it, and after it: for how long it had it, and until when.
    granted: float | None = None
    held: float = 0.0
    released: float | None = None


class Turns:
    """The locks of one backend that other processes want, too: who has released one lets them go first.

    Else a process that wants it again at once would have it every time: the others are in a pause.
    """

    def __init__(self) -> None:
        #: By key; who asks whether there are any looks here.
        self.wanted: dict[str, _Wanted] = {}

    def refused(self, key: str) -> None:
        if (wanted := self.wanted.get(key)) is not None:
            wanted.left = TURNS
            return
        if len(self.wanted) >= MOST_KNOWN:
            self.wanted.clear()
        self.wanted[key] = _Wanted(TURNS)

    def waited_for(self, key: str, held: float, now: float) -> None:
        """Note that others waited while this process had it, for *held* seconds until now."""
        self.refused(key)
        wanted = self.wanted[key]
        wanted.held, wanted.granted, wanted.released = held, None, now

    def granted(self, key: str, now: float) -> None:
        if (wanted := self.wanted.get(key)) is not None:
            wanted.granted, wanted.released = now, None

    def released(self, key: str, now: float) -> None:
        if (wanted := self.wanted.get(key)) is not None and wanted.granted is not None:
            wanted.held, wanted.granted, wanted.released = now - wanted.granted, None, now

    def __contains__(self, key: str) -> bool:
        return key in self.wanted

    def first_pause(self, key: str, now: float) -> float:
        """Return how long to pause before the first try: as one who has waited all the time would, or 0."""
        wanted = self.wanted.get(key)
        if wanted is None or wanted.released is None:
            return 0.0
        wanted.left -= 1
        if wanted.left <= 0:
            del self.wanted[key]
        return max(0.0, pause(wanted.held) - (now - wanted.released))
