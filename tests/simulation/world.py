"""Virtual time, and threads that run one at a time, in an order that a seed decides.

A thread is a greenlet. It can be replaced by another one wherever it uses a mutex, a clock or a socket, and, in
a schedule with a fine grain, before any line of the package.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import greenlet

import django_distlock
from django_distlock.ground import caller, mutexes

if TYPE_CHECKING:
    from .processes import Process

PACKAGE = str(Path(django_distlock.__file__).parent)
#: Most seconds that one step takes.
STEP = 2e-5
#: Steps after which a schedule is taken for one that never ends.
MOST_STEPS = 400_000
_LOCALS: tuple[Any, ...] = (caller.here, mutexes.this_thread)


@cache
def _is_ours(path: str) -> bool:
    return path.startswith(PACKAGE)


class Over(BaseException):
    """Ends the threads of a schedule that is over."""


class Violation(Exception):
    """A promise was broken. *kind* is one word for it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.kind}: {self.args[1]}"


class Strand:
    """One simulated thread."""

    def __init__(
        self, world: World, process: Process, target: Callable[[], object], name: str
    ) -> None:
        self.world, self.process, self.name = world, process, name
        self.ident = next(world.idents)
        self.is_over = False
        #: The exception that is to be raised in it, and at how many more places it is not yet.
        self.pending: BaseException | None = None
        self.places_left = 0
        #: How likely another thread goes on before a line of the package.
        self.grain = process.grain
        self._random = world.random.random
        #: Whether it has been woken since it began to wait; None while it does not wait.
        self.was_woken: bool | None = None
        self._waits = 0
        self._target: Callable[[], object] | None = target
        self._locals: list[dict[str, Any]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hooks: Any = (None, None)
        self.greenlet = greenlet.greenlet(self._run, parent=world.hub)
        world.strands.append(self)

    def is_alive(self) -> bool:
        return not self.is_over

    def start(self) -> None:
        self.world.make_ready(self)
        self.world.step()

    def _run(self) -> None:
        target, self._target = self._target, None
        self.trace()
        try:
            assert target is not None
            target()
        except (Over, SystemExit):
            pass
        except BaseException as error:  # noqa: BLE001 - as threading's excepthook, which the schedule reads
            self.world.fail("thread", f"{self.name} ended with {error!r}", error)
        finally:
            sys.settrace(None)
            target = None
            self.is_over = True

    # What belongs to a thread, and is kept while another one runs.

    def enter(self) -> None:
        self.process.enter()
        if self._locals is None:
            for each in _LOCALS:
                each.__dict__.clear()
            caller.here.__init__()  # type: ignore[misc] # as threading does in each thread
        else:
            for each, known in zip(_LOCALS, self._locals, strict=True):
                each.__dict__.clear()
                each.__dict__.update(known)
        if self._loop is not self.world.loop:
            # Only then, as it asks the kernel for the pid.
            asyncio._set_running_loop(self._loop)
            self.world.loop = self._loop
        sys.set_asyncgen_hooks(*self._hooks)

    def leave(self) -> None:
        if self.is_over:  # its thread-locals end with it
            self._locals = []
            for each in _LOCALS:
                each.__dict__.clear()
        else:
            self._locals = [dict(each.__dict__) for each in _LOCALS]
        self._hooks = sys.get_asyncgen_hooks()

    def note_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Note that *loop* runs in this thread; None: no more."""
        self._loop = self.world.loop = loop

    # Asynchronous exceptions, and switches before a line.

    def interrupt(self, error: BaseException, places: int) -> None:
        """Have *error* raised in it where Python does that: when a function begins, or a call of C code has ended.

        It is raised at the place number *places* from now, or, for 0, also while it waits.
        """
        self.pending, self.places_left = error, places
        if not places and self.was_woken is False:
            self._waits += 1
            self.world.make_ready(self)

    def raise_pending(self, where: str) -> None:
        """Raise what is to be raised here."""
        if self.pending is not None:
            self.places_left -= 1
            if self.places_left <= 0:
                self.world.note("interrupted", self.name, where)
                raise self.take_pending() or Over

    def take_pending(self) -> BaseException | None:
        pending, self.pending = self.pending, None
        return pending

    def trace(self) -> None:
        if self.grain or self.pending is not None:
            sys.settrace(self._trace_call)
            if self.grain:
                frame, trace_line = sys._getframe(1), self._trace_line
                while frame is not None:
                    if _is_ours(frame.f_code.co_filename):
                        frame.f_trace = trace_line
                    frame = frame.f_back  # type: ignore[assignment] # None at the end

    def _trace_call(self, frame: Any, event: str, argument: object) -> Any:
        code = frame.f_code
        if not _is_ours(code.co_filename):
            return None
        if self.pending is not None:
            self.raise_pending(code.co_qualname)
        return self._trace_line if self.grain else None

    def _trace_line(self, frame: Any, event: str, argument: object) -> Any:
        if event == "line" and self._random() < self.grain:
            # While one thread is inside its trace function, CPython traces no other: the others would not be stopped.
            sys.call_tracing(self.world.pause, ())
            sys.settrace(self._trace_call)
        return self._trace_line

    # Waiting.

    def wait(self, seconds: float | None) -> bool:
        """Let others run until it is woken, or so many *seconds* of its process have passed; return whether it was woken."""
        self.was_woken = False
        self._waits += 1
        if seconds is not None:
            number = self._waits
            self.world.after(seconds / self.process.rate, lambda: self._time_out(number))
        self.world.switch_out()
        woken, self.was_woken = self.was_woken, None
        return bool(woken)

    def wake(self) -> None:
        if self.was_woken is False:
            self.was_woken = True
            self._waits += 1
            self.world.make_ready(self)

    def _time_out(self, number: int) -> None:
        if self._waits == number and self.was_woken is False:
            self._waits += 1
            self.world.make_ready(self)


class World:
    """One schedule: its clock, its threads and what is to happen."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 1000.0
        self.strands: list[Strand] = []
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self._entered: Strand | None = None
        self.running: Strand | None = None
        #: The process whose singletons the package has now.
        self.entered: Process
        self.idents = itertools.count(1000)
        self.hub = greenlet.getcurrent()
        self.is_over = False
        self.violation: Violation | None = None
        #: How likely a step lets another thread go on; and that it is held up, for how long at most.
        self.switching, self.stalling, self.longest_stall = 0.3, 0.0, 0.0
        self.steps = 0
        self.log: list[str] | None = None
        self._hash = 0
        self._ready: list[Strand] = []
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    @property
    def digest(self) -> str:
        """What the schedule did, as a number: the same seed gives the same one."""
        return f"{self._hash:08x}-{self.steps}"

    def note(self, *what: object) -> None:
        """Add *what* happened to the trace."""
        text = " ".join(map(str, what))
        self._hash = zlib.crc32(f"{self.now:.9f} {text}".encode(), self._hash)
        if self.log is not None:
            self.log.append(f"{self.now - 1000:12.6f} {text}")

    def fail(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Note that a promise was broken; the first one counts, and ends the schedule."""
        if self.violation is None and not self.is_over:
            self.note("VIOLATION", kind, text)
            self.violation = Violation(kind, text)
            self.violation.__cause__ = error

    def after(self, seconds: float, job: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + max(seconds, 0.0), next(self._numbers), job))

    def make_ready(self, strand: Strand) -> None:
        # Once: an exception may have come between the wake-up and the turn of the same thread.
        if strand not in self._ready:
            self._ready.append(strand)

    def run(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Run until nothing is left to do, *is_done*, or a promise was broken."""
        while self.violation is None and not is_done():
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            ready = [each for each in self._ready if each.process.runs]
            if ready:
                self._switch_to(ready[int(self.random.random() * len(ready))])
            elif self._events:
                self.now = max(self.now, self._events[0][0])
            else:
                return

    def step(self) -> None:
        """Let a little time pass; maybe let other threads run."""
        strand = self.running
        if self.is_over:
            raise Over
        if strand is None or greenlet.getcurrent() is self.hub:
            return
        random = self.random.random
        self.now += random() * STEP
        chance = random()
        if chance < self.stalling:
            self.after(random() * self.longest_stall, lambda: self.make_ready(strand))
            self.switch_out()
        elif chance < self.switching:
            self.pause()

    def end_call(self) -> None:
        """End what stands for a call of C code: Python looks for asynchronous exceptions then."""
        strand = self.running
        if strand is not None and strand.pending is not None and not self.is_over:
            strand.raise_pending("after a call")

    def pause(self) -> None:
        """Let other threads run."""
        if self.running is not None and not self.is_over:
            self._ready.append(self.running)
            self.switch_out()

    def switch_out(self) -> None:
        """Let others run until the running thread is made ready again."""
        strand = self.running
        assert strand is not None
        if self.is_over:
            raise Over
        sys.settrace(None)
        self.hub.switch()
        if self.is_over:
            raise Over
        if strand.pending is not None and strand.was_woken is False and not strand.places_left:
            strand.was_woken = None
            strand.raise_pending("waiting")
        strand.trace()

    def _switch_to(self, strand: Strand) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            self.fail("endless", f"after {MOST_STEPS} steps, it still goes on")
            return
        self._ready.remove(strand)
        self._hash = zlib.crc32(b"%d" % strand.ident, self._hash)
        self._enter(strand)
        strand.greenlet.switch()
        self.running = None
        if strand.is_over:
            self._leave()

    def _enter(self, strand: Strand) -> None:
        if self._entered is not strand:
            self._leave()
            strand.enter()
            self._entered = strand
        self.running = strand

    def _leave(self) -> None:
        if self._entered is not None:
            self._entered.leave()
            self._entered = None

    def end(self) -> None:
        """End all threads that are left."""
        self.is_over = True
        for strand in self.strands:
            if strand.greenlet and not strand.is_over:
                self._enter(strand)
                strand.greenlet.throw(Over)
        self._leave()
        self.running = None
        asyncio._set_running_loop(None)
        for loop in self.loops:
            _close(loop)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop whose process was killed, and its tasks, in silence."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined] # as asyncio itself does
        with suppress(BaseException):
            task.get_coro().close()
    if not loop.is_closed():
        loop.close()


#: The schedule that runs now.
_worlds: list[World] = []


def current() -> World:
    return _worlds[-1]


@contextmanager
def entered(world: World) -> Iterator[World]:
    """Make *world* the current one, and keep what belongs to the real thread."""
    kept = [dict(each.__dict__) for each in _LOCALS]
    hooks = sys.get_asyncgen_hooks()
    tracer = sys.gettrace()
    _worlds.append(world)
    try:
        yield world
    finally:
        world.end()
        _worlds.pop()
        for each, known in zip(_LOCALS, kept, strict=True):
            each.__dict__.clear()
            each.__dict__.update(known)
        sys.set_asyncgen_hooks(*hooks)
        sys.settrace(tracer)
