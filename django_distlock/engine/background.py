"""Jobs for later or for another thread or task: one clock thread, and at most four threads for I/O.

They start when there is work and end when there is none. All are daemon threads, so the exit of the
interpreter does not wait for them.
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
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from django_distlock.exceptions import NotSent
from django_distlock.ground import clock
from django_distlock.ground.caller import forks
from django_distlock.ground.mutexes import section
from django_distlock.ground.naming import log_fields, warn

from .bells import ThreadBell, timeout
from .values import Request

logger = logging.getLogger("django_distlock")
_T = TypeVar("_T")

#: Threads for I/O: a hung server blocks one of them, and not the work for other servers.
WORKERS = 4
#: Seconds that an idle thread waits for work before it ends.
LINGER = 5.0
#: Seconds before another attempt to start a thread.
SOON = 0.25
#: Seconds between two looks whether other threads are done, at the exit.
SHORT = 0.005
#: Threads in which tasks try to acquire, for each backend that has no asyncio of its own.
TRIES = 4
#: Threads in which tasks wait on a server that keeps the queue: one for each lock waited for.
WAITS = 64
#: Seconds that a try without a timeout of its own waits for a free thread.
PATIENCE = 2.0
#: The tasks of kept_task() that are not done.
_tasks: set[asyncio.Task[Any]] = set()


class Background:
    """Runs jobs at their time, and I/O jobs in lanes: one after the other within a lane."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all jobs and threads: a parent's threads do not exist in a forked child."""
        self._mutex = section()
        self._clock = _Clock()
        # The jobs by lane, the lane that has waited longest first; and the lanes on which a thread works.
        self._lanes: dict[Hashable, deque[Callable[[], object]]] = {}
        self._busy: set[Hashable] = set()
        self._has_work = threading.Condition(self._mutex)
        self._workers = self._idle = 0

    def at(self, due: float, job: Callable[[], object]) -> bool:
        """Run *job* in the clock thread at *due* (lease time); it must not block.

        Return False if the clock thread does not run and cannot be started: the next call starts it.
        Finalizers, which run at any moment in any thread, may call this, but no other method here.
        """
        return self._clock.add(due, job)

    def submit(self, lane: Hashable, job: Callable[[], object], delay: float = 0.0) -> None:
        """Run *job* after *delay* seconds in an I/O thread, after the earlier jobs of its lane."""
        if delay > 0:
            self.at(clock.lease_time() + delay, lambda: self.submit(lane, job))
            return
        with self._mutex:
            try:
                # One step, because an asynchronous exception may come between two steps.
                self._lanes.setdefault(lane, deque()).append(job)
                self._find_worker()
            except BaseException:
                self.at(clock.lease_time(), self._find_worker)
                raise

    def drain(self, seconds: float = 2.0) -> None:
        """Run the remaining jobs in this thread, at the exit of the interpreter."""
        forks.notice()
        ends = clock.lease_time() + seconds
        self._clock.run_due()
        while self._has_jobs() and clock.lease_time() < ends:
            with self._mutex:
                lane = self._take_free()
            if lane is None:
                time.sleep(SHORT)  # other threads run the remaining jobs
            else:
                self._work_at(lane)

    def _has_jobs(self) -> bool:
        with self._mutex:
            return bool(self._busy) or any(self._lanes.values())

    def _find_worker(self) -> None:
        with self._mutex:
            if self._idle:
                self._has_work.notify()
            # Count lanes, because an idle thread that was woken before may not have taken its lane yet.
            if len(self._free()) > self._idle and self._workers < WORKERS:
                try:
                    start_daemon(self._work, "distlock-io")
                    self._workers += 1
                except NoThreadError as error:
                    warn("No thread for the work on locks, tried again soon: %s", error)
                    self.at(clock.lease_time() + SOON, self._find_worker)

    def _work(self) -> None:
        while (lane := self._next_lane()) is not None:
            self._work_at(lane)

    def _work_at(self, lane: Hashable) -> None:
        try:
            _run(self._lanes[lane].popleft())
        finally:
            with self._mutex:
                self._busy.discard(lane)
                # The lane's other jobs go to the end of the queue of lanes.
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
        lanes = list(self._lanes.items())
        return [lane for lane, jobs in lanes if jobs and lane not in self._busy]

    def _take_free(self) -> Hashable | None:
        lane = next(iter(self._free()), None)
        if lane is not None:
            self._busy.add(lane)
        return lane


class _Clock:
    """The thread that starts jobs when they are due."""

    def __init__(self) -> None:
        self._mutex = section()
        self._bell = ThreadBell()
        self._jobs: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._is_running = False

    def add(self, due: float, job: Callable[[], object]) -> bool:
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
            return False
        except BaseException:
            # An asynchronous exception may have stopped the start: one thread too many is better than no thread.
            self._is_running = False
            raise
        return True

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
    """No thread can be started: there are too many, or the interpreter is ending."""


def start_daemon(target: Callable[[], object], name: str) -> None:
    """Start a daemon thread; NoThreadError if none can be started."""
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        # An asynchronous exception during the start may cause other RuntimeErrors.
        if "new thread" in str(error):
            raise NoThreadError(error) from error
        raise


def kept_task(coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Start *coroutine* as a task, and keep a reference to the task, because event loops keep only weak ones."""
    task = asyncio.create_task(coroutine)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def _run(job: Callable[[], object]) -> None:
    try:
        job()
    except BaseException:
        # No error may end these threads, not even SystemExit: the leases of the process depend on them.
        logger.exception("A background job of django_distlock failed", extra=log_fields())


background = Background()


class Alarm:
    """Runs *job* in the clock thread at the earliest time that at() got, and then waits for the next at()."""

    def __init__(self, job: Callable[[], object]) -> None:
        self._job = job
        self._mutex = section()
        #: The time (lease time) of the next run.
        self.due = math.inf

    def at(self, due: float) -> None:
        """Run the job at *due* (lease time), unless it already runs earlier."""
        with self._mutex:
            if due < self.due and background.at(due, partial(self._ring, due)):
                # A finalizer may have set an earlier time during the call. Not min(), which could be interrupted, too.
                self.due = due if due < self.due else self.due  # noqa: FURB136

    def _ring(self, due: float) -> None:
        with self._mutex:
            if due != self.due:
                return  # an earlier time was set meanwhile, and the job has run then
            self.due = math.inf
        self._job()


def _carry_out(future: Future[_T], verb: Callable[[], _T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(verb())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            future.set_exception(error)
            del future, verb  # the frames of the error have them, and the future has the error


class VerbThreads:
    """The threads in which the verbs of one backend run for asyncio: some for tries, others for releases.

    So a release never waits for a thread behind the tries that wait for that release.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._tries: dict[str, Future[Any]] = {}
        self._open()

    def _open(self) -> None:
        """Make new pools; a pool starts no thread before its first job."""
        self._pools = {
            name: ThreadPoolExecutor(size, thread_name_prefix=f"distlock-{self._alias}-{name}")
            for name, size in {"try": TRIES, "wait": WAITS, "release": 2}.items()
        }

    async def run_try(
        self, request: Request, verb: Callable[[], _T], left: float | None = 0.0
    ) -> _T:
        """Run *verb* as a try of *request*; jobs of after() wait for the end of the try.

        NotSent if all threads are busy for *left* seconds; None: no limit, 0: PATIENCE.
        """
        return await self._run("try", request, verb, left)

    async def run_wait(self, request: Request, verb: Callable[[], _T], left: float | None) -> _T:
        return await self._run("wait", request, verb, left)

    async def _run(
        self, name: str, request: Request, verb: Callable[[], _T], left: float | None
    ) -> _T:
        future = self._submit(name, verb)
        self._tries[request.owner] = future
        future.add_done_callback(lambda _: self._tries.pop(request.owner, None))
        awaited = asyncio.wrap_future(future)
        if len(self._tries) > TRIES:
            try:
                async with timeout(PATIENCE if left == 0 else left):
                    await asyncio.wait([awaited])
            except TimeoutError:
                if future.cancel():  # no thread has begun it
                    problem = "other tasks keep all threads that take locks busy: the request was not sent in time"
                    raise NotSent(self._alias, problem) from None
            except asyncio.CancelledError:
                awaited.cancel()
                raise
        return await awaited

    async def run_release(self, verb: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._submit("release", verb))

    def _submit(self, name: str, verb: Callable[[], _T]) -> Future[_T]:
        """Run *verb* in a thread of the pool *name*; NotSent if none can be started."""
        future = Future[_T]()
        try:
            self._pools[name].submit(_carry_out, future, verb)
        except RuntimeError as error:
            if "new thread" not in str(error):
                raise  # the interpreter is ending
            # The pool has queued it all the same, and another thread of the pool may have begun it.
            if future.cancel():
                raise NotSent(self._alias, f"the request was not sent: {error}") from error
        return future

    def after(self, request: Request, job: Callable[[], None]) -> None:
        """Run *job* when no try of *request* is running: a cancelled task leaves its thread running."""
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
