"""lead() and alead(): work that one process of many does, for as long as it has the lock."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar, Unpack

from .engine.waiting import Wait, WaitUntil
from .exceptions import LockBackendError, LockError, LockNotAcquired, LockNotHeld
from .lock import Lock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .engine.lease import Lease
    from .lock import LockTerms

_T = TypeVar("_T")
#: Most seconds until a server that has failed is asked again.
LONGEST_PAUSE = 10.0


class _Candidate(Lock):
    """A lock that is waited for until *stop* is set."""

    stop: threading.Event | None = None

    def __enter__(self) -> Lease:
        return self.enter(None if self.stop is None else WaitUntil(self.stop))


def lead(
    name: str,
    work: Callable[[Lease], _T],
    *,
    stop: threading.Event | None = None,
    **terms: Unpack[LockTerms],
) -> _T | None:
    """Wait for the lock *name*, call *work* with its lease, and return what that returns.

    If the lease was lost meanwhile, wait for the lock and call *work* again: it must look at ``lease.lost``, or
    call ``lease.check()``. Its exceptions come out, but for the LockLost of this lease. While the server fails,
    ask again after pauses, of at most 10 seconds.

    *stop* ends the wait, within a second: then return None. *terms* are those of lock(), without *timeout*.
    """
    candidate = _Candidate(name, timeout=None, **terms)  # type: ignore[misc]  # twice is once too often
    candidate.stop = stop
    ends, pauses = stop or threading.Event(), Wait(None)
    while not ends.is_set():
        lease = None
        try:
            with candidate as lease:
                pauses = Wait(None)
                result = work(lease)
                if lease.lost:  # told before the release, whose server may be down
                    lease.check()
                return result
        except (LockNotAcquired, LockNotHeld, LockBackendError) as error:
            ends.wait(_pause_after(error, lease, pauses))
    return None


async def alead(
    name: str, work: Callable[[Lease], Awaitable[_T]], **terms: Unpack[LockTerms]
) -> _T:
    """Do what lead() does, and cancel *work* when its lease is lost. To stop, cancel the task that awaits this."""
    candidate = Lock(name, timeout=None, cancel_when_lost=True, **terms)  # type: ignore[misc]  # as above
    pauses = Wait(None)
    while True:
        lease = None
        try:
            async with candidate as lease:
                pauses = Wait(None)
                result = await work(lease)
                if lease.lost:  # as above
                    lease.check()
                return result
        except (LockNotHeld, LockBackendError) as error:
            await asyncio.sleep(_pause_after(error, lease, pauses))


def _pause_after(error: LockError, lease: Lease | None, pauses: Wait) -> float:
    """Return the seconds until the lock is wanted again, after *error*, which is raised if the work has raised it."""
    is_of_work = lease is not None and not (isinstance(error, LockNotHeld) and lease.lost)
    if is_of_work:
        raise error
    return pauses.next_pause(longest=LONGEST_PAUSE) if isinstance(error, LockBackendError) else 0.0
