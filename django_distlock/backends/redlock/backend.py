"""Locks in a majority of independent Redis servers: held while more than half of them say so."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

from django.core.cache import caches
from django.core.checks import CheckMessage, Error, Warning as CheckWarning

from django_distlock.backends.base import StepsBackend, server_error
from django_distlock.backends.cache_alias import own_instance
from django_distlock.backends.redis.backend import Facts, ask_facts, check_facts
from django_distlock.backends.redis.connections import PoolLink, ask
from django_distlock.backends.redis.sources import Source, source_of_cache, source_of_url
from django_distlock.backends.redis.verbs import (
    PROBE,
    MakeKey,
    check_key_functions,
    joint_label,
    label_of,
)
from django_distlock.conf import BackendSettings
from django_distlock.engine.bells import TaskBell, ThreadBell
from django_distlock.engine.steps import arun, run
from django_distlock.engine.values import Busy, Held, Request
from django_distlock.engine.waiting import Queueing, Wait, Waiting, Way
from django_distlock.exceptions import LockBackendError
from django_distlock.ground.naming import printable

from .quorum import RedlockOptions, RedlockVerbs, Verb, seconds_up
from .servers import Servers, no_greeting
from .votes import LONGEST, LONGEST_CONNECTING

_T = TypeVar("_T")
#: Seconds between two tries, chosen at random, so that votes do not split again.
PAUSE = (0.05, 0.2)


class _RandomPauses(Waiting):
    """Random pauses, so that waiters whose votes were split do not collide again."""

    __slots__ = ()

    def pause(self, wait: Wait, busy: Busy) -> float:
        return wait.bounded(random.uniform(*PAUSE), busy.remaining)  # noqa: S311 - to differ is enough


class RedlockBackend(StepsBackend):
    """Locks in the servers that ``OPTIONS["servers"]`` names, by majority."""

    options_class = RedlockOptions
    supports_listing = True
    supports_detach = True
    kind = "redlock"
    waiting = _RandomPauses(way=Way.LISTEN, queueing=Queueing.BY_TRYING, new_owners=True)

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.supports_fencing = self.options.fencing
        self.sources = [self._source(server) for server in self.options.servers]
        names = [source.where for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"'servers': {name} stands there twice; another database of it is no other server."
                )
        self._make_keys: list[MakeKey] = [
            str if "://" in server else own_instance(server).make_key
            for server in self.options.servers
        ]
        check_key_functions(*self._make_keys)
        self.location = ("redlock", *(each.identity for each in self.sources))
        #: For how many seconds a server that restarted grants no lock.
        self._least_uptime = (
            (self.options.longest_ttl or self.ttl) if self.options.restart_guard else 0.0
        )
        self._open()

    def request(self, name: str, key: str = "", **wishes: Any) -> Request:
        self.check_ttl(wishes["ttl"])  # also the ttl of a lease that another process has detached
        return super().request(name, key, **wishes)

    def label(self) -> str:
        return joint_label([label_of(make_key(PROBE)) for make_key in self._make_keys])

    def check_ttl(self, ttl: float) -> None:
        if 0 < self._least_uptime < ttl:
            raise ValueError(
                f"DISTLOCK[{self.alias!r}]: a ttl of {ttl:g} seconds is more than {self._least_uptime:g} seconds, "
                "for which servers that restarted grant nothing: set OPTIONS 'longest_ttl'."
            )

    # The verbs.

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        self._listen(request, bell, seconds)
        bell.wait(seconds)

    def held(self, key: str | None = None) -> Iterable[Held]:
        return self._run(self._verbs.held(key, self.seen_from_here().keeps, self.label()))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._run(self._verbs.end_holding(key, owner_digest))

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        where = f"DISTLOCK[{self.alias!r}]"
        options, found = self.options, list[CheckMessage]()
        if databases is None and not (options.restart_guard or options.durable):
            text = f"{where}: 'restart_guard' is off: a server that restarts without its data lets a second holder in."
            hint = "Switch it on, or have each server write each change to disk and say 'durable': True."
            found.append(CheckWarning(text, hint=hint, id="distlock.W030"))
        runs: dict[str, str] = {}
        for source in self.sources if databases else ():
            at = f"{where}: {source.where}"
            with closing(PoolLink(self.alias, source)) as link:
                try:
                    facts = link.converse(ask_facts())
                    if isinstance(facts, Exception) and self._least_uptime:
                        found.append(_no_uptime(at, facts))
                    else:
                        found += check_facts(at, facts, allow_eviction=options.allow_eviction)
                    found += _check_disk(at, link) if options.durable else []
                    found += _check_twice(where, source.where, facts, runs)
                except LockBackendError as error:
                    found.append(server_error(error, source.address))
        return found

    def close(self) -> None:
        super().close()
        self._servers.close()

    def abandon_after_fork(self) -> None:
        self._close_unused.detach()
        self._open()

    # The verbs for asyncio.

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        self._listen(request, bell, seconds)
        await bell.wait(seconds)

    async def _arun(self, steps: Verb[_T]) -> _T:
        return await arun(steps, self._servers.aask)

    def _listen(self, request: Request, bell: ThreadBell | TaskBell, seconds: float) -> None:
        if request.limit is None:  # the places of a limit have no doorbell
            self._servers.listen(self._verbs.doorbells(request), bell, seconds)

    def _open(self) -> None:
        greet = (
            partial(seconds_up, durable=self.options.durable) if self._least_uptime else no_greeting
        )
        self._servers = Servers(self.alias, self.sources, greet)
        self._run = partial(run, carry_out=self._servers.ask)
        self._verbs: RedlockVerbs = RedlockVerbs(
            self.alias,
            self._servers,
            self.options,
            least_uptime=self._least_uptime,
        )
        # The thread ends with its backend.
        self._close_unused = weakref.finalize(self, self._servers.close)
        self._close_unused.atexit = False

    def _source(self, server: str) -> Source:
        options = self.options
        connecting = options.connect_timeout or LONGEST_CONNECTING
        # The limit for greetings and for the rest of an answer that has begun; each question has its own limit.
        answering = max(connecting, options.server_timeout or LONGEST)
        limits: dict[str, Any] = {"connect_timeout": connecting, "io_timeout": answering}
        if "://" in server:
            return source_of_url(server, options.options, **limits)
        if server not in caches.settings:
            # A mistyped URL may contain a password.
            is_secret = "@" in server
            problem = "a URL needs ://" if is_secret else f"CACHES has no alias {server!r}"
            raise ValueError(f"'servers': {problem}.")
        source = source_of_cache(caches.settings[server], is_cluster=False, **limits)
        if source.sentinels or source.is_cluster:
            msg = f"'servers': the cache {server!r} is no single server, but several that share their data."
            raise ValueError(msg)
        return source


def _no_uptime(where: str, refusal: Exception) -> CheckMessage:
    text = f"{where}: it grants no lock, since it refused INFO, by which the restart guard learns when it was started: {printable(str(refusal))}"
    hint = "Let its user run INFO: ACL SETUSER <user> +info."
    return Error(text, hint=hint, id="distlock.E032")


def _check_disk(where: str, link: PoolLink) -> list[CheckMessage]:
    answer = link.converse(ask(("CONFIG", "GET", "append*")))
    hint = "Set appendonly yes and appendfsync always, or leave 'durable' out and rely on 'restart_guard'."
    if not isinstance(answer, list):
        text = f"{where}: 'durable' cannot be checked: CONFIG GET was refused."
        return [CheckWarning(text, hint=hint, id="distlock.W031")]
    known = dict(zip(answer[::2], answer[1::2], strict=True))
    if (known.get(b"appendonly"), known.get(b"appendfsync")) == (b"yes", b"always"):
        return []
    text = (
        f"{where}: OPTIONS say 'durable', but the server may lose what it granted when it restarts."
    )
    return [Error(text, hint=hint, id="distlock.E031")]


def _check_twice(where: str, server: str, facts: Facts, runs: dict[str, str]) -> list[CheckMessage]:
    run = "" if isinstance(facts, Exception) else facts.get("run_id", "")
    first = runs.setdefault(run, server)
    if not run or first == server:
        return []
    text = f"{where}: {first} and {server} are one and the same server."
    return [Error(text, hint="Name servers that can fail one by one.", id="distlock.E030")]
