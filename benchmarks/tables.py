"""The tables of a run: what is measured for each, and the rows that come of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import databases, scale
from benchmarks.measures import costs, crowds, handoffs
from benchmarks.way import files_of, way

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.contenders import Field
    from benchmarks.measures import Which

#: So many processes that want one name.
CROWDS = (2, 8, 32)


@dataclass(frozen=True)
class Wanted:
    """Whom to measure: those of *field* under *title*; *rounds*: cycles of each; *work*: seconds that a crowd's holder keeps the lock."""

    rivals: Callable[[], Field]
    title: str
    rounds: int
    files: bool
    work: float

    @property
    def of_ours(self) -> list[tuple[str, str]]:
        """Return the names and aliases of ours, each alias once."""
        ours = (one for one in self.rivals()[self.title] if one.alias and one.limit is None)
        return [(one.name, one.alias) for one in ours]

    @property
    def waiting(self) -> tuple[list[str], Which]:
        """Return who can wait for another process: their names, and where they are found."""
        found = {}
        if self.title != databases.ALONE:  # there is no other process to wait for
            all_of_them = enumerate(self.rivals()[self.title])
            found = {number: one.name for number, one in all_of_them if one.wait}
        return list(found.values()), (self.rivals, self.title, list(found))


class Row(NamedTuple):
    """The figures of one contender; nan: not to be had."""

    name: str
    figures: Sequence[float]


@dataclass(frozen=True)
class Kind:
    """A table: the headings of its figures with their digits after the point, and what measures its rows."""

    title: str
    headings: dict[str, int]
    rows: Callable[[Wanted], list[Row]] = field(repr=False)


def _cycles(wanted: Wanted) -> list[Row]:
    rivals = wanted.rivals()[wanted.title]
    found = costs(rivals, wanted.rounds)
    return [
        Row(one.name, (cost.time, cost.time / found[0].time, *cost[1:]))
        for one, cost in zip(rivals, found, strict=True)
    ]


def _handoffs(wanted: Wanted) -> list[Row]:
    names, which = wanted.waiting
    if not names:
        return []
    gaps = handoffs(which)
    return [Row(name, (gap, gap / gaps[0])) for name, gap in zip(names, gaps, strict=True)]


def _crowds(wanted: Wanted) -> list[Row]:
    names, which = wanted.waiting
    if not names:
        return []
    by_size = [crowds(which, size, wanted.work) for size in CROWDS]
    return [
        Row(name, [figure for crowd in found for figure in crowd])
        for name, *found in zip(names, *by_size, strict=True)
    ]


def _scale(measure: Callable[[str], list[float]]) -> Callable[[Wanted], list[Row]]:
    def rows(wanted: Wanted) -> list[Row]:
        return [Row(name, measure(alias)) for name, alias in wanted.of_ours if alias != "dummy"]

    return rows


def _ways(wanted: Wanted) -> list[Row]:
    rows = []
    for one in wanted.rivals()[wanted.title]:
        if one.alias:
            files = files_of(way(one))
            rows.append(Row(one.name, (len(files), files.total())))
            rows += (
                Row(f"  {name}", (math.nan, calls))
                for name, calls in sorted(files.items())
                if wanted.files
            )
    return rows


KINDS = {
    "cycle": Kind(
        "Acquire and release, uncontended",
        {"µs": 0, "of raw": 2, "processor, µs": 0, "server, µs": 1, "requests": 1},
        _cycles,
    ),
    "handoff": Kind("Hand-off to a waiter in another process", {"ms": 1, "of raw": 2}, _handoffs),
    "crowd": Kind(
        "Processes that want one name",
        {
            heading: digits
            for size in CROWDS
            for heading, digits in ((f"{size}: holds a second", 0), (f"{size}: Jain", 2))
        },
        _crowds,
    ),
    "held": Kind(
        "A cycle in a process that holds so many leases, µs",
        {f"{number:,}": 0 for number in scale.HELD},
        _scale(scale.held),
    ),
    "names": Kind(
        "A cycle where so many names have been used, µs",
        {f"{number:,}": 0 for number in scale.NAMES},
        _scale(scale.names),
    ),
    "waiters": Kind(
        "From grant to grant, with so many tasks of one process waiting, ms",
        {str(number): 2 for number in scale.WAITERS},
        _scale(scale.waiters),
    ),
    "places": Kind(
        "A cycle of a lock with so many places, all free, µs",
        {str(number or "no limit"): 0 for number in scale.PLACES},
        _scale(scale.places),
    ),
    "way": Kind("The way of one acquire", {"our files": 0, "our calls": 0}, _ways),
}
