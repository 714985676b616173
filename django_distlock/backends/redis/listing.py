"""Going over the records of locks for those that are held: a free lock leaves its record for a while."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_T = TypeVar("_T")

#: Holdings that a listing shows at most, and records that it looks at for them.
MOST_LISTED, MOST_LOOKED_AT = 1000, 100_000
#: Records that are looked at in one go.
BATCH = 250


def listed(keys: Iterable[str], look: Callable[[list[str]], list[_T]]) -> list[_T]:
    """Return what *look* finds among *keys*, some at a time, until it is enough."""
    found: list[_T] = []
    rest = islice(_each_once(keys), MOST_LOOKED_AT)
    while len(found) < MOST_LISTED and (some := list(islice(rest, BATCH))):
        found += look(some)
    return found[:MOST_LISTED]


def _each_once(keys: Iterable[str]) -> Iterator[str]:
    # SCAN may return a key twice.
    seen: set[str] = set()
    for key in keys:
        if key not in seen:
            seen.add(key)
            yield key
