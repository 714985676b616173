"""The processes of a schedule: each has the package's singletons, its clocks and its backend for itself."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import _lru_cache_wrapper, cache, partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.redis import connections
from django_distlock.backends.redlock import servers as redlock_servers
from django_distlock.conf import BackendSettings
from django_distlock.engine import background
from django_distlock.engine.deadlocks import wait_graph
from django_distlock.engine.lease import Lease
from django_distlock.engine.registry import registry
from django_distlock.engine.values import Grant, State
from django_distlock.ground import clock, mutexes
from django_distlock.handler import locks, make_backend

from . import world
from .primitives import Pool, Selector, Thread, Threading
from .wire import DriverPool, Network, Server, Socket, TaskDriverPool

if TYPE_CHECKING:
    from .world import World

#: The objects of which each process has one.
SINGLETONS: tuple[Any, ...] = (registry, background.background, wait_graph, locks)
ALIAS = "default"


class Process:
    """One process, with a backend for *settings*."""

    def __init__(
        self,
        here: World,
        number: int,
        network: Network,
        servers: list[Server],
        *,
        rate: float,
        grain: float,
    ) -> None:
        self.world, self.number, self.name = here, number, f"p{number}"
        self.network, self.servers = network, servers
        #: How fast its clocks run; how likely a switch is before each line.
        self.rate, self.grain = rate, grain
        self.is_dead = self.is_frozen = False
        self._dicts: list[dict[str, Any]] = [{} for _ in SINGLETONS]
        self.enter()
        registry._begin()
        background.background.reset()
        wait_graph.__init__()  # type: ignore[misc] # as a new process does
        locks.__init__()  # type: ignore[misc] # as above

    @property
    def runs(self) -> bool:
        return not (self.is_dead or self.is_frozen)

    def enter(self) -> None:
        """Make the package's singletons those of this process."""
        self.world.entered = self
        for each, own in zip(SINGLETONS, self._dicts, strict=True):
            each.__dict__ = own

    def open(self, settings: BackendSettings) -> BaseLockBackend:
        made = make_backend(settings)
        locks.made[ALIAS] = made
        self.backend = made
        return made

    def time(self) -> float:
        return 5000.0 * (self.number + 1) + self.world.now * self.rate

    def start(self, target: Callable[[], object], name: str) -> world.Strand:
        self.world.entered = self
        thread = Thread(target, name)
        thread._strand.world.make_ready(thread._strand)
        return thread._strand


def _now(here: World) -> float:
    here.step()
    here.end_call()
    return here.entered.time()


@contextmanager
def simulated(here: World, watch: Watch) -> Iterator[None]:
    """Have the package run in *here*: its time, its threads, its network and its random numbers."""
    now, tokens = partial(_now, here), partial(_token, here)
    ours = [
        (mutexes, "_sections", WeakKeyDictionary()),
        (clock, "lease_time", now),
        (clock, "wait_time", now),
        (clock, "_wall_time", now),
        (connections, "ConnectionPool", DriverPool),
        (connections, "new_selector", Selector),
        (connections, "AsyncConnectionPool", TaskDriverPool),
        (redlock_servers, "ConnectionPool", DriverPool),
        (redlock_servers, "socket", Socket),
        (redlock_servers, "new_selector", Selector),
        (background, "ThreadPoolExecutor", Pool),
        (sys.modules["django_distlock.backends.base"], "token_hex", tokens),
        (sys.modules["django_distlock.engine.values"].secrets, "token_hex", tokens),
        (sys.modules["django_distlock.engine.waiting"].random, "uniform", here.random.uniform),
        (sys.modules["django_distlock.engine.waiting"].random, "randrange", here.random.randrange),
        (Lease, "grant", watch.grant),
        (Lease, "end", watch.end),
    ]
    threads = [
        (module, "threading", Threading)
        for name, module in [*sys.modules.items()]
        if name.startswith("django_distlock.") and getattr(module, "threading", None) is threading
    ]
    kept = [each.__dict__ for each in SINGLETONS]
    for cached in _caches():
        cached.cache_clear()
    gc.collect()
    with ExitStack() as stack:
        stack.enter_context(world.entered(here))
        for owner, name, new in [*ours, *threads]:
            stack.enter_context(patch.object(owner, name, new))
        gc.disable()
        try:
            yield
        finally:
            here.end()
            for each, own in zip(SINGLETONS, kept, strict=True):
                each.__dict__ = own
            gc.enable()


@cache
def _caches() -> list[Any]:
    """Return what keeps results: a schedule is to take the same steps, whatever ran before it."""
    modules = [
        module for name, module in [*sys.modules.items()] if name.startswith("django_distlock.")
    ]
    owners = [
        each
        for module in modules
        for each in [module, *vars(module).values()]
        if hasattr(each, "__dict__")
    ]
    # A class method's is behind its descriptor.
    found = [getattr(each, "__func__", each) for owner in owners for each in vars(owner).values()]
    return [each for each in found if isinstance(each, _lru_cache_wrapper)]


def _token(here: World, size: int) -> str:
    return f"{here.random.getrandbits(8 * size):0{2 * size}x}"


class Watch:
    """What the schedule is told of each lease."""

    def __init__(self, here: World) -> None:
        self.world = here
        real_grant, real_end = Lease.grant, Lease.end
        watch = self

        def grant(lease: Lease, granted: Grant, asked: float) -> bool:
            is_held = real_grant(lease, granted, asked)
            if is_held:
                watch.granted(lease)
            return is_held

        def end(lease: Lease, state: State, reason: str = "", **terms: bool) -> bool:
            if state is State.LOST:
                watch.losing(lease, reason)
            return real_end(lease, state, reason, **terms)

        self.grant, self.end = grant, end

    def granted(self, lease: Lease) -> None:
        raise NotImplementedError

    def losing(self, lease: Lease, reason: str) -> None:
        raise NotImplementedError
