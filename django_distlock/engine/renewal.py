"""The renewing of leases: one schedule for the process, batched per backend."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

from django_distlock.signals import announce, lock_extended

from . import clock
from .background import Alarm, background
from .forks import forks
from .naming import printable
from .registry import registry
from .settling import settled

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from django_distlock.holding import Holding, LeaseBackend

    from .values import Request

    Asked = Sequence[tuple[Holding, Request]]

logger = logging.getLogger("django_distlock")

#: Seconds between two looks after threads and tasks that ended without releasing.
SWEEP = 1.0
#: Part of its ttl by which a lease may be renewed early, to go with others in one request.
EARLY = 0.1


class Renewal:
    """Extends every held lease at a third of its ttl and tells of those that are lost."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: in a forked child no lease is ours."""
        self._mutex = threading.Lock()
        self._in_flight: set[Holding] = set()
        self._alarm = Alarm(self._look)

    def watch(self, lease: Holding) -> None:
        """Look after *lease* until it ends."""
        lease.due = clock.lease_time() + lease.ttl / 3
        self._alarm.at(clock.lease_time() + min(lease.ttl / 3, SWEEP))

    def _look(self) -> None:
        """Do what is due, and come back when the next thing is."""
        leases = _held()
        try:
            self._end_what_is_over(leases)
            self._renew(self._take_due())
        finally:
            if leases:
                self._alarm.at(self._next_due())

    def _end_what_is_over(self, leases: Iterable[Holding]) -> None:
        for lease in leases:
            if lease.held and lease.backend.is_session_over(lease.request):
                lease.lose("the session that held it has ended")
            if lease.is_unattended:
                # It may be in somebody's hands; if it is not, its finalizer gives it back.
                registry.let_go(lease)
                if not lease.is_entered:
                    lease.end_unowned()  # whoever was giving it back has ended meanwhile

    def _take_due(self) -> dict[LeaseBackend, list[Holding]]:
        now = clock.lease_time()
        batches: dict[LeaseBackend, list[Holding]] = {}
        leases = _held()
        with self._mutex:
            for lease in leases:
                is_due = lease.due <= now + lease.ttl * EARLY
                if is_due and lease.renews and lease not in self._in_flight:
                    self._in_flight.add(lease)
                    batches.setdefault(lease.backend, []).append(lease)
        return batches

    def _renew(self, batches: dict[LeaseBackend, list[Holding]]) -> None:
        for backend, leases in batches.items():
            background.submit(backend.alias, partial(self._extend, backend, leases))

    def _extend(self, backend: LeaseBackend, leases: list[Holding]) -> None:
        # What is being given back is not renewed.
        entered = [lease for lease in leases if lease.held and lease.is_entered]
        asked = [(lease, request) for lease in entered if (request := lease.renewal())]
        try:
            for together in _by_server(backend, asked):
                self._extend_together(backend, together)
        finally:
            self._put_back(leases)

    def _extend_together(self, backend: LeaseBackend, asked: Asked) -> None:
        start = clock.lease_time()
        try:
            kept = settled(partial(backend.extend, [request for _, request in asked]))
        except Exception as error:  # noqa: BLE001 - whatever it is, the deadline decides
            self._endanger(asked, error)
        else:
            for (lease, request), is_kept in zip(asked, kept, strict=True):
                self._take_note(lease, start, request, is_kept=is_kept)

    def _take_note(self, lease: Holding, start: float, request: Request, *, is_kept: bool) -> None:
        if not is_kept:
            # What is being given back meanwhile is not lost.
            if lease.is_entered:
                lease.lose("the server says that it is not ours any more")
            return
        if not lease.backend.supports_extend:
            return  # it was only looked at
        self._warn_if_late(lease, start)
        lease.confirm(start, request.ttl)
        announce(
            lock_extended, type(lease.backend), name=lease.name, using=lease.using, lease=lease
        )

    def _warn_if_late(self, lease: Holding, start: float) -> None:
        late = start - lease.due
        if late > lease.ttl / 4:
            logger.warning(
                "Lock %s was renewed %.3g s late: is this process busy?",
                printable(lease.name),
                late,
            )

    def _endanger(self, asked: Asked, error: Exception) -> None:
        for lease, _ in asked:
            lease.endanger()
            logger.warning(
                "Lock %s could not be renewed yet: %s", printable(lease.name), printable(error)
            )

    def _put_back(self, leases: list[Holding]) -> None:
        now = clock.lease_time()
        for lease in leases:
            # One that is in jeopardy is tried again soon: nine times in a ttl.
            lease.due = now + lease.ttl / (9 if lease.in_jeopardy else 3)
        with self._mutex:
            self._in_flight.difference_update(leases)
        self._alarm.at(self._next_due())

    def _next_due(self) -> float:
        now, leases = clock.lease_time(), _held()
        with self._mutex:
            waiting = [each for each in leases if each.renews and each not in self._in_flight]
        dues = [lease.due for lease in waiting]
        ends = [lease.deadline for lease in leases]
        return max(now, min([now + SWEEP, *dues, *ends]))


def _held() -> list[Holding]:
    """Return the leases that are held: asking makes one whose deadline has passed tell that it is lost."""
    return [lease for lease in registry.leases() if lease.held]


def _by_server(backend: LeaseBackend, asked: Asked) -> Iterable[Asked]:
    """Return them by the server that keeps them: one that is down endangers no leases of others."""
    found: dict[Hashable, list[tuple[Holding, Request]]] = {}
    for lease, request in asked:
        found.setdefault(_server_of(backend, request), []).append((lease, request))
    return found.values()


def _server_of(backend: LeaseBackend, request: Request) -> Hashable:
    try:
        return backend.server_of(request)
    except Exception:  # noqa: BLE001 - nobody keeps it now: who asks for it is told why
        return None


renewal = Renewal()
forks.in_child(renewal.reset)
