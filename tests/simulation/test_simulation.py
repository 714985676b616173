"""Three hundred schedules of the real engine, each decided by a seed; `make simulate` runs more.

They run in processes of their own, as they replace the threads and clocks of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.protections.listed import places

from .plan import Plan, plan_of
from .search import mutants

if TYPE_CHECKING:
    from tests.fixtures.processes import Spawn

SCHEDULES, CHUNK = 300, 75
#: On a machine that is busy, what takes seconds of a processor takes long.
PATIENCE = 600

pytestmark = pytest.mark.timeout(PATIENCE)


def run(spawn: Spawn, act: str, **arguments: Any) -> Any:
    return spawn(f"tests.simulation.search:{act}", **arguments).result(PATIENCE)


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_no_schedule_breaks_a_promise(spawn: Spawn, first: int) -> None:
    assert run(spawn, "what_broke", first=first, count=CHUNK) == {}


def test_what_was_found_stays_mended(spawn: Spawn) -> None:
    assert run(spawn, "what_broke_again") == {}


def test_a_seed_makes_the_same_steps_again(spawn: Spawn) -> None:
    seeds = [*range(40)]

    first = run(spawn, "digests", seeds=seeds)

    assert run(spawn, "digests", seeds=seeds[::-1]) == first[::-1]


def test_a_plan_is_kept_as_text() -> None:
    plan = plan_of(7)

    assert Plan.from_json(plan.to_json()) == plan


def test_each_planted_mistake_is_of_a_text_that_stands_once() -> None:
    texts = {old for mutant in mutants() for old, _ in mutant.edits}

    assert [text for text in texts if len(places(text)) != 1] == []
