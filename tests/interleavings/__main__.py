"""`make interleave`: the database backend on real servers, in many orders of the statements of two or three sessions.

Each session is a process with a backend of its own. It stops before each statement and each commit, and a seed
decides who goes on. A session that waits for a row is seen in the server's own views, and another one goes on.
After each step the promises are checked: see promises.py. Without --orders, plans and orders are random.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console

from tests.fixtures.environment import free_port, sqlite_path

if TYPE_CHECKING:
    from .search import Totals
    from .servers import Database

_console = Console(highlight=False, markup=False, soft_wrap=True)
SERVERS = ("postgres", "mariadb", "sqlite")


def main() -> int:
    """Return 1 if a schedule breaks a promise, or a planted mistake is not found; 130 after Ctrl-C."""
    arguments = _arguments()
    # Before Django reads its settings.
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "DISTLOCK_SQLITE_PATH": sqlite_path(),
        "DISTLOCK_POSTGRES_PORT": str(free_port()),
        "DISTLOCK_MARIADB_PORT": str(free_port()),
    }
    import django

    django.setup()
    try:
        return max(_run(name, arguments) for name in arguments.server or SERVERS)
    except KeyboardInterrupt:
        return 130


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.interleavings", description=__doc__)
    add = parser.add_argument
    add("--server", action="append", choices=SERVERS, help="one of them; may be repeated")
    add("--seeds", type=int, default=1000, help="how many schedules (default: 1000)")
    add("--from", type=int, default=0, dest="first", help="the first seed")
    add("--orders", type=int, help="all orders of small plans with so many preemptions instead")
    add("--replay", help="show the steps of one schedule, by its seed or what --orders has printed")
    add("--faults", nargs="*", help="find planted mistakes, those with these words")
    return parser.parse_args()


def _run(name: str, arguments: argparse.Namespace) -> int:
    from .search import all_orders, replay, walk

    with ExitStack() as stack:
        server = _server(name, stack)
        stack.callback(server.close)
        if arguments.faults is not None:
            return _find_faults(server, arguments.faults)
        if arguments.replay is not None:
            outcome = replay(server, arguments.replay)
            _console.print("\n".join([str(outcome.plan), *outcome.steps]))
            if outcome.broken is not None:
                _console.print("".join(traceback.format_exception(outcome.broken)))
            return outcome.broken is not None
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        runs = (
            walk(server, seeds)
            if arguments.orders is None
            else all_orders(server, arguments.orders)
        )
        began, totals, told = monotonic(), None, 0
        for totals in runs:
            _show(name, totals, told)
            told = len(totals.found)
        assert totals is not None
        _console.print(f"{name}: {totals}, {monotonic() - began:.0f} s")
        return bool(totals.found)


def _server(name: str, stack: ExitStack) -> Database:
    from tests.fixtures.mariadb import MariaDB
    from tests.fixtures.postgres import PostgreSQL

    from .servers import OnMariaDB, OnPostgreSQL, OnSQLite

    if name == "postgres":
        port = int(os.environ["DISTLOCK_POSTGRES_PORT"])
        return OnPostgreSQL(stack.enter_context(PostgreSQL(port)))
    if name == "mariadb":
        port = int(os.environ["DISTLOCK_MARIADB_PORT"])
        return OnMariaDB(stack.enter_context(MariaDB(port)))
    return OnSQLite(stack.enter_context(tempfile.TemporaryDirectory()))


def _show(name: str, totals: Totals, told: int) -> None:
    """Print what was found since so many were *told*, and each thousand schedules how many these were."""
    for what, outcome in [*totals.found.items()][told:]:
        _console.print(f"--server {name} --replay {what} ({outcome.plan}): {outcome.broken!r}")
    if totals.schedules % 1000 == 0:
        _console.print(f"{name}: {totals}")


def _find_faults(server: Database, words: list[str]) -> int:
    from .faults import FAULTS
    from .search import order_that_shows

    missed = 0
    chosen = [
        each
        for each in FAULTS
        if server.name in each.servers and all(word in each.name for word in words)
    ]
    _console.print(f"{server.name}: {len(chosen)} mistakes")
    for fault in chosen:
        number, what = order_that_shows(server, fault)
        missed += not number
        found = f"found by order {number}" if number else "NOT found"
        _console.print(f"{server.name}, {fault.name}: {found}, {what[:200]}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
