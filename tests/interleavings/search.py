"""Runs many schedules on one server, and looks for planted mistakes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .plans import LEVELS, MOST_PREEMPTIONS, Path, Plan, Walk, plan_of, small_plans
from .stage import Outcome, Stage, staged

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from .faults import Fault
    from .plans import Chooser
    from .servers import Database


@dataclass
class Totals:
    """What many schedules have shown. *found*: what was broken, by what replay() takes."""

    schedules: int = 0
    steps: int = 0
    waits: int = 0
    checked: Counter[str] = field(default_factory=Counter)
    found: dict[str, Outcome] = field(default_factory=dict)

    def add(self, what: str, outcome: Outcome) -> None:
        self.schedules += 1
        self.steps += len(outcome.steps)
        self.waits += outcome.waits
        self.checked += outcome.checked
        if outcome.broken is not None:
            self.found[what] = outcome

    def __str__(self) -> str:
        return (
            f"{self.schedules} schedules, {self.steps} steps, {self.waits} waits on the server,"
            f" {self.checked.total()} checks, {len(self.found)} broken promises"
        )


def walk(server: Database, seeds: range) -> Iterator[Totals]:
    """Run the schedules of *seeds*; give the totals after each."""
    totals = Totals()
    for level in LEVELS:
        plans = ((seed, plan_of(seed, waits=server.waits)) for seed in seeds)
        mine = [(seed, plan) for seed, plan in plans if plan.level == level]
        with staged(server, level) as stage:
            for seed, plan in mine:
                totals.add(str(seed), stage.run(plan, Walk(seed)))
                yield totals


def all_orders(server: Database, bound: int) -> Generator[Totals, None, None]:
    """Run the small plans in all orders with at most *bound* preemptions; give the totals after each schedule."""
    totals = Totals()
    for number, plan in enumerate(small_plans(waits=server.waits)):
        with staged(server, plan.level) as stage:
            for path, outcome in _orders(stage, plan, bound):
                totals.add(f"{number}:{path}", outcome)
                yield totals


def replay(server: Database, what: str) -> Outcome:
    """Run one schedule again: "17" is that of a seed, "3:0102" an order of the small plan 3."""
    number, _, taken = what.partition(":")
    if taken:
        plan = small_plans(waits=server.waits)[int(number)]
        chooser: Chooser = Path(len(taken), [*map(int, taken)])
    else:
        plan, chooser = plan_of(int(number), waits=server.waits), Walk(int(number))
    with staged(server, plan.level) as stage:
        return stage.run(plan, chooser)


def order_that_shows(server: Database, fault: Fault) -> tuple[int, str]:
    """Plant *fault*, and try all orders of its plan, with no preemption, with one, two and three.

    Return how many were tried until one shows it, 0 if none does, and what was seen.
    """
    tried = 0
    with fault.planted(), staged(server, fault.level) as stage:
        for bound in range(MOST_PREEMPTIONS):
            for path, outcome in _orders(stage, fault.plan, bound):
                tried += 1
                if outcome.broken is not None:
                    return tried, f"order {path}: {outcome.broken}"
    return 0, ""


def _orders(stage: Stage, plan: Plan, bound: int) -> Iterator[tuple[Path, Outcome]]:
    """Run *plan* in all orders with at most *bound* preemptions."""
    path: Path | None = Path(bound)
    while path is not None:
        yield path, stage.run(plan, path)
        path = path.next(bound)
