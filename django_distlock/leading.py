"""lead() and alead(): work that one process of many does, for as long as it has the lock."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar, Unpack

from asgiref.sync import iscoroutinefunction

from .decorators import refuse_unfinished
from .engine.cancelling import is_loss
from .engine.waiting import Wait
from .exceptions import LockBackendError, LockNotAcquired, LockNotHeld
from .lock import Lock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .backends.base import BaseLockBackend
    from .engine.lease import Lease
    from .lock import LockTerms

_T = TypeVar("_T")
_RIGHT = "finish the work before it returns, or write await alead(...)"
#: Most seconds until a server that has failed is asked again.
LONGEST_PAUSE = 10.0


class _Candidate(Lock):
    """A lock whose acquire() waits until *stop* is set."""

    stop: threading.Event | None = None

    def _pending(self, backend: BaseLockBackend, key: str) -> Lease:
        lease = super()._pending(backend, key)
        lease.stop = self.stop
        return lease


def lead(
    name: str,
    work: Callable[[Lease], _T],
    *,
    stop: threading.Event | None = None,
    **terms: Unpack[LockTerms],
) -> _T | None:
    """Wait for the lock *name*, call *work* with its lease, and return the result of *work*.

    If the lease was lost meanwhile, wait for the lock and call *work* again: *work* must look at ``lease.lost``, or
    call ``lease.check()``. Exceptions of *work* are raised, except the LockLost of this lease, alone or in an
    exception group. While the server fails, ask again after pauses of at most 10 seconds.

    If *stop* is set, the wait ends within a second and None is returned. *terms* are those of lock(), without *timeout*.
    """
    if iscoroutinefunction(work):
        raise TypeError("lead() calls a function; write await alead(...) for a coroutine function.")
    if "timeout" in terms:
        raise TypeError("lead() waits until it leads; write stop=threading.Event(), not timeout.")
    candidate = _Candidate(name, timeout=None, **terms)  # type: ignore[misc]  # a timeout in *terms* was refused
    candidate.stop = stop
    ends, pauses = stop or threading.Event(), Wait(None)
    while not ends.is_set():
        lease, results = None, list[_T]()
        try:
            with candidate as lease:
                pauses = Wait(None)
                results.append(work(lease))
                refuse_unfinished(results[0], "The function of lead", _RIGHT)
                if lease.lost:  # raise LockLost before the release, whose server may be down
                    lease.check()
        except (LockNotAcquired, LockNotHeld, LockBackendError, BaseExceptionGroup) as error:
            if not _is_kept(results, error, lease):
                ends.wait(_pause_after(error, lease, pauses))
                continue
        return results[0]
    return None


async def alead(
    name: str, work: Callable[[Lease], Awaitable[_T]], **terms: Unpack[LockTerms]
) -> _T:
    """Do what lead() does, and cancel *work* when its lease is lost, unless *cancel_when_lost* is False.

    To stop it, cancel the task that awaits it.
    """
    if not iscoroutinefunction(work):
        raise TypeError(
            "alead() awaits a coroutine function; write lead(...) for a function, "
            "and functools.partial(work, ...) in place of a lambda."
        )
    if "timeout" in terms:
        raise TypeError("alead() waits until it leads; cancel its task, and leave out timeout.")
    given: LockTerms = {"timeout": None, "cancel_when_lost": True, **terms}
    candidate = Lock(name, **given)
    pauses = Wait(None)
    while True:
        lease, results = None, list[_T]()
        try:
            async with candidate as lease:
                pauses = Wait(None)
                results.append(await work(lease))
                if lease.lost:  # as above
                    lease.check()
        except (LockNotAcquired, LockNotHeld, LockBackendError, BaseExceptionGroup) as error:
            if not _is_kept(results, error, lease):
                await asyncio.sleep(_pause_after(error, lease, pauses))
                continue
        return results[0]


def _is_kept(results: list[_T], error: BaseException, lease: Lease | None) -> bool:
    """Return True, and log *error*, if the work has returned under the lock and only the release has failed."""
    if lease is None or not results or not isinstance(error, LockBackendError):
        return False
    lease.warn_of(error)
    return True


def _pause_after(error: BaseException, lease: Lease | None, pauses: Wait) -> float:
    """Return the seconds to wait after *error*; raise *error* if the work raised it, unless it is the loss of *lease*."""
    if lease is not None and not is_loss(error, lease):
        raise error
    # In tests with a lock that is busy for everybody, LockNotAcquired comes at once.
    is_refused = isinstance(error, (LockNotAcquired, LockBackendError))
    return pauses.next_pause(longest=LONGEST_PAUSE) if is_refused else 0.0
