"""``manage.py purge_stale_locks``, for cron: deletes old rows and nodes of locks."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError
from django.utils.translation import gettext as _, ngettext

from django_distlock import locks
from django_distlock.exceptions import InvalidLockBackend, LockError
from django_distlock.ground import clock
from django_distlock.management.base import (
    WRONG_ARGUMENTS,
    LockCommand,
    add_options,
    duration,
    wanted_aliases,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser

#: Characters of the progress bar.
WIDTH = 30


class Command(LockCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.description = _(
            "Delete the records of locks that have been stale or free for longer than a day (or "
            "--older-than) and that nobody waits for, and the positions of waiters that died. "
            "Several can run at once, and while locks are in use. "
            "Exit codes: 0 done, 1 some aliases failed (the others are done), 2 wrong arguments."
        )
        add_options(parser, _("every alias that can be purged"))
        add = parser.add_argument
        text = _("seconds, or a number with s, m, h, d or w: 12h, 7d (default: %(default)s)")
        add("--older-than", type=duration, default="1d", metavar="TIME", help=text)
        text = _("records in one transaction (default: %(default)s)")
        add("--batch-size", type=int, default=1000, metavar="N", help=text)
        text = _("print what would be deleted, and delete nothing")
        add("--dry-run", action="store_true", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        aliases = wanted_aliases(options["using"])
        shows = options["verbosity"] > 0 and not options["json"]
        purged: list[dict[str, Any]] = []
        failed: dict[str, str] = {}
        for alias in aliases:
            try:
                if options["using"] or locks[alias].supports_purge:
                    purged.append(self._purge(alias, options, shows=shows))
            except (LockError, InvalidLockBackend) as error:
                failed[alias] = str(error)
            except ValueError as error:
                text = re.sub(r"^(older|batch)_", r"--\1-", str(error))
                raise CommandError(text, returncode=WRONG_ARGUMENTS) from error
        if options["json"]:
            problems = [{"alias": alias, "error": error} for alias, error in failed.items()]
            report = {"dry_run": options["dry_run"], "purged": purged, "failed": problems}
            self.stdout.write(json.dumps(report))
        elif shows and not purged and not failed:
            self.stdout.write(
                _("No alias of DISTLOCK leaves records behind: there is nothing to purge.")
            )
        self.tell_failed(failed, _("Not purged: %s."))

    def _purge(self, alias: str, options: dict[str, Any], *, shows: bool) -> dict[str, Any]:
        """Purge one alias, and return the result for --json."""
        size, dry_run = options["batch_size"], options["dry_run"]
        shows_bar = shows and self.stdout.isatty()
        looked_at = deleted = 0
        began = asked = clock.wait_time()
        batches = locks[alias].purge(options["older_than"], batch_size=size, dry_run=dry_run)
        for batch in batches:
            looked_at, deleted = looked_at + batch.looked_at, deleted + batch.deleted
            if shows_bar:
                bar = "#" * round(batch.progress * WIDTH)
                self.stdout.write(f"\r{alias}: [{bar:.<{WIDTH}}] {batch.progress:4.0%}", ending="")
                self.stdout.flush()
            if batch.deleted:
                # SQLite gives the file to the next request, not to the longest waiter, so pause for the others.
                time.sleep(clock.wait_time() - asked)
            asked = clock.wait_time()
        spent = clock.wait_time() - began
        if shows_bar:
            self.stdout.write("\r\x1b[K", ending="")
        if shows:
            done = (
                _("%(alias)s: %(deleted)s of %(all)s records would be deleted in %(time)s")
                if dry_run
                else _("%(alias)s: %(deleted)s of %(all)s records deleted in %(time)s")
            )
            facts = {"alias": alias, "deleted": f"{deleted:,}", "all": f"{looked_at:,}"}
            self.stdout.write(done % {**facts, "time": clock.in_words(spent, ngettext)})
        spent = round(spent, 3)
        return {"alias": alias, "looked_at": looked_at, "deleted": deleted, "seconds": spent}
