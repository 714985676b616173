"""Redis, five of them for Redlock, and memcached."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import redis as redis_py
from pymemcache.client.base import Client

from benchmarks.contenders import Contender, ours
from tests.fixtures.memcached import Memcached
from tests.fixtures.redis import Redis

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def redis() -> Iterator[dict[str, list[Contender]]]:
    """Start one Redis."""
    port = int(os.environ["DISTLOCK_REDIS_PORT"])
    with Redis(port):
        peers = [_by_redis_py(port), _by_django_redis()]
        yield {"Redis": [_raw_redis([port]), *peers, ours("redis")]}


@contextmanager
def redlock() -> Iterator[dict[str, list[Contender]]]:
    """Start five Redis servers."""
    ports = [int(port) for port in os.environ["DISTLOCK_REDIS_FIVE_PORTS"].split(",")]
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(Redis(port))
        yield {"Redlock on five Redis": [_raw_redis(ports), ours("redlock")]}


@contextmanager
def memcached() -> Iterator[dict[str, list[Contender]]]:
    """Start memcached."""
    port = int(os.environ["DISTLOCK_MEMCACHED_PORT"])
    with Memcached(port):
        yield {"memcached": [_raw_memcached(port), ours("memcached")]}


def _raw_redis(ports: list[int]) -> Contender:
    clients = [redis_py.Redis(port=port) for port in ports]

    def cycle() -> None:
        for client in clients:
            client.set("raw", "owner", nx=True, px=30_000)
        for client in clients:
            client.delete("raw")

    return Contender("raw SET NX PX, DEL", cycle)


def _by_redis_py(port: int) -> Contender:
    client = redis_py.Redis(port=port)

    def cycle() -> None:
        with client.lock("redis-py", timeout=30):
            pass

    return Contender("redis-py Lock", cycle)


def _by_django_redis() -> Contender:
    from django.core.cache import caches

    cache: Any = caches["django_redis"]

    def cycle() -> None:
        with cache.lock("django-redis", timeout=30):
            pass

    return Contender("django-redis cache.lock", cycle)


def _raw_memcached(port: int) -> Contender:
    client = Client(("127.0.0.1", port))

    def cycle() -> None:
        client.add("raw", b"owner", expire=30, noreply=False)
        client.delete("raw", noreply=False)

    return Contender("raw add, delete", cycle)
