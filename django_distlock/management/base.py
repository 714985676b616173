"""What the commands have in common: arguments, exit codes and tables."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

from django.core.management.base import BaseCommand, CommandError
from django.utils.translation import gettext as _

from django_distlock import (
    InvalidLockBackend,
    LockError,
    LockNotAcquired,
    LockNotHeld,
    NotSupported,
    locks,
)
from django_distlock.conf import DEFAULT_ALIAS

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterable, Sequence

    from django.core.management.base import OutputWrapper

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
#: Exit code of wrong arguments, argparse's own.
WRONG_ARGUMENTS = 2
#: As sysexits.h has them: try again later; no server; what was agreed was broken.
BUSY, NO_SERVER, LOST = os.EX_TEMPFAIL, os.EX_UNAVAILABLE, os.EX_PROTOCOL
#: The exit code of an error is that of the first kind which it is.
CODES = (
    (LockNotAcquired, BUSY),
    (LockNotHeld, LOST),
    ((InvalidLockBackend, NotSupported, ValueError), WRONG_ARGUMENTS),
    (LockError, NO_SERVER),
)


class LockCommand(BaseCommand):
    """A command for which wrong settings of one alias must not stand in the way of another."""

    requires_system_checks = ()

    def tell_failed(self, failed: dict[str, str], text: str) -> None:
        """Write the error of each alias that *failed*; CommandError with *text* if there are any."""
        for alias, error in failed.items():
            self.stderr.write(self.style.ERROR(f"{alias}: {error}"))
        if failed:
            raise CommandError(text % ", ".join(failed))


def command_error(error: InvalidLockBackend | LockError | ValueError) -> CommandError:
    code = next(code for kinds, code in CODES if isinstance(error, kinds))
    return CommandError(str(error), returncode=code)


def duration(text: str) -> float:
    """Return the seconds of a time such as 90, 1.5s, 15m, 12h, 7d or 2w."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip().lower())
    if found is None:
        msg = _("%r is not a time: write seconds, or a number with s, m, h, d or w, such as 12h.")
        raise ArgumentTypeError(msg % text)
    number, unit = found.groups()
    return float(number) * UNITS[unit]


def add_options(parser: ArgumentParser, which: str) -> None:
    """Add --json, and --using, which may be given several times; *which* aliases are meant by default."""
    parser.add_argument("--json", action="store_true", help=_("print one JSON object"))
    text = _("an alias of DISTLOCK; can be given several times (default: %s)") % which
    parser.add_argument("--using", action="append", metavar="ALIAS", help=text)


def add_lock(parser: ArgumentParser) -> None:
    """Add the name of a lock, and --using, which names its alias."""
    parser.add_argument("name", help=_("the name of the lock"))
    text = _("the alias in DISTLOCK (default: %(default)s)")
    parser.add_argument("--using", default=DEFAULT_ALIAS, metavar="ALIAS", help=text)


def wanted_aliases(using: list[str] | None) -> list[str]:
    """Return the aliases that --using names, or all; CommandError if there is no such alias."""
    try:
        known = list(locks)
    except InvalidLockBackend as error:
        raise CommandError(str(error)) from error
    for alias in using or ():
        if alias not in known:
            text = _("DISTLOCK has no alias %(alias)r; it has %(known)s.")
            facts = {"alias": alias, "known": ", ".join(known)}
            raise CommandError(text % facts, returncode=WRONG_ARGUMENTS)
    return list(dict.fromkeys(using or known))


def write_rows(out: OutputWrapper, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write *rows* as a table to a terminal, if rich is installed; else as lines with tabs."""
    if out.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            out.write("\t".join(headings))
        else:
            table = Table()
            for heading in headings:
                table.add_column(heading, overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            console = Console()
            with console.capture() as captured:
                console.print(table)
            out.write(captured.get(), ending="")
            return
    for row in rows:
        out.write("\t".join(row))
