"""What a lock in Redis or memcached costs, beside the raw commands and what one would pick instead.

Run: python -m benchmarks.caches [--rounds N]. It starts servers of its own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.measures import handoff, microseconds, ours
from tests.fixtures.environment import free_port
from tests.fixtures.memcached import Memcached
from tests.fixtures.redis import Redis

if TYPE_CHECKING:
    from collections.abc import Callable

os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
for port in ("DISTLOCK_REDIS_PORT", "DISTLOCK_MEMCACHED_PORT"):
    # Chosen before Django reads its settings; the processes of the hand-off inherit them.
    os.environ.setdefault(port, str(free_port()))
os.environ.setdefault(
    "DISTLOCK_SQLITE_PATH", str(Path(tempfile.mkdtemp(prefix="distlock-")) / "db.sqlite3")
)


def raw_redis() -> Callable[[], None]:
    """Return the two least commands of a lock in Redis."""
    import redis

    client = redis.Redis(port=int(os.environ["DISTLOCK_REDIS_PORT"]))

    def cycle() -> None:
        client.set("raw", "owner", nx=True, px=30_000)
        client.delete("raw")

    return cycle


def by_redis_py() -> Callable[[], None]:
    """Return the same by redis-py's own lock."""
    import redis

    client = redis.Redis(port=int(os.environ["DISTLOCK_REDIS_PORT"]))

    def cycle() -> None:
        with client.lock("redis-py", timeout=30):
            pass

    return cycle


def by_django_redis() -> Callable[[], None]:
    """Return the same by ``cache.lock()`` of django-redis."""
    from django.core.cache import caches

    cache: Any = caches["django_redis"]

    def cycle() -> None:
        with cache.lock("django-redis", timeout=30):
            pass

    return cycle


def raw_memcached() -> Callable[[], None]:
    """Return the two least commands of a lock in memcached."""
    from pymemcache.client.base import Client

    client = Client(("127.0.0.1", int(os.environ["DISTLOCK_MEMCACHED_PORT"])))

    def cycle() -> None:
        client.add("raw", b"owner", expire=30, noreply=False)
        client.delete("raw", noreply=False)

    return cycle


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        stack.enter_context(Redis(int(os.environ["DISTLOCK_REDIS_PORT"])))
        stack.enter_context(Memcached(int(os.environ["DISTLOCK_MEMCACHED_PORT"])))
        Console().print(measure(rounds))


def measure(rounds: int) -> Table:
    """Return the table of all."""
    import django

    django.setup()
    table = Table("", "acquire + release, µs", "of raw", "hand-off, ms")
    rows: dict[str, list[tuple[str, Callable[[], None], str]]] = {
        "Redis": [
            ("raw SET NX PX, DEL", raw_redis(), ""),
            ("redis-py Lock", by_redis_py(), ""),
            ("django-redis cache.lock", by_django_redis(), ""),
            ("django_distlock", ours("redis"), "redis"),
        ],
        "memcached": [
            ("raw add, delete", raw_memcached(), ""),
            ("django_distlock", ours("memcached"), "memcached"),
        ],
    }
    for server, cycles in rows.items():
        raw = 0.0
        for name, cycle, alias in cycles:
            cost = microseconds(cycle, rounds)
            raw = raw or cost
            passed = f"{handoff(alias):.1f}" if alias else ""
            table.add_row(f"{server}: {name}", f"{cost:.0f}", f"{cost / raw:.2f}", passed)
    return table


if __name__ == "__main__":
    main()
