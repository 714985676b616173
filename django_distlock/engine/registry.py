"""Every attempt and every lease of this process, from before its first request to its end; what is held is renewed."""

from __future__ import annotations

import contextlib
import gc
import threading
from functools import partial
from typing import TYPE_CHECKING

from django_distlock.signals import announce, backend_failed, lock_extended

from . import clock
from .background import Alarm, background
from .caller import forks
from .naming import warn
from .steps import settled

if TYPE_CHECKING:
    import weakref
    from collections.abc import Hashable, Iterable, Sequence

    from django_distlock.backends.base import BaseLockBackend
    from django_distlock.lease import Lease

    from .values import Request

    Asked = Sequence[tuple[Lease, Request]]

#: Seconds between two looks after threads and tasks that ended without releasing.
SWEEP = 1.0
#: Part of its ttl by which a lease may be renewed early, to go with others in one request.
EARLY = 0.1


class Registry:
    """The leases that have not ended. It extends those that are held at a third of their ttl, and finds those lost."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._mutex = threading.Lock()
        self._leases: dict[int, weakref.ref[Lease]] = {}
        #: Those whose thread or task may yet release them, though nobody has a reference; of others, the backend.
        self._kept: dict[int, Lease | BaseLockBackend] = {}
        self._in_flight: set[Lease] = set()
        self._has_unattended = False
        self._alarm = Alarm(self._look)

    def add(self, lease: Lease) -> None:
        self._kept[id(lease)] = lease
        self._leases[id(lease)] = lease.ref

    def granted(self, lease: Lease, now: float) -> None:
        """Look after *lease*, which is held since *now* (lease time)."""
        third = lease.request.ttl / 3
        lease.due = now + third
        look = now + min(third, SWEEP)
        if look < self._alarm.due:
            self._alarm.at(look)

    def discard(self, lease: Lease) -> None:
        self._leases.pop(id(lease), None)
        self._kept.pop(id(lease), None)

    def leases(self) -> list[Lease]:
        known = [lease() for lease in list(self._leases.values())]
        return [lease for lease in known if lease is not None]

    def disown(self) -> None:
        """Make every lease inert, and begin anew: a forked child holds nothing of its parent's."""
        for lease in self.leases():
            lease.disown()
        self._begin()

    def release_all(self, seconds: float = 2.0) -> None:
        """Give back all that is held or may be, one after the other, in so many seconds at most."""
        forks.notice()
        ends = clock.wait_time() + seconds
        for lease in self.leases():
            if clock.wait_time() < ends:
                with contextlib.suppress(Exception):
                    lease.abandon()

    # Looking after them.

    def _held(self) -> list[Lease]:
        """Return the leases that are held: asking makes one whose deadline has passed tell that it is lost."""
        return [lease for lease in self.leases() if lease.held]

    def _look(self) -> None:
        if self._has_unattended:
            # An error and its frames may have one of them, in a circle that only the collector ends.
            self._has_unattended = False
            gc.collect()
        leases = self._held()
        try:
            self._end_what_is_over(leases)
            for backend, due in self._take_due().items():
                background.submit(backend.alias, partial(self._extend, backend, due))
        finally:
            if leases:
                self._alarm.at(self._next_due())

    def _end_what_is_over(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            if lease.held and lease.backend.is_session_over(lease.request):
                lease.lose("the session that held it has ended")
            if lease.is_unattended:
                # It may be in somebody's hands; if it is not, its finalizer gives it back, by a backend
                # that is no garbage itself.
                if self._kept.get(id(lease)) is lease and lease not in self._in_flight:
                    self._kept[id(lease)] = lease.backend
                    self._has_unattended = True
                if not lease.is_entered:
                    lease.end_unowned()  # whoever was giving it back has ended meanwhile

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
        # What is being given back is not renewed.
        entered = [lease for lease in leases if lease.held and lease.is_entered]
        asked = [(lease, request) for lease in entered if (request := lease.renewal())]
        try:
            for together in _by_server(backend, asked):
                self._extend_together(backend, together)
        finally:
            self._put_back(leases)

    def _extend_together(self, backend: BaseLockBackend, asked: Asked) -> None:
        start = clock.lease_time()
        try:
            kept = settled(partial(backend.extend, [request for _, request in asked]))
        except Exception as error:  # noqa: BLE001 - whatever it is, the deadline decides
            for lease, _ in asked:
                lease.endanger()
                warn("Lock %s could not be renewed yet: %s", lease.name, error, of=lease)
                announce(backend_failed, lease, error=error, waited=None)
        else:
            for (lease, request), is_kept in zip(asked, kept, strict=True):
                if is_kept:
                    self._extended(lease, start, request.ttl)
                elif lease.is_entered:  # what is being given back meanwhile is not lost
                    lease.lose("the server says that it is not ours any more")

    def _extended(self, lease: Lease, start: float, ttl: float) -> None:
        if not lease.backend.supports_extend:
            return  # it was only looked at
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

    def _put_back(self, leases: list[Lease]) -> None:
        now = clock.lease_time()
        for lease in leases:
            # One that is in jeopardy is tried again soon: nine times in a ttl.
            lease.due = now + lease.ttl / (9 if lease.in_jeopardy else 3)
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
    """Return them by the server that keeps them: one that is down endangers no leases of others."""
    found: dict[Hashable, list[tuple[Lease, Request]]] = {}
    for lease, request in asked:
        try:
            server = backend.server_of(request)
        except Exception:  # noqa: BLE001 - nobody keeps it now: who asks for it is told why
            server = None
        found.setdefault(server, []).append((lease, request))
    return found.values()


registry = Registry()
forks.in_child(registry.disown)
