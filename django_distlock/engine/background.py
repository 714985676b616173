"""What has to be done later or by another thread: one clock thread, at most four for I/O.

Both start when there is something to do and end when there is not. All are daemons: the exit
of the interpreter waits for none of them.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from . import clock
from .bells import ThreadBell
from .caller import forks
from .naming import log_fields, warn
from .values import Request

logger = logging.getLogger("django_distlock")
_T = TypeVar("_T")

#: Threads for I/O: one hung server takes one of them, and delays no other server's work.
WORKERS = 4
#: Seconds a thread with nothing to do waits for more before it ends.
LINGER = 5.0
#: Seconds until a thread that could not be started is tried again.
SOON = 0.25
#: Seconds between two looks whether the workers are done, at the exit.
SHORT = 0.005
#: Threads in which tasks wait on a server that keeps the queue: one for each lock waited for.
WAITS = 64


class Background:
    """Runs jobs at their time, and I/O jobs in lanes: one after the other within a lane."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all jobs and threads: those of a parent process do not exist in a forked child."""
        self._mutex = threading.Lock()
        self._clock = _Clock()
        # All jobs by lane, the lane that has waited longest first, and the lanes somebody is at.
        self._lanes: dict[Hashable, deque[Callable[[], object]]] = {}
        self._busy: set[Hashable] = set()
        self._has_work = threading.Condition(self._mutex)
        self._workers = self._idle = 0

    def at(self, due: float, job: Callable[[], object]) -> None:
        """Run *job* in the clock thread at *due* (lease time); it must not block.

        Finalizers may call this, which run at any moment in any thread; nothing else here.
        """
        self._clock.add(due, job)

    def submit(self, lane: Hashable, job: Callable[[], object], delay: float = 0.0) -> None:
        """Run *job* after *delay* seconds in an I/O thread, after all that its lane has to do."""
        if delay > 0:
            self.at(clock.lease_time() + delay, lambda: self.submit(lane, job))
            return
        with self._mutex:
            # In one step: an exception from outside may stop us after any.
            self._lanes.setdefault(lane, deque()).append(job)
            self._find_worker()

    def drain(self, seconds: float = 2.0) -> None:
        """Run here and now, at the exit of the interpreter, what the lanes still have to do."""
        forks.notice()
        ends = clock.lease_time() + seconds
        self._clock.run_due()
        while self._has_jobs() and clock.lease_time() < ends:
            with self._mutex:
                lane = self._take_free()
            if lane is None:
                time.sleep(SHORT)  # a worker is at what is left
            else:
                self._work_at(lane)

    def _has_jobs(self) -> bool:
        with self._mutex:
            return bool(self._busy) or any(self._lanes.values())

    def _find_worker(self) -> None:
        if self._idle:
            self._has_work.notify()
        # An idle one that was woken before may not have taken its lane yet.
        if len(self._free()) > self._idle and self._workers < WORKERS:
            try:
                start_daemon(self._work, "distlock-io")
                self._workers += 1
            except NoThreadError as error:
                warn("No thread for the work on locks, tried again soon: %s", error)
                self.at(clock.lease_time() + SOON, self._find_worker_now)

    def _find_worker_now(self) -> None:
        with self._mutex:
            self._find_worker()

    def _work(self) -> None:
        while (lane := self._next_lane()) is not None:
            self._work_at(lane)

    def _work_at(self, lane: Hashable) -> None:
        try:
            _run(self._lanes[lane].popleft())
        finally:
            with self._mutex:
                self._busy.discard(lane)
                # What is left goes to the end of the line of lanes.
                if jobs := self._lanes.pop(lane):
                    self._lanes[lane] = jobs

    def _next_lane(self) -> Hashable | None:
        with self._mutex:
            if not self._free():
                self._idle += 1
                try:
                    self._has_work.wait(LINGER)
                finally:
                    self._idle -= 1
            lane = self._take_free()
            if lane is None:
                self._workers -= 1
            return lane

    def _free(self) -> list[Hashable]:
        return [lane for lane, jobs in self._lanes.items() if jobs and lane not in self._busy]

    def _take_free(self) -> Hashable | None:
        lane = next(iter(self._free()), None)
        if lane is not None:
            self._busy.add(lane)
        return lane


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
        try:
            with self._mutex:
                heapq.heappush(self._jobs, (due, next(self._numbers), job))
                is_first, was_running = self._jobs[0][2] is job, self._is_running
                self._is_running = True
            if not was_running:
                start_daemon(self._run, "distlock-clock")
            elif is_first:
                self._bell.ring()
        except NoThreadError as error:
            self._is_running = False
            warn("No thread to extend leases, tried again with the next one: %s", error)
        except BaseException:
            # What comes from outside may have stopped the start: better a thread too many than none.
            self._is_running = False
            raise

    def run_due(self) -> bool:
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
        with self._mutex:
            if self._jobs:
                return self._jobs[0][0] - clock.lease_time()
            self._is_running = is_busy
            return LINGER if is_busy else None

    def _take_due(self) -> Callable[[], object] | None:
        with self._mutex:
            is_due = self._jobs and self._jobs[0][0] <= clock.lease_time()
            return heapq.heappop(self._jobs)[2] if is_due else None


class NoThreadError(Exception):
    """There can be no new thread: there are too many, or the interpreter ends."""


def start_daemon(target: Callable[[], object], name: str) -> None:
    """Start a thread that no exit waits for; NoThreadError if there can be none."""
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        # The start has others, when an exception from outside stops it.
        if "new thread" in str(error):
            raise NoThreadError(error) from error
        raise


def _run(job: Callable[[], object]) -> None:
    try:
        job()
    except BaseException:
        # Nothing may end these threads, sys.exit() least of all: the leases of a process depend on them.
        logger.exception("A background job of django_distlock failed", extra=log_fields())


background = Background()


class Alarm:
    """Runs *job* in the clock thread at the earliest time that was asked for, and then waits to be asked anew."""

    def __init__(self, job: Callable[[], object]) -> None:
        self._job = job
        self._mutex = threading.Lock()
        #: When it runs: lease time.
        self.due = math.inf

    def at(self, due: float) -> None:
        """Run the job at *due* (lease time), unless it runs before that anyway."""
        with self._mutex:
            if due < self.due:
                background.at(due, partial(self._ring, due))
                self.due = due

    def _ring(self, due: float) -> None:
        with self._mutex:
            if due != self.due:
                return  # an earlier time was asked for since, and what was due then has been done
            self.due = math.inf
        self._job()


class VerbThreads:
    """The threads in which the verbs of one backend run for asyncio: some for tries, others for ends.

    A release never stands behind the tries that wait for it.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._tries: dict[str, Future[Any]] = {}
        self._open()

    def _open(self) -> None:
        """Have new pools; none starts a thread before it has something to do."""
        self._pools = {
            name: ThreadPoolExecutor(size, thread_name_prefix=f"distlock-{self._alias}-{name}")
            for name, size in {"try": 4, "wait": WAITS, "release": 2}.items()
        }

    async def run_try(self, request: Request, verb: Callable[[], _T]) -> _T:
        """Run *verb* as a try; whatever comes after() it waits for its end."""
        return await self._run("try", request, verb)

    async def run_wait(self, request: Request, verb: Callable[[], _T]) -> _T:
        return await self._run("wait", request, verb)

    async def _run(self, name: str, request: Request, verb: Callable[[], _T]) -> _T:
        future = self._pools[name].submit(verb)
        self._tries[request.owner] = future
        future.add_done_callback(lambda _: self._tries.pop(request.owner, None))
        return await asyncio.wrap_future(future)

    async def run_release(self, verb: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._pools["release"].submit(verb))

    def after(self, request: Request, job: Callable[[], None]) -> None:
        """Run *job* once no try of *request* is under way: a cancelled task leaves its thread running."""
        if future := self._tries.get(request.owner):
            future.add_done_callback(lambda _: job())
        else:
            job()

    def close(self) -> None:
        pools = self._pools
        self._open()
        for pool in pools.values():
            pool.shutdown(wait=False)


forks.in_child(background.reset)
