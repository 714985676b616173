"""What the tests of faults at Redis share: aliases on a server, who waits there, and what other processes do."""

from __future__ import annotations

import gc
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django_distlock import Lease, lock, locks
from django_distlock.backends.redis import RedisBackend
from django_distlock.backends.redis.verbs import keys_of
from tests.contract.rivals import Rival
from tests.fixtures.child import hear_word, say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_django.fixtures import Settings

    from tests.fixtures.redis import Redis

BACKEND = "django_distlock.backends.redis.RedisBackend"
DATABASE = 5
#: A ttl that no test lives to see the end of.
LONG = 60.0


def alias(port: int, **options: Any) -> dict[str, Any]:
    """Return settings of a Redis on this port."""
    location = f"redis://127.0.0.1:{port}/{DATABASE}"
    return {"BACKEND": BACKEND, "OPTIONS": {"location": location, **options}}


def configure(settings: Settings, server: Redis, port: int | None = None, **options: Any) -> None:
    """Have "default" go to *port*, a proxy's perhaps, and "direct" to the server itself, with patience."""
    settings.DISTLOCK = {
        "default": alias(port or server.port, **options),
        "direct": alias(server.port, connect_timeout=5.0, io_timeout=10.0),
    }


def backend(using: str = "default") -> RedisBackend:
    """Return the backend of *using* as what it is."""
    found = locks[using]
    assert isinstance(found, RedisBackend)
    return found


def rival(name: str, *, ttl: float = 20.0, using: str = "direct") -> Rival:
    """Return somebody else who wants the lock, as the server sees them."""
    return Rival.of(backend(using), name, ttl=ttl)


def take(name: str, **terms: Any) -> Lease:
    lease = lock(name, **terms).acquire()
    assert lease
    return lease


def holders(name: str) -> int:
    """Return how many the server says hold it now."""
    return sum(held.name == name for held in backend("direct").held())


def waiters(server: Redis, name: str) -> int:
    """Return how many stand in the server's queue, dead or alive."""
    queue = keys_of(backend("direct").request(name, ttl=1, holder=None).key).all[2]
    with server.client(DATABASE) as client:
        found: int = client.zcard(queue)
        return found


def left_behind(server: Redis) -> list[str]:
    """Return the keys that a free lock does not have."""
    with server.client(DATABASE) as client:
        return [key for key in client.keys("*") if not key.endswith("}")]


def connections(server: Redis) -> set[str]:
    """Return the ids of all connections but the one that asks."""
    with server.client(DATABASE) as client:
        me = client.client_id()
        return {each["id"] for each in client.client_list() if each["id"] != str(me)}


def connections_to(servers: Iterable[Redis]) -> set[int]:
    """Return our own ports of all connections that this process has to these servers."""
    theirs, ours = {each.port for each in servers}, set()
    sockets = [each for each in Path("/proc/self/fd").iterdir() if each.is_socket()]
    for each in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(int(each.name))) as end:
            if end.family == socket.AF_INET and end.getpeername()[1] in theirs:
                ours.add(end.getsockname()[1])
    return ours


# What children do.


def wait(name: str) -> None:
    """Wait until served, tell, and hold it until told to leave."""
    with lock(name, timeout=None) as lease:
        say("held", token=lease.fencing_token)
        hear_word("leave")


def open_files() -> int:
    """Return how many files, sockets included, this process has open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, not paths
