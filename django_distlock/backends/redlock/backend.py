"""Locks in a majority of independent Redis servers: held while more than half of them say so."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from django.core.cache import caches
from django.core.checks import CheckMessage

from django_distlock.backends.base import StepsBackend
from django_distlock.backends.redis.sources import Source, source_of_cache
from django_distlock.backends.redis.verbs import KeySpace
from django_distlock.conf import BackendSettings
from django_distlock.engine.bells import TaskBell, ThreadBell
from django_distlock.engine.steps import arun, run
from django_distlock.engine.values import Held, Release, Request
from django_distlock.engine.waiting import Place, Wait, Waiting, Way

from .options import RedlockOptions, check_guard, check_servers
from .servers import Servers
from .verbs import Verb, Verbs
from .votes import LONGEST, LONGEST_CONNECTING

_T = TypeVar("_T")
#: Seconds until a lock that is busy is asked for again: chosen at random, so that votes split no second time.
PAUSE = (0.05, 0.2)


class _Waiting(Waiting):
    """Pauses that differ, so that those whose votes were split meet no more."""

    __slots__ = ()

    def pause(self, wait: Wait, remaining: float | None) -> float:
        pause = random.uniform(*PAUSE)  # noqa: S311 - to differ is enough
        return wait.bounded(pause if remaining is None else min(pause, remaining))


class RedlockBackend(StepsBackend):
    """Locks in the servers that ``OPTIONS["servers"]`` names, by majority."""

    options_class = RedlockOptions
    supports_listing = True
    supports_detach = True
    kind = "redlock"
    waiting = _Waiting(way=Way.LISTEN, place=Place.ENQUEUE)

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.supports_fencing = self.options.fencing
        self.sources = [self._source(server) for server in self.options.servers]
        places = [source.where for source in self.sources]
        for place in places:
            if places.count(place) > 1:
                raise ValueError(
                    f"'servers': {place} stands there twice; another database of it is no other server."
                )
        plain = KeySpace(str)
        self._spaces = [
            plain if "://" in server else KeySpace(caches[server].make_key)
            for server in self.options.servers
        ]
        self.place = tuple(source.url for source in self.sources), self._spaces[0].pattern
        #: Seconds for which a server that restarted grants nothing.
        self._guard = (self.options.longest_ttl or self.ttl) if self.options.restart_guard else 0.0
        self._open()

    def request(self, name: str, **wishes: Any) -> Request:
        self.check_ttl(wishes["ttl"])  # also that of a lease that another process has detached
        return super().request(name, **wishes)

    def check_ttl(self, ttl: float) -> None:
        if 0 < self._guard < ttl:
            raise ValueError(
                f"DISTLOCK[{self.alias!r}]: a ttl of {ttl:g} seconds is more than {self._guard:g} seconds, "
                "for which servers that restarted grant nothing: set OPTIONS 'longest_ttl'."
            )

    # The verbs.

    def abandon(self, request: Request) -> Release:
        """Give it back: whoever does leaves the queue."""
        return self.release(request)

    def enqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        """Have *bell* rung; servers learn of the waiter by its next try."""
        self._servers.listen(request.owner, bell)

    def dequeue(self, request: Request) -> None:
        self.release(request)

    def held(self, key: str | None = None) -> Iterable[Held]:
        return self._run(self._verbs.held(key, self.keeps))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._run(self._verbs.force(key, owner_digest))

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

    async def aabandon(self, request: Request) -> None:
        await self.arelease(request)

    async def aenqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        self.enqueue(request, bell)

    async def _arun(self, steps: Verb[_T]) -> _T:
        return await arun(steps, self._servers.aask)

    def _open(self) -> None:
        self._servers = Servers(self.sources)
        self._run = partial(run, carry_out=self._servers.ask)
        self._verbs: Verbs = Verbs(
            self.alias,
            self._servers,
            self._spaces,
            self.options,
            guard=self._guard,
            behind=self.queue.behind,
        )
        # A backend that nobody has any more leaves no thread behind.
        self._close_unused = weakref.finalize(self, self._servers.close)
        self._close_unused.atexit = False

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
