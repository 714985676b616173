"""Who of this process may ask the server next: one contender per lock, the others wait here."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import ref

from . import clock
from .waiting import Turns

if TYPE_CHECKING:
    from django_distlock.lease import Lease

    from .bells import Bell

    #: What stands in a line: a bell, or the reference to the lease of who found nobody there.
    Place = Bell | ref[Lease]

#: Hand-offs inside a process before it gives way to other processes known to want the lock.
IN_A_ROW = 16


class _Line:
    """The contenders for one lock, the one whose turn it is first."""

    __slots__ = ("holding", "in_a_row", "is_contested", "places", "turn")

    def __init__(self) -> None:
        self.places: deque[Place] = deque()
        #: Who was told that it is their turn.
        self.turn: Place | None = None
        #: Who holds it, not to be kept alive by this line.
        self.holding: ref[Lease] | None = None
        self.in_a_row = 0
        self.is_contested = False

    def pass_on(self) -> None:
        """Give the turn to the first one who is there to take it, unless that was told already."""
        while self.places and (first := self.places[0]) is not self.turn:
            # Who came without a bell is the first from the beginning, and has the turn.
            if not isinstance(first, ref) and first.ring():
                self.turn, self.holding = first, None
                self.in_a_row += 1
            else:
                self.places.popleft()


class LocalQueue:
    """First come, first served, for the threads and the tasks of one process alike.

    Who finds nobody here is the only entry for its key: *lines* then has the reference to its lease, by
    ``lines.setdefault(key, ref)``. A line is made of it when a second one comes.
    """

    def __init__(self) -> None:
        self.lines: dict[str, Place | _Line] = {}
        #: Of the locks that other processes were seen to want, where nothing tells them that one is free.
        self.turns = Turns()
        self._mutex = threading.Lock()

    def join(self, key: str, bell: Bell) -> bool:
        """Stand in line for *key*; return whether it is our turn at once. Else the bell tells."""
        with self._mutex:
            line = self._line(key)
            line.places.append(bell)
            if line.places[0] is not bell:
                return False
            line.turn = bell
            return True

    def has_turn(self, key: str, bell: Bell) -> bool:
        with self._mutex:
            return self._line(key).places[0] is bell

    def leave(self, key: str, place: Place) -> None:
        """Leave the line, wherever *place* is in it; the next one gets our turn.

        Twice does no harm, and finishes what an exception from outside has broken off.
        """
        with self._mutex:
            line = self.lines.get(key)
            if isinstance(line, _Line):
                if self.turns.wanted and line.places and line.places[0] is place:
                    self.turns.released(key, clock.wait_time())
                with suppress(ValueError):
                    line.places.remove(place)
                line.pass_on()
                if not line.places:
                    del self.lines[key]
            elif line is place:
                del self.lines[key]

    def hold(self, key: str, bell: Bell, lease: ref[Lease]) -> None:
        """Note that *bell*, whose turn it is, holds the lock by *lease*; not if it has left already."""
        with self._mutex:
            line = self.lines.get(key)
            if isinstance(line, _Line) and line.places and line.places[0] is bell:
                line.holding = lease

    def held_by(self, key: str) -> Lease | None:
        with self._mutex:
            line = self.lines.get(key)
            holding = line.holding if isinstance(line, _Line) else line
            lease = holding() if isinstance(holding, ref) else None
            return lease if lease is not None and lease.is_granted else None

    def callers(self, key: str) -> int:
        """Return how many of this process want the lock, or have it: those in the line; without one, the only one."""
        line = self.lines.get(key)
        return len(line.places) if isinstance(line, _Line) else 1

    def behind(self, key: str) -> int | None:
        """Return how many of this process wait for one of it that holds the lock; None: none of it does."""
        return None if self.held_by(key) is None else self.callers(key) - 1

    def contest(self, key: str) -> None:
        with self._mutex:
            if key in self.lines:
                self._line(key).is_contested = True

    def gives_way(self, key: str) -> bool:
        """Return whether it is time to let another process have the lock, and begin to count anew."""
        with self._mutex:
            line = self._line(key)
            if line.in_a_row < IN_A_ROW or not line.is_contested:
                return False
            line.in_a_row, line.is_contested = 0, False
            return True

    def _line(self, key: str) -> _Line:
        """Return the line for *key*, made now if there is none, or one entry only."""
        line = self.lines.setdefault(key, new := _Line())
        if isinstance(line, _Line):
            return line
        # Without the mutex others can only find it there: it stays until it leaves.
        new.places.append(line)
        new.turn, new.holding = line, line if isinstance(line, ref) else None
        self.lines[key] = new
        return new
