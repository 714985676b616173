"""Exceptions that come from outside, at any moment: they go up as they are, and leave nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from django_distlock import (
    Lease,
    Lock,
    LockBackendError,
    LockDeadlock,
    LockLost,
    LockNotHeld,
    LockNotOwned,
    lock,
    lock_all,
)
from django_distlock.backends.base import BaseLockBackend
from django_distlock.engine.background import background
from django_distlock.engine.values import State
from django_distlock.lock_set import LockSet
from tests.fixtures.eventually import eventually
from tests.fixtures.garbage import collect_garbage
from tests.fixtures.interruption import StopAt, TimeLimit, is_ours

from .crew import SOON, held_in_thread, length_of_line, start, taken
from .faults import Faulty, total
from .profiles import Profile, needs
from .rivals import Rivals

#: Seconds until a signal must have ended a wait, on a busy machine.
AT_ONCE = 4.0
#: At how many steps of a call an exception comes: at the last ones of an acquire, the first ones of leaving, and at some of all.
FIRST, LAST, STEPS = 20, 10, int(os.environ.get("DISTLOCK_STEPS", "10"))
#: Kinds of blocks.
LEFT = ["with", "with a lease", "inner with", "several, kept"]
RELEASED = ["lease.release", "lock.release", "lock_all.release", "lock_all.release, one lost"]
LEFT_BY_A_TASK = ["async with", "async with a lease", "arelease", "async several"]


@pytest.fixture(scope="module", autouse=True)
def interruptible() -> Iterator[None]:
    """Have Ctrl-C raise, also where the tests were started in the background, which ignores it.

    And say nothing of connections that a driver was kept from making; by no code that a signal could hit.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", id)
        yield
        signal.signal(signal.SIGINT, before)
        collect_garbage()  # here, where it is expected to complain


def test_ctrl_c_while_waiting_leaves_nothing(
    faulty: Faulty, using: str, name: str, rival: Rivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, other = rival(), rival()
    holder.takes()
    asked, me = total(faulty.calls), threading.get_ident()
    dropped, is_over = list[object](), threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda told: dropped.append(told.exc_type))

    def press() -> float:
        eventually(lambda: faulty.calls["wait_for"] or total(faulty.calls) > asked + 2)
        while True:
            dropped.clear()
            signal.pthread_kill(me, signal.SIGINT)
            pressed = time.monotonic()
            # Once more only if Python tells that a finalizer has dropped it.
            is_over.wait(AT_ONCE)
            if KeyboardInterrupt not in dropped:
                return pressed

    pressed = start(press)
    with pytest.raises(KeyboardInterrupt):
        try:
            lock(name, using=using, timeout=20).acquire()
        finally:
            is_over.set()
        pressed.result(10)  # which tells why none was pressed

    # Not when the server had answered, nor at the end of a slice of the wait.
    assert time.monotonic() - pressed.result(10) < AT_ONCE
    holder.leaves()
    other.takes(within=SOON)


@needs("typical")
def test_ctrl_c_while_waiting_in_the_line_of_the_process_holds_up_nobody(
    using: str, name: str, rival: Rivals, backend: BaseLockBackend
) -> None:
    other, me = rival(), threading.get_ident()

    def press() -> None:
        eventually(lambda: length_of_line(backend, name) == 2)
        signal.pthread_kill(me, signal.SIGINT)

    with held_in_thread(lock(name, using=using)):
        pressed = start(press)
        with pytest.raises(KeyboardInterrupt):
            lock(name, using=using, timeout=20).acquire()
        pressed.result(10)
        eventually(lambda: length_of_line(backend, name) == 1)

    with lock(name, using=using, timeout=SOON):  # its place is given up in the background
        assert not other.tries()
    assert other.tries()


@needs("typical")
def test_an_exception_set_on_a_thread_that_stands_in_line_holds_up_nobody(
    using: str, name: str, rival: Rivals, backend: BaseLockBackend
) -> None:
    other, idents = rival(), list[int]()
    # Whatever thread a first waiter starts is started: in Python 3.11 the exception may hit the new thread
    # instead, and whoever starts it waits for it for ever.
    with held_in_thread(lock(name, using=using)):
        assert lock(name, using=using, timeout=0.1).acquire() is None

    # A short timeout: in Python 3.11 threads that are traced, as for coverage, stand still until the
    # exception has been noticed, which is when the waiter wakes.
    def take() -> None:
        idents.append(threading.get_ident())
        with lock(name, using=using, timeout=1):
            pass

    with held_in_thread(lock(name, using=using)):
        waiting = start(take)
        eventually(lambda: length_of_line(backend, name) == 2)
        # What some task queues do to a job that takes too long.
        set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
        set_exception(ctypes.c_ulong(idents[0]), ctypes.py_object(TimeLimit))

    with pytest.raises(TimeLimit):
        waiting.result(20)
    eventually(lambda: length_of_line(backend, name) == 0)
    other.takes(within=SOON)


@needs("typical")
def test_a_time_limit_by_a_signal_goes_up_as_it_is_and_leaves_nothing(
    using: str, name: str, rival: Rivals
) -> None:
    names = [f"{name}:{number}" for number in range(12)]
    before = signal.signal(signal.SIGUSR1, _raise_time_limit)
    try:
        for each in names:
            holder = rival(of=each)
            holder.takes()
            _wait_until_the_time_limit(using, each, random.uniform(0, 0.03))
            holder.leaves()
    finally:
        signal.signal(signal.SIGUSR1, before)

    _come_free(rival, names)


def _come_free(rival: Rivals, names: Iterable[str]) -> None:
    for name in names:
        other = rival(of=name)
        other.takes(within=SOON)
        other.leaves()


def _raise_time_limit(*args: object) -> None:
    raise TimeLimit


def _wait_until_the_time_limit(using: str, name: str, seconds: float) -> None:
    me, is_on, is_over = threading.get_ident(), threading.Event(), threading.Event()

    def limit() -> None:
        assert is_on.wait(10)
        # Once more if nothing comes of it: finalizers and drivers may drop what is raised in them.
        wait = seconds
        while not is_over.wait(wait):
            signal.pthread_kill(me, signal.SIGUSR1)
            wait = 5.0

    limiting = start(limit)
    with pytest.raises(TimeLimit):
        try:
            is_on.set()
            lock(name, using=using, timeout=18).acquire()
        finally:
            is_over.set()
    limiting.result(10)


def test_an_exception_at_any_step_of_an_acquire_goes_up_and_leaves_nothing(
    using: str, name: str, rival: Rivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = list[object]()  # what finalizers raise goes up nowhere
    monkeypatch.setattr(sys, "unraisablehook", lambda told: dropped.append(told.exc_type))

    def calls_until(number: int, each: str) -> int:
        with StopAt(number) as step:
            lease = lock(each, using=using, timeout=0).acquire()
        assert lease
        lease.release()
        return step.calls

    # The first ones may have to connect.
    fewest = min(calls_until(0, f"{name}:{turn}") for turn in range(3))
    # The last ones come after the grant.
    steps = range(1, fewest)
    numbers = {*steps[-LAST:], *random.sample(steps, min(STEPS, len(steps)))}
    for number in numbers:
        with suppress(TimeLimit):
            made = calls_until(number, f"{name}:at:{number}")
            assert made < number or TimeLimit in dropped

    _come_free(rival, (f"{name}:at:{number}" for number in numbers))


@needs("typical")
@pytest.mark.parametrize("kind", [*LEFT, *RELEASED, *LEFT_BY_A_TASK])
def test_an_exception_at_any_step_of_leaving_goes_up_and_leaves_nothing(
    using: str, name: str, rival: Rivals, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    dropped, kept = list[object](), list[object]()  # what finalizers raise goes up nowhere
    monkeypatch.setattr(sys, "unraisablehook", lambda told: dropped.append(told.exc_type))

    def calls_until(number: int, each: str) -> int:
        recipe, step = lock(each, using=using), StopAt(number)
        with suppress(TimeLimit, LockLost):
            if kind in LEFT_BY_A_TASK:
                asyncio.run(_leave_in_a_task(kind, recipe, step, kept))
            else:
                _leave(kind, recipe, step, kept)
        sys.setprofile(None)
        return step.calls

    fewest = min(calls_until(0, f"{name}:{turn}") for turn in range(3))
    steps = range(1, fewest)
    numbers = {*steps[:FIRST], *random.sample(steps, min(STEPS, len(steps)))}
    for number in numbers:
        calls_until(number, f"{name}:at:{number}")

    _come_free(rival, (f"{name}:at:{number}{end}" for number in numbers for end in ("", ":2")))


def _leave(kind: str, recipe: Lock, step: StopAt, kept: list[object]) -> None:
    """Take *recipe*, and have *step* count the calls until it is given back."""
    if kind == "inner with":
        with recipe, lock(recipe.name, using=recipe.terms.using):
            step.__enter__()
        return
    block: Any = recipe
    if kind != "with":
        # At its first call, only its user could tell that it was to end.
        step.number += bool(step.number)
    if kind in {"with a lease", "lease.release"}:
        block = recipe.acquire()
    elif kind == "several, kept" or kind.startswith("lock_all.release"):
        block = lock_all(recipe.name, f"{recipe.name}:2", using=recipe.terms.using)
        kept.append(block)
    if kind in RELEASED:
        if kind != "lease.release":
            kept.append(leases := block.acquire())
            if kind == "lock_all.release, one lost":
                leases[0].end(State.LOST)
        step.__enter__()
        block.release()
        return
    with block:
        step.__enter__()


@needs("typical")
@pytest.mark.parametrize("of", [lock, lock_all])
def test_an_exception_in_a_release_of_what_is_not_held_goes_up(
    using: str, name: str, of: Callable[..., Lock | LockSet]
) -> None:
    recipe = of(name, using=using)

    for number in 1, 2, 3:
        with pytest.raises(TimeLimit), StopAt(number):
            recipe.release()


async def _leave_in_a_task(kind: str, recipe: Lock, step: StopAt, kept: list[object]) -> None:
    """Do what _leave() does in a task, which sees all steps before it ends."""
    block: Any = recipe
    step.number += bool(step.number)
    try:
        if kind in {"async with a lease", "arelease"}:
            block = await recipe.aacquire()
        elif kind == "async several":
            block = lock_all(recipe.name, f"{recipe.name}:2", using=recipe.terms.using)
        kept.append(block)  # otherwise it is found to be nobody's, as its task has ended
        if kind == "arelease":
            step.__enter__()
            await block.arelease()
            return
        async with block:
            step.__enter__()
    finally:
        sys.setprofile(None)


def _stopped_at_each_step(
    use: Callable[[Lease, StopAt], object], using: str, name: str
) -> list[str]:
    """Call *use* with a lease, and stop it at each of its steps, each time with another lock; return the locks' names."""

    def calls_until(number: int, each: str) -> int:
        lease, step = lock(each, using=using).acquire(), StopAt(number)
        assert lease
        use(lease, step)
        return step.calls

    steps = range(1, min(calls_until(0, f"{name}:{turn}") for turn in range(3)))
    names = [f"{name}:at:{number}" for number in steps]
    for number, each in zip(steps, names, strict=True):
        calls_until(number, each)
    return names


@needs("typical", "detach")
@pytest.mark.parametrize("verb", ["detach", "attach"])
def test_an_exception_at_any_step_of_a_handover_leaves_nothing(
    using: str, name: str, rival: Rivals, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", id)  # what finalizers raise goes up nowhere

    def use(lease: Lease, step: StopAt) -> None:
        if verb == "detach":
            with suppress(TimeLimit), lease:
                with step:
                    text = lease.detach()
                Lease.attach(text).release()
        else:
            text = lease.detach()
            with suppress(TimeLimit), step:
                lease = Lease.attach(text)
            with suppress(LockNotHeld):  # if the exception came before the request
                Lease.attach(text).release()
        if lease.held:
            lease.release()

    _come_free(rival, _stopped_at_each_step(use, using, name))


@pytest.mark.parametrize("verb", ["check", "extend"])
def test_an_exception_at_any_step_of_a_look_at_a_lease_does_not_keep_its_lock(
    using: str, name: str, rival: Rivals, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", id)  # what finalizers raise goes up nowhere

    def use(lease: Lease, step: StopAt) -> None:
        with suppress(TimeLimit), step:
            getattr(lease, verb)()
        # The lock of a session ends with a request that was interrupted.
        with suppress(LockLost, LockNotOwned):
            lease.release()

    _come_free(rival, _stopped_at_each_step(use, using, name))
    # Nor does it hold up what is given back in the background.
    is_done = threading.Event()
    background.submit(using, is_done.set)
    assert is_done.wait(SOON)


class InterruptAt:
    """Calls a handler between the lines of ours that this thread runs, as a signal might: at each, or at some."""

    def __init__(self, handler: Callable[[], object], every: int = 1) -> None:
        self._handler, self._every = handler, every
        self.lines = self.interrupts = 0
        # One object for all frames, kept here: CPython 3.11 has been seen to call another, freed before.
        self._tracing = self._trace

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._tracing)
        return self

    def __exit__(self, *args: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not is_ours(frame):
            return None
        self.lines += event == "line"
        if event == "line" and self.lines % self._every == 0:
            sys.settrace(None)
            self.interrupts += 1
            try:
                self._handler()
            finally:
                sys.settrace(self._tracing)
        return self._tracing


class TestASignalHandlerThatTakesALock:
    """At whatever line it comes, it does not wait for its own thread."""

    @pytest.fixture(autouse=True)
    def not_behind_a_statement(self, profile: Profile) -> None:
        if profile.name.startswith(("sqlite", "postgres-fair")):
            pytest.skip("an interrupted statement keeps rows from other writers, for io_timeout")

    def test_it_gets_another_lock(self, using: str, name: str, profile: Profile) -> None:
        handled = Counter[str]()

        def handle() -> None:
            try:
                with lock(f"{name}:handler", using=using, timeout=20):
                    handled["held"] += 1
            except LockDeadlock:
                handled["refused"] += 1

        def work() -> int:
            # At each line, there would be 1,400 requests to a server.
            interrupt = InterruptAt(handle, every=5)
            interrupt.lines = random.randrange(5)
            with interrupt, lock(name, using=using, timeout=20):
                pass
            return interrupt.interrupts

        interrupts = start(work).result(60)

        assert interrupts > 20
        assert handled.total() == interrupts
        # In memory, what the verb of another lock has half done is not touched.
        assert handled["refused"] == 0 or profile.name == "locmem"

    def test_it_is_told_that_the_same_lock_would_wait_for_itself(
        self, using: str, name: str, rival: Rivals
    ) -> None:
        outcomes = list[str]()

        def handle() -> None:
            try:
                with lock(name, using=using, timeout=None):
                    outcomes.append("held")
            except LockDeadlock:
                outcomes.append("told")

        def work() -> None:
            with InterruptAt(handle, every=5), lock(name, using=using, timeout=20):
                pass

        start(work).result(60)

        assert set(outcomes) == {"held", "told"}
        rival().takes(within=SOON)

    @pytest.mark.needs("session_bound")
    def test_it_extends_the_lease_that_it_interrupts_or_is_refused(
        self, using: str, name: str
    ) -> None:
        outcomes = Counter[str]()

        def work() -> bool:
            lease = taken(name, using=using)

            def handle() -> None:
                try:
                    lease.extend()
                    outcomes["extended"] += 1
                except LockBackendError:
                    outcomes["refused"] += 1

            with lease, InterruptAt(handle):
                lease.extend()
                return lease.held

        assert start(work).result(60)
        assert outcomes["extended"] > 1

    @pytest.mark.needs("session_bound")
    def test_it_releases_the_lease_that_it_interrupts(
        self, using: str, name: str, rival: Rivals
    ) -> None:
        def interrupt(every: int, each: str) -> int:
            lease = taken(each, using=using)

            failed = list[LockBackendError]()

            def handle() -> None:
                try:
                    lease.release()
                except LockNotHeld:
                    pass
                except LockBackendError as error:
                    failed.append(error)  # the request that it interrupts may hide it

            with suppress(LockNotHeld), InterruptAt(handle, every) as interrupted:
                lease.extend()
            assert not failed
            if not interrupted.interrupts:
                lease.release()
            assert lease.state is not State.HELD
            return interrupted.lines

        def work() -> None:
            lines = interrupt(10_000, name)
            for number in range(1, lines + 1, 3):
                interrupt(number, f"{name}:{number}")
                _come_free(rival, [f"{name}:{number}"])

        start(work).result(120)


@pytest.mark.parametrize("verb", ["try_acquire", "release"])
def test_ctrl_c_in_the_middle_of_a_request_leaves_nothing(
    faulty: Faulty, using: str, name: str, rival: Rivals, verb: str
) -> None:
    other = rival()
    faulty.press_ctrl_c(verb)

    with pytest.raises(KeyboardInterrupt), lock(name, using=using):
        pass

    other.takes(within=SOON)
