"""How waiters wait: the ways that a backend can choose, the length of pauses, letting others go first. No I/O."""

from __future__ import annotations

import enum
import random
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from django_distlock.conf import LONGEST
from django_distlock.ground import clock

if TYPE_CHECKING:
    from .values import Busy

SHORTEST_PAUSE = 0.005
LONGEST_PAUSE = 0.25
LONGEST_WAKEABLE_PAUSE = 1.0
#: Seconds: a pause is SHARE of the time for which the same holder was seen, within these bounds.
SHORTEST_POLL, LONGEST_POLL = 0.01, 0.25
SHARE = 0.1
#: Most seconds between two looks of a wait whether to stop.
LOOK = 1.0
#: Seconds after which a server that pays for each waiter, as for a transaction, gets a pause from it.
SLICE = 10.0
#: How many times in a row a process lets others go first after it has noticed them.
TURNS = 16
#: How many locks Turns keeps at most.
MOST_KNOWN = 1000
#: The holder before one was seen.
_NOBODY = object()


class Way(enum.Enum):
    """How a waiter learns that it should try again."""

    #: It does not: it tries again after pauses, which are short while the lock often changes its holder.
    POLL = "poll"
    #: As POLL, but it probes first, because a try writes to this server even if it is refused.
    LOOK = "look, then try"
    #: It is woken, and looks now and then in case a wake-up was lost.
    LISTEN = "listen"
    #: The server keeps the queue: a try with a position lasts until the lock is granted, or for a time.
    ON_SERVER = "wait on the server"


class Queueing(enum.Enum):
    """How a waiter gets a position in a queue on the server."""

    NONE = "there is no queue"
    ENQUEUE = "by enqueue()"
    BY_TRYING = "by a try that is refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How the waiters of one backend wait."""

    way: Way = Way.POLL
    queueing: Queueing = Queueing.NONE
    #: Whether the waiters of one process have a line, of which only the first one asks the server. Without one,
    #: nobody ever waits.
    in_line: bool = True
    #: Whether the server lets nobody pass who waits in its queue.
    is_in_order: bool = False
    #: Whether the position in the server's queue becomes the grant, so that no other caller of this process can wait in it.
    position_is_grant: bool = False
    #: Whether enqueue() takes a position in the queue for any place of a lock with a limit, and keeps it.
    queues_places: bool = False
    #: Seconds after which a waiter that was not woken looks again; None: after growing pauses. With ON_SERVER: the
    #: longest wait on the server; None: no limit.
    look_again: float | None = None
    #: Whether the server ends the owner of a try that it refuses, so that the next try needs a new one.
    new_owners: bool = False
    #: Whether a reader that comes after a writer with a position on the server is served after that writer.
    writers_first: bool = False

    def for_places(self) -> Waiting:
        """Return how waiters wait for any place of a lock with a limit: no server can wait for several locks."""
        if self.queues_places:
            return replace(self, queueing=Queueing.ENQUEUE)
        return replace(_POLLING, new_owners=self.new_owners)

    @property
    def polls(self) -> bool:
        """Whether waiters only look again after pauses, because nothing wakes them."""
        return self.look_again is None and self.way in {Way.POLL, Way.LOOK}

    def pause(self, wait: Wait, busy: Busy) -> float:
        """Return the seconds to sleep before the next try, after one that found the lock *busy*."""
        if self.polls:
            seconds = wait.pause_behind(busy.mark or busy.holder)
        elif self.look_again is not None:
            seconds = self.look_again
        else:
            return wait.next_pause(busy.remaining, longest=LONGEST_WAKEABLE_PAUSE)
        return wait.bounded(seconds, busy.remaining)

    def on_server(self, wait: Wait) -> float | None:
        """Return the seconds of the next wait on the server; None: no limit.

        The next one begins at the tail of the server's queue. So it is shorter for those that have just come:
        callers that have waited for long keep their position for longer. It is random, so that no caller is
        always at the tail when the lock is released.
        """
        if self.look_again is None:
            return wait.left
        share = min(1.0, max(0.5, wait.waited / (3 * self.look_again)))
        return wait.bounded(self.look_again * share * random.uniform(0.9, 1.0))  # noqa: S311


_POLLING = Waiting()


class Wait:
    """One caller's wait: when it ends, and how long its next pause is."""

    __slots__ = ("_began", "_ends", "_holder", "_pause", "_seen_since", "_stop")

    def __init__(
        self,
        timeout: float | None,
        began: float | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """*timeout* is in seconds; None: no limit, 0: one try. *began* is a ``clock.wait_time()``, by default now.

        If *stop* is set, the wait ends within a second.
        """
        self._stop = stop
        self._began = clock.wait_time() if began is None else began
        # Some drivers and servers accept no more, and 31 years are enough.
        self._ends = None if timeout is None else self._began + min(timeout, LONGEST)
        self._pause = SHORTEST_PAUSE
        #: For waits that nothing wakes: the holding that was seen last, and since when.
        self._holder: object = _NOBODY
        self._seen_since = 0.0

    @property
    def is_for_one_try(self) -> bool:
        """Whether its timeout was 0."""
        return self._ends is not None and self._ends <= self._began

    @property
    def waited(self) -> float:
        return clock.wait_time() - self._began

    @property
    def left(self) -> float | None:
        """Seconds until the timeout, or until *stop* is looked at, never below 0; None without either."""
        if self._stop is not None:
            return 0.0 if self.is_over else LOOK
        return None if self._ends is None else max(0.0, self._ends - clock.wait_time())

    @property
    def is_over(self) -> bool:
        if self._stop is not None:
            return self._stop.is_set()
        return self._ends is not None and clock.wait_time() >= self._ends

    def next_pause(self, *bounds: float | None, longest: float = LONGEST_PAUSE) -> float:
        """Return the next pause in seconds: jittered, growing, within *bounds* and the time left.

        Decorrelated jitter: each pause is drawn between the shortest and three times the last
        (M. Brooker, "Exponential Backoff And Jitter", 2015).
        """
        self._pause = min(longest, random.uniform(SHORTEST_PAUSE, self._pause * 3))  # noqa: S311
        return self.bounded(self._pause, *bounds)

    def pause_behind(self, holder: object) -> float:
        """Return the next pause in seconds where nothing wakes: short at first, longer while the lock keeps its *holder*.

        *holder* identifies the holding, None if it is not known.
        """
        now = clock.wait_time()
        if holder != self._holder:
            self._holder, self._seen_since = holder, now
        return poll_pause(now - self._seen_since)

    def bounded(self, *seconds: float | None) -> float:
        """Return the least of *seconds*, within the time left; None is no bound."""
        return max(0.0, min(each for each in (*seconds, self.left) if each is not None))


def poll_pause(seen: float) -> float:
    """Return a pause in seconds for a lock whose present holder was first seen *seen* seconds ago.

    It is random, so that waiters that have waited equally long come first equally often.
    """
    return random.uniform(0.5, 1.0) * min(LONGEST_POLL, max(SHORTEST_POLL, seen * SHARE))  # noqa: S311


@dataclass(slots=True)
class _Wanted:
    left: int
    #: When this process acquired it; after the release, how long it held it, and when it released it.
    granted: float | None = None
    held: float = 0.0
    released: float | None = None


class Turns:
    """The locks of one backend that other processes want, too: after a release, a process lets them go first.

    Otherwise a process that wants the lock again at once would get it every time, as the others are in a pause.
    """

    def __init__(self) -> None:
        #: By key. Callers read it to see whether there are any.
        self.wanted: dict[str, _Wanted] = {}

    def refused(self, key: str) -> _Wanted:
        if (wanted := self.wanted.get(key)) is not None:
            wanted.left = TURNS
            return wanted
        if len(self.wanted) >= MOST_KNOWN:
            self.wanted.clear()
        # Other threads change it too, and may have added one or may remove this one.
        return self.wanted.setdefault(key, _Wanted(TURNS))

    def waited_for(self, key: str, held: float, now: float) -> None:
        """Note that others waited while this process held the lock, for *held* seconds until *now*."""
        wanted = self.refused(key)
        wanted.held, wanted.granted, wanted.released = held, None, now

    def granted(self, key: str, now: float) -> None:
        if (wanted := self.wanted.get(key)) is not None:
            wanted.granted, wanted.released = now, None

    def released(self, key: str, now: float) -> None:
        wanted = self.wanted.get(key)
        if wanted is not None and (granted := wanted.granted) is not None:
            wanted.held, wanted.granted, wanted.released = now - granted, None, now

    def first_pause(self, key: str, now: float) -> float:
        """Return the pause before the first try: that of a waiter that has waited since the release, or 0."""
        # Callers without a position in the line ask for it too, each in its own thread.
        if (wanted := self.wanted.get(key)) is None or (released := wanted.released) is None:
            return 0.0
        wanted.left -= 1
        if wanted.left <= 0:
            self.wanted.pop(key, None)
        return max(0.0, poll_pause(wanted.held) - (now - released))
