"""How waiters wait: the ways a backend can pick from, how long to pause, when to let others go first; no I/O."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from django_distlock.conf import LONGEST

from . import clock

SHORTEST_PAUSE = 0.005
LONGEST_PAUSE = 0.25
LONGEST_WAKEABLE_PAUSE = 1.0
#: Seconds: between these two a pause is about a tenth of the time that the same holder was seen for.
SHORTEST_POLL, LONGEST_POLL = 0.01, 0.25
SHARE = 0.1
#: How often in a row a process lets others go first that it has seen once.
TURNS = 16
#: Of how many locks it is known that others want them.
MOST_KNOWN = 1000


class Way(enum.Enum):
    """How a waiter learns that it is worth to try again."""

    #: It does not: it tries again after pauses, short ones while the lock changes hands.
    POLL = "poll"
    #: As before, but with a look first: on this server a try writes even if it is refused.
    LOOK = "look, then try"
    #: Something wakes it; a look now and then makes good for what was lost.
    LISTEN = "listen"
    #: The server keeps the queue: a try with a place lasts until it is granted.
    ON_SERVER = "wait on the server"


class Place(enum.Enum):
    """How a waiter gets a place in a queue on the server."""

    NONE = "there is no queue"
    ENQUEUE = "by enqueue()"
    BY_TRYING = "by a try that is refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How the waiters of one backend wait."""

    way: Way = Way.POLL
    place: Place = Place.NONE
    #: Whether the waiters of one process stand in a line of their own, and only the first one asks the server.
    in_line: bool = True
    #: Seconds after which a waiter that was not woken looks again; None: soon, then less and less often.
    look_again: float | None = None
    #: Whether a reader that comes while a writer has a place on the server is served after it.
    writers_first: bool = False

    @property
    def polls(self) -> bool:
        """Whether nothing tells a waiter that the lock is free."""
        return self.look_again is None and self.way in {Way.POLL, Way.LOOK}

    def pause(self, wait: Wait, remaining: float | None) -> float:
        """Return how many seconds to sleep before the next try; the holder's lease has *remaining* seconds left."""
        if self.polls:
            seconds = wait.pauses.next(clock.wait_time(), wait.holder)
            return wait.bounded(seconds if remaining is None else min(seconds, remaining))
        if self.look_again is not None:
            bound = self.look_again if remaining is None else min(self.look_again, remaining)
            return wait.bounded(bound)
        return wait.next_pause(remaining, longest=LONGEST_WAKEABLE_PAUSE)


class Wait:
    """One caller's wait: until when it lasts, and how long its next pause is."""

    __slots__ = ("_began", "_ends", "_pause", "holder", "pauses")

    def __init__(self, timeout: float | None, began: float | None = None) -> None:
        """*timeout* in seconds; None waits for ever, 0 leaves room for one try. *began*: by ``clock.wait_time()``."""
        self._began = clock.wait_time() if began is None else began
        # Not every driver and server takes more, and 31 years are as good as 292.
        self._ends = None if timeout is None else self._began + min(timeout, LONGEST)
        self._pause = SHORTEST_PAUSE
        #: Where nothing ends the wait but a look: its pauses, and what tells the holding seen last from the next.
        self.pauses = Pauses()
        self.holder: object = None

    @property
    def is_for_one_try(self) -> bool:
        """Whether there was no time from the first."""
        return self._ends is not None and self._ends <= self._began

    @property
    def waited(self) -> float:
        return clock.wait_time() - self._began

    @property
    def left(self) -> float | None:
        """Seconds until it is over, never below 0; None where it never is."""
        return None if self._ends is None else max(0.0, self._ends - clock.wait_time())

    @property
    def is_over(self) -> bool:
        return self._ends is not None and clock.wait_time() >= self._ends

    def next_pause(self, *bounds: float | None, longest: float = LONGEST_PAUSE) -> float:
        """Return the next pause in seconds: jittered, growing, within *bounds* and the time left.

        Decorrelated jitter: each pause is drawn between the shortest and three times the last
        (M. Brooker, "Exponential Backoff And Jitter", 2015).
        """
        self._pause = min(longest, random.uniform(SHORTEST_PAUSE, self._pause * 3))  # noqa: S311
        return self.bounded(min([self._pause, *(bound for bound in bounds if bound is not None)]))

    def bounded(self, seconds: float) -> float:
        left = self.left
        return max(0.0, seconds if left is None else min(seconds, left))


def poll_pause(seen: float) -> float:
    """Return a pause for a lock that the same holder was seen to hold for so many seconds.

    Drawn by chance, so that of those who wait equally long each is first equally often.
    """
    return random.uniform(0.5, 1.0) * min(LONGEST_POLL, max(SHORTEST_POLL, seen * SHARE))  # noqa: S311


class Pauses:
    """The pauses of one wait: short at first, longer for a lock that stays with its holder."""

    def __init__(self) -> None:
        self._holder: object = self  # nobody that was seen
        self._since = 0.0

    def next(self, now: float, holder: object) -> float:
        """Return the next pause; *holder* is what tells this holding from the next, None if it is not known."""
        if holder != self._holder:
            self._holder, self._since = holder, now
        return poll_pause(now - self._since)


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
        return max(0.0, poll_pause(wanted.held) - (now - wanted.released))
