"""Very many tasks of one process at once: none fails for that."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from django_distlock import lock

from .profiles import Profile, needs

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
#: Many more than any pool of threads or connections has places; DISTLOCK_CROWD=2000 on a fast machine.
CROWD = int(os.environ.get("DISTLOCK_CROWD", "200"))
#: So many that what each one costs must not grow with those who wait for the same lock: the backends on which it once did.
GREAT_CROWDS = {"redis-fair": 2_000, "zookeeper": 1_000}
#: Seconds that one of them waits at most, on a busy machine.
LONGEST = 150


@pytest.fixture(autouse=True)
def unhurried(
    using: str, profile: Profile, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many tasks on one busy machine need time: leases and sessions do not end meanwhile."""
    # All leases are looked at once a second, as in any process, not twenty times.
    monkeypatch.setattr("django_distlock.engine.registry.SWEEP", 1.0)
    # The time of one caller counts, not this one, which so few tasks would not exceed.
    monkeypatch.setattr("django_distlock.engine.background.PATIENCE", 0.1)
    patient = {**profile.settings, "TTL": LONGEST}
    if profile.name == "zookeeper":
        options = profile.settings["OPTIONS"] | {"session_timeout": 50.0, "io_timeout": 50.0}
        patient |= {"TTL": 50, "OPTIONS": options}
    settings.DISTLOCK = {using: patient}


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


async def test_a_crowd_gets_one_lock_in_turn(using: str, name: str, profile: Profile) -> None:
    crowd = max(CROWD, GREAT_CROWDS.get(profile.name, 0))
    inside, most_inside, served = 0, 0, 0

    async def work() -> None:
        nonlocal inside, most_inside, served
        async with lock(name, using=using, timeout=LONGEST):
            inside += 1
            most_inside = max(most_inside, inside)
            await asyncio.sleep(0)
            inside -= 1
            served += 1

    await asyncio.gather(*(work() for _ in range(crowd)))

    assert (most_inside, served) == (1, crowd)
