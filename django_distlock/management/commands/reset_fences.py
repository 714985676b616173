"""``manage.py reset_fences MODEL``: makes rows whose fence is ahead of all tokens claimable again."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.management.base import CommandError
from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, connections
from django.utils.translation import gettext as _, ngettext

from django_distlock import InvalidLockBackend, LockError, locks
from django_distlock.engine import fencing
from django_distlock.exceptions import first_line
from django_distlock.management.base import (
    BUSY,
    NO_SERVER,
    WRONG_ARGUMENTS,
    LockCommand,
    add_question,
    check_can_ask,
    command_error,
    is_agreed,
    wanted_aliases,
)
from django_distlock.models import FencedModel, Lowered
from django_distlock.operators import holdings

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from django_distlock.engine.values import Held

NOT_AGREED = 1


class Command(LockCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.description = _(
            "Set the fences of all rows of a FencedModel to 0, after a question, so that every "
            "lease can claim them. Needed only if they are ahead of all tokens, after a change of "
            "the backend, its server or the data. Nobody may hold a lock meanwhile. Exit codes: "
            "0 done, 1 the answer was no, 2 wrong arguments, 69 a server does not answer, 75 a "
            "lock is held."
        )
        parser.add_argument("model", help=_("the model, such as shop.Account"))
        text = _("the alias in DATABASES (default: %(default)s)")
        add = partial(parser.add_argument, "--database", metavar="ALIAS", help=text)
        add(choices=[*connections], default=DEFAULT_DB_ALIAS)
        add_question(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        check_can_ask(options)
        try:
            self._reset(options)
        except (OperationalError, InterfaceError) as error:
            text = f"DATABASES[{options['database']!r}]: {first_line(error)}"
            raise CommandError(text, returncode=NO_SERVER) from error

    def _reset(self, options: dict[str, Any]) -> None:
        rows = fencing.fenced(_model(options["model"]), options["database"])
        if unknown := _check_nobody_holds():
            text = _("These aliases cannot tell whether a lock is held: %s.")
            self.stderr.write(self.style.WARNING(text % ", ".join(unknown)))
        if not options["yes"]:
            question = _(
                "A holder that was paused before this can then claim the rows once more. "
                "Set %(number)d fences of %(model)s to 0? [y/N] "
            )
            if not is_agreed(question % {"number": rows.count(), "model": options["model"]}):
                sys.exit(NOT_AGREED)
            _check_nobody_holds()
        number = rows.update(fence=Lowered(0))
        if options["json"]:
            self.stdout.write(json.dumps({"reset": number}))
        elif options["verbosity"]:
            self.stdout.write(_("Reset: %d") % number)


def _model(label: str) -> type[FencedModel]:
    try:
        model = apps.get_model(label)
    except (LookupError, ValueError) as error:
        text = _("There is no model %r: write its app and its name, such as shop.Account.")
        raise CommandError(text % label, returncode=WRONG_ARGUMENTS) from error
    if not issubclass(model, FencedModel):
        text = _("%s is not a FencedModel: its rows have no fence.") % label
        raise CommandError(text, returncode=WRONG_ARGUMENTS)
    return model


def _check_nobody_holds() -> list[str]:
    """Raise CommandError if a lock with a fencing token is held; return the aliases that cannot tell."""
    unknown: list[str] = []
    found: list[Held] = []
    try:
        for alias in wanted_aliases(None):
            backend = locks[alias]
            if backend.supports_fencing and backend.supports_listing:
                found += (held for held in holdings(alias) if held.state == "held")
            elif backend.supports_fencing:
                unknown.append(alias)
    except (InvalidLockBackend, LockError) as error:
        raise command_error(error) from error
    if found:
        text = ngettext(
            "%(number)d lock is held, such as %(name)r: stop what holds it.",
            "%(number)d locks are held, such as %(name)r: stop what holds them.",
            len(found),
        )
        raise CommandError(text % {"number": len(found), "name": found[0].name}, returncode=BUSY)
    return unknown
