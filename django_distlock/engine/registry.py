"""All leases of this process, which are renewed while they are held; and those that the running code holds."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from django_distlock.ground import clock
from django_distlock.ground.caller import forks
from django_distlock.ground.mutexes import section
from django_distlock.ground.naming import warn
from django_distlock.signals import backend_failed, lock_extended

from .announcements import announce
from .background import SHORT, Alarm, background
from .steps import settled

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence

    from django_distlock.backends.base import BaseLockBackend
    from django_distlock.engine.lease import Lease

    from .values import Request

    Asked = Sequence[tuple[Lease, Request]]
    #: Returns a lease, or None if there is none (any more).
    Known = Callable[[], "Lease | None"]
    #: Alias and Request.lock_key.
    _Lock = tuple[str, str]
    _Level = dict[_Lock, tuple[Known, ...]]

#: Seconds between two searches for threads and tasks that ended without releasing their locks.
SWEEP = 1.0
#: Share of its ttl by which a lease may be renewed early, to be renewed with others in one request.
EARLY = 0.1


class Registry:
    """The leases that have not ended. It renews held ones after a third of their ttl, and finds lost ones."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._mutex = section()
        #: By id, each lease, and what is kept alive: the lease while its thread or task can still release it;
        #: after that, only its backend.
        self._known: dict[int, tuple[weakref.ref[Lease], Lease | BaseLockBackend]] = {}
        self._in_flight: set[Lease] = set()
        self._has_unattended = False
        self._alarm = Alarm(self._look)
        #: The id of the thread that ends this process; 0 before the end.
        self._ended_by = 0

    def add(self, lease: Lease) -> None:
        """Register *lease*, before its first request; SystemExit at the end of the process, see refuse_at_end()."""
        self._known[id(lease)] = lease.ref, lease
        if self._ended_by:
            self.refuse_at_end()

    def refuse_at_end(self) -> None:
        """Raise SystemExit, which ends a thread silently, if another thread is ending the process.

        A lock that is acquired then would not be released.
        """
        if self._ended_by not in {0, threading.get_ident()}:
            raise SystemExit

    def granted(self, lease: Lease, now: float) -> None:
        """Begin to look after *lease*, held from *now* (lease time)."""
        look = min(lease.due, now + SWEEP)
        if look < self._alarm.due:
            self._alarm.at(look)

    def discard(self, lease: Lease) -> None:
        self._known.pop(id(lease), None)

    def let_go(self, lease: Lease) -> None:
        """Drop the reference to *lease*: its finalizer releases it when there is no other reference."""
        if self._keeps(lease):
            self._known[id(lease)] = lease.ref, lease.backend

    def _keeps(self, lease: Lease) -> bool:
        """Return whether *lease* is kept alive."""
        return self._known.get(id(lease)) == (lease.ref, lease)

    def leases(self) -> list[Lease]:
        known = [ref() for ref, _ in list(self._known.values())]
        return [lease for lease in known if lease is not None]

    def disown(self) -> None:
        """Make every lease inert and start empty: a forked child holds none of its parent's locks."""
        for lease in self.leases():
            lease.disown()
        self._begin()

    def release_all(self, seconds: float = 2.0) -> None:
        """Release one lease after the other, also those that may be held; stop after so many seconds."""
        forks.notice()
        ends = clock.wait_time() + seconds
        for lease in self.leases():
            if clock.wait_time() < ends:
                with contextlib.suppress(Exception):
                    lease.abandon()

    def end(self, seconds: float) -> None:
        """Stop other threads from acquiring locks from now on, and release all that are held."""
        forks.notice()
        self._ended_by = threading.get_ident()
        ends = clock.wait_time() + seconds
        # Daemon threads still run: a request that is under way may be granted after its lease was released.
        while clock.wait_time() < ends - seconds / 2 and any(
            each.is_asking for each in self.leases()
        ):
            time.sleep(SHORT)
        self.release_all(ends - clock.wait_time())

    # Renewal, and the search for leases that are lost or abandoned.

    def _held(self) -> list[Lease]:
        """Return the leases that are held; reading ``held`` reports one whose deadline has passed as lost."""
        return [lease for lease in self.leases() if lease.held]

    def _look(self) -> None:
        if self._has_unattended:
            # An error and its frames may refer to a lease, in a cycle that only the collector frees.
            self._has_unattended = False
            gc.collect()
        try:
            leases = self._held()
            self._end_what_is_over(leases)
            for backend, due in self._take_due().items():
                # Not behind what is to be given back to a server that hangs, perhaps one of several of this alias.
                background.submit((backend.alias, "renewal"), partial(self._extend, backend, due))
            if leases:
                self._alarm.at(self._next_due())
        except BaseException:
            # A callback or receiver of a lost lease may raise anything, SystemExit too.
            self._alarm.at(clock.lease_time() + SWEEP)
            raise

    def _end_what_is_over(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            if lease.held:
                lease.lose_with_session()
            if lease.is_unattended:
                # Other code may still refer to it. If none does, its finalizer releases it, by a
                # backend that is no garbage itself.
                if self._keeps(lease) and lease not in self._in_flight:
                    self.let_go(lease)
                    self._has_unattended = True
                if not lease.is_entered:
                    lease.end_unowned()  # the thread or task that was releasing it has ended

    def _take_due(self) -> dict[BaseLockBackend, list[Lease]]:
        now = clock.lease_time()
        batches: dict[BaseLockBackend, list[Lease]] = {}
        leases = self._held()
        with self._mutex:
            for lease in leases:
                is_due = lease.due <= now + lease.ttl * EARLY
                if is_due and lease.renews and lease not in self._in_flight:
                    self._in_flight.add(lease)
                    batches.setdefault(lease.backend, []).append(lease)
        return batches

    def _extend(self, backend: BaseLockBackend, leases: list[Lease]) -> None:
        start = clock.lease_time()
        # A lease that is being released is not renewed.
        entered = [lease for lease in leases if lease.held and lease.is_entered]
        asked = [(lease, request) for lease in entered if (request := lease.renewal())]
        try:
            for together in _by_server(backend, asked):
                self._extend_together(backend, together)
        finally:
            self._put_back(leases, start)

    def _extend_together(self, backend: BaseLockBackend, asked: Asked) -> None:
        start = clock.lease_time()
        try:
            kept = settled(partial(backend.extend, [request for _, request in asked]))
        except Exception as error:  # noqa: BLE001 - after any error, the deadline decides
            for lease, _ in asked:
                lease.endanger()
                warn("Lock %s could not be renewed yet: %s", lease.name, error, of=lease)
                announce(backend_failed, lease, error=error, waited=None, requests=None)
        else:
            for (lease, request), is_kept in zip(asked, kept, strict=True):
                if is_kept:
                    self._extended(lease, start, request.ttl)
                elif lease.is_entered:  # a lease that is being released meanwhile is not lost
                    lease.lose("the server says that it is not ours any more")

    def _extended(self, lease: Lease, start: float, ttl: float) -> None:
        if not lease.backend.supports_extend:
            return  # the server was only asked whether it is still held
        if (late := start - lease.due) > lease.ttl / 4:
            text = clock.in_words(late)
            warn(
                "Lock %s was renewed %s late: is this process busy?",
                lease.name,
                text,
                of=lease,
                late=late,
            )
        lease.confirm(start, ttl)
        announce(lock_extended, lease, lease=lease)

    def _put_back(self, leases: list[Lease], start: float) -> None:
        """Plan the next renewal of *leases*, whose last one began at *start* (lease time)."""
        now = clock.lease_time()
        for lease in leases:
            # A lease in jeopardy is tried again soon: nine times in a ttl.
            soon, later = now + lease.ttl / 9, max(now, start + lease.ttl / 3)
            lease.due = soon if lease.in_jeopardy else later
        with self._mutex:
            self._in_flight.difference_update(leases)
        self._alarm.at(self._next_due())

    def _next_due(self) -> float:
        now, leases = clock.lease_time(), self._held()
        with self._mutex:
            waiting = [each for each in leases if each.renews and each not in self._in_flight]
        dues = [lease.due for lease in waiting]
        ends = [lease.deadline for lease in leases]
        return max(now, min([now + SWEEP, *dues, *ends]))


def _by_server(backend: BaseLockBackend, asked: Asked) -> Iterable[Asked]:
    """Group the leases by server, so that a server that is down endangers only its own leases."""
    found: dict[Hashable, list[tuple[Lease, Request]]] = {}
    for lease, request in asked:
        try:
            server = backend.server_of(request)
        except Exception:  # noqa: BLE001 - no server is known now: extend() raises the reason
            server = None
        found.setdefault(server, []).append((lease, request))
    return found.values()


registry = Registry()
forks.in_child(registry.disown)


# What the running code holds, as far as its context knows: what re-entry looks at.

#: The leases held in this chain of contexts: what re-entry looks at. They are not kept alive by it:
#: copies of a context outlive the task in callbacks and in tasks that were begun by it.
#: No level is ever changed, as copies of the context have it too; each is longer than the next one, so
#: that one more lease costs a few steps, however many are held.
_held_here: ContextVar[tuple[_Level, ...]] = ContextVar("distlock_held_here", default=())


class Awaited:
    """The lease that aacquire() will bring, in the context of its caller: another task may await it."""

    def __init__(self, key: str) -> None:
        self.is_over = False
        self.known: Known | None = None
        self.key = key
        self._work: Callable[[], object] = lambda: None

    def note(self, using: str, work: Coroutine[Any, Any, Any]) -> None:
        """Make it known to re-entry, until *work*, which brings the lease, is over, or was dropped before it began."""
        self._work = weakref.ref(work)
        note_held_here(using, self.key, self)

    @property
    def may_come(self) -> bool:
        return not self.is_over and self._work() is not None

    def __call__(self) -> Lease | None:
        return self.known() if self.known else None


def held_here(using: str, key: str) -> list[Lease]:
    """Return the leases of a lock that this chain of contexts knows of, the last one last; some may have ended."""
    levels = _held_here.get()
    if not levels:
        return []
    known = [each for level in levels for each in level.get((using, key), ())]
    return [lease for each in known if (lease := each()) is not None]


def all_held_here() -> list[Lease]:
    """Return the leases of all locks that this chain of contexts knows of; see held_here()."""
    known = [each for level in _held_here.get() for of_lock in level.values() for each in of_lock]
    return [lease for each in known if (lease := each()) is not None]


def note_held_here(using: str, key: str, known: Known) -> None:
    """Make the lease that *known* returns known to re-entry, in this chain of contexts."""
    level: _Level = {(using, key): (known,)}
    levels = _held_here.get()
    while levels and len(levels[-1]) <= len(level):
        level = _merged(levels[-1], level)
        levels = levels[:-1]
    _held_here.set((*levels, level))


def forget_here(lease: Lease) -> None:
    """Remove *lease*, which has ended, from what re-entry knows, if it is the last one: most often it is."""
    levels = _held_here.get()
    if levels and [*levels[-1].values()] == [(lease.ref,)]:
        _held_here.set(levels[:-1])


def _merged(older: _Level, newer: _Level) -> _Level:
    """Return both levels as one, the last lease last, without what has ended."""
    locks = [*(lock for lock in older if lock not in newer), *newer]
    merged = {lock: _still_held((*older.get(lock, ()), *newer.get(lock, ()))) for lock in locks}
    return {lock: known for lock, known in merged.items() if known}


def _still_held(known: Iterable[Known]) -> tuple[Known, ...]:
    """Return what re-entry is to look at from now on, each lease once."""
    kept: dict[int, Known] = {}
    for each in known:
        lease = each()
        if lease is not None:
            if not lease.has_ended:
                kept[id(lease)] = lease.ref
        elif isinstance(each, Awaited) and each.may_come:
            kept[id(each)] = each
    return tuple(kept.values())
