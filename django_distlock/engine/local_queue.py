"""Who of this process may ask the server next: one contender per lock, the others wait here."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_distlock.lease import Lease

    from .bells import Bell

#: Hand-offs inside a process before it gives way to other processes known to want the lock.
IN_A_ROW = 16


class _Line:
    """The contenders for one lock, the one whose turn it is first."""

    __slots__ = ("holding", "in_a_row", "is_contested", "places", "turn")

    def __init__(self) -> None:
        self.places: deque[Bell] = deque()
        #: Who was told that it is their turn.
        self.turn: Bell | None = None
        #: Who holds it, not to be kept alive by this line.
        self.holding: weakref.ref[Lease] | None = None
        self.in_a_row = 0
        self.is_contested = False

    def pass_on(self) -> None:
        """Give the turn to the first one who is there to take it, unless that was told already."""
        while self.places and self.places[0] is not self.turn:
            if self.places[0].ring():
                self.turn, self.holding = self.places[0], None
                self.in_a_row += 1
            else:
                self.places.popleft()


class LocalQueue:
    """First come, first served, for the threads and the tasks of one process alike."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._mutex = threading.Lock()

    def join(self, key: str, bell: Bell) -> bool:
        """Stand in line for *key*; return whether it is our turn at once. Else the bell tells."""
        with self._mutex:
            line = self._lines.setdefault(key, _Line())
            line.places.append(bell)
            if line.places[0] is not bell:
                return False
            line.turn = bell
            return True

    def has_turn(self, key: str, bell: Bell) -> bool:
        """Return whether it is the turn of *bell*."""
        with self._mutex:
            return self._lines[key].places[0] is bell

    def leave(self, key: str, bell: Bell) -> None:
        """Leave the line, wherever we stand in it; the next one gets our turn.

        Twice does no harm, and finishes what an exception from outside has broken off.
        """
        with self._mutex:
            if (line := self._lines.get(key)) is None:
                return
            with suppress(ValueError):
                line.places.remove(bell)
            line.pass_on()
            if not line.places:
                del self._lines[key]

    def hold(self, key: str, lease: Lease) -> None:
        """Note that whose turn it is holds the lock."""
        with self._mutex:
            self._lines[key].holding = weakref.ref(lease)

    def held_by(self, key: str) -> Lease | None:
        """Return the lease that this process holds the lock by, if its line knows one."""
        with self._mutex:
            line = self._lines.get(key)
            return line.holding() if line and line.holding else None

    def contest(self, key: str) -> None:
        """Note that other processes want the lock."""
        with self._mutex:
            if line := self._lines.get(key):
                line.is_contested = True

    def gives_way(self, key: str) -> bool:
        """Return whether it is time to let another process have the lock, and begin to count anew."""
        with self._mutex:
            line = self._lines[key]
            if line.in_a_row < IN_A_ROW or not line.is_contested:
                return False
            line.in_a_row, line.is_contested = 0, False
            return True
