"""Bells: a ring is heard, whenever it comes."""

from __future__ import annotations

import asyncio
import time

from django_distlock.engine.bells import TaskBell


async def test_a_ring_that_a_late_event_loop_finds_together_with_the_timeout_is_heard() -> None:
    bell = TaskBell()
    waiting = asyncio.create_task(bell.wait(0.05))
    await asyncio.sleep(0)
    time.sleep(0.1)  # noqa: ASYNC251 - the event loop is held up
    bell.ring()

    assert await waiting
    assert not await bell.wait(0)
