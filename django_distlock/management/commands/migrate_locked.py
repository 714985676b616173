"""``manage.py migrate_locked``: of many processes that start together, one migrates and the others wait."""

from __future__ import annotations

import sqlite3
import time
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from django.core.management.commands import migrate
from django.db import connections
from django.utils.translation import gettext as _

from django_distlock import (
    InvalidLockBackend,
    LockBackendError,
    LockError,
    LockNotAcquired,
    lock,
    locks,
)
from django_distlock.conf import BackendSettings, tests_run
from django_distlock.engine.waiting import Wait
from django_distlock.handler import make_backend
from django_distlock.management.base import LockCommand, command_error, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from django.core.management.base import CommandParser
    from django.db.backends.base.base import BaseDatabaseWrapper

    Attempt = Callable[[], AbstractContextManager[object]]

#: The alias of the backend that is made for an advisory lock.
ALIAS = "migrate_locked"
BACKEND = "django_distlock.backends.advisory.AdvisoryBackend"
#: Most seconds between two tries. Who waits inside the server is in a transaction, and whoever holds
#: the lock may wait for that: CREATE INDEX CONCURRENTLY does.
LONGEST_PAUSE = 1.0


class Command(LockCommand, migrate.Command):
    requires_system_checks = migrate.Command.requires_system_checks

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.description = _(
            "Migrate the database while holding a lock, so that of many processes one migrates and the others wait. "
            "No lock is taken if there is nothing to do. Exit codes: 75 somebody else still migrates after --wait, "
            "69 no lock server answers, 76 the lock was lost, 2 wrong arguments."
        )
        text = _(
            "how long to wait while somebody else migrates: seconds, or a number with s, m, h, d or w "
            "(default: %(default)s)"
        )
        parser.add_argument("--wait", type=duration, default="15m", metavar="TIME", help=text)
        text = _(
            "an alias in DISTLOCK (default: a lock that needs no tables, of the database itself)"
        )
        parser.add_argument("--using", metavar="ALIAS", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        wait, using = Wait(options.pop("wait")), options.pop("using")
        run = partial(super().handle, *args, **options)
        # A database that tests make is theirs alone.
        if options["plan"] or options["check_unapplied"] or tests_run():
            run()
            return
        is_to_do = partial(self._is_to_do, *args, **options)
        if is_to_do():
            tells = options["verbosity"] > 0
            with self._held(connections[options["database"]], using, wait, tells=tells):
                if is_to_do():
                    run()
                    return
        if options["verbosity"]:
            self.stdout.write(_("Nothing to migrate."))

    def _is_to_do(self, *args: Any, **options: Any) -> bool:
        if options["prune"] or options["run_syncdb"]:
            return True
        known = {"check_unapplied": True, "verbosity": 0}
        try:
            super().handle(*args, **options | known)
        except SystemExit:
            return True
        return False

    @contextmanager
    def _held(
        self, database: BaseDatabaseWrapper, using: str | None, wait: Wait, *, tells: bool
    ) -> Iterator[None]:
        """Hold the lock of *database*; CommandError if it stays busy, cannot be had, or is lost."""
        of_migrations: BaseException | None = None
        try:
            attempt = _attempt(database, using)
            with ExitStack() as stack:
                while not _succeeds(attempt, stack, wait):
                    if tells:
                        self.stdout.write(_("Somebody else migrates this database: waiting."))
                        self.stdout.flush()
                        tells = False
                    if not database.in_atomic_block:
                        database.close()  # a server may not bear it idle for so long
                    time.sleep(wait.next_pause(longest=LONGEST_PAUSE))
                try:
                    yield
                except BaseException as error:
                    of_migrations = error
                    raise
        except (InvalidLockBackend, LockError) as error:
            if error is of_migrations:
                raise
            raise command_error(error) from error


def _succeeds(attempt: Attempt, stack: ExitStack, wait: Wait) -> bool:
    """Try once to put what *attempt* makes on *stack*; LockNotAcquired if *wait* is over."""
    try:
        stack.enter_context(attempt())
    except LockNotAcquired as busy:
        if wait.is_over:
            busy.waited = wait.waited
            raise
        return False
    return True


def _attempt(database: BaseDatabaseWrapper, using: str | None) -> Attempt:
    """Return what tries to hold the lock of *database*: that of the alias *using*, or one that needs no tables."""
    name = f"migrate:{database.settings_dict['NAME']}"
    if using is None and database.vendor == "sqlite":
        with database.cursor() as cursor:
            cursor.execute("PRAGMA database_list")
            path = cursor.fetchone()[2]
        return partial(_file, f"{path}.migrate-lock", name) if path else nullcontext
    if using is None:
        using = ALIAS
        options = {"using": database.alias, "fencing": False, "max_connections": 1}
        made = make_backend(BackendSettings(ALIAS, BACKEND, options=options))
        if (before := locks.replace(ALIAS, made)) is not None:
            before.close()
    return partial(lock, name, using=using, timeout=0)


@contextmanager
def _file(path: str, name: str) -> Iterator[None]:
    """Hold a lock of the operating system, which ends with the process, on the file *path*; SQLite knows how."""
    with ExitStack() as stack:
        try:
            file = sqlite3.connect(path, timeout=0, isolation_level=None)
            stack.enter_context(closing(file)).execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise LockNotAcquired(name) from error
            raise LockBackendError(ALIAS, f"{path}: {error}") from error
        yield
