"""Locks in Redis: each verb is one script, which the server carries out as one step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import call
from typing import Any, ClassVar, TypeVar

from django.core.cache import caches
from django.core.checks import CheckMessage, Error, Warning as CheckWarning

from django_distlock.backends.base import StepsBackend
from django_distlock.backends.cache_alias import check_clearing, own_instance
from django_distlock.conf import BackendSettings
from django_distlock.engine.background import PATIENCE
from django_distlock.engine.bells import TaskBell, ThreadBell, timeout
from django_distlock.engine.steps import Steps, arun, run
from django_distlock.engine.values import Busy, Grant, Held, Release, Request, batches
from django_distlock.engine.waiting import Queueing, Waiting, Way
from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockOutcomeUnknown,
    NotSent,
    NotSupported,
)
from django_distlock.ground import clock
from django_distlock.ground.naming import printable, with_label

from .connections import (
    AsyncClusterLink,
    AsyncPoolLink,
    ClusterLink,
    Conversation,
    PerLoop,
    PoolLink,
)
from .sources import (
    RedisCacheOptions,
    RedisOptions,
    RedisSettings,
    Source,
    source_of_cache,
    source_of_url,
)
from .verbs import (
    BATCH,
    PROBE,
    WITHOUT_SCRIPTS,
    RedisVerbs,
    check_key_functions,
    key_space,
    keys_of,
    label_of,
)

Act = Callable[[], Any]
#: A server's answer to INFO, or its error.
Facts = dict[str, str] | Exception

_T = TypeVar("_T")

#: The oldest version: BLPOP takes fractions of a second, and the effects of a script are replicated, not its text.
OLDEST = (6, 0)
#: The first version with WAITAOF, and the first that answers it after fsync(), also with fsync() once a second.
OLDEST_WITH_DISK, OLDEST_WITH_SURE_DISK = (7, 2), (8, 0)
#: Seconds for which a waiter listens between two tries: less than half of scripts.PATIENCE.
LISTEN = 0.2
#: Seconds until a waiter whose connection broke tries again.
CUT_OFF = 0.05


class RedisBackend(StepsBackend):
    """Locks in the Redis that ``OPTIONS["location"]`` names."""

    options_class: ClassVar[type[RedisSettings]] = RedisOptions
    supports_fencing = True
    supports_shared = True
    supports_fair = True
    supports_listing = True
    supports_detach = True
    supports_min_hold = True

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        if self.options.scripting:
            self.waiting = Waiting(
                way=Way.LISTEN,
                queueing=Queueing.BY_TRYING,
                queues_places=True,
                is_in_order=self.options.fair,
                look_again=LISTEN,
                writers_first=True,
            )
        else:
            self.supports_shared = self.supports_listing = False
            self.supports_detach = self.supports_min_hold = False
            self.instead = WITHOUT_SCRIPTS
        self.source = self.make_source()
        self.location = ("redis", self.source.identity)
        # All locks of one script must be on one server.
        self._batch = 1 if self.source.is_cluster else BATCH
        self._verbs: RedisVerbs = RedisVerbs(self.alias, self.options, batch=self._batch)
        self._open()

    def make_source(self) -> Source:
        options = self.options
        return source_of_url(
            options.location, options.options, is_cluster=options.cluster, **options.limits
        )

    # The verbs.

    def revoke_all(self, requests: Sequence[Request]) -> Sequence[Release | Exception]:
        """Release the locks for good; a server that fails is asked once."""
        outcomes: list[Release | Exception] = []
        failed: dict[Hashable, LockBackendError] = {}
        for some in batches(requests, self._batch):
            server: Hashable = None
            try:
                server = self.server_of(some[0])
                if server in failed:
                    outcomes += [failed[server]] * len(some)
                else:
                    outcomes += self._run(self._verbs.revoke(some))
            except Exception as error:  # noqa: BLE001 - see BaseLockBackend.revoke_all()
                outcomes += [error] * len(some)
                # Contended concerns one lock, whose slot a cluster is moving: go on with the others.
                if isinstance(error, LockBackendError) and not isinstance(error, Contended):
                    failed[server] = error
        return outcomes

    def server_of(self, request: Request) -> Hashable:
        return self._link.server_of(keys_of(request.key).record)

    def enqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        if request.limit is not None:  # without a limit, a refused try takes the position
            self._run(self._verbs.enqueue(request))

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        run(self._sleep(self._link, request, bell, seconds), call)

    def held(self, key: str | None = None) -> Iterator[Held]:
        if not self.supports_listing:
            raise NotSupported(self.alias, "listing", self.instead)
        keys = [] if key is None else [key]
        if key is None:
            # A set, because SCAN may return a key twice. Free locks have records, too.
            label = self.label()
            space = key_space(label)
            found = {*map(space.key_of, self._link.keys(space.pattern))}
            all_keys = (with_label(label, each) for each in found if each)
            keys = sorted(filter(self.keeps, all_keys))
        for some in batches(keys, BATCH):
            yield from self._run(self._verbs.held(some))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._run(self._verbs.end_holding(key, owner_digest))

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        if databases is None:
            return self._check_clearing()
        if not databases:
            return []
        where = f"DISTLOCK[{self.alias!r}]"
        return self.check_server(self.source.address) or check_facts(
            where,
            self._link.converse(ask_facts()),
            allow_eviction=self.options.allow_eviction,
            wait_disk=self.options.wait_disk,
        )

    def _check_clearing(self) -> list[CheckMessage]:
        server, database = self.options.location, self.options.options.get("db")
        return check_clearing(self.alias, None, server=server, database=database)

    def close(self) -> None:
        super().close()
        self._link.close()

    def abandon_after_fork(self) -> None:
        self._open()

    # The verbs for asyncio.

    async def atry_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        # The wait at the gate takes time of the timeout, but not of the lease.
        link: AsyncPoolLink | AsyncClusterLink = await self._loops.get()
        try:
            async with timeout(PATIENCE if left == 0 else left):
                await link.gate_of_tries.acquire()
        except TimeoutError:
            problem = "other tasks have as many tries under way as may be: the request was not sent in time"
            raise NotSent(self.alias, problem) from None
        try:
            start = clock.lease_time()
            steps = self._verbs.acquire(request, queued=queued)
            answer = await link.converse(steps, self.source.answers_within)
        finally:
            link.gate_of_tries.release()
        return replace(answer, start=start) if isinstance(answer, Grant) else answer

    async def aenqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        if request.limit is not None:
            await self._arun(self._verbs.enqueue(request))

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        await arun(self._sleep(await self._loops.get(), request, bell, seconds), call)

    async def _arun(self, steps: Steps[Any, _T]) -> _T:
        link: AsyncPoolLink | AsyncClusterLink = await self._loops.get()
        return await link.converse(steps)

    def _sleep(
        self, link: Any, request: Request, bell: ThreadBell | TaskBell, seconds: float
    ) -> Steps[Act, None]:
        """Wait on the server for up to LISTEN or *seconds*, whichever is less; then the caller tries again."""
        if self.waiting.polls:
            yield partial(bell.wait, seconds)
            return
        seconds = min(seconds, LISTEN)
        # The server ends a BLPOP up to 0.1 s late; only before a deadline, the wait must end in time.
        within = seconds + 0.3 if seconds == LISTEN else max(seconds, 0.001)
        try:
            bell_on_server = keys_of(request.key).bell(request.waiter)
            yield partial(link.converse, self._verbs.listen(bell_on_server, seconds), within)
        except (Contended, LockOutcomeUnknown):
            # Only the listening failed: the next try shows whether the server works.
            yield partial(bell.wait, min(seconds, CUT_OFF))

    def _open(self) -> None:
        link = ClusterLink if self.source.is_cluster else PoolLink
        self._link = link(self.alias, self.source)
        self._run = self._link.converse
        async_link = AsyncClusterLink if self.source.is_cluster else AsyncPoolLink
        self._loops = PerLoop(partial(async_link, self.alias, self.source))


class CacheRedisBackend(RedisBackend):
    """Locks in the Redis of the cache ``OPTIONS["cache"]``, with the cache's keys, but not its time limits."""

    options_class = RedisCacheOptions

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._cache = own_instance(self.options.cache)
        check_key_functions(self._cache.make_key)

    def make_source(self) -> Source:
        return source_of_cache(
            caches.settings[self.options.cache],
            is_cluster=self.options.cluster,
            **self.options.limits,
        )

    def label(self) -> str:
        return label_of(self._cache.make_key(PROBE))

    def _check_clearing(self) -> list[CheckMessage]:
        return check_clearing(self.alias, self.options.cache)


def check_facts(
    where: str, facts: Facts, *, allow_eviction: bool, wait_disk: bool = False
) -> list[CheckMessage]:
    if isinstance(facts, Exception):
        text = f"{where}: its version and its maxmemory-policy are not known, since it refused INFO: {printable(str(facts))}"
        return [CheckWarning(text, hint="Let the user run INFO.", id="distlock.W020")]
    found: list[CheckMessage] = []
    version, policy = facts.get("redis_version", ""), facts.get("maxmemory_policy", "noeviction")
    number = tuple(map(int, version.split(".")[:2])) if version else OLDEST_WITH_SURE_DISK
    if number < OLDEST:
        text = f"{where}: Redis {printable(version)} is too old."
        hint = "Use Redis 6.0 or later, or Valkey."
        found.append(Error(text, hint=hint, id="distlock.E020"))
    if wait_disk:
        found += _check_disk(where, facts, number)
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


def _check_disk(
    where: str, facts: dict[str, str], number: tuple[int, ...]
) -> Iterator[CheckMessage]:
    is_valkey = "valkey_version" in facts
    version = facts["valkey_version"] if is_valkey else facts.get("redis_version", "")
    name = f"{'Valkey' if is_valkey else 'Redis'} {version}"
    if number < OLDEST_WITH_DISK or facts.get("aof_enabled") == "0":
        text = f"{where}: {printable(name)} cannot tell when a lock is on its disk (OPTIONS 'wait_disk')."
        hint = "Use Redis 8.0 or later with appendonly yes."
        yield Error(text, hint=hint, id="distlock.E022")
    elif is_valkey or number < OLDEST_WITH_SURE_DISK:
        text = f"{where}: {printable(name)} may tell that a lock is on its disk before it is (OPTIONS 'wait_disk')."
        hint = "Use Redis 8.0 or later, or set appendfsync always, with which 'wait_disk' is not needed."
        yield CheckWarning(text, hint=hint, id="distlock.W022")


def ask_facts() -> Conversation[Facts]:
    (answer,) = yield (("INFO",),)
    if isinstance(answer, dict):  # the client of a cluster has parsed it
        first = next(iter(answer.values()))
        known = first if isinstance(first, dict) else answer
        return {name: str(value) for name, value in known.items()}
    if isinstance(answer, bytes):
        lines = answer.decode().splitlines()
        return dict(line.partition(":")[::2] for line in lines if ":" in line)
    return answer if isinstance(answer, Exception) else {}
