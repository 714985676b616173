"""The local queue: of the callers in this process that want a lock, one asks the server, the others wait here."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import ref

from django_distlock.ground import clock
from django_distlock.ground.mutexes import section

from .waiting import Turns

if TYPE_CHECKING:
    from django_distlock.engine.lease import Lease
    from django_distlock.exceptions import LockBackendError

    from .bells import Bell

    #: A place in a line of this process: a bell, or for a caller that came first, a reference to its lease.
    LocalPlace = Bell | ref[Lease]

#: Hand-offs inside a process before it lets another process that wants the lock go first.
IN_A_ROW = 16


class _Line:
    """The callers that hold or want one lock; the first one has the turn."""

    __slots__ = ("has_failed", "holding", "in_a_row", "is_contested", "places", "turn")

    def __init__(self) -> None:
        self.places: deque[LocalPlace] = deque()
        #: The place that was told that it has the turn.
        self.turn: LocalPlace | None = None
        #: The lease that holds the lock; a weak reference, so that the line does not keep it alive.
        self.holding: ref[Lease] | None = None
        self.in_a_row = 0
        self.is_contested = False
        #: Whether the last answer to one of them was an error of the server.
        self.has_failed = False

    def pass_on(self) -> None:
        """Ring the first place that can take the turn, unless it has the turn already."""
        while self.places and (first := self.places[0]) is not self.turn:
            # A place without a bell was the first from the beginning, and has the turn.
            if not isinstance(first, ref) and first.ring():
                self.turn, self.holding = first, None
                self.in_a_row += 1
            else:
                self.places.popleft()


class LocalQueue:
    """First come, first served, for the threads and tasks of one process.

    For a single caller, *lines* has only a reference to its lease, added by ``lines.setdefault(key, ref)``.
    A line is made from it when a second caller comes.
    """

    def __init__(self) -> None:
        self.lines: dict[str, LocalPlace | _Line] = {}
        #: The locks that other processes want too, for backends that do not wake waiters.
        self.turns = Turns()
        self._failures: dict[Bell, LockBackendError] = {}
        self._mutex = section()

    def join(self, key: str, bell: Bell) -> bool:
        """Join the line for *key*; return whether we have the turn at once. If not, the bell rings later."""
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

    def leave(self, key: str, place: LocalPlace) -> None:
        """Leave the line, wherever *place* is in it; if it had the turn, the next one gets it.

        Safe to call twice; the second call finishes what an asynchronous exception interrupted.
        """
        with self._mutex:
            line = self.lines.get(key)
            if isinstance(line, _Line):
                if self.turns.wanted and line.places and line.places[0] is place:
                    self.turns.released(key, clock.wait_time())
                if not isinstance(place, ref):
                    self._failures.pop(place, None)
                with suppress(ValueError):
                    line.places.remove(place)
                line.pass_on()
                if not line.places:
                    self.lines.pop(key, None)
            elif line is place:
                self.lines.pop(key, None)

    def look_again(self, key: str) -> None:
        """Ring the first in the line of a lock with a limit: one of its places has come free."""
        with self._mutex:
            self.turns.released(key, clock.wait_time())
            line = self.lines.get(key)
            first = line.places[0] if isinstance(line, _Line) and line.places else None
            if first is not None and not isinstance(first, ref):
                first.ring()

    def hold(self, key: str, bell: Bell, lease: ref[Lease]) -> None:
        """Note that *bell*, which has the turn, holds the lock by *lease*; do nothing if it has left already."""
        with self._mutex:
            line = self.lines.get(key)
            if isinstance(line, _Line) and line.places and line.places[0] is bell:
                line.holding, line.has_failed = lease, False

    def held_by(self, key: str) -> Lease | None:
        with self._mutex:
            line = self.lines.get(key)
            holding = line.holding if isinstance(line, _Line) else line
            lease = holding() if isinstance(holding, ref) else None
            return lease if lease is not None and lease.is_granted else None

    def failure(self, bell: Bell) -> LockBackendError | None:
        """Return the error with which *bell* must give up; None if it need not."""
        return self._failures.get(bell)

    def contest(self, key: str) -> None:
        with self._mutex:
            if key in self.lines:
                line = self._line(key)
                line.is_contested, line.has_failed = True, False

    def failed(self, key: str, error: LockBackendError) -> None:
        """Note that the server failed for one caller; after two failures in a row, all others give up with *error*.

        A single failure may be that of one connection, such as one that was idle for long and had died.
        """
        with self._mutex:
            line = self.lines.get(key)
            if not isinstance(line, _Line):
                return
            if line.has_failed:
                for place in line.places:
                    if not isinstance(place, ref):
                        self._failures[place] = error.copy()
                        place.ring()
            line.has_failed = True

    def gives_way(self, key: str) -> bool:
        """Return True if another process should get the lock now; the count of hand-offs then starts again."""
        with self._mutex:
            line = self._line(key)
            if line.in_a_row < IN_A_ROW or not line.is_contested:
                return False
            line.in_a_row, line.is_contested = 0, False
            return True

    def _line(self, key: str) -> _Line:
        """Return the line for *key*; make one if there is none, or only a single caller."""
        line = self.lines.setdefault(key, new := _Line())
        if isinstance(line, _Line):
            return line
        # Callers without the mutex only use setdefault(), which finds the entry; it stays until it leaves.
        new.places.append(line)
        new.turn, new.holding = line, line if isinstance(line, ref) else None
        self.lines[key] = new
        return new
