"""Run: python -m benchmarks [SERVER ...] [--only TABLE] [--save FOLDER]. It starts servers of its own.

Locks on each server beside its raw commands and what users would pick instead, in turns: one acquire
and release, uncontended; how long after a release a waiter in another process holds; what many
processes get out of one name; how what ours cost grows; and how long the way of one acquire is.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import django
from rich.console import Console
from rich.progress import Progress

from benchmarks import caches, databases, etcd, report, zookeeper
from benchmarks.measures import awake
from benchmarks.tables import KINDS, Wanted
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
    """Measure, print, and save what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(SERVERS)}")
    parser.add_argument("--only", choices=KINDS, action="append", help="one of the tables")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--work", type=float, default=1.0, help="of a crowd's holders, in ms")
    parser.add_argument("--files", action="store_true", help="list the calls of each file, too")
    parser.add_argument("--no-disk", action="store_true", help="have no database wait for its disk")
    parser.add_argument("--save", type=Path, help="write figures and charts into this folder")
    parser.add_argument("--draw", type=Path, help="only draw the charts of this folder again")
    arguments = parser.parse_args()
    if unknown := set(arguments.servers) - set(SERVERS):
        parser.error(f"no such server: {', '.join(sorted(unknown))}")
    if arguments.draw:
        report.draw(arguments.draw)
        return
    _choose_places()
    os.environ["DISTLOCK_BENCH_DISK"] = "" if arguments.no_disk else "1"
    django.setup()
    found = report.Report(arguments.no_disk)
    console = Console(stderr=True)
    with Progress(console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=None)
        for server in arguments.servers or SERVERS:
            start, rivals = SERVERS[server]
            with start(), awake():
                for title in rivals():
                    wanted = Wanted(
                        rivals, title, arguments.rounds, arguments.files, arguments.work / 1e3
                    )
                    for name in arguments.only or KINDS:
                        progress.update(task, description=f"{title}: {name}", refresh=True)
                        found.add(name, title, KINDS[name].rows(wanted))
            if arguments.save:
                found.save(arguments.save)
                report.draw(arguments.save)
    found.show(Console())


def _choose_places() -> None:
    # Before Django reads its settings; the processes of the hand-off inherit them.
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        "DISTLOCK_SQLITE_PATH": sqlite_path(),
        "DISTLOCK_REDIS_FIVE_PORTS": ",".join(str(free_port()) for _ in range(5)),
        **{name: str(free_port()) for name in SERVER_PORTS},
    }


if __name__ == "__main__":
    main()
