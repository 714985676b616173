"""Backends whose verbs can be watched, failed, hung, and cut off from their replies."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from django_distlock.backends.base import BaseLockBackend
from django_distlock.conf import BackendSettings
from django_distlock.engine.bells import TaskBell, ThreadBell
from django_distlock.engine.waiting import Queueing, Way
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from django_distlock.backends.locmem import LocMemBackend
    from django_distlock.engine.values import Busy, Grant, Release, Request

    _Base = LocMemBackend  # stands for whatever this is mixed into
else:
    _Base = object

#: Seconds that a hung verb hangs at most, so that a failing test ends.
LONGEST_HANG = 30.0


class Faulty(_Base):
    """Mixed into a real backend, which does all the work: what is added goes around its verbs."""

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.calls: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        #: Whether waiters hear no bell.
        self.is_deaf = False
        self._before: dict[str, Callable[[], None]] = {}
        self._after: dict[str, Callable[[], None]] = {}

    # What tests do to it.

    def fail(self, verb: str, times: float = float("inf")) -> None:
        """Let the next requests fail before they are carried out."""
        self._before[verb] = _a_few_times(times, self._refuse)

    def lose_replies(self, verb: str, times: float = 1) -> None:
        """Carry the next requests out, and lose what the server says."""
        self._after[verb] = _a_few_times(times, self._lose)

    def hang(self, verb: str) -> threading.Event:
        """Let requests hang before they reach the server, until the event that is returned is set."""
        return self._hang(self._before, verb)

    def hang_replies(self, verb: str) -> threading.Event:
        """Carry requests out, and let their replies hang until the event that is returned is set."""
        return self._hang(self._after, verb)

    def press_ctrl_c(self, verb: str) -> None:
        """Press Ctrl-C once, just when a request has been carried out."""
        self._after[verb] = _a_few_times(1, _press_ctrl_c)

    def notice(self, verb: str, callback: Callable[[], None]) -> None:
        """Call *callback* after each request."""
        self._after[verb] = callback

    def heal(self) -> None:
        """Be an ordinary backend again; what hangs goes on."""
        hung = [*self._before.values(), *self._after.values()]
        self._before, self._after = {}, {}
        for fault in hung:
            if isinstance(fault, _Hang):
                fault.over.set()

    # Its verbs.

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        with self._around("try_acquire"):
            return super().try_acquire(request, queued=queued, left=left)

    def wait_for(self, request: Request, left: float | None) -> Grant | Busy:
        with self._around("wait_for"):
            return super().wait_for(request, left)

    def release(self, request: Request) -> Release:
        with self._around("release"):
            return super().release(request)

    def revoke_all(self, requests: Sequence[Request]) -> Sequence[Release | Exception]:
        if not self.has_own("revoke_all"):
            return super().revoke_all(requests)
        try:
            with self._around("release"):
                return super().revoke_all(requests)
        except LockBackendError as error:
            return [error] * len(requests)

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        with self._around("extend"):
            return super().extend(requests)

    def take_over(self, request: Request, former: str) -> bool:
        with self._around("take_over"):
            return super().take_over(request, former)

    def end_holding(self, key: str, owner_digest: str) -> bool:
        with self._around("end_holding"):
            return super().end_holding(key, owner_digest)

    def probe(self, request: Request) -> Busy | None:
        with self._around("probe"):
            return super().probe(request)

    def probe_all(self, requests: Sequence[Request]) -> list[Busy | None]:
        if not self.has_own("probe_all"):
            return super().probe_all(requests)
        with self._around("probe"):
            return super().probe_all(requests)

    def enqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        with self._around("enqueue"):
            super().enqueue(request, _NoBell() if self.is_deaf else bell)

    def dequeue(self, request: Request) -> None:
        with self._around("dequeue"):
            super().dequeue(request)

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        if self._queues_before_sleeping():
            with self._around("enqueue"):
                pass
        if self.is_deaf:
            ThreadBell().wait(seconds)
        else:
            super().sleep(request, bell, seconds)

    # The twins, where the backend has some of its own: the others call the verbs above.

    async def atry_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        async with self._around_twin("try_acquire"):
            return await super().atry_acquire(request, queued=queued, left=left)

    async def aenqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        async with self._around_twin("enqueue"):
            await super().aenqueue(request, _NoBell() if self.is_deaf else bell)

    async def arelease(self, request: Request) -> Release:
        async with self._around_twin("release"):
            return await super().arelease(request)

    async def aextend(self, requests: Sequence[Request]) -> Sequence[bool]:
        async with self._around_twin("extend"):
            return await super().aextend(requests)

    async def atake_over(self, request: Request, former: str) -> bool:
        async with self._around_twin("take_over"):
            return await super().atake_over(request, former)

    async def aprobe(self, request: Request) -> Busy | None:
        async with self._around_twin("probe"):
            return await super().aprobe(request)

    async def aprobe_all(self, requests: Sequence[Request]) -> list[Busy | None]:
        if not self.has_own("aprobe_all"):
            return await super().aprobe_all(requests)
        async with self._around_twin("probe_all", "probe"):
            return await super().aprobe_all(requests)

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        if self._queues_before_sleeping():
            async with self._around_twin("sleep", "enqueue"):
                pass
        if self.is_deaf:
            await TaskBell().wait(seconds)
        else:
            await super().asleep(request, bell, seconds)

    def _queues_before_sleeping(self) -> bool:
        """Return whether who sleeps has been queued, though not by enqueue()."""
        waits = self.waiting
        return waits.way is Way.LISTEN and waits.queueing is not Queueing.ENQUEUE

    @asynccontextmanager
    async def _around_twin(self, verb: str, counted: str = "") -> AsyncIterator[None]:
        if not self.has_own(f"a{verb}"):
            yield
            return
        counted = counted or verb
        self.calls[counted] += 1
        await _in_a_thread(self._before.get(counted))
        yield
        self.answers[counted] += 1
        await _in_a_thread(self._after.get(counted))

    def has_own(self, verb: str) -> bool:
        real = type(self).__mro__[2]
        return getattr(real, verb) is not getattr(BaseLockBackend, verb)

    @contextmanager
    def _around(self, verb: str) -> Iterator[None]:
        self.calls[verb] += 1
        self._before.get(verb, _nothing)()
        try:
            yield
        finally:  # an error is an answer, too, such as that of a request that is interrupted
            self.answers[verb] += 1
        self._after.get(verb, _nothing)()

    def _refuse(self) -> None:
        raise LockBackendError(self.alias, "the test lets this request fail")

    def _lose(self) -> None:
        raise LockOutcomeUnknown(self.alias, "the test loses this reply")

    def _hang(self, faults: dict[str, Callable[[], None]], verb: str) -> threading.Event:
        fault = _Hang()
        faults[verb] = fault
        return fault.over


async def _in_a_thread(fault: Callable[[], None] | None) -> None:
    if fault is not None:
        await asyncio.to_thread(fault)


class _NoBell(ThreadBell):
    def ring(self) -> bool:
        return True


class _Hang:
    def __init__(self) -> None:
        self.over = threading.Event()

    def __call__(self) -> None:
        self.over.wait(LONGEST_HANG)


def _press_ctrl_c() -> None:
    raise KeyboardInterrupt


def _nothing() -> None:
    pass


def _a_few_times(times: float, fault: Callable[[], None]) -> Callable[[], None]:
    left = times
    mutex = threading.Lock()

    def limited() -> None:
        nonlocal left
        with mutex:
            left -= 1
            is_due = left >= 0
        if is_due:
            fault()

    return limited


def once(callback: Callable[[], None]) -> Callable[[], None]:
    """Return what calls *callback* when it is called first."""
    return _a_few_times(1, callback)


def faulty_version_of(backend: BaseLockBackend, settings: BackendSettings) -> Faulty:
    """Return another backend of the same class and settings, with Faulty around its verbs."""
    kind: type[Faulty] = type("Faulty", (Faulty, type(backend)), {})
    return kind(settings)


def total(calls: Counter[str]) -> int:
    """Return how many requests were made, of all kinds."""
    return sum(calls.values())
