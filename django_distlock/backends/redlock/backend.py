"""Locks in a majority of independent Redis servers: held while more than half of them say so."""

from __future__ import annotations

import random
import weakref
from typing import TYPE_CHECKING, Any

from django.core.cache import caches

from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.redis.scripts import KeySpace
from django_distlock.backends.redis.sources import Source, source_of_cache
from django_distlock.engine.steps import arun, run
from django_distlock.engine.waiting import Place, Wait, Waiting, Way

from .options import RedlockOptions, check_guard, check_servers
from .servers import Servers
from .verbs import Verbs
from .votes import LONGEST, LONGEST_CONNECTING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from django.core.checks import CheckMessage

    from django_distlock.conf import BackendSettings
    from django_distlock.engine.bells import TaskBell, ThreadBell
    from django_distlock.engine.values import Busy, Grant, Held, Release, Request

#: Seconds until a lock that is busy is asked for again: chosen at random, so that votes split no second time.
PAUSE = (0.05, 0.2)


class _Waiting(Waiting):
    """Pauses that differ, so that those whose votes were split meet no more."""

    __slots__ = ()

    def pause(self, wait: Wait, remaining: float | None) -> float:
        pause = random.uniform(*PAUSE)  # noqa: S311 - to differ is enough
        return wait.bounded(pause if remaining is None else min(pause, remaining))


class RedlockBackend(BaseLockBackend):
    """Locks in the servers that ``OPTIONS["servers"]`` names, by majority."""

    options_class = RedlockOptions
    supports_listing = True
    supports_detach = True
    kind = "redlock"
    waiting = _Waiting(way=Way.LISTEN, place=Place.ENQUEUE)

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.supports_fencing = self.options.fencing
        self.longest_ttl = self.options.longest_ttl or self.ttl
        self.sources = [self._source(server) for server in self.options.servers]
        _refuse_duplicates(self.sources)
        plain = KeySpace(str)
        self._spaces = [
            plain if "://" in server else KeySpace(caches[server].make_key)
            for server in self.options.servers
        ]
        self.place = tuple(source.url for source in self.sources), self._spaces[0].pattern
        places = [source.where for source in self.sources]
        self._verbs = Verbs(self.alias, places, self._spaces, self.options, self._guarded_seconds)
        self._open()

    def request(self, name: str, **wishes: Any) -> Request:
        """Return a request; ValueError if it could outlive the restart of a server."""
        request = super().request(name, **wishes)
        self._check_ttl(request)
        return request

    # The verbs.

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        return run(self._verbs.acquire(request, self._channel(queued)), self._servers.ask)

    def release(self, request: Request) -> Release:
        return run(self._verbs.release(request, self._servers.channel), self._servers.ask)

    def abandon(self, request: Request) -> Release:
        """Give it back: whoever does leaves the queue."""
        return self.release(request)

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        self._check_ttl(*requests)
        return run(self._verbs.extend(requests), self._servers.ask)

    def take_over(self, request: Request, former: str) -> bool:
        return run(self._verbs.take_over(request, former), self._servers.ask)

    def probe(self, request: Request) -> Busy | None:
        return run(self._verbs.probe(request), self._servers.ask)

    def enqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        """Have *bell* rung; servers learn of the waiter by its next try."""
        self._servers.listen(request.owner, bell)

    def dequeue(self, request: Request) -> None:
        self.release(request)

    def held(self, key: str | None = None) -> Iterable[Held]:
        return run(self._verbs.held(key, self.keeps), self._servers.ask)

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return run(self._verbs.force(key, owner_digest), self._servers.ask)

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        where = f"DISTLOCK[{self.alias!r}]"
        found = check_guard(where, self.options)
        if databases:
            found += check_servers(where, self.options, self.alias, self.sources)
        return found

    def close(self) -> None:
        super().close()
        self._servers.close()

    def abandon_after_fork(self) -> None:
        self._close_unused.detach()
        self._open()

    # Their twins for asyncio.

    async def atry_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        return await arun(self._verbs.acquire(request, self._channel(queued)), self._servers.aask)

    async def arelease(self, request: Request) -> Release:
        return await arun(self._verbs.release(request, self._servers.channel), self._servers.aask)

    async def aabandon(self, request: Request) -> None:
        await self.arelease(request)

    async def aextend(self, requests: Sequence[Request]) -> Sequence[bool]:
        self._check_ttl(*requests)
        return await arun(self._verbs.extend(requests), self._servers.aask)

    async def atake_over(self, request: Request, former: str) -> bool:
        return await arun(self._verbs.take_over(request, former), self._servers.aask)

    async def aprobe(self, request: Request) -> Busy | None:
        return await arun(self._verbs.probe(request), self._servers.aask)

    async def aenqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        self.enqueue(request, bell)

    def _open(self) -> None:
        self._servers = Servers(self.sources)
        # A backend that nobody has any more leaves no thread behind.
        self._close_unused = weakref.finalize(self, self._servers.close)
        self._close_unused.atexit = False

    def _channel(self, queued: bool) -> str:
        return self._servers.subscribed_channel() if queued else ""

    def _source(self, server: str) -> Source:
        options = self.options
        connecting = options.connect_timeout or LONGEST_CONNECTING
        # Of greetings and of the rest of an answer that has begun; questions have a limit of their own.
        answering = max(connecting, options.server_timeout or LONGEST)
        limits: dict[str, Any] = {"connect_timeout": connecting, "io_timeout": answering}
        if "://" in server:
            return Source(server, **limits)
        if server not in caches.settings:
            raise ValueError(f"'servers': CACHES has no alias {server!r}.")
        source = source_of_cache(caches.settings[server], is_cluster=False, **limits)
        if source.sentinels or source.is_cluster:
            msg = f"'servers': the cache {server!r} is no single server, but several that share their data."
            raise ValueError(msg)
        return source

    @property
    def _guarded_seconds(self) -> float:
        return self.longest_ttl if self.options.restart_guard else 0.0

    def _check_ttl(self, *requests: Request) -> None:
        guard = self._guarded_seconds
        for request in requests:
            if guard and request.ttl > guard:
                raise ValueError(
                    f"DISTLOCK[{self.alias!r}]: a ttl of {request.ttl:g} seconds is more than {guard:g} seconds, "
                    "for which servers that restarted grant nothing: set OPTIONS 'longest_ttl'."
                )


def _refuse_duplicates(sources: Sequence[Source]) -> None:
    places = [source.where for source in sources]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(
                f"'servers': {place} stands there twice; another database of it is no other server."
            )
