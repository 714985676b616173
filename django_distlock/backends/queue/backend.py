"""QueueBackend: the verbs that do not depend on the server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from django_distlock.backends.base import StepsBackend
from django_distlock.engine.background import background
from django_distlock.engine.registry import registry
from django_distlock.engine.values import Busy, Grant, Request, State
from django_distlock.engine.waiting import Queueing, Waiting, Way
from django_distlock.ground import clock

from .labels import SessionRequest
from .recipe import Recipe

if TYPE_CHECKING:
    from django_distlock.conf import BackendSettings
    from django_distlock.engine.bells import TaskBell, ThreadBell
    from django_distlock.engine.holding import Holding


class QueueBackend(StepsBackend):
    """First come, first served, with readers and writers; a lock ends with the session of its holder."""

    supports_fencing = True
    supports_shared = True
    supports_fair = True
    supports_listing = True
    session_bound = True
    waiting = Waiting(
        way=Way.LISTEN,
        queueing=Queueing.BY_TRYING,
        is_in_order=True,
        position_is_grant=True,
        queues_places=True,
        look_again=1.0,
        writers_first=True,
    )
    _verbs: Recipe[Any]

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.make_request = partial(SessionRequest, longest=self.options.session_timeout)

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        # A waiter for any place is not in the queue of a single place.
        return self._run(self._verbs.acquire(request, queued=queued and request.limit is None))

    # Waiting.

    def enqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        self._run(self._verbs.enqueue(request, bell))

    async def aenqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        await self._arun(self._verbs.enqueue(request, bell))

    def dequeue_later(self, request: Request) -> None:
        self._verbs.drop_later(request, if_waiting=True)

    def abandon_later(self, request: Request) -> None:
        self._verbs.drop_later(request)

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        if self._verbs.may_sleep(request, bell):
            bell.wait(seconds)

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        if self._verbs.may_sleep(request, bell):
            await bell.wait(seconds)

    def forget_bell(self, request: Request) -> None:
        self._verbs.forget_bell(request)

    # The session.

    def is_session_over(self, request: Request) -> bool:
        return self._verbs.is_session_over(request)

    def _leases(self) -> list[Holding]:
        return [lease for lease in registry.leases() if lease.backend is self and lease.held]

    def _session_lost(self, reason: str) -> None:
        """End the leases of a session that is over. Does not block; any thread may call it."""

        def lose() -> None:
            for lease in self._leases():
                if self.is_session_over(lease.request):
                    lease.end(State.LOST, reason)

        background.at(clock.lease_time(), lose)
