"""Locks in Redis: each verb is one script, which the server carries out as one step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

from django.core.cache import caches
from django.core.checks import CheckMessage, Error, Warning as CheckWarning

from django_distlock.backends.base import StepsBackend
from django_distlock.backends.cache_alias import check_clearing, own_instance
from django_distlock.conf import BackendSettings
from django_distlock.engine import clock
from django_distlock.engine.bells import Bell, TaskBell, ThreadBell
from django_distlock.engine.naming import printable
from django_distlock.engine.steps import Steps, arun, run
from django_distlock.engine.values import Held, Release, Request
from django_distlock.engine.waiting import Place, Wait, Waiting, Way
from django_distlock.exceptions import LockOutcomeUnknown

from .connections import (
    AsyncClusterLink,
    AsyncPoolLink,
    ClusterLink,
    Conversation,
    PerLoop,
    PoolLink,
)
from .scripts import RETENTION
from .sources import RedisCacheOptions, RedisOptions, RedisSettings, Source, source_of_cache
from .verbs import BATCH, KeySpace, MakeKey, Verbs

Act = Callable[[], Any]

_T = TypeVar("_T")

#: BLPOP takes fractions of a second, and EVALSHA's effects are replicated, not the script.
OLDEST = (6, 0)
#: Seconds for which a waiter listens without a look: less than half its patience.
LISTEN = 0.2
#: Seconds until a waiter whose connection broke tries again.
CUT_OFF = 0.05
#: Seconds between two times that the places of the others are kept: well within their patience.
KEEP = 0.15
#: Seconds after which another one listens, as who does may stand in an event loop that is blocked.
STALE = 1.0


class RedisBackend(StepsBackend):
    """Locks in the Redis that ``OPTIONS["location"]`` names."""

    options_class: ClassVar[type[RedisSettings]] = RedisOptions
    supports_fencing = True
    supports_shared = True
    supports_fair = True
    supports_listing = True
    supports_detach = True
    supports_delays = True
    longest_lock_delay = RETENTION

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        # Who claims an order gives each waiter a place of its own on the server, from when it came.
        self.waiting = Waiting(
            way=Way.LISTEN,
            place=Place.BY_TRYING,
            in_line=not self.options.fair,
            look_again=LISTEN,
            writers_first=True,
        )
        self.source = self.make_source()
        self._space = KeySpace(self.make_key())
        self.location = self.source.url, self._space.pattern
        # The locks of one script must be on one server.
        batch = 1 if self.source.is_cluster else BATCH
        self._verbs: Verbs = Verbs(
            self.alias, self._space, self.options, self.queue.behind, batch=batch
        )
        self._open()

    def make_source(self) -> Source:
        return Source(
            self.options.location,
            connect_timeout=self.options.connect_timeout,
            io_timeout=self.options.io_timeout,
            is_cluster=self.options.cluster,
        )

    def make_key(self) -> MakeKey:
        return str

    # The verbs.

    def revoke_all(self, requests: Sequence[Request]) -> Sequence[Release | Exception]:
        """Give them back for good, in one go where one server has them all."""
        if self.source.is_cluster:
            return [self._revoke([request])[0] for request in requests]
        return self._revoke(requests)

    def _revoke(self, requests: Sequence[Request]) -> Sequence[Release | Exception]:
        try:
            return self._run(self._verbs.revoke(requests))
        except Exception as error:  # noqa: BLE001 - see BaseLockBackend.revoke_all()
            return [error] * len(requests)

    def server_of(self, request: Request) -> Hashable:
        return self._link.server_of(self._space.of(request.key).record)

    def dequeue(self, request: Request) -> None:
        self._run(self._verbs.leave(request))

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        run(self._sleep(self._link, request, bell, seconds), _done)

    def is_behind(self, request: Request) -> bool:
        return self._listeners.is_behind(request)

    def forget_bell(self, request: Request) -> None:
        self._listeners.leave(request)

    def held(self, key: str | None = None) -> Iterable[Held]:
        if key is None:
            taken = self._link.keys(self._space.taken_pattern)
            records = (self._space.key_of(each.rpartition(":")[0]) for each in taken)
            # Of a lock that is held and reserved there are two; and SCAN may return one twice.
            keys = sorted(each for each in {*records} if each and self.keeps(each))
        else:
            keys = [key]
        return self._run(self._verbs.held(keys))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._run(self._verbs.end_holding(key, owner_digest))

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        if not databases:
            return []
        where = f"DISTLOCK[{self.alias!r}]"
        return self.check_server(self.source.place) or check_facts(
            where, self._link, allow_eviction=self.options.allow_eviction
        )

    def close(self) -> None:
        super().close()
        self._link.close()

    def abandon_after_fork(self) -> None:
        self._open()

    # Their twins for asyncio.

    async def aabandon(self, request: Request) -> None:
        await self._arun(self._verbs.leave(request))
        await self.arelease(request)

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        await arun(self._sleep(await self._loops.get(), request, bell, seconds), _done)

    async def _arun(self, steps: Steps[Any, _T]) -> _T:
        link: AsyncPoolLink | AsyncClusterLink = await self._loops.get()
        return await link.converse(steps)

    def _sleep(
        self, link: Any, request: Request, bell: ThreadBell | TaskBell, seconds: float
    ) -> Steps[Act, None]:
        """Block on the doorbells that this waiter, and others of this process, have on the server, or behind who does."""
        if not self._listeners.listens(request, bell):
            wait = Wait(seconds)
            while self._listeners.is_behind(request) and not wait.is_over:
                if (yield partial(bell.wait, wait.bounded(STALE))):
                    return
            return
        try:
            keys = self._space.of(request.key)
            bells = [keys.bell(owner) for owner in self._listeners.owners(request)]
            seconds = min(seconds, LISTEN)
            # The server, which looks ten times a second, may be a bit late, unless a deadline is waited for.
            within = seconds + 0.3 if seconds == LISTEN else max(seconds, 0.001)
            heard = yield partial(link.converse, self._verbs.listen(bells, seconds), within)
            if heard is not None:
                self._listeners.ring(request, heard.removeprefix(keys.bells))
            if others := self._listeners.to_keep(request):
                yield partial(link.converse, self._verbs.keep(others))
        except LockOutcomeUnknown:
            # Only listening was broken off: the next try tells how the server is.
            yield partial(bell.wait, min(seconds, CUT_OFF))

    def _open(self) -> None:
        self._listeners = Listeners()
        link = ClusterLink if self.source.is_cluster else PoolLink
        self._link = link(self.alias, self.source)
        self._run = self._link.converse
        async_link = AsyncClusterLink if self.source.is_cluster else AsyncPoolLink
        self._loops = PerLoop(partial(async_link, self.alias, self.source))


class CacheRedisBackend(RedisBackend):
    """Locks in the Redis behind the cache ``OPTIONS["cache"]``: its server, its keys, not its time limits."""

    options_class = RedisCacheOptions

    def make_source(self) -> Source:
        return source_of_cache(
            caches.settings[self.options.cache],
            is_cluster=self.options.cluster,
            connect_timeout=self.options.connect_timeout,
            io_timeout=self.options.io_timeout,
        )

    def make_key(self) -> MakeKey:
        return own_instance(self.options.cache).make_key

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        if databases is None:
            return check_clearing(self.alias, self.options.cache)
        return super().check(databases)


@dataclass(slots=True)
class _Line:
    waiting: dict[str, tuple[Request, Bell]] = field(default_factory=dict)
    #: Those who were rung, and have not asked again since: their places are theirs to keep.
    called: set[str] = field(default_factory=set)
    listener: str = ""
    heard_at: float = 0.0
    kept_at: float = 0.0

    @property
    def is_heard(self) -> bool:
        is_fresh = clock.wait_time() - self.heard_at < STALE
        return is_fresh and self.listener in self.waiting


class Listeners:
    """Of the waiters of this process for one lock, one listens on the server, for all, on one connection. No I/O."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._lines: dict[str, _Line] = {}

    def listens(self, request: Request, bell: Bell) -> bool:
        """Note that *bell* is waited on; return whether *request* is the one to listen."""
        with self._mutex:
            line = self._lines.setdefault(request.key, _Line())
            line.waiting[request.owner] = request, bell
            line.called.discard(request.owner)
            if not line.is_heard:
                line.listener = request.owner
            if line.listener != request.owner:
                return False
            line.heard_at = clock.wait_time()
            return True

    def is_behind(self, request: Request) -> bool:
        """Return whether another one listens for it."""
        with self._mutex:
            line = self._lines.get(request.key)
            return line is not None and line.is_heard and line.listener != request.owner

    def owners(self, request: Request) -> list[str]:
        with self._mutex:
            return list(self._lines[request.key].waiting)

    def to_keep(self, request: Request) -> list[Request]:
        with self._mutex:
            line, now = self._lines[request.key], clock.wait_time()
            if now - line.kept_at < KEEP:
                return []
            line.kept_at = now
            absent = {request.owner, *line.called}
            return [other for owner, (other, _) in line.waiting.items() if owner not in absent]

    def ring(self, request: Request, owner: str) -> None:
        with self._mutex:
            line = self._lines[request.key]
            if owner in line.waiting:
                line.called.add(owner)
                if not line.waiting[owner][1].ring():
                    del line.waiting[owner]

    def leave(self, request: Request) -> None:
        """Wait no more; somebody else listens from now on."""
        with self._mutex:
            line = self._lines.get(request.key)
            if line is None or line.waiting.pop(request.owner, None) is None:
                return
            line.called.discard(request.owner)
            # Also if it had been rung to listen itself, and goes before it has done so.
            if line.listener not in line.waiting:
                # One whose event loop is gone cannot listen.
                while line.waiting and not next(iter(line.waiting.values()))[1].ring():
                    del line.waiting[next(iter(line.waiting))]
            if not line.waiting:
                del self._lines[request.key]


def _done(act: Act) -> Any:
    return act()


def check_facts(
    where: str, link: PoolLink | ClusterLink, *, allow_eviction: bool
) -> list[CheckMessage]:
    facts = link.converse(_facts())
    if isinstance(facts, Exception):
        text = f"{where}: its version and its maxmemory-policy are not known, since it refused INFO: {printable(str(facts))}"
        return [CheckWarning(text, hint="Let the user run INFO.", id="distlock.W020")]
    found: list[CheckMessage] = []
    version, policy = facts.get("redis_version", ""), facts.get("maxmemory_policy", "noeviction")
    if version and tuple(map(int, version.split(".")[:2])) < OLDEST:
        text = f"{where}: Redis {printable(version)} is too old."
        hint = "Use Redis 6.0 or later, or Valkey."
        found.append(Error(text, hint=hint, id="distlock.E020"))
    if policy == "noeviction":
        return found
    text = f"{where}: the server's maxmemory-policy is {printable(policy)}: it drops locks that are held when its memory is full."
    if allow_eviction:
        return [*found, CheckWarning(text, hint="Two holders are possible.", id="distlock.W021")]
    hint = (
        "Set it to noeviction, give locks a server of their own, or, if two holders at once are "
        "bearable, set OPTIONS 'allow_eviction': True."
    )
    return [*found, Error(text, hint=hint, id="distlock.E021")]


def _facts() -> Conversation[dict[str, str] | Exception]:
    (answer,) = yield (("INFO",),)
    if isinstance(answer, dict):  # as a cluster's client has read it already
        first = next(iter(answer.values()))
        known = first if isinstance(first, dict) else answer
        return {name: str(value) for name, value in known.items()}
    if isinstance(answer, bytes):
        lines = answer.decode().splitlines()
        return dict(line.partition(":")[::2] for line in lines if ":" in line)
    return answer if isinstance(answer, Exception) else {}
