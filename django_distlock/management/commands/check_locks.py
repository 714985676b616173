"""``manage.py check_locks``: tries one real lock on each alias, step by step."""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _

from django_distlock import InvalidLockBackend, LockError, lock, locks
from django_distlock.engine.registry import registry
from django_distlock.engine.values import Busy
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from django_distlock.management.base import (
    LockCommand,
    add_options,
    wanted_aliases,
    write_rows,
)
from django_distlock.operators import holdings

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterator

HEADINGS = "alias", "acquire", "contend", "extend", "list", "release", "notes"
#: Features that not every backend supports.
FEATURES = "fencing", "shared", "fair", "min_hold", "extend", "detach", "listing"
PURPOSE = "check_locks"


class Command(LockCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.description = _(
            "Acquire, contend for, extend, list and release a lock of its own on each alias, and show how "
            "long each step takes and what the alias cannot do. "
            "Exit codes: 0 all work, 1 some do not, 2 wrong arguments."
        )
        add_options(parser, _("every alias"))

    def handle(self, *args: Any, **options: Any) -> None:
        reports = [_check(alias) for alias in wanted_aliases(options["using"])]
        if options["json"]:
            self.stdout.write(json.dumps({"aliases": reports}))
        elif options["verbosity"]:
            write_rows(self.stdout, HEADINGS, map(_cells, reports))
        failed = {report["alias"]: report["error"] for report in reports if "error" in report}
        self.tell_failed(failed, _("Not in order: %s."))


def _check(alias: str) -> dict[str, Any]:
    """Return the milliseconds of each step that worked, and the *error* of the step that failed."""
    report: dict[str, Any] = {"alias": alias, "milliseconds": {}, "cannot": []}
    try:
        backend = locks[alias]
        report["cannot"] = [each for each in FEATURES if not getattr(backend, f"supports_{each}")]
        try_out(alias, report["milliseconds"])
        if not any(each.backend is backend for each in registry.leases()):
            backend.close()  # the next lock then begins a session, which raises fencing tokens to the clock
    except (LockError, InvalidLockBackend) as error:
        report["error"] = str(error)
    return report


class StepFailed(LockError):
    """A *step* of check_locks failed."""

    def __init__(self, step: str, problem: str) -> None:
        self.step, self.problem = step, problem
        super().__init__(step, problem)

    def __str__(self) -> str:
        return f"{self.step}: {self.problem}"


def try_out(alias: str, milliseconds: dict[str, float] | None = None) -> None:
    """Acquire, contend for, extend, list and release a lock on *alias*; store in *milliseconds* how long each step took.

    StepFailed for the first step that fails, InvalidLockBackend for wrong settings.
    """
    spent = {} if milliseconds is None else milliseconds

    @contextmanager
    def timed(step: str) -> Iterator[None]:
        began = clock.wait_time()
        try:
            yield
        except LockError as error:
            raise StepFailed(step, str(error)) from error
        spent[step] = round((clock.wait_time() - began) * 1000, 2)

    backend = locks[alias]
    backend.check_key()
    # One name for all checks of a thread, because some backends keep a row for each name.
    name = f"{PURPOSE}:{Holder.current().host}:{os.getpid()}:{threading.get_ident()}"
    with ExitStack() as stack:
        with timed("acquire"):
            own = lock(name, using=alias, timeout=0, renew=False, purpose=PURPOSE)
            lease = stack.enter_context(own)
        with timed("contend"):
            # Try as another process would.
            other = backend.request(name, ttl=backend.ttl, holder=Holder.current(PURPOSE))
            if not isinstance(backend.try_acquire(other, queued=False), Busy):
                backend.release(other)
                raise LockError("a second holder got the lock too; this alias excludes nobody")
        if backend.supports_extend:
            with timed("extend"):
                lease.extend()
        if backend.supports_listing:
            with timed("list"):
                if not holdings(alias, name):
                    raise LockError("the lock is held, and the list does not have it")
        with timed("release"):
            stack.close()


def _cells(report: dict[str, Any]) -> list[str]:
    spent = (report["milliseconds"].get(step) for step in HEADINGS[1:-1])
    times = ["-" if each is None else f"{each:.2f} ms" for each in spent]
    return [report["alias"], *times, ", ".join(f"no {each}" for each in report["cannot"]) or "-"]
