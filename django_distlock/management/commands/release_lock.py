"""``manage.py release_lock NAME``: take a lock away from its holder."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError
from django.utils.translation import gettext as _

from django_distlock import InvalidLockBackend, LockError, locks
from django_distlock.engine import clock
from django_distlock.management.base import (
    WRONG_ARGUMENTS,
    LockCommand,
    add_lock,
    command_error,
)
from django_distlock.operators import holdings

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from django_distlock.engine.values import Held

NOT_HELD = 1


class Command(LockCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.description = _(
            "Take a lock away from whoever holds it, after a question. The holder is not stopped: it "
            "learns at its next renewal that it has lost the lock. Exit codes: 0 released, 1 nobody "
            "held it or the answer was no, 2 wrong arguments, 69 the server does not answer."
        )
        add_lock(parser)
        parser.add_argument("--yes", action="store_true", help=_("do not ask"))
        text = _("print one JSON object; needs --yes")
        parser.add_argument("--json", action="store_true", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        if not options["yes"] and (options["json"] or not sys.stdin.isatty()):
            text = _("Nobody can be asked here: add --yes.")
            raise CommandError(text, returncode=WRONG_ARGUMENTS)
        try:
            released = self._release(options)
        except (InvalidLockBackend, LockError, ValueError) as error:
            raise command_error(error) from error
        if options["json"]:
            self.stdout.write(json.dumps({"released": released}))
        elif options["verbosity"]:
            self.stdout.write(_("Released: %d") % released)
        if not released:
            sys.exit(NOT_HELD)

    def _release(self, options: dict[str, Any]) -> int:
        """Return how many of the holdings that were shown were ended."""
        backend = locks[options["using"]]
        found = holdings(options["using"], options["name"])
        for held in found if not options["json"] and options["verbosity"] else ():
            self.stdout.write(_line(held))
        if found and not options["yes"] and input(_("Release it? [y/N] ")).strip().lower() != "y":
            return 0
        return sum(backend.force_release(held.key, held.owner_digest) for held in found)


def _line(held: Held) -> str:
    by = f" by {held.holder}" if held.holder else ""
    left = "" if held.remaining is None else f", {clock.in_words(max(0, held.remaining))} left"
    return f"{held.name}: {held.state}{by}{left}"
