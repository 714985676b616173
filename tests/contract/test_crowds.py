"""Very many tasks of one process at once: none fails for that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from django_distlock import lock

from .profiles import Profile, needs

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
#: Many more than any pool of threads or connections has places.
CROWD = 2_000
#: Seconds that one of them waits at most, on a busy machine.
LONGEST = 150


@pytest.fixture(autouse=True)
def unhurried(using: str, profile: Profile, settings: Settings) -> None:
    """Three servers of ZooKeeper and so many tasks on one busy machine: sessions need time."""
    if profile.name == "zookeeper":
        options = profile.settings["OPTIONS"] | {"session_timeout": 50.0, "io_timeout": 50.0}
        settings.DISTLOCK = {using: {**profile.settings, "TTL": 50, "OPTIONS": options}}


async def test_a_crowd_gets_locks_of_their_own(using: str, name: str) -> None:
    served = 0

    async def work(number: int) -> None:
        nonlocal served
        async with lock(f"{name}:{number}", using=using, timeout=LONGEST) as lease:
            served += lease.held

    await asyncio.gather(*map(work, range(CROWD)))

    assert served == CROWD


@needs("leased")
async def test_a_crowd_that_holds_gives_back_at_once(using: str, name: str) -> None:
    all_hold, all_are_free = asyncio.Barrier(CROWD), asyncio.Barrier(CROWD)

    async def work(number: int) -> None:
        async with lock(f"{name}:{number}", using=using, timeout=LONGEST):
            await all_hold.wait()
        await all_are_free.wait()

    await asyncio.gather(*map(work, range(CROWD)))

    assert not await lock(f"{name}:0", using=using).alocked()


async def test_a_crowd_gets_one_lock_in_turn(using: str, name: str) -> None:
    inside, most_inside, served = 0, 0, 0

    async def work() -> None:
        nonlocal inside, most_inside, served
        async with lock(name, using=using, timeout=LONGEST):
            inside += 1
            most_inside = max(most_inside, inside)
            await asyncio.sleep(0)
            inside -= 1
            served += 1

    await asyncio.gather(*(work() for _ in range(CROWD)))

    assert (most_inside, served) == (1, CROWD)
