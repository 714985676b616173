"""ZooKeeperBackend: each holder and waiter is an ephemeral node, and the first in line holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.checks import Error

from django_distlock.backends.base import BaseLockBackend
from django_distlock.conf import LONGEST
from django_distlock.engine import clock
from django_distlock.engine.waiting import Place, Waiting, Way
from django_distlock.exceptions import LockBackendError

from .conversation import Conversation
from .leases import Leases
from .options import ZooKeeperOptions
from .places import Places
from .recipe import LOOK_AGAIN, Recipe
from .request import ZooKeeperRequest
from .session import Session
from .upkeep import Terms, Upkeep

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from django.core.checks import CheckMessage

    from django_distlock.conf import BackendSettings
    from django_distlock.engine.bells import Bell, TaskBell, ThreadBell
    from django_distlock.engine.values import Busy, Grant, Held, Purged, Release, Request

    from .steps import Steps


class ZooKeeperBackend(BaseLockBackend):
    """First come, first served, with readers and writers; a lock ends with the session that holds it."""

    options_class = ZooKeeperOptions
    options: ZooKeeperOptions
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
        self.place = str(self.options.hosts), self.options.root
        self._begin()

    def _begin(self) -> None:
        self._leases = Leases(self)
        self._session = Session(self.options, self._leases)
        self._places = self._leases.places = Places(self._session)
        self._recipe = Recipe(self.alias, self.options, self._session, self._places)
        self._talk = Conversation(self.alias, self.options.io_timeout)
        self._upkeep = Upkeep(self._recipe, self._talk, self.options.root, self.keeps)

    # The verbs.

    def request(self, name: str, **wishes: Any) -> Request:
        """Return a request for *name*; its ttl is the session timeout at most."""
        return super().request(name, limit=self.options.session_timeout, **wishes)

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        """Stand in line, and look who is first."""
        if queued and (busy := self._unchanged(request)):
            return busy
        steps, ends = self._take(request, queued=queued, left=left)
        return self._noted(request, self._talk.have(steps, changes=True, ends=ends))

    async def atry_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        """See try_acquire()."""
        if queued and (busy := self._unchanged(request)):
            return busy
        steps, ends = self._take(request, queued=queued, left=left)
        return self._noted(request, await self._talk.ahave(steps, changes=True, ends=ends))

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        """Wait until who is before us has gone."""
        if self._is_told(request, bell):
            bell.wait(seconds)

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        """See sleep()."""
        if self._is_told(request, bell):
            await bell.wait(seconds)

    def forget_bell(self, request: Request) -> None:
        """Ring no more; who is not served by now has left the line."""
        if (place := self._places.get(request.owner)) is not None:
            place.bell = None
            if not place.is_granted:
                self._places.drop(place)

    def dequeue(self, request: Request) -> None:
        """Leave the line; no I/O that blocks."""
        self.forget_bell(request)

    def dequeue_later(self, request: Request) -> None:
        """See dequeue()."""
        self._lanes.after(request, lambda: self.dequeue(request))

    def release(self, request: Request) -> Release:
        """Delete the node: whoever watches it is told."""
        return self._talk.have(self._give_back(request), changes=True)

    async def arelease(self, request: Request) -> Release:
        """See release()."""
        return await self._talk.ahave(self._give_back(request), changes=True)

    def abandon(self, request: Request) -> Release:
        """See release(), which serves those who wait as well."""
        return self.release(request)

    async def aabandon(self, request: Request) -> None:
        """See abandon()."""
        await self.arelease(request)

    def abandon_later(self, request: Request) -> None:
        """Delete the node in the background, until that has worked or the session is over."""

        def drop() -> None:
            if (place := self._places.get(request.owner)) is not None:
                self._places.drop(place)

        self._lanes.after(request, drop)

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Look whether the nodes are still there, which keeps the session as well."""
        return self._talk.have(self._recipe.keep(requests), changes=False)

    async def aextend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """See extend()."""
        return await self._talk.ahave(self._recipe.keep(requests), changes=False)

    def is_session_over(self, request: Request) -> bool:
        """Look at what kazoo has heard."""
        place = self._places.get(request.owner)
        if place is None:
            return not self._places.has_released(request.owner)
        return self._places.is_dead(place)

    def probe(self, request: Request) -> Busy | None:
        """Look who is first."""
        return self._talk.have(self._recipe.look(request.key), changes=False)

    async def aprobe(self, request: Request) -> Busy | None:
        """See probe()."""
        return await self._talk.ahave(self._recipe.look(request.key), changes=False)

    # For operators.

    def held(self, key: str | None = None) -> Iterable[Held]:
        """Tell the locks of this alias that are held."""
        return self._upkeep.held(key)

    def end_holding(self, key: str, owner_digest: str) -> bool:
        """Delete the node of the holder: the next token is higher by itself."""
        return self._upkeep.end_holding(key, owner_digest)

    def purge(
        self, older_than: float, *, batch_size: int = 1000, dry_run: bool = False
    ) -> Iterator[Purged]:
        """Delete the nodes of locks that nobody holds or waits for, made longer ago than that."""
        return self._upkeep.purge(Terms(older_than, batch_size, dry_run=dry_run))

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        """Say, where servers may be asked, whether the ensemble can be used."""
        if databases is None:
            return []
        try:
            self._upkeep.keys()
        except LockBackendError as error:
            hint = "See the reference of django_distlock, checks, distlock.E040."
            return [Error(str(error), hint=hint, id="distlock.E040")]
        return []

    def close(self) -> None:
        """End the session: what it holds comes free at once, and its holders are told."""
        super().close()
        self._session.close()
        self._leases.session_lost("its session was closed")

    def say_goodbye(self, seconds: float) -> None:
        """End the session: nodes that nobody had the time to delete would last as long as it."""
        self._session.say_goodbye(seconds)

    def abandon_after_fork(self) -> None:
        """Leave the session to the parent."""
        self._session.abandon()
        self._begin()

    # The rest is ours.

    def _take(
        self, request: Request, *, queued: bool, left: float | None
    ) -> tuple[Steps[Grant | Busy], float]:
        ends = self._talk.ends
        if queued:
            # Another server may take the session on: who waits anyway can wait for that. Who stands in
            # line already has been answered before: the ensemble may be without a quorum for long.
            place = self._places.get(request.owner)
            patience = LONGEST if place and place.looked_at else self.options.session_timeout
            ends = max(
                ends, clock.wait_time() + (patience if left is None else min(left, patience))
            )
        return self._recipe.take(request, ends, keeps=queued), ends

    def _is_told(self, request: Request, bell: Bell) -> bool:
        """Have *bell* rung when it is worth to try again; False if it is by now."""
        place = self._places.get(request.owner)
        if place is None:
            return False
        place.bell = bell
        return place.watched is not None

    def _unchanged(self, request: Request) -> Busy | None:
        """Return what was found last, while nobody has rung: no request is needed to know it."""
        place = self._places.get(request.owner)
        if place is None or place.watched is None or self._places.is_dead(place):
            return None
        is_fresh = clock.wait_time() - place.looked_at < LOOK_AGAIN
        return place.busy if is_fresh and self._session.client is not None else None

    def _noted(self, request: Request, answer: Grant | Busy) -> Grant | Busy:
        if (place := self._places.get(request.owner)) is not None and place.is_granted:
            self._leases.look_at(place.ends)
        return answer

    def _give_back(self, request: Request) -> Steps[Release]:
        return self._recipe.give_back(request, self._talk.ends)
