"""All leases of this process, which are renewed while they are held."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

from django_distlock.exceptions import Contended
from django_distlock.ground import clock
from django_distlock.ground.caller import forks
from django_distlock.ground.mutexes import section
from django_distlock.ground.naming import warn
from django_distlock.signals import backend_failed, lock_extended

from .background import SHORT, Alarm, background
from .steps import settled
from .values import State

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from django_distlock.backends.base import BaseLockBackend

    from .holding import Holding
    from .values import Grant, Request

    Asked = Sequence[tuple[Holding, Request]]

#: Seconds between two searches for threads and tasks that ended without releasing their locks.
SWEEP = 1.0
#: Share of its ttl by which a lease may be renewed early, to be renewed with others in one request.
EARLY = 0.1


class Registry:
    """The leases that have not ended. The registry renews held leases after a third of their ttl, and finds lost ones."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._mutex = section()
        #: By id, each lease, and what is kept alive: the lease while its thread or task can still release it;
        #: after that, only its backend.
        self._known: dict[int, tuple[weakref.ref[Holding], Holding | BaseLockBackend]] = {}
        self._in_flight: set[Holding] = set()
        self._has_unattended = False
        self._alarm = Alarm(self._look)
        #: The id of the thread that ends this process; 0 before the end.
        self._ended_by = 0

    def add(self, lease: Holding) -> None:
        """Register *lease* before its first request; SystemExit at the end of the process, see refuse_at_end()."""
        lease.kept_in = self._known
        self._known[id(lease)] = lease.ref, lease
        if self._ended_by:
            self.refuse_at_end()

    def refuse_at_end(self) -> None:
        """Raise SystemExit, which ends a thread silently, if another thread is ending the process.

        A lock that is acquired then would not be released.
        """
        if self._ended_by not in {0, threading.get_ident()}:
            raise SystemExit

    def grant(self, lease: Holding, granted: Grant, asked: float) -> bool:
        """Make *lease* held, and plan its renewal; return False where Holding.grant() does."""
        is_held = lease.grant(granted, asked)
        if is_held and (look := min(lease.due, lease.granted_at + SWEEP)) < self._alarm.due:
            self._alarm.at(look)
        return is_held

    def let_go(self, lease: Holding) -> None:
        """Drop the reference to *lease*: its finalizer releases it when there is no other reference."""
        if self._keeps(lease):
            self._known[id(lease)] = lease.ref, lease.backend

    def _keeps(self, lease: Holding) -> bool:
        """Return True if the registry keeps *lease* alive."""
        return self._known.get(id(lease)) == (lease.ref, lease)

    def leases(self) -> list[Holding]:
        known = [ref() for ref, _ in list(self._known.values())]
        return [lease for lease in known if lease is not None]

    def disown(self) -> None:
        """Make every lease inert and start empty: a forked child holds none of its parent's locks."""
        for lease in self.leases():
            lease.disown()
        self._begin()

    def release_all(self, seconds: float = 2.0) -> None:
        """Release one lease after the other, also pending ones; stop after so many *seconds*."""
        forks.notice()
        ends = clock.wait_time() + seconds
        for lease in self.leases():
            if clock.wait_time() < ends:
                lease.entries = ()
                with contextlib.suppress(Exception):
                    if lease.end(State.RELEASED):
                        settled(partial(lease.backend.abandon, lease.request))

    def end(self, seconds: float) -> None:
        """Stop other threads from acquiring locks from now on, and release all leases."""
        forks.notice()
        self._ended_by = threading.get_ident()
        ends = clock.wait_time() + seconds
        # Daemon threads still run: a request under way may be granted after its lease was released.
        while clock.wait_time() < ends - seconds / 2 and any(
            each.is_asking for each in self.leases()
        ):
            time.sleep(SHORT)
        self.release_all(ends - clock.wait_time())

    # Renewal, and the search for leases that are lost or abandoned.

    def _held(self) -> list[Holding]:
        """Return the held leases; a lease whose deadline has passed becomes lost."""
        return [lease for lease in self.leases() if lease.held]

    def _look(self) -> None:
        if self._has_unattended:
            # An error and its frames may refer to a lease in a cycle, which only the garbage collector frees.
            self._has_unattended = False
            gc.collect()
        try:
            leases = self._held()
            self._end_what_is_over(leases)
            for backend, due in self._take_due().items():
                # In a separate lane: releases of this alias may wait for a server that hangs, perhaps one of several.
                background.submit((backend.alias, "renewal"), partial(self._extend, backend, due))
            if leases:
                self._alarm.at(self._next_due())
        except BaseException:
            # A callback or receiver of a lost lease may raise anything, SystemExit too.
            self._alarm.at(clock.lease_time() + SWEEP)
            raise

    def _end_what_is_over(self, leases: Iterable[Holding]) -> None:
        for lease in leases:
            if lease.held:
                lease.lose_with_session()
            if lease.is_unattended:
                # If no other code refers to the lease, its finalizer releases it. The registry keeps the
                # backend, which the finalizer needs.
                if self._keeps(lease) and lease not in self._in_flight:
                    self.let_go(lease)
                    self._has_unattended = True
                if not lease.is_entered:
                    lease.end_unattended()  # the thread or task that was releasing it has ended

    def _take_due(self) -> dict[BaseLockBackend, list[Holding]]:
        now = clock.lease_time()
        batches: dict[BaseLockBackend, list[Holding]] = {}
        leases = self._held()
        with self._mutex:
            for lease in leases:
                is_due = lease.due <= now + lease.request.ttl * EARLY
                if is_due and lease.renews and lease not in self._in_flight:
                    self._in_flight.add(lease)
                    batches.setdefault(lease.backend, []).append(lease)
        return batches

    def _extend(self, backend: BaseLockBackend, leases: list[Holding]) -> None:
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
            self._not_extended(backend, asked, error)
        else:
            for (lease, request), is_kept in zip(asked, kept, strict=True):
                if is_kept:
                    self._extended(lease, start, request.ttl)
                elif lease.is_entered:  # otherwise the lease is being released, not lost
                    lease.end(State.LOST, "the server says that it is not ours any more")

    def _not_extended(self, backend: BaseLockBackend, asked: Asked, error: Exception) -> None:
        if isinstance(error, Contended) and len(asked) > 1:
            # It concerns one of the locks, and must not keep the others from being renewed.
            for one in asked:
                self._extend_together(backend, [one])
            return
        for lease, _ in asked:
            lease.endanger()
            warn("Lock %s could not be renewed yet: %s", lease.name, error, of=lease)
            lease.announce(backend_failed, error=error, waited=None, requests=None)

    def _extended(self, lease: Holding, start: float, ttl: float) -> None:
        if not lease.backend.supports_extend:
            return  # extend() has only asked whether the lease is still held
        if (late := start - lease.due) > lease.request.ttl / 4:
            text = "Lock %s was renewed %s late: is this process busy?"
            warn(text, lease.name, clock.in_words(late), of=lease, late=late)
        lease.confirm(start, ttl)
        lease.announce(lock_extended, lease=lease)

    def _put_back(self, leases: list[Holding], start: float) -> None:
        """Plan the next renewal of *leases*, whose last renewal began at *start* (lease time)."""
        now = clock.lease_time()
        for lease in leases:
            # A lease in jeopardy is tried again soon: nine times in a ttl.
            ttl = lease.request.ttl
            lease.due = now + ttl / 9 if lease.in_jeopardy else max(now, start + ttl / 3)
        with self._mutex:
            self._in_flight.difference_update(leases)
        self._alarm.at(self._next_due())

    def _next_due(self) -> float:
        now, leases = clock.lease_time(), self._held()
        with self._mutex:
            dues = [each.due for each in leases if each.renews and each not in self._in_flight]
        ends = [lease.deadline for lease in leases]
        return max(now, min([now + SWEEP, *dues, *ends]))


def _by_server(backend: BaseLockBackend, asked: Asked) -> Iterable[Asked]:
    """Group the leases by server, so that a server that is down endangers only its own leases."""
    found: dict[Hashable, list[tuple[Holding, Request]]] = {}
    for lease, request in asked:
        try:
            server = backend.server_of(request)
        except Exception:  # noqa: BLE001 - no server is known now: extend() raises the reason
            server = None
        found.setdefault(server, []).append((lease, request))
    return found.values()


registry = Registry()
forks.in_child(registry.disown)
