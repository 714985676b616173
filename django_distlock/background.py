"""What has to be done later or by another thread: one clock thread, at most four for I/O.

Both start when there is something to do and end when there is not. All are daemons: the exit
of the interpreter waits for none of them.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from . import clock
from .bells import ThreadBell

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("django_distlock")

#: Threads for I/O: one hung server takes one of them, and delays no other server's work.
WORKERS = 4
#: Seconds a thread with nothing to do waits for more before it ends.
LINGER = 5.0
#: Seconds between two looks whether the workers are done, at the exit.
SHORT = 0.005


class Background:
    """Runs jobs at their time, and I/O jobs in lanes: one after the other within a lane."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all jobs and threads: those of a parent process do not exist in a forked child."""
        self._mutex = threading.Lock()
        self._clock = _Clock()
        self._lanes: dict[str, deque[Callable[[], object]]] = {}
        self._free: deque[str] = deque()
        self._has_work = threading.Condition(self._mutex)
        self._workers = self._idle = 0

    def at(self, due: float, job: Callable[[], object]) -> None:
        """Run *job* in the clock thread at *due* (lease time); it must not block.

        Finalizers may call this, which run at any moment in any thread; nothing else here.
        """
        self._clock.add(due, job)

    def submit(self, lane: str, job: Callable[[], object], delay: float = 0.0) -> None:
        """Run *job* after *delay* seconds in an I/O thread, after all that its lane has to do."""
        if delay > 0:
            self.at(clock.lease_time() + delay, lambda: self.submit(lane, job))
            return
        with self._mutex:
            if lane not in self._lanes:
                self._lanes[lane] = deque()
                self._free.append(lane)
            self._lanes[lane].append(job)
            self._find_worker()

    def drain(self, seconds: float = 2.0) -> None:
        """Run here and now, at the exit of the interpreter, what the lanes still have to do."""
        ends = clock.lease_time() + seconds
        self._clock.run_due()
        while self._lanes and clock.lease_time() < ends:
            if (lane := self._take_lane()) is None:
                time.sleep(SHORT)  # a worker is at what is left
            else:
                _run(self._lanes[lane].popleft())
                self._give_back(lane)

    def _take_lane(self) -> str | None:
        with self._mutex:
            return self._free.popleft() if self._free else None

    def _find_worker(self) -> None:
        if self._idle:
            self._has_work.notify()
        # An idle one that was woken before may not have taken its lane yet.
        if len(self._free) > self._idle and self._workers < WORKERS:
            _start(self._work, "distlock-io")
            self._workers += 1

    def _work(self) -> None:
        while (lane := self._next_lane()) is not None:
            _run(self._lanes[lane].popleft())
            self._give_back(lane)

    def _next_lane(self) -> str | None:
        with self._mutex:
            if not self._free:
                self._idle += 1
                self._has_work.wait(LINGER)
                self._idle -= 1
            if not self._free:
                self._workers -= 1
                return None
            return self._free.popleft()

    def _give_back(self, lane: str) -> None:
        with self._mutex:
            if self._lanes[lane]:
                self._free.append(lane)
            else:
                del self._lanes[lane]


class _Clock:
    """The thread that starts jobs when they are due."""

    def __init__(self) -> None:
        # A finalizer may add a job: in a thread that is in here already.
        self._mutex = threading.RLock()
        self._bell = ThreadBell()
        self._jobs: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._is_running = False

    def add(self, due: float, job: Callable[[], object]) -> None:
        with self._mutex:
            heapq.heappush(self._jobs, (due, next(self._numbers), job))
            if not self._is_running:
                # In this order: what stops us between the two costs a thread too many, not the clock.
                _start(self._run, "distlock-clock")
                self._is_running = True
            elif self._jobs[0][2] is job:
                self._bell.ring()

    def run_due(self) -> bool:
        """Run here and now what is due; tell whether anything was."""
        has_run = False
        while (job := self._take_due()) is not None:
            _run(job)
            has_run = True
        return has_run

    def _run(self) -> None:
        is_busy = True
        while (left := self._left(is_busy=is_busy)) is not None:
            was_rung = self._bell.wait(left)
            is_busy = self.run_due() or was_rung

    def _left(self, *, is_busy: bool) -> float | None:
        """Return the seconds until a job is due, or to linger for one; None when none came meanwhile."""
        with self._mutex:
            if self._jobs:
                return self._jobs[0][0] - clock.lease_time()
            self._is_running = is_busy
            return LINGER if is_busy else None

    def _take_due(self) -> Callable[[], object] | None:
        with self._mutex:
            is_due = self._jobs and self._jobs[0][0] <= clock.lease_time()
            return heapq.heappop(self._jobs)[2] if is_due else None


def _start(target: Callable[[], object], name: str) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


def _run(job: Callable[[], object]) -> None:
    try:
        job()
    except Exception:
        # Nothing may end these threads: the leases of a whole process depend on them.
        logger.exception("A background job of django_distlock failed")


background = Background()


class Alarm:
    """Runs *job* in the clock thread at the earliest time that was asked for, and then waits to be asked anew."""

    def __init__(self, job: Callable[[], object]) -> None:
        self._job = job
        self._mutex = threading.Lock()
        self._due = math.inf

    def at(self, due: float) -> None:
        """Run the job at *due* (lease time), unless it runs before that anyway."""
        with self._mutex:
            if due < self._due:
                background.at(due, partial(self._ring, due))
                self._due = due

    def _ring(self, due: float) -> None:
        with self._mutex:
            if due != self._due:
                return  # an earlier time was asked for since, and what was due then has been done
            self._due = math.inf
        self._job()


os.register_at_fork(after_in_child=background.reset)
atexit.register(background.drain)
