"""Running a recipe: its steps send requests back to back, and go on with the outcomes of all."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
from collections.abc import Generator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

from django_distlock.engine import clock
from django_distlock.engine.bells import timeout

_T = TypeVar("_T")

#: Seconds after which who waits for a reply looks whether anybody wants it still.
SLICE = 0.25
#: Yields kazoo's results of requests that are sent; is sent what each came to, errors as they are.
Steps: TypeAlias = Generator[Sequence[Any], list[Any], _T]


class Silence(Exception):
    """No reply within the time that was given."""


def value(outcome: Any) -> Any:
    """Return *outcome*, or raise it."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def run(steps: Steps[_T], ends: float) -> _T:
    """Run *steps*; from *ends* (wait time) on no reply is waited for.

    In a thread of their own: an exception that a signal handler raises, or that is set on this
    thread, would be lost where it meets kazoo at work, which catches all, or leave it locked.
    """
    work = _Work(steps, ends)
    try:
        _begin(work)
        work.wait()
    except BaseException:
        work.give_up()
        raise
    return work.answer()


def _begin(work: _Work[_T]) -> None:
    try:
        _thread.start_new_thread(work.run, ())
    except RuntimeError:  # there are no new threads while the interpreter ends
        work.run()


class _Work(Generic[_T]):
    """Steps that run in another thread, and what they come to."""

    def __init__(self, steps: Steps[_T], ends: float) -> None:
        self._steps = steps
        self._ends = ends
        self._answer: _T | None = None
        self._error: BaseException | None = None
        self._is_given_up = self._is_over = False
        # They are waited for in C: nothing can leave them in a state that is none.
        self._begun, self._over = _thread.allocate_lock(), _thread.allocate_lock()
        self._over.acquire()

    def wait(self) -> None:
        """Wait for the end."""
        while not self._is_over:
            self._over.acquire(True, 1.0)

    def give_up(self) -> None:
        """Leave no request under way: what has not begun does not begin."""
        self._is_given_up = True
        if not self._begun.acquire(blocking=False):
            self.wait()

    def answer(self) -> _T:
        """Return what came of it, or raise it."""
        if self._error is not None:
            raise self._error
        return cast("_T", self._answer)

    def run(self) -> None:
        """Run the steps, until nobody waits for them."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._answer = self._run()
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for
            self._error = error
        finally:
            self._is_over = True
            self._over.release()

    def _run(self) -> _T | None:
        with contextlib.closing(self._steps):
            try:
                batch = next(self._steps)
                while not self._is_given_up:
                    for result in batch:
                        self._wait_for(result)
                    batch = self._steps.send([_outcome(result) for result in batch])
            except StopIteration as end:
                answer: _T = end.value
                return answer
        return None

    def _wait_for(self, result: Any) -> None:
        """Wait for one reply: not beyond the end, and not for long once the steps are given up."""
        while not (result.ready() or self._is_given_up):
            left = self._ends - clock.wait_time()
            if left <= 0:
                return
            result.wait(min(left, SLICE))


async def arun(steps: Steps[_T], ends: float) -> _T:
    """See run(); the event loop waits, and no thread."""
    with contextlib.closing(steps):
        try:
            batch = next(steps)
            while True:
                await _all_ready(batch, ends)
                batch = steps.send([_outcome(result) for result in batch])
        except StopIteration as end:
            answer: _T = end.value
            return answer


def _outcome(result: Any) -> Any:
    if not result.ready():
        return Silence()
    return result.value if result.successful() else result.exception


async def _all_ready(batch: Sequence[Any], ends: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with timeout(max(0.0, ends - clock.wait_time())):
            for result in batch:
                if not result.ready():
                    await _ready(result)


async def _ready(result: Any) -> None:
    loop, is_ready = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(is_ready.set)

    result.rawlink(tell)
    try:
        await is_ready.wait()
    finally:
        result.unlink(tell)
