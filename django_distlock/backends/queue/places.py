"""How a lock with a limit is acquired: each place is a lock, and those who wait stand in one line for all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from django_distlock.engine.steps import Steps
from django_distlock.engine.values import Busy, Grant, Request, Secret, first_place, first_to_end

if TYPE_CHECKING:
    from .standings import Standings

#: What the owner of a waiter's turn in the line ends with.
IN_LINE = "~"


def turn_owner(request: Request) -> Secret:
    """Return the owner of the turn of a waiter; also when it asks for one place."""
    return Secret(f"{request.owner}{IN_LINE}")


def turn_of(request: Request) -> Request:
    """Return the request for the turn of a waiter for any place: a lock that only the first in the line holds."""
    return replace(
        request,
        key=request.line,
        owner=turn_owner(request),
        ttl=math.inf,
        min_hold=0.0,
        limit=None,
        place=None,
    )


class Take(Protocol):
    """See acquire_any()."""

    def __call__(self, request: Request, /, *, queued: bool) -> Steps[Any, Grant | Busy]: ...


class Look(Protocol):
    """See acquire_any()."""

    def __call__(self, request: Request, /, *, watches: bool) -> Steps[Any, list[Busy | None]]: ...


def is_line(key: str) -> bool:
    """Return whether *key* is that of a line, which holds no place."""
    return key.endswith(IN_LINE)


def acquire_any(
    request: Request, standings: Standings[Any], take: Take, look: Look, *, queued: bool
) -> Steps[Any, Grant | Busy]:
    """Acquire any place; if none is free, stand in the line if *queued*.

    *take* acquires one lock; *look* returns who has each place, and with *watches* rings this waiter when one
    comes free.
    """
    own, turn = standings.get(request.owner), standings.get(turn_owner(request))
    is_in_line, busy = turn is not None, Busy() if turn is None else turn.busy
    is_first = turn is not None and turn.is_granted and not standings.is_over(turn)
    # The place that it has perhaps, or that has come free.
    came_free = standings.come_free(request, turn) if is_first and own is None else None
    tried = own.request if own else came_free
    if tried or not is_in_line:
        tried = tried or request.at(first_place(request.limit or 1))
        answer = yield from take(tried, queued=False)
        if isinstance(answer, Grant):
            return replace(answer, place=tried.place)
    if is_in_line and not is_first:
        answer = yield from take(turn_of(request), queued=True)
        if isinstance(answer, Busy):
            return _told(request, standings, busy)  # the first of the line has no place either
    found = yield from look(request, watches=is_in_line)
    for each in (each for each in request.from_any if found[each.place or 0] is None):
        answer = yield from take(each, queued=False)
        if isinstance(answer, Grant):
            return replace(answer, place=each.place)
    if queued and not is_in_line:
        # It looks again at once, as the first one or behind others.
        yield from take(turn_of(request), queued=True)
    return _told(request, standings, first_to_end(found) or Busy())


def _told(request: Request, standings: Standings[Any], busy: Busy) -> Busy:
    """Note the answer in the turn of a waiter, which gets the same one until something has happened."""
    if (turn := standings.get(turn_owner(request))) is not None:
        turn.busy = busy
    return busy
