"""Who of this process waits for whose lock, so that callers who wait for each other are told at once."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from django_distlock.exceptions import LockDeadlock

from .caller import Caller, forks
from .naming import warn
from .registry import registry
from .waiting import Wait

#: What LockDeadlock says.
REASON = "others wait for a lock that this caller holds, and hold this one"


class LockId(NamedTuple):
    """One lock, whatever alias it is taken by."""

    location: Hashable
    key: str


class HeldBy(NamedTuple):
    """Who holds a lock and is not giving it back."""

    caller: Caller
    shared: bool


@dataclass(eq=False, slots=True)
class Waiter:
    """One attempt that blocks its caller; *came* is a number from arrive(), for a reader."""

    name: str
    lock: LockId
    caller: Caller
    shared: bool
    wait: Wait
    came: int = 0
    #: A number from arrive(): the server lets no reader pass by this writer that came after it.
    ahead_since: int | None = None

    def stand_before_readers(self) -> None:
        """Note, if it is a writer, that readers who come from now on are served after it."""
        if not self.shared and self.ahead_since is None:
            self.ahead_since = waits.arrive()


class Waits:
    """The callers that wait. Who holds what is looked up only when somebody begins to wait."""

    def __init__(self) -> None:
        self._arrivals = itertools.count(1)
        #: Tells the locks that are held otherwise than by a lease.
        self.other_holders: list[Callable[[], Iterator[tuple[LockId, HeldBy]]]] = []
        self.forget()

    def forget(self) -> None:
        """Begin anew in a forked child, where the threads that wait are not."""
        self._mutex = threading.Lock()
        self._waiting: dict[Caller, Waiter] = {}

    def arrive(self) -> int:
        return next(self._arrivals)

    def begin(self, waiter: Waiter) -> None:
        """Note that *waiter* waits; LockDeadlock if whoever it waits for waits for its caller.

        To look when somebody begins to wait is enough: who has just been served waits for nobody.
        """
        with self._mutex:
            self._waiting[waiter.caller] = waiter
            if not self._is_in_circle(waiter):
                return
            del self._waiting[waiter.caller]
        warn("Lock %s: deadlock", waiter.name, name=waiter.name)
        raise LockDeadlock(waiter.name, REASON)

    def end(self, waiter: Waiter) -> None:
        with self._mutex:
            if self._waiting.get(waiter.caller) is waiter:
                del self._waiting[waiter.caller]

    def count(self, lock: LockId) -> int:
        return sum(waiter.lock == lock for waiter in list(self._waiting.values()))

    def _is_in_circle(self, waiter: Waiter) -> bool:
        if len(self._waiting) == 1:
            return False
        holders = self._holders()
        reached, look = set[Caller](), [*self._ahead(waiter, holders)]
        while look:
            caller = look.pop()
            if caller not in reached:
                reached.add(caller)
                other = self._waiting.get(caller)
                if other is not None and not other.wait.is_over:
                    look += self._ahead(other, holders)
        return waiter.caller in reached

    def _ahead(self, waiter: Waiter, holders: dict[LockId, list[HeldBy]]) -> Iterator[Caller]:
        """Tell whom *waiter* waits for. Itself is none: another thread may release for it."""
        for holder in holders.get(waiter.lock, ()):
            if holder.caller != waiter.caller and not (waiter.shared and holder.shared):
                yield holder.caller
        if waiter.shared:
            for caller, other in self._waiting.items():
                since = other.ahead_since
                if other.lock == waiter.lock and since is not None and since < waiter.came:
                    yield caller

    def _holders(self) -> dict[LockId, list[HeldBy]]:
        found = defaultdict[LockId, list[HeldBy]](list)
        for lease in registry.leases():
            # One that was handed on is released by somebody else.
            if (caller := lease.caller) is not None and lease.is_kept:
                lock = LockId(lease.backend.location, lease.request.key)
                found[lock].append(HeldBy(caller, lease.shared))
        for lock, holder in itertools.chain(*(tell() for tell in self.other_holders)):
            found[lock].append(holder)
        return found


waits = Waits()
forks.in_child(waits.forget)
