"""QueueBackend: the verbs that do not depend on the server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from django_distlock.backends.base import BaseLockBackend
from django_distlock.engine.background import background
from django_distlock.engine.registry import registry
from django_distlock.engine.values import Release, Request
from django_distlock.engine.waiting import Queueing, Waiting, Way
from django_distlock.ground import clock

from .labels import SessionRequest
from .places import is_line, turn_owner

if TYPE_CHECKING:
    from django_distlock.conf import BackendSettings
    from django_distlock.engine.bells import Bell, TaskBell, ThreadBell
    from django_distlock.engine.lease import Lease

    from .standings import Standings


class QueueBackend(BaseLockBackend):
    """First come, first served, with readers and writers; a lock ends with the session of its holder."""

    supports_fencing = True
    supports_shared = True
    supports_fair = True
    supports_listing = True
    finds_place = True
    session_bound = True
    clock = "session"
    waiting = Waiting(
        way=Way.LISTEN,
        queueing=Queueing.BY_TRYING,
        in_line=False,
        look_again=1.0,
        writers_first=True,
    )
    _standings: Standings[Any]

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.make_request = partial(SessionRequest, longest=self.options.session_timeout)

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        if self._is_told(request, bell):
            bell.wait(seconds)

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        if self._is_told(request, bell):
            await bell.wait(seconds)

    def _owner_in_line(self, request: Request) -> str:
        """Return the owner that stands in the line: its own, or that of the turn of a waiter for any place."""
        return request.owner if request.limit is None else turn_owner(request)

    def _is_told(self, request: Request, bell: Bell) -> bool:
        """Arrange that *bell* rings when the waiter should try again; return False if it should do so now."""
        standing = self._standings.get(self._owner_in_line(request))
        if standing is None:
            return False
        standing.bell = bell
        return self._standings.may_sleep(standing)

    def forget_bell(self, request: Request) -> None:
        """Stop ringing its bell; a waiter that is not granted by now leaves the line, as does one that has a place."""
        self._leave_line(request)
        if (standing := self._standings.get(request.owner)) is not None:
            standing.bell = None
            self._drop_later(request, request.owner, if_waiting=True)

    def dequeue(self, request: Request) -> None:
        self.forget_bell(request)

    dequeue_later = dequeue

    def abandon(self, request: Request) -> Release:
        """Release the lock; release() takes a waiter out of the line too, but not out of that for any place."""
        self._leave_line(request)
        return self.release(request)

    def abandon_later(self, request: Request) -> None:
        self._leave_line(request)
        self._drop_later(request, request.owner)

    def _leave_line(self, request: Request) -> None:
        """Give up, in the background, the turn in the line for any place, if it has one."""
        if is_line(request.line):
            self._drop_later(request, turn_owner(request))

    def _drop_later(self, request: Request, owner: str, *, if_waiting: bool = False) -> None:
        drop = partial(self._standings.drop_owner, owner, if_waiting=if_waiting)
        self._threads.after(request, drop)

    def _leases(self) -> list[Lease]:
        return [lease for lease in registry.leases() if lease.backend is self and lease.held]

    def _session_lost(self, reason: str) -> None:
        """End the leases of a session that is over. Does not block; any thread may call it."""

        def lose() -> None:
            for lease in self._leases():
                if self.is_session_over(lease.request):
                    lease.lose(reason)

        background.at(clock.lease_time(), lose)

    def is_session_over(self, request: Request) -> bool:
        standing = self._standings.get(request.owner)
        if standing is None:
            return request.owner not in self._standings.released
        return self._standings.is_over(standing)
