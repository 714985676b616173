"""Going over the locks that a server has, some at a time."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_T = TypeVar("_T")

#: Locks that are looked at in one go.
BATCH = 250


def listed(keys: Iterable[str], look: Callable[[list[str]], list[_T]]) -> list[_T]:
    """Return all that *look* finds among *keys*, some at a time."""
    found: list[_T] = []
    rest = _each_once(keys)
    while some := list(islice(rest, BATCH)):
        found += look(some)
    return found


def _each_once(keys: Iterable[str]) -> Iterator[str]:
    # SCAN may return a key twice.
    seen: set[str] = set()
    for key in keys:
        if key not in seen:
            seen.add(key)
            yield key
