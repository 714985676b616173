"""``manage.py check_locks``: does it work here? One real lock on each alias, step by step."""

from __future__ import annotations

import json
import uuid
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.management.base import BaseCommand, CommandError
from django.utils.translation import gettext as _

from django_distlock import InvalidLockBackend, LockError, lock, locks
from django_distlock.engine import clock
from django_distlock.engine.holder import Holder
from django_distlock.engine.values import Busy
from django_distlock.management.base import add_using, wanted_aliases, write_rows
from django_distlock.operators import holdings

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable

    from django_distlock.backends.base import BaseLockBackend

_T = TypeVar("_T")

HEADINGS = "alias", "acquire", "contend", "extend", "list", "release", "cannot"
#: Features that not every backend has, and the attributes that tell.
FEATURES = {
    "fencing": "supports_fencing",
    "shared": "supports_shared",
    "fair": "supports_fair",
    "delays": "supports_delays",
    "detach": "supports_detach",
    "listing": "supports_listing",
}
PURPOSE = "check_locks"


class Command(BaseCommand):
    # It says itself what is wrong with an alias.
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.description = _(
            "Acquire, contend for, extend, list and release a lock of its own on each alias, and show how "
            "long each step takes and what the alias cannot do. "
            "Exit codes: 0 all work, 1 some do not, 2 wrong arguments."
        )
        add_using(parser, _("every alias"))
        parser.add_argument("--json", action="store_true", help=_("print one JSON object"))

    def handle(self, *args: Any, **options: Any) -> None:
        reports = [_check(alias) for alias in wanted_aliases(options["using"])]
        if options["json"]:
            self.stdout.write(json.dumps({"aliases": reports}))
        elif options["verbosity"]:
            write_rows(self.stdout, HEADINGS, map(_cells, reports))
        for report in reports:
            if "error" in report:
                self.stderr.write(self.style.ERROR(f"{report['alias']}: {report['error']}"))
        if failed := [report["alias"] for report in reports if "error" in report]:
            raise CommandError(_("Not in order: %s.") % ", ".join(failed))


def _check(alias: str) -> dict[str, Any]:
    """Return the milliseconds of each step that worked, and the *error* of the one that did not."""
    report: dict[str, Any] = {"alias": alias, "milliseconds": {}, "cannot": []}
    step = ""

    def timed(name: str, act: Callable[[], _T]) -> _T:
        nonlocal step
        step, began = name, clock.wait_time()
        found = act()
        report["milliseconds"][name] = round((clock.wait_time() - began) * 1000, 2)
        return found

    try:
        backend = locks[alias]
        report["cannot"] = [each for each, flag in FEATURES.items() if not getattr(backend, flag)]
        name = f"{PURPOSE}:{uuid.uuid4().hex}"
        with ExitStack() as stack:
            own = lock(name, using=alias, timeout=0, renew=False, purpose=PURPOSE)
            lease = timed("acquire", partial(stack.enter_context, own))
            timed("contend", partial(_contend, backend, name))
            timed("extend", lease.extend)
            if backend.supports_listing:
                timed("list", partial(_find, alias, name))
            timed("release", stack.close)
    except (LockError, InvalidLockBackend) as error:
        report["error"] = f"{step}: {error}" if step else str(error)
    return report


def _contend(backend: BaseLockBackend, name: str) -> None:
    """Ask for the lock a second time, as another process would; LockError if it is granted."""
    other = backend.request(name, ttl=backend.ttl, holder=Holder.current(PURPOSE))
    if not isinstance(backend.try_acquire(other, queued=False), Busy):
        backend.release(other)
        msg = "a second holder got the lock too; this alias excludes nobody"
        raise LockError(msg)


def _find(alias: str, name: str) -> None:
    """Look for the lock in the list; LockError if it is not there."""
    if not holdings(alias, name):
        msg = "the lock is held, and the list does not have it"
        raise LockError(msg)


def _cells(report: dict[str, Any]) -> list[str]:
    spent = (report["milliseconds"].get(step) for step in HEADINGS[1:-1])
    times = ["-" if each is None else f"{each:.2f} ms" for each in spent]
    return [report["alias"], *times, ", ".join(report["cannot"]) or "-"]
