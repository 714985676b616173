"""What benchmarks measure: what taking and giving back costs, and what waiters get, in turns."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.fixtures.launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.contenders import Contender, Field

    #: Contenders, for another process: where they are found, and which of them.
    Which = tuple[Callable[[], Field], str, Sequence[int]]

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

    *server* is nan where the server does not tell. *requests*: packets with data that this process sent.
    """

    time: float
    processor: float
    server: float
    requests: float


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
    sent = packets_sent()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(BLOCK):
        one.take()
        one.free()
    took, used = time.perf_counter() - began, time.process_time() - used
    sent = packets_sent() - sent
    spent = (one.spent() if one.spent else math.nan) - spent_before
    return Cost(took / BLOCK * 1e6, used / BLOCK * 1e6, spent / BLOCK, sent / BLOCK)


def packets_sent() -> int:
    """Return how many packets with data the open connections of this process have sent: Linux counts them."""
    return sum(map(_sent_by, Path("/proc/self/fd").iterdir()))


def _sent_by(descriptor: Path) -> int:
    try:
        if not str(descriptor.readlink()).startswith("socket:"):
            return 0
        with socket.socket(fileno=os.dup(int(descriptor.name))) as line:
            told = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    except OSError:
        return 0  # closed since, or no TCP connection
    # tcpi_data_segs_out of struct tcp_info in linux/tcp.h; kernels before 4.6 tell less.
    return int(struct.unpack_from("I", told, 156)[0]) if len(told) == 160 else 0


def handoffs(which: Which, rounds: int = 4, passes: int = 25) -> list[float]:
    """Return for each the median milliseconds from a release to the grant of the other of two processes."""
    crew = _crew(2, _pass_on, which, rounds, passes)
    gaps: list[list[float]] = [[] for _ in which[2]]
    for place, turn in itertools.product(range(len(gaps)), range(rounds)):
        holds = sorted(
            (*hold, who)
            for who, told in enumerate(crew)
            for hold in zip(told[turn][place][::2], told[turn][place][1::2], strict=True)
        )
        gaps[place] += [b[0] - a[1] for a, b in itertools.pairwise(holds) if a[2] != b[2]]
    return [statistics.median(each) * 1e3 if each else math.nan for each in gaps]


class Crowd(NamedTuple):
    """What many processes get out of one name: holds a second, and Jain's index of their shares."""

    holds: float
    fairness: float


def crowds(
    which: Which, size: int, work: float, rounds: int = 3, seconds: float = 1.0
) -> list[Crowd]:
    """Return for each what *size* processes get that all want its name, for *work* seconds at a time.

    1 is the index of equal shares (R. Jain et al., "A Quantitative Measure Of Fairness", 1984).
    """
    crew = _crew(size, partial(_compete, work), which, rounds, seconds)
    found = []
    for place, _ in enumerate(which[2]):
        counts = [sum(turn[place][0] for turn in told) for told in crew]
        squares = sum(count * count for count in counts)
        fairness = sum(counts) ** 2 / (size * squares) if squares else math.nan
        found.append(Crowd(sum(counts) / (rounds * seconds), fairness))
    return found


#: What each of a crew has to tell: by round, by contender.
Told = list[list[list[float]]]


def _crew(
    size: int,
    act: Callable[[Contender, Any], list[float]],
    which: Which,
    rounds: int,
    amount: float,
) -> list[Told]:
    """Have so many processes do *act* for each contender in turns, all of them at once."""
    spawn = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[Told] = spawn.Queue()
    start = spawn.Barrier(size)
    given = (start, results, act, which, rounds, amount)
    crew = [spawn.Process(target=_take_turns, args=given) for _ in range(size)]
    for process in crew:
        process.start()
    told = [results.get(timeout=600) for _ in crew]
    for process in crew:
        process.join()
    return told


def _take_turns(  # noqa: PLR0917 - a process is given no keywords
    start: multiprocessing.synchronize.Barrier,
    results: multiprocessing.Queue[Told],
    act: Callable[[Contender, Any], list[float]],
    which: Which,
    rounds: int,
    amount: float,
) -> None:
    import django

    django.setup()
    rivals, title, numbers = which
    field = rivals()[title]
    told: Told = [[] for _ in range(rounds)]
    for number in numbers:
        _warm_up(field[number])
    for turn, number in itertools.product(told, numbers):
        start.wait(300)
        turn.append(act(field[number], amount))
    results.put(told)


def _warm_up(one: Contender) -> None:
    """Take the lock once: modules are imported and connections opened then, which is not what is measured."""
    assert one.wait is not None
    one.wait()
    one.free()


def _pass_on(one: Contender, passes: int) -> list[float]:
    """Take the lock again and again; return when it was taken and given back."""
    assert one.wait is not None
    moments = []
    for _ in range(passes):
        one.wait()
        taken = time.monotonic()
        time.sleep(0.005)
        released = time.monotonic()
        one.free()
        moments += [taken, released]
    return moments


def _compete(work: float, one: Contender, seconds: float) -> list[float]:
    """Take the lock as often as it can be had, for *work* seconds each time; return how often."""
    assert one.wait is not None
    count = 0
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        one.wait()
        if work:
            time.sleep(work)
        count += 1
        one.free()
    return [count]
