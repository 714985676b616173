"""What operators do, in code and in commands: list who holds what, and end a holding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .conf import DEFAULT_ALIAS
from .engine.naming import checked_name
from .engine.steps import settled
from .engine.waiting import Place
from .engine.waits import LockId, waits
from .handler import locks

if TYPE_CHECKING:
    from .backends.base import BaseLockBackend
    from .engine.values import Held


def holdings(using: str, name: str | None = None) -> list[Held]:
    """Return who holds the locks of alias *using*: all of them, or the lock *name*.

    *waiters* includes callers of this process that the server does not know.
    NotSupported if the alias cannot list its locks, LockBackendError if its server does not answer.
    """
    backend = locks[using]
    key = None if name is None else backend.key_of(checked_name(name))
    # Read to its end: an open query blocks writers.
    found = settled(lambda: [*backend.held(key)])
    return [
        held if waiters == held.waiters else replace(held, waiters=waiters)
        for held in found
        for waiters in [_waiters(backend, held)]
    ]


def force_release(name: str, using: str = DEFAULT_ALIAS) -> int:
    """End what anybody holds of the lock *name*, also what min_hold reserves; return how many holdings it ended.

    The holder is not stopped: it learns at its next renewal that it has lost the lock, at once if it is
    in this process. NotSupported if the alias cannot list its locks.
    """
    backend = locks[using]
    return sum(backend.force_release(held.key, held.owner_digest) for held in holdings(using, name))


def _waiters(backend: BaseLockBackend, held: Held) -> int | None:
    if held.waiters is None:
        return waits.count(LockId(backend.location, held.key)) or None
    if (others := backend.queue.callers(held.key) - 1) == 0 == held.behind:
        return held.waiters
    # A waiter on the server counts those of its process, too; behind a holder there is none on the server.
    if (behind := backend.queue.behind(held.key)) is None:
        behind = others if backend.waiting.place is Place.NONE else held.behind
    return held.waiters + behind
