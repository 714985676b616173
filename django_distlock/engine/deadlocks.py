"""Deadlocks in this process: callers that wait for each other's locks get LockDeadlock at once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from django_distlock.exceptions import LockDeadlock
from django_distlock.ground.caller import Caller, forks
from django_distlock.ground.mutexes import section
from django_distlock.ground.naming import warn

from .registry import registry
from .waiting import Wait

#: The reasons in LockDeadlock.
REASON = "others wait for a lock that this caller holds, and hold this one"
OWN = "this caller holds it itself, by transaction_lock() or by lock(), and would wait for itself"


class LockId(NamedTuple):
    """The identity of one lock, the same for all aliases through which it can be acquired."""

    location: Hashable
    key: str


class HeldBy(NamedTuple):
    """The caller that holds a lock and is not releasing it; *transaction*: the connection whose transaction holds it."""

    caller: Caller
    shared: bool
    transaction: object | None = None


@dataclass(eq=False, slots=True)
class Waiter:
    """One attempt that blocks its caller; for a reader, *came* is its number from arrive()."""

    name: str
    lock: LockId
    caller: Caller
    shared: bool
    wait: Wait
    came: int = 0
    #: A writer's number from arrive(): readers with later numbers are served after this writer.
    ahead_since: int | None = None
    #: The connection of the caller's transaction that is to hold the lock; None: a lease is to hold it.
    transaction: object | None = None


class WaitGraph:
    """The callers that wait for locks. Holders are looked up only when a caller begins to wait."""

    def __init__(self) -> None:
        self._arrivals = itertools.count(1)
        #: Functions that return the locks held without a lease.
        self.other_holders: list[Callable[[], Iterator[tuple[LockId, HeldBy]]]] = []
        self.forget()

    def forget(self) -> None:
        """Start empty in a forked child: the parent's waiting threads do not exist there."""
        self._mutex = section()
        self._waiting: dict[Caller, Waiter] = {}

    def arrive(self) -> int:
        return next(self._arrivals)

    def begin(self, waiter: Waiter) -> None:
        """Note that *waiter* waits; LockDeadlock if a caller that it waits for waits for the caller of *waiter*.

        Checking when a wait begins is enough, because a caller that has just acquired a lock waits for none.
        """
        with self._mutex:
            self._waiting[waiter.caller] = waiter
            reason = self._reason_against(waiter)
            if reason is None:
                return
            del self._waiting[waiter.caller]
        warn("Lock %s: deadlock", waiter.name, name=waiter.name)
        raise LockDeadlock(waiter.name, reason)

    def end(self, waiter: Waiter) -> None:
        with self._mutex:
            if self._waiting.get(waiter.caller) is waiter:
                del self._waiting[waiter.caller]

    def _reason_against(self, waiter: Waiter) -> str | None:
        """Return why *waiter* would wait for ever; None if it would not."""
        in_transactions = [held for tell in self.other_holders for held in tell()]
        if len(self._waiting) == 1 and not in_transactions and waiter.transaction is None:
            return None
        holders = self._holders(in_transactions)
        reached, look = set[Caller](), [*self._ahead(waiter, holders)]
        if waiter.caller in look:
            return OWN
        while look:
            caller = look.pop()
            if caller not in reached:
                reached.add(caller)
                other = self._waiting.get(caller)
                if other is not None and not other.wait.is_over:
                    look += self._ahead(other, holders)
        return REASON if waiter.caller in reached else None

    def _ahead(self, waiter: Waiter, holders: dict[LockId, list[HeldBy]]) -> Iterator[Caller]:
        """Return the callers that *waiter* waits for.

        The caller waits for itself if one of the two is a transaction's lock and the other is not, or is another
        transaction's: it cannot release while it waits. With two leases, another thread may release the first.
        """
        for holder in holders.get(waiter.lock, ()):
            is_alike = holder.transaction is waiter.transaction
            if holder.caller == waiter.caller and is_alike:
                continue
            if not (waiter.shared and holder.shared):
                yield holder.caller
        if waiter.shared:
            for caller, other in self._waiting.items():
                since = other.ahead_since
                if other.lock == waiter.lock and since is not None and since < waiter.came:
                    yield caller

    def _holders(self, otherwise: Iterable[tuple[LockId, HeldBy]]) -> dict[LockId, list[HeldBy]]:
        found = defaultdict[LockId, list[HeldBy]](list)
        for lease in registry.leases():
            # Other code releases a lease without caller, which was handed on.
            if (caller := lease.caller) is not None and lease.is_kept:
                lock = LockId(lease.backend.location, lease.request.key)
                found[lock].append(HeldBy(caller, lease.request.shared))
        for lock, holder in otherwise:
            found[lock].append(holder)
        return found


wait_graph = WaitGraph()
forks.in_child(wait_graph.forget)
