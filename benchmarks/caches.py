"""Redis, five of them for Redlock, and memcached."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import redis as redis_py
from pymemcache.client.base import Client

from benchmarks.contenders import Contender, ours, peer, polled
from tests.fixtures.memcached import Memcached
from tests.fixtures.redis import Redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.contenders import Field


@contextmanager
def redis() -> Iterator[None]:
    """Start one Redis."""
    with Redis(_port()):
        redis_py.Redis(port=_port()).rpush("raw-bell", "free")
        yield


@cache
def redis_field() -> Field:
    """Return who is measured there."""
    import redis_lock
    from django.core.cache import caches

    client = redis_py.Redis(port=_port())
    cache: Any = caches["django_redis"]
    spent = _spent("set", "evalsha")
    return {
        "Redis": [
            _raw_redis([_port()], _spent("set", "del")),
            peer("redis-py Lock", lambda: client.lock("redis-py", timeout=30), spent=spent),
            peer(
                "django-redis cache.lock",
                lambda: cache.lock("django-redis", timeout=30),
                spent=spent,
            ),
            peer(
                "python-redis-lock",
                lambda: redis_lock.Lock(client, "python", expire=30),
                spent=spent,
            ),
            ours("redis", _spent("evalsha")),
            ours("redis-fair"),
            ours("redis", limit=1),
        ]
    }


@contextmanager
def redlock() -> Iterator[None]:
    """Start five Redis servers."""
    with ExitStack() as stack:
        for port in _five_ports():
            stack.enter_context(Redis(port))
            redis_py.Redis(port=port).rpush("raw-bell", "free")
        yield


@cache
def redlock_field() -> Field:
    """Return who is measured there."""
    from pottery import Redlock

    masters = {redis_py.Redis(port=port) for port in _five_ports()}
    pottery = peer("pottery", lambda: Redlock(key="pottery", masters=masters, auto_release_time=30))
    return {"Redlock on five Redis": [_raw_redis(_five_ports()), pottery, ours("redlock")]}


@contextmanager
def memcached() -> Iterator[None]:
    """Start memcached."""
    with Memcached(_memcached_port()):
        yield


@cache
def memcached_field() -> Field:
    """Return who is measured there."""
    import pylibmc
    from sherlock import MCLock

    sherlock = pylibmc.Client([f"127.0.0.1:{_memcached_port()}"], binary=True)
    return {
        "memcached": [
            _raw_memcached(),
            peer("sherlock", lambda: MCLock("sherlock", client=sherlock, expire=30)),
            ours("memcached"),
        ]
    }


def _port() -> int:
    return int(os.environ["DISTLOCK_REDIS_PORT"])


def _five_ports() -> list[int]:
    return [int(port) for port in os.environ["DISTLOCK_REDIS_FIVE_PORTS"].split(",")]


def _memcached_port() -> int:
    return int(os.environ["DISTLOCK_MEMCACHED_PORT"])


def _spent(*commands: str) -> Callable[[], float]:
    """Return what tells the microseconds that Redis has spent on these *commands*, and on what their scripts call."""
    client = redis_py.Redis(port=_port())

    def spent() -> float:
        known: Any = client.info("commandstats")
        return float(sum(known.get(f"cmdstat_{name}", {}).get("usec", 0) for name in commands))

    return spent


def _raw_redis(ports: list[int], spent: Callable[[], float] | None = None) -> Contender:
    clients = [redis_py.Redis(port=port) for port in ports]
    is_held_by_bell = False

    def take() -> None:
        for client in clients:
            client.set("raw", "owner", nx=True, px=30_000)

    def wait() -> None:
        nonlocal is_held_by_bell
        is_held_by_bell = True
        for client in clients:
            client.blpop(["raw-bell"])

    def free() -> None:
        for client in clients:
            if is_held_by_bell:
                client.rpush("raw-bell", "free")
            else:
                client.delete("raw")

    return Contender("raw SET NX PX, DEL", take, free, wait, spent=spent)


def _raw_memcached() -> Contender:
    client = Client(("127.0.0.1", _memcached_port()))

    def take() -> bool:
        return bool(client.add("raw", b"owner", expire=30, noreply=False))

    def free() -> None:
        client.delete("raw", noreply=False)

    return Contender("raw add, delete", take, free, polled(take))
