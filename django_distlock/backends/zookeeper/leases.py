"""What becomes of leases when their session is suspended, goes on or ends, and at the end of their ttl."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from django_distlock.engine import clock
from django_distlock.engine.background import Alarm, background
from django_distlock.engine.registry import registry
from django_distlock.exceptions import LockBackendError

if TYPE_CHECKING:
    from django_distlock.engine.values import Request
    from django_distlock.lease import Lease

    from .backend import ZooKeeperBackend
    from .places import Places


class Leases:
    """The leases of one backend. Called in kazoo's threads: what takes time is done in others."""

    places: Places

    def __init__(self, backend: ZooKeeperBackend) -> None:
        self._backend = backend
        self._alarm = Alarm(self._look)

    def session_began(self) -> None:
        """Have the leases confirmed, if they are still held, and finish what was broken off."""
        self.places.go_on()
        if self.places.granted():
            background.submit(self._backend.alias, self._go_on)

    def session_suspended(self) -> None:
        """Put the leases in jeopardy."""
        background.at(clock.lease_time(), self._endanger)

    def session_lost(self, reason: str) -> None:
        """Have the leases lost."""
        background.at(clock.lease_time(), partial(self._lose, reason))

    def look_at(self, due: float) -> None:
        """Free, at *due* (lease time) or whenever it is over, what was not extended by then.

        The ensemble keeps it for as long as the session goes on.
        """
        self._alarm.at(due)

    def _look(self) -> None:
        now = clock.lease_time()
        ends = []
        for place in self.places.granted():
            if place.ends <= now:
                self.places.drop(place)
            else:
                ends.append(place.ends)
        if ends:
            self._alarm.at(min(ends))

    def _mine(self) -> list[Lease]:
        return [lease for lease in registry.leases() if lease.backend is self._backend]

    def _held(self) -> list[Lease]:
        return [lease for lease in self._mine() if lease.held]

    def _endanger(self) -> None:
        for lease in self._held():
            lease.endanger()

    def _lose(self, reason: str) -> None:
        for lease in self._held():
            if self._backend.is_session_over(lease.request):
                lease.lose(reason)

    def _go_on(self) -> None:
        """Give back what was lost by our own clock meanwhile, and confirm the rest."""
        owners = {lease.request.owner for lease in self._mine()}
        for place in self.places.granted():
            if place.request.owner not in owners:
                self.places.drop(place)
        self._confirm()

    def _confirm(self) -> None:
        asked = [(lease, request) for lease in self._held() if (request := _asked(lease))]
        start = clock.lease_time()
        try:
            kept = self._backend.extend([request for _, request in asked])
        except LockBackendError:
            return  # the renewals go on trying
        for (lease, request), is_kept in zip(asked, kept, strict=True):
            if is_kept:
                lease.confirm(start, request.ttl)
            elif lease.is_entered:  # else it is being released in this very moment
                lease.lose("its node is gone")


def _asked(lease: Lease) -> Request | None:
    """Return what confirms it: for no longer than it has, if it is not to be renewed."""
    return lease.renewal() if lease.renews else replace(lease.request, ttl=lease.remaining)
