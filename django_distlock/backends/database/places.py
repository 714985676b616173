"""The places that waiters of this process have in the server's queues: the first of each looks for all."""

from __future__ import annotations

import threading
from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from django_distlock.engine import clock

if TYPE_CHECKING:
    from django_distlock.engine.bells import Bell
    from django_distlock.engine.values import Request

#: Seconds between two times that the places of those who do not look themselves are kept.
KEEP = 0.5


class _Place(NamedTuple):
    ticket: int
    owner: str
    bell: Bell


class _Line:
    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.kept_at = clock.wait_time()


class Places:
    """By lock, in the order of their tickets: nobody is served before the first one of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew with nobody waiting."""
        self._mutex = threading.Lock()
        self._lines: dict[str, _Line] = {}

    def add(self, request: Request, ticket: int, bell: Bell) -> None:
        """Note a new place."""
        with self._mutex:
            line = self._lines.setdefault(request.key, _Line())
            line.places = [place for place in line.places if place.owner != request.owner]
            insort(line.places, _Place(ticket, request.owner, bell), key=attrgetter("ticket"))

    def drop(self, request: Request) -> None:
        """Forget a place; who is the first one now looks from now on."""
        with self._mutex:
            line = self._lines.get(request.key)
            if line is None:
                return
            was_first = line.places[0].owner == request.owner
            line.places = [place for place in line.places if place.owner != request.owner]
            if was_first:
                self._ring_first(request.key, line)

    def ring_first(self, key: str) -> None:
        """Have the first one look."""
        with self._mutex:
            if line := self._lines.get(key):
                self._ring_first(key, line)

    def is_behind(self, request: Request) -> bool:
        """Return whether another one is before it."""
        with self._mutex:
            line = self._lines.get(request.key)
            owners = [place.owner for place in line.places] if line else []
            return request.owner in owners[1:]

    def to_keep(self, request: Request) -> list[str]:
        """Return whose places are to be kept now, if *request* is the first one."""
        with self._mutex:
            line = self._lines.get(request.key)
            if line is None or line.places[0].owner != request.owner:
                return []
            if clock.wait_time() - line.kept_at < KEEP:
                return []
            line.kept_at = clock.wait_time()
            return [place.owner for place in line.places[1:]]

    def _ring_first(self, key: str, line: _Line) -> None:
        # One whose event loop is gone is no more there.
        while line.places and not line.places[0].bell.ring():
            del line.places[0]
        if not line.places:
            del self._lines[key]
