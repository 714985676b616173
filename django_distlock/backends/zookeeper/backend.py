"""ZooKeeperBackend: each holder and waiter is an ephemeral node, and the first in line holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.checks import CheckMessage, Error
from kazoo.exceptions import AuthFailedError, KazooException

from django_distlock.backends.base import StepsBackend, server_error
from django_distlock.conf import LONGEST, BackendSettings
from django_distlock.engine import clock
from django_distlock.engine.background import background
from django_distlock.engine.registry import registry
from django_distlock.engine.steps import arun, run
from django_distlock.engine.values import Busy, Grant, Held, Purged, Release, Request, batches
from django_distlock.engine.waiting import Place, Waiting, Way
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

from .options import ZooKeeperOptions, ZooKeeperRequest
from .places import Places, Steps
from .recipe import BROKEN, Recipe
from .session import Session, Silence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django_distlock.engine.bells import Bell, TaskBell, ThreadBell
    from django_distlock.lease import Lease


_T = TypeVar("_T")
#: How many locks are listed at once.
BATCH = 500


class ZooKeeperBackend(StepsBackend):
    """First come, first served, with readers and writers; a lock ends with the session that holds it."""

    options_class = ZooKeeperOptions
    options: ZooKeeperOptions
    _verbs: Recipe
    request_class = ZooKeeperRequest
    supports_fencing = True
    supports_shared = True
    supports_fair = True
    supports_listing = True
    supports_purge = True
    session_bound = True
    clock = "session"
    waiting = Waiting(
        way=Way.LISTEN, place=Place.BY_TRYING, in_line=False, look_again=1.0, writers_first=True
    )

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.location = str(self.options.hosts), self.options.root
        self._begin()

    def _begin(self) -> None:
        self._session = Session(
            self.options, self._session_began, self._session_suspended, self._session_lost
        )
        self._places = Places(self.alias, self._session)
        self._verbs = Recipe(self.alias, self.options, self._session, self._places)

    # The verbs.

    def request(self, name: str, **wishes: Any) -> Request:
        """Return a request for *name*; its ttl is the session timeout at most."""
        return super().request(name, limit=self.options.session_timeout, **wishes)

    def try_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
    ) -> Grant | Busy:
        ends = self._patience(request, left) if queued else self._soon()
        return self._run(self._verbs.acquire(request, queued=queued, ends=ends), ends)

    async def atry_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
    ) -> Grant | Busy:
        ends = self._patience(request, left) if queued else self._soon()
        return await self._arun(self._verbs.acquire(request, queued=queued, ends=ends), ends)

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        if self._is_told(request, bell):
            bell.wait(seconds)

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        if self._is_told(request, bell):
            await bell.wait(seconds)

    def forget_bell(self, request: Request) -> None:
        """Ring no more; who is not served by now has left the line."""
        if (place := self._places.get(request.owner)) is not None:
            place.bell = None
            if not place.is_granted:
                self._places.drop(place)

    dequeue = dequeue_later = forget_bell

    def abandon(self, request: Request) -> Release:
        """See release(), which serves those who wait as well."""
        return self.release(request)

    async def aabandon(self, request: Request) -> None:
        await self.arelease(request)

    def abandon_later(self, request: Request) -> None:
        """Delete the node in the background, until that has worked or the session is over."""
        if (place := self._places.get(request.owner)) is not None:
            self._places.drop(place)

    def is_session_over(self, request: Request) -> bool:
        place = self._places.get(request.owner)
        if place is None:
            return request.owner not in self._places.released
        return self._places.is_dead(place)

    # For operators.

    def held(self, key: str | None = None) -> Iterator[Held]:
        for keys in batches(self._keys() if key is None else [key], BATCH):
            yield from self._run(self._verbs.holders(keys))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._run(self._verbs.end_holding(key, owner_digest))

    def purge(
        self, older_than: float, *, batch_size: int = 1000, dry_run: bool = False
    ) -> Iterator[Purged]:
        if not older_than >= 0:
            raise ValueError(f"older_than must be 0 seconds or more, not {older_than!r}.")
        if not batch_size >= 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size!r}.")
        before = self._run(self._verbs.now()) - older_than
        keys, looked_at = self._keys(), 0
        for batch in batches(keys, batch_size):
            deleted = self._run(self._verbs.purge(batch, before, dry_run=dry_run))
            looked_at += len(batch)
            yield Purged(len(batch), deleted, looked_at / len(keys))

    def _keys(self) -> list[str]:
        return list(filter(self.keeps, self._run(self._verbs.keys())))

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        if databases is None:
            return []
        try:
            self._keys()
        except LockBackendError as error:
            if isinstance(error.__cause__, (Silence, AuthFailedError, *BROKEN)):
                return [server_error(error, self.options.servers)]
            hint = "Correct the OPTIONS of the alias, or what the text names on the ensemble."
            return [Error(str(error), hint=hint, id="distlock.E040")]
        return []

    def close(self) -> None:
        """End the session: what it holds comes free at once, and its holders are told."""
        super().close()
        self._session.close()
        self._session_lost("its session was closed")

    def say_goodbye(self, seconds: float) -> None:
        """End the session: nodes that nobody had the time to delete would last as long as it."""
        self._session.say_goodbye(seconds)

    def abandon_after_fork(self) -> None:
        self._session.abandon()
        self._begin()

    # Having steps carried out.

    def _soon(self) -> float:
        """Return when a request that is sent now is given up, in wait time."""
        return clock.wait_time() + self.options.io_timeout

    def _patience(self, request: Request, left: float | None) -> float:
        """Return when somebody who waits anyway gives up: another server may take the session on.

        Who stands in line has been answered before: the ensemble may be without a quorum for long.
        """
        place = self._places.get(request.owner)
        longest = LONGEST if place and place.looked_at else self.options.session_timeout
        patience = longest if left is None else min(left, longest)
        return clock.wait_time() + max(patience, self.options.io_timeout)

    def _run(  # type: ignore[override]  # an attribute of the base
        self, steps: Steps[_T], ends: float | None = None, /
    ) -> _T:
        ask = partial(self._session.ask, ends=self._soon() if ends is None else ends)
        try:
            return run(steps, ask)
        except (Silence, KazooException) as error:
            raise self._error(error) from error

    async def _arun(self, steps: Steps[_T], ends: float | None = None) -> _T:
        ask = partial(self._session.aask, ends=self._soon() if ends is None else ends)
        try:
            return await arun(steps, ask)
        except (Silence, KazooException) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> LockBackendError:
        if isinstance(error, Silence):
            return LockOutcomeUnknown(self.alias, "no reply in time")
        kind = type(error).__name__
        if isinstance(error, BROKEN):
            if not self._session.is_refused:
                return LockOutcomeUnknown(self.alias, f"the connection broke: {kind}")
            # Credentials are refused once a session has begun: what was sent until then is broken off.
            kind = AuthFailedError.__name__
        return LockBackendError(self.alias, f"the ensemble refused: {kind}")

    def _is_told(self, request: Request, bell: Bell) -> bool:
        """Have *bell* rung when it is worth to try again; False if it is by now."""
        place = self._places.get(request.owner)
        if place is None:
            return False
        place.bell = bell
        return bool(place.watched)

    # What becomes of leases. Kazoo's threads call these, and must not be blocked.

    def _session_began(self) -> None:
        """Have the leases confirmed, if they are still held, and finish what was broken off."""
        self._places.go_on()
        if self._places.granted():
            # By way of the clock thread: after what it is still to tell of the session before.
            confirm = partial(background.submit, self.alias, self._confirm)
            background.at(clock.lease_time(), confirm)

    def _session_suspended(self) -> None:
        def endanger() -> None:
            for lease in self._leases():
                lease.endanger()

        background.at(clock.lease_time(), endanger)

    def _session_lost(self, reason: str) -> None:
        def lose() -> None:
            for lease in self._leases():
                if self.is_session_over(lease.request):
                    lease.lose(reason)

        background.at(clock.lease_time(), lose)

    def _leases(self) -> list[Lease]:
        return [lease for lease in registry.leases() if lease.backend is self and lease.held]

    def _confirm(self) -> None:
        """Give back what was lost by our own clock meanwhile, and confirm the rest."""
        owners = {lease.request.owner for lease in registry.leases() if lease.backend is self}
        for place in self._places.granted():
            if place.request.owner not in owners:
                self._places.drop(place)
        asked = [(lease, request) for lease in self._leases() if (request := _renewal(lease))]
        start = clock.lease_time()
        try:
            kept = self.extend([request for _, request in asked])
        except LockBackendError:
            return  # the renewals go on trying
        for (lease, request), is_kept in zip(asked, kept, strict=True):
            if is_kept:
                lease.confirm(start, request.ttl)
            elif lease.is_entered:  # else it is being released in this very moment
                lease.lose("its node is gone")


def _renewal(lease: Lease) -> Request | None:
    """Return what confirms it: for no longer than it has, if it is not to be renewed."""
    return lease.renewal() if lease.renews else replace(lease.request, ttl=lease.remaining)
