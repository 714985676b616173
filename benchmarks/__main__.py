"""Run: python -m benchmarks [SERVER ...] [--rounds N]. It starts servers of its own.

One acquire and release, uncontended, and how long after a release a waiter in another process holds.
"""

from __future__ import annotations

import argparse
import os

import django
from rich.console import Console
from rich.table import Table

from benchmarks import caches, databases, zookeeper
from benchmarks.contenders import Contender
from benchmarks.measures import handoff, microseconds
from tests.fixtures.environment import SERVER_PORTS, free_port, sqlite_path

SERVERS = {
    "sqlite": databases.sqlite,
    "postgres": databases.postgres,
    "mariadb": databases.mariadb,
    "redis": caches.redis,
    "redlock": caches.redlock,
    "memcached": caches.memcached,
    "zookeeper": zookeeper.zookeeper,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(SERVERS)}")
    parser.add_argument("--rounds", type=int, default=2000)
    arguments = parser.parse_args()
    if unknown := set(arguments.servers) - set(SERVERS):
        parser.error(f"no such server: {', '.join(sorted(unknown))}")
    _choose_places()
    django.setup()
    Console().print(_measure(arguments.servers or list(SERVERS), arguments.rounds))


def _choose_places() -> None:
    # Before Django reads its settings; the processes of the hand-off inherit them.
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        "DISTLOCK_SQLITE_PATH": sqlite_path(),
        "DISTLOCK_REDIS_FIVE_PORTS": ",".join(str(free_port()) for _ in range(5)),
        **{name: str(free_port()) for name in SERVER_PORTS},
    }


def _measure(servers: list[str], rounds: int) -> Table:
    table = Table("", "acquire + release, µs", "of raw", "hand-off, ms")
    for server in servers:
        with SERVERS[server]() as contenders:
            for title, rivals in contenders.items():
                table.add_section()
                table.add_row(title)
                _compare(table, rivals, rounds)
    return table


def _compare(table: Table, rivals: list[Contender], rounds: int) -> None:
    costs = [microseconds(rival.cycle, rounds) for rival in rivals]
    for rival, cost in zip(rivals, costs, strict=True):
        passed = f"{handoff(rival.alias):.1f}" if rival.alias else ""
        table.add_row(f"  {rival.name}", f"{cost:.0f}", f"{cost / costs[0]:.2f}", passed)


if __name__ == "__main__":
    main()
