"""Locks in Redis for asyncio: whatever is cancelled leaves nothing, and an event loop leaves nothing either."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.redis.connections import ROUNDS, AsyncPoolLink
from django_distlock.engine.values import Grant
from django_distlock.exceptions import NotSent
from django_distlock.ground.holder import Holder
from tests.fixtures.eventually import aeventually, eventually
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import Redis

from .conftest import paused
from .redis_tools import (
    LONG,
    alias,
    backend,
    configure,
    connections,
    holders,
    left_behind,
    open_files,
    rival,
    waiters,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_django.fixtures import Settings

    from tests.fixtures.redis import Replicated

# Some start servers of their own.
pytestmark = [pytest.mark.server, pytest.mark.caches]

CROWD = 100
#: Set it higher for a long run.
LOOPS = int(os.environ.get("DISTLOCK_LOOPS", "60"))


@pytest.fixture
def server(settings: Settings) -> Iterator[Redis]:
    """A server of the test's own, behind the alias "default"."""
    with Redis() as server:
        configure(settings, server)
        yield server
        locks.reset()


@pytest.fixture
def proxy(server: Redis, settings: Settings) -> Iterator[Proxy]:
    """The way to the server for the alias "default"."""
    with Proxy(server.port) as proxy:
        configure(settings, server, proxy.port, io_timeout=10)
        yield proxy
        proxy.pass_through()
        locks.reset()


async def hold(name: str, *, shared: bool = False) -> None:
    async with lock(name, ttl=LONG, timeout=10, shared=shared):
        await asyncio.sleep(0)


# Broken connections.


async def be_a_crowd(name: str) -> AsyncPoolLink:
    """Leave three idle connections."""
    link: AsyncPoolLink = await backend()._loops.get()
    verbs = [backend()._verbs.listen(f"{name}:{number}", 0.3) for number in range(3)]
    await asyncio.gather(*(link.converse(verb, 5.0) for verb in verbs))
    assert len(link._idle) == 3
    return link


@pytest.mark.parametrize("module", ["asyncio", "uvloop"])
def test_connections_that_were_reset_while_idle_are_replaced_unseen(
    proxy: Proxy, name: str, module: str
) -> None:
    async def be_reset() -> None:
        link = await be_a_crowd(name)
        proxy.cut()
        proxy.pass_through()

        async with asyncio.timeout(5):
            while not all([await each.has_news() for each in link._idle]):  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        assert not await lock(name).alocked()

    with asyncio.Runner(loop_factory=pytest.importorskip(module).new_event_loop) as runner:
        runner.run(be_reset())


@pytest.mark.parametrize("timeout", [0, 10])
async def test_connections_that_a_router_swallows_are_replaced_unseen(
    proxy: Proxy, server: Redis, settings: Settings, name: str, timeout: float
) -> None:
    configure(settings, server, proxy.port, io_timeout=1.0)
    await be_a_crowd(name)
    proxy.swallow()

    async with lock(name, timeout=timeout) as lease:
        proxy.swallow()
        await lease.aextend()
        proxy.swallow()


async def test_a_frozen_server_is_an_error_in_time_and_nothing_is_left(
    server: Redis, settings: Settings, name: str
) -> None:
    configure(settings, server, io_timeout=1.5)
    await hold(name)
    with paused(server):
        # The idle connection, and as many rounds to connect as an event loop that is held up makes necessary.
        async with asyncio.timeout(1.5 + ROUNDS * (0.25 + 1.5) + 2):
            with pytest.raises(LockBackendError):
                await lock(name, ttl=LONG, timeout=0).aacquire()

    await aeventually(lambda: not left_behind(server), 5)
    await asyncio.sleep(0.2)  # whatever comes late has come
    assert not holders(name)


async def test_sentinels_that_hang_are_passed_over(
    redis_sentinel: Replicated, settings: Settings, name: str
) -> None:
    with Proxy(redis_sentinel.sentinel.port) as one, Proxy(redis_sentinel.sentinel.port) as other:
        one.black_hole()
        other.black_hole()
        known = settings.CACHES["redis_sentinel"]
        ports = [one.port, other.port, redis_sentinel.sentinel.port]
        options = {**known["OPTIONS"], "SENTINELS": [("127.0.0.1", port) for port in ports]}
        settings.CACHES = {**settings.CACHES, "three": {**known, "OPTIONS": options}}
        by_cache = "django_distlock.backends.redis.CacheRedisBackend"
        settings.DISTLOCK = {"default": {"BACKEND": by_cache, "OPTIONS": {"cache": "three"}}}

        await asyncio.gather(*(hold(f"{name}:{number}") for number in range(8)))

        locks.reset()


# Event loops that come and go.


def test_many_short_event_loops_leave_nothing(server: Redis, settings: Settings, name: str) -> None:
    configure(settings, server, io_timeout=10)
    asyncio.run(hold(name))
    files, open_before = open_files(), connections(server)

    for _ in range(LOOPS):
        asyncio.run(hold(name))

    eventually(lambda: connections(server) <= open_before, 5, "their connections are closed")
    eventually(lambda: open_files() <= files, 5, "their sockets are closed")
    assert not left_behind(server)


# Crowds.


async def test_a_hundred_tasks_wait_for_a_lock_each_without_threads_and_are_all_served(
    server: Redis, settings: Settings, name: str
) -> None:
    configure(settings, server, io_timeout=10)  # a machine that is busy may need long for a crowd
    await hold(name)
    names = [f"{name}:{number}" for number in range(CROWD)]
    rivals = [rival(each, ttl=LONG) for each in names]
    assert all(await asyncio.to_thread(lambda: [other.tries() for other in rivals]))
    threads = set(threading.enumerate())
    tasks = [asyncio.create_task(hold(each)) for each in names]
    await aeventually(lambda: queues(server) == len(rivals), 20, "all wait")

    new = set(threading.enumerate()) - threads
    assert not [each for each in new if not each.name.startswith(("distlock-io", "distlock-clock"))]
    await asyncio.to_thread(lambda: [other.leaves() for other in rivals])

    async with asyncio.timeout(10):
        await asyncio.gather(*tasks)


async def test_a_hundred_waiters_for_one_fair_lock_do_not_melt_the_server(
    server: Redis, settings: Settings, name: str
) -> None:
    sites = {f"site{i}": alias(server.port, fair=True, io_timeout=10) for i in range(CROWD)}
    settings.DISTLOCK = {"direct": alias(server.port), **sites}
    holder, served = rival(name, ttl=LONG), list[str]()
    await asyncio.to_thread(holder.takes)

    async def queue(site: str) -> None:
        async with lock(name, using=site, timeout=30):
            served.append(site)

    tasks = [asyncio.create_task(queue(site)) for site in sites]
    await aeventually(lambda: waiters(server, name) == CROWD, 20, "all stand in line")
    began = time.monotonic()
    asked = server.calls()["evalsha"]
    busy = _seconds_of_work(server)
    await asyncio.sleep(1)

    # Each looks five times a second, and costs less than a tenth of a millisecond.
    asked, busy = server.calls()["evalsha"] - asked, _seconds_of_work(server) - busy
    elapsed = time.monotonic() - began
    assert asked < CROWD * 10 * elapsed
    assert busy < 0.4 * elapsed
    await asyncio.to_thread(holder.leaves)
    async with asyncio.timeout(15):
        await asyncio.gather(*tasks)
    assert sorted(served) == sorted(sites)


def queues(server: Redis) -> int:
    """Return at how many locks somebody stands in line."""
    return sum(key.endswith(":q") for key in left_behind(server))


def _seconds_of_work(server: Redis) -> float:
    cpu = server.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])


async def test_an_answer_that_has_come_in_time_counts_though_the_event_loop_is_late(
    server: Redis, settings: Settings, name: str
) -> None:
    configure(settings, server, io_timeout=0.3)
    request = backend().request(name, ttl=LONG, holder=Holder.current())
    await backend().aprobe(request)  # it is connected now

    asking = asyncio.ensure_future(backend().atry_acquire(request, queued=False))
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251 - a task that blocks the event loop

    assert isinstance(await asking, Grant)


async def test_tries_of_a_crowd_wait_for_each_other_within_their_timeout_and_not_in_their_lease(
    server: Redis, proxy: Proxy, settings: Settings, name: str
) -> None:
    configure(settings, server, proxy.port, io_timeout=10.0)
    proxy.delay(0.4)

    async def work(number: int, timeout: float | None) -> tuple[float, float]:
        began = time.monotonic()
        async with lock(f"{name}:{number}", ttl=60, timeout=timeout) as lease:
            return time.monotonic() - began, lease.remaining

    patient = [asyncio.ensure_future(work(number, None)) for number in range(800)]
    hasty = asyncio.gather(
        *(work(number, 0.5) for number in range(800, 850)), return_exceptions=True
    )

    assert {type(each) for each in await hasty} == {NotSent}
    assert sum(each.done() for each in patient) < 400
    waited, remaining = max(await asyncio.gather(*patient))
    assert remaining > 60 - waited / 2


async def test_a_release_does_not_wait_behind_the_tries_of_others(
    server: Redis, proxy: Proxy, name: str
) -> None:
    lease = await lock(name).aacquire()
    assert lease
    proxy.delay(0.1)
    names = (f"{name}:{number}" for number in range(600))
    crowd = [asyncio.ensure_future(lock(each).aacquire()) for each in names]
    await asyncio.sleep(0)

    await lease.arelease()

    assert sum(each.done() for each in crowd) < 300
    proxy.delay(0)
    granted = await asyncio.gather(*crowd)
    await asyncio.gather(*(each.arelease() for each in granted if each))
    assert all(granted)
