"""How what a lock of ours costs grows: with the leases held, the names known, the tasks that wait, and the places."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from django_distlock import Lock, lock, locks
from django_distlock.backends.session.backend import SessionBackend

if TYPE_CHECKING:
    from collections.abc import Callable

#: Of leases, names, waiting tasks and places.
HELD = (0, 1_000)
NAMES = (10, 1_000, 100_000)
WAITERS = (1, 10, 100, 500)
PLACES = (None, 1, 4, 20, 100)
#: Cycles that one figure is the median of, and tasks that take locks at once where many are wanted.
CYCLES, TOGETHER = 300, 200


def held(alias: str) -> list[float]:
    """Return the microseconds of a cycle in a process that holds so many leases."""
    if isinstance(locks[alias], SessionBackend):
        return [math.nan] * len(HELD)  # each lease needs a connection of its own
    found, another = [], lambda turn: lock(f"another:{turn}", using=alias)
    _cycle(another)  # servers that have just begun are slower
    for number in HELD:
        with ExitStack() as all_held:
            for each in range(number):
                all_held.enter_context(lock(f"held:{each}", using=alias, ttl=600))
            found.append(_cycle(another))
    return found


def names(alias: str) -> list[float]:
    """Return the microseconds of a cycle where so many names have been used."""
    found, first = [], 0
    for number in NAMES:
        asyncio.run(_use(alias, range(first, number)))
        first = number
        found.append(_cycle(partial(_one_of, alias, number)))
    return found


def _one_of(alias: str, number: int, turn: int) -> Lock:
    return lock(f"names:{turn * 7919 % number}", using=alias)  # a prime: far from the last one


async def _use(alias: str, numbers: range) -> None:
    left = iter(numbers)

    async def use_some() -> None:
        for number in left:
            async with lock(f"names:{number}", using=alias, timeout=60):
                pass

    await asyncio.gather(*(use_some() for _ in range(TOGETHER)))


def waiters(alias: str) -> list[float]:
    """Return the milliseconds from one grant to the next among so many tasks of a process that wait for one name."""

    async def serve(number: int) -> float:
        async def work() -> None:
            async with lock("waited for", using=alias, timeout=120):
                pass

        async with lock("waited for", using=alias, timeout=120):
            tasks = [asyncio.create_task(work()) for _ in range(number)]
            all_wait = time.perf_counter() + 0.5
            while (began := time.perf_counter()) < all_wait:
                # Virtual machines may take memory that is not used for a moment: that would be measured then.
                async with lock("another", using=alias):
                    await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return (time.perf_counter() - began) / number * 1e3

    return [asyncio.run(serve(number)) for number in WAITERS]


def places(alias: str) -> list[float]:
    """Return the microseconds of a cycle of a lock with so many places, all of them free."""
    return [_cycle(partial(_place_of, alias, number)) for number in PLACES]


def _place_of(alias: str, limit: int | None, _: int) -> Lock:
    return lock(f"places: {limit}", using=alias, limit=limit)


def _cycle(made: Callable[[int], Lock]) -> float:
    times = []
    for turn in range(CYCLES):
        recipe = made(turn)
        began = time.perf_counter()
        with recipe:
            pass
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6
