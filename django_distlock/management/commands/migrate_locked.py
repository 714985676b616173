"""``manage.py migrate_locked``: of many processes that start together, one migrates and the others wait."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError
from django.core.management.commands import migrate
from django.db import DatabaseError, connections
from django.utils.translation import gettext as _

from django_distlock import (
    InvalidLockBackend,
    LockBackendError,
    LockError,
    LockNotAcquired,
    LockNotHeld,
    NotSupported,
    lock,
    locks,
)
from django_distlock.backends.database.connections import Unusable
from django_distlock.conf import BackendSettings, tests_run
from django_distlock.engine.waiting import Wait
from django_distlock.exceptions import DOCS
from django_distlock.handler import make_backend
from django_distlock.management.base import (
    CONTRIB,
    NO_SERVER,
    LockCommand,
    apps_with_migrate,
    command_error,
    duration,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from django.core.management.base import CommandParser
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor

    from django_distlock import Lease

    Attempt = Callable[[], AbstractContextManager[Lease | None]]

#: The alias of the backend that is made for an advisory lock.
ALIAS = "migrate_locked"
BACKEND = "django_distlock.backends.advisory.AdvisoryBackend"
#: Most seconds between two tries. Waiting inside the server would hold a transaction open, and CREATE INDEX
#: CONCURRENTLY in the process that migrates waits for all transactions.
LONGEST_PAUSE = 1.0


def _command_of_project() -> type[migrate.Command]:
    """Return the command ``migrate`` that the project would have without the lock."""
    for name in apps_with_migrate():
        if name != CONTRIB:
            module = import_module(f"{name}.management.commands.migrate")
            # A module without Command is still being imported: its command is a subclass of this one.
            return getattr(module, "Command", migrate.Command)
    return migrate.Command


if TYPE_CHECKING:
    Migrate = migrate.Command
else:
    Migrate = _command_of_project()


class Command(LockCommand, Migrate):
    requires_system_checks = Migrate.requires_system_checks

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
        # Only the tests use a database that they created.
        if options["plan"] or options["check_unapplied"] or tests_run():
            run()
            return
        if using is not None:
            _check_alias(using)
        is_to_do = partial(self._is_to_do, *args, **options)
        if is_to_do():
            database, tells = connections[options["database"]], options["verbosity"] > 0
            with self._held(database, using, wait, tells=tells) as lease:
                if is_to_do():
                    with _checked_before_each(database, lease):
                        run()
                    return
        if options["verbosity"]:
            self.stdout.write(_("Nothing to migrate."))

    def _is_to_do(self, *args: Any, **options: Any) -> bool:
        """Return True if there may be something to migrate; write nothing to the database."""
        if options["prune"] or options["run_syncdb"]:
            return True
        # With other processes, django-tenants would wait for ever after the exit of --check.
        known = {"check_unapplied": True, "verbosity": 0, "executor": "standard"}
        alias = options["database"]
        # A separate connection: django-tenants leaves it on the schema in which it found something to do.
        before, look = connections[alias], connections.create_connection(alias)
        # In these methods PostGIS creates an extension and django-tenants a table, which needs the lock.
        vars(look).update(prepare_database=lambda: None, schema_editor=lambda **_: sys.exit(1))
        connections[alias] = look
        try:
            super().handle(*args, **options | known)
        except (SystemExit, DatabaseError):
            # SQLite refuses reads while somebody migrates. Any other error comes again when migrating.
            return True
        finally:
            look.close()
            connections[alias] = before
        return False

    @contextmanager
    def _held(
        self, database: BaseDatabaseWrapper, using: str | None, wait: Wait, *, tells: bool
    ) -> Iterator[Lease | None]:
        """Hold the lock of *database*; CommandError if the lock stays busy, fails or is lost."""
        of_migrations: BaseException | None = None
        try:
            attempt = _attempt(database, using)
            with ExitStack() as stack:
                lease = self._wait_for(
                    lambda: stack.enter_context(attempt()), database, wait, tells=tells
                )
                try:
                    yield lease
                except BaseException as error:
                    of_migrations = error
                    raise
        except (InvalidLockBackend, LockError) as error:
            if error is of_migrations:
                raise
            if using is None and isinstance(error.__cause__, Unusable):
                advice = _("Add such an alias to DISTLOCK, and name it with --using: see %s")
                page = f"{DOCS}howto/migrate.html#poolers"
                raise CommandError(f"{error} {advice % page}", returncode=NO_SERVER) from error
            raise command_error(error) from error

    def _wait_for(
        self,
        acquire: Callable[[], Lease | None],
        database: BaseDatabaseWrapper,
        wait: Wait,
        *,
        tells: bool,
    ) -> Lease | None:
        """Call *acquire* until it returns a lease, and return that; raise its error once *wait* is over."""
        was_busy = False
        while True:
            try:
                return acquire()
            except LockNotAcquired as busy:
                was_busy = True
                if wait.is_over:
                    busy.waited = wait.waited
                    raise
            except LockBackendError:
                # If the server answered before, wait while it is restarted.
                if not was_busy or wait.is_over:
                    raise
            if tells:
                self.stdout.write(_("Somebody else migrates this database: waiting."))
                self.stdout.flush()
                tells = False
            if not database.in_atomic_block:
                database.close()  # a server may close connections that are idle for so long
            time.sleep(wait.next_pause(longest=LONGEST_PAUSE))


def _check_alias(using: str) -> None:
    """Raise CommandError for an alias that is wrong, also while there is nothing to migrate."""
    try:
        locks[using].check_key()
    except InvalidLockBackend as error:
        raise command_error(error) from error


@contextmanager
def _checked_before_each(database: BaseDatabaseWrapper, lease: Lease | None) -> Iterator[None]:
    """In the block, raise CommandError before a migration of *database* begins, if *lease* is lost."""
    schema_editor, pid = database.schema_editor, os.getpid()

    def checked(*args: Any, **kwargs: Any) -> BaseDatabaseSchemaEditor:
        # Each migration begins with its schema editor. Other processes, which django-tenants can fork, have no lease.
        if lease is not None and os.getpid() == pid:
            try:
                _check(lease)
            except LockNotHeld as error:
                raise command_error(error) from error
        return schema_editor(*args, **kwargs)

    vars(database)["schema_editor"] = checked
    try:
        yield
    finally:
        del vars(database)["schema_editor"]


def _check(lease: Lease) -> None:
    """Raise LockLost unless *lease* is held: ask the server, or our clock if the server does not answer."""
    try:
        lease.extend()
    except (LockBackendError, NotSupported):
        lease.check()


def _attempt(database: BaseDatabaseWrapper, using: str | None) -> Attempt:
    """Return a function that tries once to hold the lock of *database*: on the alias *using*, or a lock without tables."""
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
        made.check_key()
    return partial(lock, name, using=using, timeout=0)


@contextmanager
def _file(path: str, name: str) -> Iterator[None]:
    """Hold an exclusive lock of SQLite on the file *path*, which SQLite creates; the lock ends with the process."""
    with ExitStack() as stack:
        try:
            file = sqlite3.connect(path, timeout=0, isolation_level=None)
            stack.enter_context(closing(file)).execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise LockNotAcquired(name) from error
            raise LockBackendError(ALIAS, f"{path}: {error}") from error
        yield
