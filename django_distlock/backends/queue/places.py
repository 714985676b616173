"""How a lock with a limit is acquired: each place is a lock, and those who wait stand in one line for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from django_distlock.engine.steps import Steps
from django_distlock.engine.values import Busy, Grant, Request, Secret, first_place, first_to_end

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


class Known(NamedTuple):
    """Facts about a waiter: the place that it has perhaps, or that has come free; and its turn in the line.

    *busy*: what it was told when it joined the line.
    """

    tried: Request | None
    busy: Busy
    is_in_line: bool
    is_first: bool


class Take(Protocol):
    """See acquire_any()."""

    def __call__(self, request: Request, /, *, queued: bool) -> Steps[Any, Grant | Busy]: ...


class Look(Protocol):
    """See acquire_any()."""

    def __call__(self, request: Request, /, *, watches: bool) -> Steps[Any, list[Busy | None]]: ...


def place_of_holder(request: Request, path: str, folder: Callable[[str], str]) -> Request | None:
    """Return the request for the place that the holder with this *path* had; *folder* gives that of a key."""
    above, _, _ = path.rpartition("/")
    return next((each for each in request.holdings if folder(each.key) == above), None)


def is_line(key: str) -> bool:
    """Return whether *key* is that of a line, which holds no place."""
    return key.endswith(IN_LINE)


def acquire_any(
    request: Request, known: Known, take: Take, look: Look, *, queued: bool
) -> Steps[Any, Grant | Busy]:
    """Acquire any place; if none is free, stand in the line if *queued*.

    *take* acquires one lock; *look* returns who has each place, and with *watches* rings this waiter when one
    comes free.
    """
    turn = turn_of(request)
    if known.tried or not known.is_in_line:
        tried = known.tried or request.at(first_place(request.limit or 1))
        answer = yield from take(tried, queued=False)
        if isinstance(answer, Grant):
            return replace(answer, place=tried.place)
    if known.is_in_line and not known.is_first:
        answer = yield from take(turn, queued=True)
        if isinstance(answer, Busy):
            return known.busy  # the first of the line has no place either
    found = yield from look(request, watches=known.is_in_line)
    for each in (each for each in request.from_any if found[each.place or 0] is None):
        answer = yield from take(each, queued=False)
        if isinstance(answer, Grant):
            return replace(answer, place=each.place)
    if queued and not known.is_in_line:
        # It looks again at once, as the first one or behind others.
        yield from take(turn, queued=True)
    return first_to_end(found) or Busy()
