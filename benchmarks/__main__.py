"""Run: python -m benchmarks [SERVER ...] [--only TABLE]. It starts servers of its own.

One acquire and release, uncontended, in turns with what users would pick instead; how long after a
release a waiter in another process holds; what eight processes get out of one name; and how long
the way of one acquire is.
"""

from __future__ import annotations

import argparse
import math
import os
from argparse import Namespace
from typing import TYPE_CHECKING

import django
from rich.console import Console
from rich.table import Table

from benchmarks import caches, databases, etcd, zookeeper
from benchmarks.measures import awake, costs, crowd, handoff
from benchmarks.way import files_of, way
from tests.fixtures.environment import SERVER_PORTS, free_port, sqlite_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from benchmarks.contenders import Field

    #: What starts a server, and who is measured there.
    Arena = tuple[Callable[[], AbstractContextManager[None]], Callable[[], Field]]

SERVERS: dict[str, Arena] = {
    "memory": (databases.memory, databases.memory_field),
    "sqlite": (databases.sqlite, databases.sqlite_field),
    "postgres": (databases.postgres, databases.postgres_field),
    "mariadb": (databases.mariadb, databases.mariadb_field),
    "redis": (caches.redis, caches.redis_field),
    "redlock": (caches.redlock, caches.redlock_field),
    "memcached": (caches.memcached, caches.memcached_field),
    "zookeeper": (zookeeper.zookeeper, zookeeper.zookeeper_field),
    "etcd": (etcd.etcd, etcd.etcd_field),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(SERVERS)}")
    parser.add_argument("--only", choices=TABLES, action="append", help="one of the tables")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--files", action="store_true", help="list the calls of each file, too")
    parser.add_argument("--no-disk", action="store_true", help="have no database wait for its disk")
    arguments = parser.parse_args()
    if unknown := set(arguments.servers) - set(SERVERS):
        parser.error(f"no such server: {', '.join(sorted(unknown))}")
    _choose_places()
    os.environ["DISTLOCK_BENCH_DISK"] = "" if arguments.no_disk else "1"
    django.setup()
    tables = {kind: Table(kind, *TABLES[kind][0]) for kind in arguments.only or TABLES}
    for server in arguments.servers or SERVERS:
        arena = SERVERS[server]
        with arena[0](), awake():
            for title in arena[1]():
                for kind, table in tables.items():
                    table.add_section()
                    table.add_row(f"[bold]{title}")
                    TABLES[kind][1](table, arena, title, arguments)
    for table in tables.values():
        Console().print(table)


def _choose_places() -> None:
    # Before Django reads its settings; the processes of the hand-off inherit them.
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        "DISTLOCK_SQLITE_PATH": sqlite_path(),
        "DISTLOCK_REDIS_FIVE_PORTS": ",".join(str(free_port()) for _ in range(5)),
        **{name: str(free_port()) for name in SERVER_PORTS},
    }


def _add_cycles(table: Table, arena: Arena, title: str, arguments: Namespace) -> None:
    rivals = arena[1]()[title]
    found = costs(rivals, arguments.rounds)
    for rival, cost in zip(rivals, found, strict=True):
        ratio = cost.time / found[0].time
        server = "" if math.isnan(cost.server) else f"{cost.server:.1f}"
        table.add_row(
            rival.name, f"{cost.time:.0f}", f"{ratio:.2f}", f"{cost.processor:.0f}", server
        )


def _add_handoffs(table: Table, arena: Arena, title: str, _: Namespace) -> None:
    rivals = _waiting(arena, title)
    gaps = {name: handoff(arena[1], title, number) for number, name in rivals.items()}
    for name, gap in gaps.items():
        table.add_row(name, f"{gap:.1f}", f"{gap / next(iter(gaps.values())):.2f}")


def _add_crowds(table: Table, arena: Arena, title: str, _: Namespace) -> None:
    rivals = _waiting(arena, title)
    crowds = {name: crowd(arena[1], title, number) for number, name in rivals.items()}
    for name, one in crowds.items():
        ratio = one.holds / next(iter(crowds.values())).holds
        table.add_row(name, f"{one.holds:.0f}", f"{ratio:.2f}", f"{one.fairness:.2f}")


def _add_ways(table: Table, arena: Arena, title: str, arguments: Namespace) -> None:
    for rival in arena[1]()[title]:
        if rival.alias:
            files = files_of(way(rival))
            table.add_row(rival.name, str(len(files)), str(files.total()))
            for name, calls in sorted(files.items()) if arguments.files else ():
                table.add_row(f"  {name}", "", str(calls))


def _waiting(arena: Arena, title: str) -> dict[int, str]:
    """Return who can wait for another process: their numbers and names."""
    if title == databases.ALONE:
        return {}
    return {number: one.name for number, one in enumerate(arena[1]()[title]) if one.wait}


#: Each table: its headings, and what fills it.
TABLES = {
    "cycle": (("acquire + release, µs", "of raw", "processor, µs", "server, µs"), _add_cycles),
    "handoff": (("hand-off, ms", "of raw"), _add_handoffs),
    "crowd": (("holds a second", "of raw", "Jain's index"), _add_crowds),
    "way": (("our files", "our calls"), _add_ways),
}


if __name__ == "__main__":
    main()
