"""What benchmarks measure: one cycle of taking and giving back, and how soon a waiter has the lock."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.contenders import Cycle


def microseconds(cycle: Cycle, rounds: int) -> float:
    """Return the median of one cycle."""
    for _ in range(rounds // 10):
        cycle()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        cycle()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def pass_on(
    alias: str, rounds: int, results: multiprocessing.Queue[list[float]], turn: int
) -> None:
    """Take the lock again and again in one of two processes, and note when it was given and taken."""
    import django

    django.setup()
    from django_distlock import lock

    moments = []
    for _ in range(rounds):
        with lock("handoff", using=alias, timeout=60):
            taken = time.monotonic()
            time.sleep(0.005)
        moments += [taken, time.monotonic()]
    results.put(moments)


def handoff(alias: str, rounds: int = 100) -> float:
    """Return the median milliseconds from a release to the grant of the other process."""
    spawn = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[list[float]] = spawn.Queue()
    crew = [spawn.Process(target=pass_on, args=(alias, rounds, results, turn)) for turn in range(2)]
    for process in crew:
        process.start()
    both = [results.get(timeout=300) for _ in crew]
    for process in crew:
        process.join()
    holds = sorted(
        (*hold, who) for who, m in enumerate(both) for hold in zip(m[::2], m[1::2], strict=True)
    )
    gaps = [b[0] - a[1] for a, b in itertools.pairwise(holds) if a[2] != b[2]]
    return statistics.median(gaps) * 1e3 if gaps else float("nan")
