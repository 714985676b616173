"""``manage.py list_locks``: the held locks and their holders, of every alias that can list them."""

from __future__ import annotations

import json
import time
from argparse import ArgumentTypeError
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError
from django.utils.translation import gettext as _

from django_distlock import InvalidLockBackend, LockError, locks
from django_distlock.ground import clock
from django_distlock.ground.naming import printable
from django_distlock.management.base import (
    LockCommand,
    add_options,
    duration,
    wanted_aliases,
    write_rows,
)
from django_distlock.operators import holdings

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from django_distlock.engine.values import Held

HEADINGS = "alias", "state", "name", "holder", "since", "remaining", "waiters"
STATES = "held", "stale", "reserved"
#: Seconds between two listings.
SHORTEST_PAUSE = 0.1


class Command(LockCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.description = _(
            "List who holds which lock. On a terminal it is a table (if rich is installed), elsewhere "
            "lines with tabs. Aliases that cannot list their locks are left out. "
            "Exit codes: 0 all listed, 1 some aliases failed (the others are listed), 2 wrong arguments."
        )
        add_options(parser, _("every alias that can list its locks"))
        add = parser.add_argument
        text = _("only names like this: 'invoice:*'")
        add("--name", metavar="PATTERN", default="*", help=text)
        add("--state", choices=STATES, help=_("only locks in this state"))
        text = _("list them again so often, until Ctrl-C (default: each %(const)s s)")
        add("--watch", nargs="?", type=_pause, const="2", metavar="TIME", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        aliases = wanted_aliases(options["using"])
        if options["watch"] is None:
            self._list(aliases, options)
            return
        with suppress(KeyboardInterrupt):
            while True:
                if self.stdout.isatty():
                    self.stdout.write("\x1b[H\x1b[2J", ending="")
                with suppress(CommandError):
                    self._list(aliases, options)
                self.stdout.flush()
                time.sleep(options["watch"])

    def _list(self, aliases: list[str], options: dict[str, Any]) -> None:
        wanted: list[tuple[str, Held]] = []
        failed: dict[str, str] = {}
        for alias in aliases:
            try:
                if options["using"] or locks[alias].supports_listing:
                    wanted += [
                        (alias, held)
                        for held in holdings(alias)
                        if fnmatchcase(held.name, options["name"])
                        and options["state"] in {None, held.state}
                    ]
            except (LockError, InvalidLockBackend) as error:
                failed[alias] = str(error)
        if options["json"]:
            found = [_as_json(alias, held) for alias, held in wanted]
            problems = [{"alias": alias, "error": error} for alias, error in failed.items()]
            self.stdout.write(json.dumps({"locks": found, "failed": problems}))
        elif options["verbosity"] and not wanted and self.stdout.isatty():
            self.stdout.write(_("Nobody holds a lock."))
        elif options["verbosity"]:
            write_rows(self.stdout, HEADINGS, [_cells(*each) for each in wanted])
        self.tell_failed(failed, _("Not listed: %s."))


def _pause(text: str) -> float:
    if (seconds := duration(text)) < SHORTEST_PAUSE:
        raise ArgumentTypeError(_("%r is too short: at least %s seconds.") % (text, SHORTEST_PAUSE))
    return seconds


def _cells(alias: str, held: Held) -> tuple[str, ...]:
    left = held.remaining
    if left is None:
        remaining = "-"
    else:
        remaining = clock.in_words(left) if left > 0 else f"ended {clock.in_words(abs(left))} ago"
    since = "-"
    if held.age is not None:
        began = datetime.now(UTC) - timedelta(seconds=held.age)
        since = f"{clock.time_of_day(began)} ({clock.in_words(held.age)} ago)"
    state = f"{held.state}, shared" if held.shared else held.state
    if held.place is not None:
        state = f"{state}, place {held.place}"
        if held.limit is not None:
            state = f"{state} of {held.limit}"
    waiters = "-" if held.waiters is None else str(held.waiters)
    return alias, state, printable(held.name), str(held.holder or "-"), since, remaining, waiters


def _as_json(alias: str, held: Held) -> dict[str, Any]:
    words = "name", "key", "state", "shared", "place", "limit", "age", "remaining", "waiters"
    facts = {word: getattr(held, word) for word in words}
    holder = held.holder and asdict(held.holder)
    return {"alias": alias, **facts, "holder": holder, "fencing_token": held.token}
