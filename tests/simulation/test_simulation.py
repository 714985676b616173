"""A thousand schedules of the real engine, each decided by a seed; `make simulate` runs more."""

from __future__ import annotations

import pytest

from tests.protections.listed import places

from .plan import Plan, plan_of
from .schedule import outcome
from .search import mutants, regressions

SCHEDULES, CHUNK = 1000, 25
#: On a machine that is busy, what takes a second or two of a processor takes long.
PATIENCE = 600


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_no_schedule_breaks_a_promise(first: int) -> None:
    broken = {
        seed: violation
        for seed in range(first, first + CHUNK)
        if (violation := outcome(plan_of(seed))[0])
    }

    assert broken == {}


@pytest.mark.parametrize("plan", regressions(), ids=str)
def test_what_was_found_stays_mended(plan: Plan) -> None:
    assert outcome(plan)[0] is None


@pytest.mark.timeout(PATIENCE)
def test_a_seed_makes_the_same_steps_again() -> None:
    first = [outcome(plan_of(seed))[1] for seed in range(40)]

    assert [outcome(plan_of(seed))[1] for seed in reversed(range(40))] == first[::-1]


def test_a_plan_is_kept_as_text() -> None:
    plan = plan_of(7)

    assert Plan.from_json(plan.to_json()) == plan


def test_each_planted_mistake_is_of_a_text_that_stands_once() -> None:
    texts = {old for mutant in mutants() for old, _ in mutant.edits}

    assert [text for text in texts if len(places(text)) != 1] == []
