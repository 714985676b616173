"""The common parts of the commands: arguments, exit codes and tables."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentError, ArgumentTypeError, _AppendAction
from contextlib import suppress
from datetime import timedelta
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, Literal

from django.apps import apps
from django.core.management import find_commands
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
from django_distlock.conf import DEFAULT_ALIAS, LONGEST

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterable, Sequence

    from django.core.management.base import OutputWrapper

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
#: The exit code for wrong arguments, as of argparse.
WRONG_ARGUMENTS = 2
#: Exit codes of sysexits.h: EX_TEMPFAIL, EX_UNAVAILABLE, EX_PROTOCOL.
BUSY, NO_SERVER, LOST = 75, 69, 76
#: Exit codes of shells for SIGINT and SIGPIPE.
INTERRUPTED, NOT_READ = 130, 141
#: The exit codes of errors; the first class that matches counts.
CODES = (
    (LockNotAcquired, BUSY),
    (LockNotHeld, LOST),
    ((InvalidLockBackend, NotSupported, ValueError), WRONG_ARGUMENTS),
    (LockError, NO_SERVER),
)


#: The app that makes migrate the same as migrate_locked.
CONTRIB = "django_distlock.contrib.migrate"


class LockCommand(BaseCommand):
    """Base class of the commands, which skip system checks: wrong settings of one alias must not block others."""

    requires_system_checks: list[str] | tuple[str, ...] | Literal["__all__"] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        # Some terminals cannot show every character of a name.
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            try:
                super().run_from_argv(argv)
            finally:
                self.stdout.flush()
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            try:
                # Fails again if one of these is the broken pipe; otherwise the work, such as a migration, had its own.
                for stream in (self.stdout, self.stderr):
                    stream.write()
                    stream.flush()
            except BrokenPipeError:
                # The reader has gone. Python flushes stdout once more at its exit, which must not fail.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(NOT_READ)
            raise

    def execute(self, *args: Any, **options: Any) -> str | None:
        # call_command() passes its keyword arguments unchanged: convert them as those from a shell.
        parser = self.create_parser("", "")
        for action in parser._actions:  # noqa: SLF001 - as call_command() does
            value = options.get(action.dest)
            if isinstance(value, timedelta):
                options[action.dest] = value.total_seconds()
            elif isinstance(value, str):
                try:
                    value = parser._get_value(action, value)  # noqa: SLF001
                    parser._check_value(action, value)  # noqa: SLF001
                except ArgumentError as error:
                    parser.error(str(error))
                options[action.dest] = [value] if isinstance(action, _AppendAction) else value
        return super().execute(*args, **options)

    def tell_failed(self, failed: dict[str, str], text: str) -> None:
        """Write the error of each alias in *failed*; CommandError with *text* if there are any."""
        for alias, error in failed.items():
            self.stderr.write(self.style.ERROR(f"{alias}: {error}"))
        if failed:
            raise CommandError(text % ", ".join(failed))


def apps_with_migrate() -> list[str]:
    """Return the installed apps with a command ``migrate``, in order: Django runs the first one's."""
    return [
        config.name
        for config in apps.get_app_configs()
        if "migrate" in find_commands(f"{config.path}/management")
    ]


def command_error(error: InvalidLockBackend | LockError | ValueError) -> CommandError:
    code = next(code for kinds, code in CODES if isinstance(error, kinds))
    return CommandError(str(error), returncode=code)


def duration(text: str) -> float:
    """Return the seconds of a time such as 90, 1.5s, 15m, 12h, 7d or 2w; at most about 31 years."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip().lower())
    if found is None:
        msg = _("%r is not a time: write seconds, or a number with s, m, h, d or w, such as 12h.")
        raise ArgumentTypeError(msg % text)
    number, unit = found.groups()
    if (seconds := float(number) * UNITS[unit]) > LONGEST:
        raise ArgumentTypeError(_("%r is too long: at most %d seconds.") % (text, LONGEST))
    return seconds


def patience(text: str) -> float | None:
    """Return the duration() of *text*; None (no limit) for "forever"."""
    return None if text.strip().lower() == "forever" else duration(text)


def add_options(parser: ArgumentParser, which: str) -> None:
    """Add --json, and --using, which may be repeated; *which* describes the default aliases."""
    parser.add_argument("--json", action="store_true", help=_("print one JSON object"))
    text = _("an alias of DISTLOCK; can be given several times (default: %s)") % which
    parser.add_argument("--using", action="append", metavar="ALIAS", help=text)


def add_lock(parser: ArgumentParser) -> None:
    """Add the name of a lock, and --using for its alias."""
    parser.add_argument("name", help=_("the name of the lock"))
    text = _("the alias in DISTLOCK (default: %(default)s)")
    parser.add_argument("--using", default=DEFAULT_ALIAS, metavar="ALIAS", help=text)


def add_question(parser: ArgumentParser) -> None:
    """Add --yes, and --json, which needs it, to a command that asks first."""
    parser.add_argument("--yes", action="store_true", help=_("do not ask"))
    text = _("print one JSON object; needs --yes")
    parser.add_argument("--json", action="store_true", help=text)


def check_can_ask(options: dict[str, Any]) -> None:
    """Raise CommandError if the command cannot ask, and --yes was not given."""
    # Python has no stdin if it was closed, as by <&- in a shell.
    can_ask = sys.stdin is not None and sys.stdin.isatty()
    if not options["yes"] and (options["json"] or not can_ask):
        text = _("Nobody can be asked here: add --yes.")
        raise CommandError(text, returncode=WRONG_ARGUMENTS)


def is_agreed(question: str) -> bool:
    """Ask *question*; return True if the answer is y. Ctrl-D means no."""
    with suppress(EOFError):
        return input(question).strip().lower() == "y"
    return False


def wanted_aliases(using: list[str] | None) -> list[str]:
    """Return the aliases given by --using, or all aliases; CommandError for an unknown alias."""
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
    """Write *headings* and *rows*: as a table on a terminal if rich is installed, else as lines with tabs."""
    if out.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            pass
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
    for row in (headings, *rows):
        out.write("\t".join(row))
