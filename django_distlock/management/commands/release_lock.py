"""``manage.py release_lock NAME``: takes a lock away from its holder."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _

from django_distlock import InvalidLockBackend, LockError, locks
from django_distlock.ground import clock
from django_distlock.ground.naming import printable
from django_distlock.management.base import (
    LockCommand,
    add_lock,
    add_question,
    check_can_ask,
    command_error,
    is_agreed,
)
from django_distlock.operators import elsewhere, holdings

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
        add_question(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        check_can_ask(options)
        try:
            released = self._release(options)
        except (InvalidLockBackend, LockError, ValueError) as error:
            raise command_error(error) from error
        if options["json"]:
            self.stdout.write(json.dumps({"released": released}))
        if not released:
            sys.exit(NOT_HELD)

    def _release(self, options: dict[str, Any]) -> int:
        """Show the holdings, end them after the question, and return how many were ended."""
        backend = locks[options["using"]]
        found = holdings(options["using"], options["name"])
        shows = options["verbosity"] and not options["json"]
        if shows:
            nobody = _("Nobody holds '%s'.") % printable(options["name"])
            self.stdout.write("\n".join(map(_line, found)) or nobody)
        if shows and not found:
            for alias in elsewhere(options["name"], options["using"]):
                text = _("It is held on the alias %(alias)s: add --using %(alias)s.")
                self.stdout.write(text % {"alias": alias})
        if found and not options["yes"] and not is_agreed(_("Release it? [y/N] ")):
            return 0
        released = sum(backend.force_release(held.key, held.owner_digest) for held in found)
        if shows and found:
            self.stdout.write(_("Released: %d") % released)
        return released


def _line(held: Held) -> str:
    by = f" by {held.holder}" if held.holder else ""
    left = "" if held.remaining is None else f", {clock.in_words(max(0, held.remaining))} left"
    return f"{printable(held.name)}: {held.state}{by}{left}"
