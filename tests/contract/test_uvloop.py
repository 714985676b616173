"""Under uvloop instead of asyncio's own event loop: tasks that are cancelled by the hundred leave nothing."""

from __future__ import annotations

import asyncio
import random

import pytest

from django_distlock import lock

from .crew import SOON
from .profiles import needs
from .rivals import Rivals

pytestmark = needs("typical")
uvloop = pytest.importorskip("uvloop")  # there is none for each Python

NAMES, TASKS = 8, 120


async def _hold(using: str, name: str) -> None:
    async with lock(name, using=using, timeout=30):
        await asyncio.sleep(random.uniform(0, 0.02))


async def _storm(using: str, names: list[str]) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(_hold(using, names[i % len(names)])) for i in range(TASKS)]
    victims = random.sample(tasks, TASKS * 3 // 4)
    for task in victims:
        await asyncio.sleep(random.uniform(0, 0.004))
        task.cancel()
    await asyncio.wait(tasks)
    return tasks


def test_a_storm_of_cancellations_leaves_nothing_and_all_others_are_served(
    using: str, name: str, rival: Rivals
) -> None:
    names = [f"{name}:{number}" for number in range(NAMES)]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        tasks = runner.run(_storm(using, names))

    assert [repr(task.exception()) for task in tasks if not task.cancelled()] == [
        "None" for task in tasks if not task.cancelled()
    ]
    for each in names:
        rival(of=each).takes(SOON)
