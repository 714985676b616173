"""Locks in a majority of independent Redis servers: held while more than half of them say so."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from django.core.cache import caches

from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.redis.connections import PerLoop, PoolLink
from django_distlock.backends.redis.scripts import KeySpace
from django_distlock.backends.redis.sources import Source, source_of_cache
from django_distlock.backends.redis.verbs import listed
from django_distlock.engine.waiting import Waiting
from django_distlock.exceptions import LockBackendError

from .checks import check_guard, check_servers
from .listing import looks, merged
from .nodes import Node
from .options import RedlockOptions
from .rounds import Nodes
from .tasks import TaskNodes
from .validity import LONGEST, LONGEST_CONNECTING, majority
from .verbs import Verbs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from django.core.checks import CheckMessage

    from django_distlock.conf import BackendSettings
    from django_distlock.engine.values import Busy, Grant, Held, Release, Request
    from django_distlock.engine.waiting import Wait

    from .listing import Seen

#: Seconds until a lock that is busy is asked for again: chosen at random, so that votes split no second time.
PAUSE = (0.05, 0.2)


class _Waiting(Waiting):
    """Pauses that differ, so that those whose votes were split meet no more."""

    __slots__ = ()

    def pause(self, wait: Wait, remaining: float | None) -> float:
        """See Waiting.pause()."""
        pause = random.uniform(*PAUSE)  # noqa: S311 - to differ is enough
        return wait.bounded(pause if remaining is None else min(pause, remaining))


class RedlockBackend(BaseLockBackend):
    """Locks in the servers that ``OPTIONS["servers"]`` names, by majority."""

    options_class = RedlockOptions
    supports_listing = True
    supports_detach = True
    kind = "redlock"
    waiting = _Waiting()

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.supports_fencing = self.options.fencing
        self.longest_ttl = self.options.longest_ttl or self.ttl
        self.sources = [self._source(server) for server in self.options.servers]
        _refuse_duplicates(self.sources)
        self._spaces = [KeySpace(_make_key(server)) for server in self.options.servers]
        self.place = tuple(source.url for source in self.sources), self._spaces[0].pattern
        self._places = [source.where for source in self.sources]
        self._verbs = Verbs(
            self.alias, self._places, self._spaces, self.options, self._guarded_seconds
        )
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
        """Ask once."""
        return self._nodes.hold(self._verbs.acquire(request))

    def release(self, request: Request) -> Release:
        """Give it back, on all of them."""
        return self._nodes.hold(self._verbs.release(request))

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend many at once."""
        for request in requests:
            self._check_ttl(request)
        return self._nodes.hold(self._verbs.extend(requests))

    def take_over(self, request: Request, former: str) -> bool:
        """Change the owner, on a majority."""
        return self._nodes.hold(self._verbs.take_over(request, former))

    def probe(self, request: Request) -> Busy | None:
        """Look."""
        return self._nodes.hold(self._verbs.probe(request))

    def held(self, key: str | None = None) -> Iterable[Held]:
        """Tell the locks of this alias that a majority has."""
        found: dict[int, list[Seen]] = {}
        failures: dict[int, str] = {}
        servers = range(len(self.sources))
        with ThreadPoolExecutor(len(servers)) as threads:
            futures = [threads.submit(partial(self._seen_by, server, key)) for server in servers]
        for server, future in enumerate(futures):
            try:
                found[server] = future.result()
            except LockBackendError as error:
                failures[server] = error.problem
        if len(found) < majority(len(servers)):
            raise self._verbs.not_enough(failures)
        return merged(found.values(), majority(len(servers)))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        """End the holding that *owner_digest* names."""
        return self._nodes.hold(self._verbs.force(key, owner_digest))

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        """Say what is wrong with the settings; with *databases*, with the servers."""
        where = f"DISTLOCK[{self.alias!r}]"
        found = check_guard(where, self.options)
        if databases:
            servers = list(zip(self._places, self._links, strict=True))
            found += check_servers(where, self.options, servers)
        return found

    def close(self) -> None:
        """Let idle connections and threads go; an event loop takes its own along when it ends."""
        super().close()
        self._nodes.close()
        for link in self._links:
            link.close()

    def abandon_after_fork(self) -> None:
        """Forget the parent's connections, and say nothing on them."""
        self._open()

    # Their twins for asyncio.

    async def atry_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        """See try_acquire()."""
        return await (await self._loops.get()).hold(self._verbs.acquire(request))

    async def arelease(self, request: Request) -> Release:
        """See release()."""
        return await (await self._loops.get()).hold(self._verbs.release(request))

    async def aabandon(self, request: Request) -> None:
        """See abandon()."""
        await self.arelease(request)

    async def aextend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """See extend()."""
        for request in requests:
            self._check_ttl(request)
        return await (await self._loops.get()).hold(self._verbs.extend(requests))

    async def atake_over(self, request: Request, former: str) -> bool:
        """See take_over()."""
        return await (await self._loops.get()).hold(self._verbs.take_over(request, former))

    async def aprobe(self, request: Request) -> Busy | None:
        """See probe()."""
        return await (await self._loops.get()).hold(self._verbs.probe(request))

    def _open(self) -> None:
        self._nodes = Nodes([Node(source) for source in self.sources])
        self._links = [PoolLink(self.alias, source) for source in self.sources]
        self._loops = PerLoop(partial(TaskNodes, self.sources))

    def _source(self, server: str) -> Source:
        options = self.options
        connecting = options.connect_timeout or LONGEST_CONNECTING
        # Of greetings and of the rest of an answer that has begun; questions have a limit of their own.
        answering = max(connecting, options.server_timeout or LONGEST)
        limits: dict[str, Any] = {"connect_timeout": connecting, "io_timeout": answering}
        if "://" in server:
            return Source(server, **limits)
        if server not in caches.settings:
            msg = f"'servers': CACHES has no alias {server!r}."
            raise ValueError(msg)
        source = source_of_cache(caches.settings[server], is_cluster=False, **limits)
        if source.sentinels or source.is_cluster:
            msg = f"'servers': the cache {server!r} is no single server, but several that share their data."
            raise ValueError(msg)
        return source

    @property
    def _guarded_seconds(self) -> float:
        return self.longest_ttl if self.options.restart_guard else 0.0

    def _check_ttl(self, request: Request) -> None:
        guard = self._guarded_seconds
        if guard and request.ttl > guard:
            msg = (
                f"DISTLOCK[{self.alias!r}]: a ttl of {request.ttl:g} seconds is more than {guard:g} seconds, for "
                "which servers that restarted grant nothing: set OPTIONS 'longest_ttl'."
            )
            raise ValueError(msg)

    def _seen_by(self, server: int, key: str | None) -> list[Seen]:
        link, space = self._links[server], self._spaces[server]

        def keys() -> Iterator[str]:
            found = map(space.key_of, link.keys(space.pattern))
            return (each for each in found if each and self.keeps(each))

        def look(some: list[str]) -> list[Seen]:
            return link.converse(looks({each: self._verbs.look(each, server) for each in some}))

        return listed(keys() if key is None else [key], look)


def _make_key(server: str) -> Any:
    return str if "://" in server else caches[server].make_key


def _refuse_duplicates(sources: Sequence[Source]) -> None:
    places = [source.where for source in sources]
    for place in places:
        if places.count(place) > 1:
            msg = (
                f"'servers': {place} stands there twice; another database of it is no other server."
            )
            raise ValueError(msg)
