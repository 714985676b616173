"""Running calls in threads of their own, and bringing back what they return or raise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from django_distlock import lock
from django_distlock.engine import deadlocks as waiting
from django_distlock.engine.deadlocks import wait_graph
from django_distlock.engine.registry import registry

if TYPE_CHECKING:
    from django.dispatch import Signal

    from django_distlock import Lease, Lock
    from django_distlock.backends.base import BaseLockBackend

_T = TypeVar("_T")

#: Seconds after which a thread that has not come back fails its test.
LONGEST = 40.0
#: Seconds until everything must be free: a release by another thread, on a busy machine. What a
#: server carries out late is given back by a second look, two seconds after the first.
SOON = 6.0


def start(call: Callable[[], _T]) -> Future[_T]:
    """Run *call* in a new thread; the future has its outcome."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - goes to whoever asks the future
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def elsewhere(call: Callable[[], _T]) -> _T:
    """Return what *call* returns in another thread."""
    return start(call).result(LONGEST)


def together(*calls: Callable[[], _T]) -> list[_T]:
    """Run each of *calls* in a thread of its own, begun at one moment; return what they return."""
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], _T]) -> _T:
        ready.wait(LONGEST)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(run, call) for call in calls]
        return [future.result(LONGEST) for future in futures]


def taken(name: Any, **terms: Any) -> Lease:
    """Return a lease, which its caller releases."""
    lease = lock(name, **terms).acquire()
    assert lease
    return lease


async def ataken(name: Any, **terms: Any) -> Lease:
    """See taken()."""
    lease = await lock(name, **terms).aacquire()
    assert lease
    return lease


def can_take(using: str, name: str, timeout: float = 0, **terms: Any) -> bool:
    """Take the lock if it can be had within *timeout*, and give it back."""
    lease = lock(name, using=using, timeout=timeout, **terms).acquire()
    if lease:
        lease.release()
    return lease is not None


@contextmanager
def listening(signal: Signal, receiver: Callable[..., object]) -> Iterator[None]:
    """Connect *receiver* to *signal* during the block."""
    signal.connect(receiver)
    try:
        yield
    finally:
        signal.disconnect(receiver)


def take_and_release(using: str, name: str, timeout: float | None = 30) -> float:
    """Take the lock, give it back, and return when it was granted."""
    with lock(name, using=using, timeout=timeout):
        return time.monotonic()


@contextmanager
def held_in_thread(recipe: Lock) -> Iterator[Lease]:
    """Have another thread of this process hold the lock during the block."""
    over = threading.Event()
    taken: Future[Lease] = Future()

    def hold() -> None:
        with recipe as lease:
            taken.set_result(lease)
            over.wait(LONGEST)

    holder = start(hold)
    try:
        yield taken.result(LONGEST)
    finally:
        over.set()
        holder.result(LONGEST)


def length_of_line(backend: BaseLockBackend, name: str) -> int:
    """Return how many of this process hold the lock or wait for it, or stand in its line without being there."""
    lock = _lock(backend, name)
    line = backend.queue.lines.get(lock.key)
    leases = [lease for lease in registry.leases() if lease.is_kept]
    held = sum((lease.backend.location, lease.request.key) == lock for lease in leases)
    return max(held + waiting_for(backend, name), len(getattr(line, "callers", "1")) if line else 0)


def waiting_for(backend: BaseLockBackend, name: str) -> int:
    """Return how many of this process wait for the lock."""
    lock = _lock(backend, name)
    return sum(waiter.lock == lock for waiter in [*wait_graph._waiting.values()])


def is_contested(backend: BaseLockBackend, name: str) -> bool:
    """Return whether the line of this process knows that others want the lock."""
    line = backend.queue.lines.get(_lock(backend, name).key)
    return getattr(line, "is_contested", False)


def _lock(backend: BaseLockBackend, name: str) -> waiting.LockId:
    return waiting.LockId(backend.location, backend.request(name, ttl=1, holder=None).key)
