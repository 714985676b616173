"""What benchmarks measure: what taking and giving back costs, and how soon a waiter has the lock."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from tests.fixtures.launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.contenders import Contender, Field

    #: A contender, for another process: where it is found.
    Which = tuple[Callable[[], Field], str, int]

#: Cycles of one contender before it is the turn of the next: all of them meet the same machine.
BLOCK = 20
#: Part of the blocks that count: those in which the machine was quietest for the raw commands.
QUIET = 1 / 3


@contextmanager
def awake() -> Iterator[None]:
    """Keep each processor busy with what gives way to everything: to wake one takes as long as a lock."""
    idler = [sys.executable, "-c", "import os\nos.nice(19)\nwhile True: pass"]
    idlers = [launch(idler) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for each in idlers:
            each.kill()
            each.wait()


class Cost(NamedTuple):
    """What one cycle costs: microseconds by the clock, of this process's processor time, and of the server's time.

    The last one is nan where the server does not tell.
    """

    time: float
    processor: float
    server: float


def costs(contenders: Sequence[Contender], rounds: int) -> list[Cost]:
    """Return the median cost of an uncontended cycle of each, measured in turns."""
    blocks = [[_block(one) for one in contenders] for _ in range(max(3, rounds // BLOCK))]
    quiet = sorted(blocks, key=lambda block: block[0].time)[: max(3, int(len(blocks) * QUIET))]
    return [
        Cost(*(statistics.median(values) for values in zip(*column, strict=True)))
        for column in zip(*quiet, strict=True)
    ]


def _block(one: Contender) -> Cost:
    one.take()
    one.free()
    spent_before = one.spent() if one.spent else math.nan
    began, used = time.perf_counter(), time.process_time()
    for _ in range(BLOCK):
        one.take()
        one.free()
    took, used = time.perf_counter() - began, time.process_time() - used
    spent = (one.spent() if one.spent else math.nan) - spent_before
    return Cost(took / BLOCK * 1e6, used / BLOCK * 1e6, spent / BLOCK)


def handoff(rivals: Callable[[], Field], title: str, number: int, rounds: int = 100) -> float:
    """Return the median milliseconds from a release to the grant of the other of two processes."""
    both = _crew(2, _pass_on, (rivals, title, number), rounds)
    holds = sorted(
        (*hold, who) for who, m in enumerate(both) for hold in zip(m[::2], m[1::2], strict=True)
    )
    gaps = [b[0] - a[1] for a, b in itertools.pairwise(holds) if a[2] != b[2]]
    return statistics.median(gaps) * 1e3 if gaps else float("nan")


class Crowd(NamedTuple):
    """What many processes get out of one name: holds a second, and Jain's index of their shares."""

    holds: float
    fairness: float


def crowd(
    rivals: Callable[[], Field], title: str, number: int, size: int = 8, seconds: float = 4.0
) -> Crowd:
    """Return what *size* processes get that all want one name for *seconds*.

    1 is the index of equal shares (R. Jain et al., "A Quantitative Measure Of Fairness", 1984).
    """
    counts = [count for (count,) in _crew(size, _compete, (rivals, title, number), seconds)]
    squares = sum(count * count for count in counts)
    return Crowd(sum(counts) / seconds, sum(counts) ** 2 / (size * squares) if squares else 0.0)


def _crew(size: int, target: Callable[..., None], *args: object) -> list[list[float]]:
    """Run *target* in so many processes, which begin together; return what each has to tell."""
    spawn = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[list[float]] = spawn.Queue()
    start = spawn.Barrier(size)
    crew = [spawn.Process(target=target, args=(start, results, *args)) for _ in range(size)]
    for process in crew:
        process.start()
    told = [results.get(timeout=300) for _ in crew]
    for process in crew:
        process.join()
    return told


def _contender(which: Which) -> Contender:
    import django

    django.setup()
    rivals, title, number = which
    return rivals()[title][number]


def _pass_on(
    start: multiprocessing.synchronize.Barrier,
    results: multiprocessing.Queue[list[float]],
    which: Which,
    rounds: int,
) -> None:
    """Take the lock again and again, and note when it was taken and given back."""
    one = _contender(which)
    assert one.wait is not None
    moments = []
    start.wait(60)
    for _ in range(rounds):
        one.wait()
        taken = time.monotonic()
        time.sleep(0.005)
        released = time.monotonic()
        one.free()
        moments += [taken, released]
    results.put(moments)


def _compete(
    start: multiprocessing.synchronize.Barrier,
    results: multiprocessing.Queue[list[float]],
    which: Which,
    seconds: float,
) -> None:
    """Take the lock as often as it can be had, for a millisecond's work each time."""
    one = _contender(which)
    assert one.wait is not None
    count = 0
    start.wait(60)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        one.wait()
        time.sleep(0.001)
        count += 1
        one.free()
    results.put([count])
