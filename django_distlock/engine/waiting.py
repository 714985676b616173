"""How waiters wait: the ways that a backend can choose, the lengths of pauses, letting others go first. No I/O."""

from __future__ import annotations

import enum
import math
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
#: Seconds: between these bounds, a pause is SHARE of the time since the present holder was first seen.
SHORTEST_POLL, LONGEST_POLL = 0.01, 0.25
SHARE = 0.1
#: Most seconds between two looks at *stop*.
LOOK = 1.0
#: Seconds of one wait on a server that pays for each waiter, for example by an open transaction.
SLICE = 10.0
#: How many times in a row a process lets others go first after it has noticed them.
YIELDS = 16
#: How many locks ContestedLocks keeps at most.
MOST_KNOWN = 1000
#: The holder before one was seen.
_NOBODY = object()


class Way(enum.Enum):
    """How a waiter learns that it should try again."""

    #: The waiter tries again after pauses, which are short while the lock often changes its holder.
    POLL = "poll"
    #: As POLL, but the waiter probes first, because on this server even a refused try writes.
    LOOK = "look, then try"
    #: The waiter is woken, and looks now and then in case a wake-up was lost.
    LISTEN = "listen"
    #: The server keeps the queue: a request waits there until the lock is granted, or for a time.
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
    #: Whether the callers of one process queue, so that only the first asks the server. False only for locks that are
    #: always free.
    in_line: bool = True
    #: Whether the server serves its queue in order, so that nobody passes a waiter.
    is_in_order: bool = False
    #: Whether the position in the server's queue becomes the grant, so that no other caller of this process can take it over.
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
        """Return how waiters wait for any place of a lock with a limit; no server can wait for several locks."""
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

        Each wait begins at the tail of the server's queue. So waits are shorter for new callers, and callers that
        have waited for long keep their position for longer. The seconds are random, so that no caller is always at
        the tail when the lock is released.
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
        self, timeout: float | None, began: float | None = None, stop: threading.Event | None = None
    ) -> None:
        """*timeout* is in seconds; None: no limit, 0: one try. *began* is a ``clock.wait_time()``, by default now.

        If *stop* is set, the wait ends within a second.
        """
        self._stop = stop
        self._began = clock.wait_time() if began is None else began
        # At most LONGEST, as some drivers and servers accept no more, and 31 years are enough.
        self._ends = None if timeout is None else self._began + min(timeout, LONGEST)
        self._pause = SHORTEST_PAUSE
        #: For waits that nothing wakes: the holding that was seen last, and since when.
        self._holder: object = _NOBODY
        self._seen_since = 0.0

    @property
    def is_for_one_try(self) -> bool:
        """Whether the timeout was 0."""
        return self._ends is not None and self._ends <= self._began

    @property
    def waited(self) -> float:
        return clock.wait_time() - self._began

    @property
    def left(self) -> float | None:
        """Seconds until the timeout, or until the next look at *stop*, never below 0; None without either."""
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
        """Return the next pause in seconds if nothing wakes the waiter: longer while the lock keeps its *holder*.

        *holder* identifies the holding; None if it is not known.
        """
        now = clock.wait_time()
        if holder != self._holder:
            self._holder, self._seen_since = holder, now
        return poll_pause(now - self._seen_since)

    def bounded(self, *seconds: float | None) -> float:
        """Return the least of *seconds* and of the time left; None is no bound."""
        return max(0.0, min(each for each in (*seconds, self.left) if each is not None))


def poll_pause(seen: float) -> float:
    """Return a pause in seconds for a lock whose present holder was first seen *seen* seconds ago.

    The pause is random, so that waiters that have waited equally long win equally often.
    """
    return random.uniform(0.5, 1.0) * min(LONGEST_POLL, max(SHORTEST_POLL, seen * SHARE))  # noqa: S311


@dataclass(slots=True)
class _Wanted:
    left: int
    #: When this process acquired the lock; after the release, how long it held the lock, and when it released it.
    granted: float | None = None
    held: float = 0.0
    released: float | None = None


class ContestedLocks:
    """The locks of one backend that other processes want, too: after a release, a process lets them go first.

    Otherwise a process that wants the lock again at once would get it every time, as the others are in a pause.
    Where waiters wait on the server, which has a queue, the process stands behind them there without a try.
    """

    def __init__(self) -> None:
        #: By key. Callers read it to see whether it is empty.
        self.wanted: dict[str, _Wanted] = {}

    def refused(self, key: str) -> _Wanted:
        if (wanted := self.wanted.get(key)) is not None:
            wanted.left = YIELDS
            return wanted
        if len(self.wanted) >= MOST_KNOWN:
            self.wanted.clear()
        # setdefault(), because other threads add and remove locks, too.
        return self.wanted.setdefault(key, _Wanted(YIELDS))

    def waited_for(self, key: str, held: float, now: float) -> None:
        """Note that other processes waited while this one held the lock, for *held* seconds until *now*."""
        wanted = self.refused(key)
        wanted.held, wanted.granted, wanted.released = held, None, now

    def granted(self, key: str, now: float) -> None:
        if (wanted := self.wanted.get(key)) is not None:
            wanted.granted, wanted.released = now, None

    def released(self, key: str, now: float) -> None:
        wanted = self.wanted.get(key)
        if wanted is not None and (granted := wanted.granted) is not None:
            wanted.held, wanted.granted, wanted.released = now - granted, None, now

    def last_release(self, key: str, now: float) -> tuple[float, float]:
        """Return how many seconds this process held the lock, and how long ago it released it.

        0 and inf if the lock is not wanted or not released yet, and after YIELDS calls.
        """
        # Callers outside the local queue call this, too, each in its own thread.
        if (wanted := self.wanted.get(key)) is None or (released := wanted.released) is None:
            return 0.0, math.inf
        wanted.left -= 1
        if wanted.left <= 0:
            self.wanted.pop(key, None)
        return wanted.held, now - released

    def first_pause(self, key: str, now: float) -> float:
        """Return the pause before the first try: the rest of the pause of a waiter in another process, or 0."""
        held, since = self.last_release(key, now)
        return max(0.0, poll_pause(held) - since)
