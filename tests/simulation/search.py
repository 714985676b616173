"""Looks for schedules that break a promise, and makes them smaller."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from tests.protections.listed import Protection

from .plan import Plan, plan_of, smaller
from .schedule import outcome

#: Seeds that one process runs before it reports.
CHUNK = 50
#: Seeds that are tried for each smaller plan: with another plan, the same seed makes another order.
TRIES = 12
REGRESSIONS = Path(__file__).parent / "regressions.jsonl"


def what_broke(first: int, count: int) -> dict[str, str]:
    """Return by plan the promises that *count* seeds from *first* on break."""
    return _violations(map(plan_of, range(first, first + count)))


def what_broke_again() -> dict[str, str]:
    """Return by plan the promises that the plans which once broke one break now."""
    return _violations(regressions())


def _violations(plans: Iterable[Plan]) -> dict[str, str]:
    settle()
    found = {str(plan): outcome(plan)[0] for plan in plans}
    return {plan: str(violation) for plan, violation in found.items() if violation is not None}


def digests(seeds: list[int]) -> list[str]:
    """Return what the schedules of *seeds* did, in this order."""
    settle()
    return [outcome(plan_of(seed))[1] for seed in seeds]


def search(first: int, count: int, jobs: int, most: int) -> Iterator[tuple[int, list[int]]]:
    """Run *count* seeds from *first* on; give how many are done, and the seeds that were found since.

    Of each CHUNK, no seed is run after *most* were found: a mistake may make schedules that take a minute.
    """
    ready = [(at, min(CHUNK, first + count - at)) for at in range(first, first + count, CHUNK)]
    context = multiprocessing.get_context("spawn")
    done = 0
    with context.Pool(jobs, _begin, maxtasksperchild=20) as pool:
        for found in pool.imap(partial(_broken, most), ready):
            done = min(done + CHUNK, count)
            yield done, found


def _begin() -> None:
    import django

    django.setup()
    settle()


def _broken(most: int, chunk: tuple[int, int]) -> list[int]:
    first, count = chunk
    found = (seed for seed in range(first, first + count) if outcome(plan_of(seed))[0] is not None)
    return [*itertools.islice(found, most)]


def settle() -> None:
    """Take what there is now out of the garbage collector's way: schedules call it often."""
    gc.collect()
    gc.freeze()


def shrunk(plan: Plan) -> Plan:
    """Return a smaller plan that breaks the same promise."""
    violation, _ = outcome(plan)
    assert violation is not None
    is_smaller = True
    while is_smaller:
        candidates = (_like(each, violation.kind) for each in smaller(plan))
        found = next((each for each in candidates if each is not None), None)
        is_smaller = found is not None
        plan = found or plan
    return plan


def _like(plan: Plan, kind: str) -> Plan | None:
    """Return *plan*, with the first seed that breaks a promise of this *kind*."""
    for seed in itertools.chain([plan.seed], range(TRIES)):
        again = replace(plan, seed=seed)
        violation, _ = outcome(again)
        if violation is not None and violation.kind == kind:
            return again
    return None


def regressions() -> list[Plan]:
    """Return the plans that once broke a promise."""
    return [Plan.from_json(line) for line in REGRESSIONS.read_text().splitlines()]


@cache
def mutants() -> list[Protection]:
    """Return the mistakes that the search must find."""
    known = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]
    return [Protection("simulation", **entry, red=[]) for entry in known]
