"""DatabaseBackend: leases as rows, acquired and released by one statement each."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from django.core.checks import Error, Warning as CheckWarning
from django.db import connections

from django_distlock import conf
from django_distlock.backends.base import server_error
from django_distlock.engine.values import Busy, Grant, Release, batches
from django_distlock.engine.waiting import Queueing, Waiting, Way
from django_distlock.exceptions import Contended, LockBackendError
from django_distlock.ground import clock

from . import purge, records
from .base import BaseDatabaseBackend, ConnectionOptions
from .dialect import COUNTER, LOCK, WAITER
from .mysql import MySQL
from .postgresql import PostgreSQL
from .sqlite import SQLite
from .waiters import Notified, Watcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from django.core.checks import CheckMessage

    from django_distlock.conf import BackendSettings
    from django_distlock.engine.bells import Bell, TaskBell, ThreadBell
    from django_distlock.engine.values import Held, Purged, Request

    from .dialect import Dialect

_DIALECTS: dict[str, type[Dialect]] = {"postgresql": PostgreSQL, "mysql": MySQL, "sqlite": SQLite}
#: The first version with RETURNING.
_LEAST_SQLITE = (3, 35, 0)
#: How many leases one statement extends.
BATCH = 500


@dataclass(frozen=True, slots=True)
class DatabaseOptions(ConnectionOptions):
    """OPTIONS of DatabaseBackend.

    fair: first come, first served, also between processes.
    listen: wake waiters through one more connection: by LISTEN and NOTIFY on PostgreSQL (not through PgBouncer);
        on MariaDB, MySQL and SQLite it looks for all waiters of this process.
    """

    max_connections: int = 8
    fair: bool = False
    listen: bool = True


class DatabaseBackend(BaseDatabaseBackend):
    """Locks in a table of a database that the project already uses."""

    options_class = DatabaseOptions
    vendors: ClassVar = {**BaseDatabaseBackend.vendors, "sqlite": "SQLite"}
    supports_fencing = True
    supports_fair = True
    supports_listing = True
    supports_purge = True
    supports_detach = True
    supports_min_hold = True
    options: DatabaseOptions

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._notified: Notified | None = None
        self._watcher: Watcher | None = None
        listens = self.options.listen and not conf.tests_run()  # as in OwnConnections
        if listens and isinstance(self.dialect, PostgreSQL):
            self._notified = Notified(self._own)
        elif listens and self.dialect.pauses:
            self._watcher = Watcher(self._own, self.dialect)
        self._listeners = [one for one in (self._notified, self._watcher) if one is not None]
        is_fair, listens = self.options.fair, self._notified is not None
        looks = self.dialect.looks_before_retry and not is_fair
        self.waiting = Waiting(
            way=Way.LISTEN if listens else Way.LOOK if looks else Way.POLL,
            queueing=Queueing.ENQUEUE if listens or is_fair else Queueing.NONE,
            queues_places=listens or is_fair,
            is_in_order=is_fair,
        )

    def make_dialect(self, vendor: str) -> Dialect:
        return _DIALECTS[vendor](fair=self.options.fair)

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        try:
            return self._own.ask(self._take, request, queued, left=left)
        except Contended as error:
            return self._busy(request) or self._ask_again(error, 0.0, self._try, request, queued)

    def _take(self, cursor: Any, request: Request, queued: bool) -> Grant | Busy:
        """Try once to acquire the lock; the ttl counts from now, after the wait for a connection."""
        start = clock.lease_time()
        answer = self.dialect.try_acquire(cursor, request, queued)
        return replace(answer, start=start) if isinstance(answer, Grant) else answer

    def _try(self, request: Request, queued: bool) -> Grant | Busy:
        try:
            return self._own.ask(self._take, request, queued)
        except Contended:
            if busy := self._busy(request):
                return busy
            raise

    def _busy(self, request: Request) -> Busy | None:
        # A guard() locks the counter's row, but not the row of the lock.
        with suppress(Contended):  # a file that cannot be read, either
            return Busy() if self._ask(self.dialect.is_guarded, request.key) else None
        return None

    def release(self, request: Request) -> Release:
        ask, verb = self._own.ask, self.dialect.release
        outcome: Release = self._retry_while_blocked(request.ttl, ask, verb, request)
        return outcome

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend all leases in as few statements as possible."""
        kept: list[bool] = []
        for batch in batches(requests, BATCH):
            patience = min(request.ttl for request in batch)
            kept += self._retry_while_blocked(patience, self._own.ask, self.dialect.extend, batch)
        return kept

    def take_over(self, request: Request, former: str) -> bool:
        ask, verb = self._own.ask, self.dialect.take_over
        is_ours: bool = self._retry_while_blocked(request.ttl, ask, verb, request, former)
        return is_ours

    def probe(self, request: Request) -> Busy | None:
        return self.probe_all([request])[0]

    def probe_all(self, requests: Sequence[Request]) -> list[Busy | None]:
        found: list[Busy | None] = self._retry_while_blocked(
            0.0, self._own.ask, self.dialect.probe_all, requests
        )
        return found

    def enqueue(self, request: Request, bell: Bell) -> None:
        channel = ""
        if self._notified is not None:
            self._notified.expect(request.owner, None, bell)
            channel = self._notified.channel
        ticket = self._retry_while_blocked(
            0.0, self._own.ask, self.dialect.enqueue, request, channel
        )
        if self._notified is not None:
            self._notified.ring_for(request.owner, ticket)

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        self._watch(request, bell)
        super().sleep(request, bell, seconds)

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        self._watch(request, bell)
        await super().asleep(request, bell, seconds)

    def dequeue(self, request: Request) -> None:
        self.forget_bell(request)
        self._retry_while_blocked(0.0, self._own.ask, self.dialect.dequeue, request)

    def forget_bell(self, request: Request) -> None:
        for listener in self._listeners:
            listener.forget_bell(request.owner)

    def held(self, key: str | None = None) -> Iterable[Held]:
        has_positions = self.waiting.queueing is not Queueing.NONE
        return self._query(records.held, self.keeps, key, has_positions)

    def free_locks(self, text: str) -> Iterable[Held]:
        head = self.key_of("x").removesuffix("x")
        return self._query(records.free_locks, head, text)

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._query_once(records.force_release, key, owner_digest)

    def purge(
        self, older_than: float, *, batch_size: int = 1000, dry_run: bool = False
    ) -> Iterator[Purged]:
        """Delete each batch in a separate short transaction; ValueError for arguments out of range."""
        purge.check_limits(older_than, batch_size)
        return purge.purge(self._query, self.may_keep, older_than, batch_size, dry_run=dry_run)

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        """Check the settings; with *databases*, check that the database can be used."""
        if databases is None:
            return self._check_settings()
        if self.options.using not in databases:
            return []
        is_sqlite = connections[self.options.using].vendor == "sqlite"
        if is_sqlite and sqlite3.sqlite_version_info < _LEAST_SQLITE:
            text = f"DISTLOCK[{self.alias!r}]: SQLite {sqlite3.sqlite_version} has no RETURNING."
            return [Error(text, hint="Install SQLite 3.35 or later.", id="distlock.E004")]
        return self.check_tables((LOCK, COUNTER, WAITER)) or self._check_way()

    def _check_way(self) -> list[CheckMessage]:
        """Check for a pooler that breaks transactions or notifications."""
        try:
            self._query(self.dialect.is_guarded, "check")  # uses a transaction
            if self._notified is None or self._notified.is_reached():
                return []
        except LockBackendError as error:
            return [server_error(error, self.options.using)]
        text = f"DISTLOCK[{self.alias!r}]: notifications do not arrive from the database {self.options.using!r}: a pooler such as PgBouncer in transaction mode keeps them, and waiters poll."
        hint = "Set OPTIONS 'listen' to False, or let 'using' name an alias of DATABASES that connects to the server directly."
        return [CheckWarning(text, hint=hint, id="distlock.W002")]

    def close(self) -> None:
        super().close()
        for listener in self._listeners:
            listener.close()

    def abandon_after_fork(self) -> None:
        super().abandon_after_fork()
        for listener in self._listeners:
            listener.abandon()

    def _check_settings(self) -> list[CheckMessage]:
        using, connection = self.options.using, connections[self.options.using]
        if connection.vendor == "sqlite" and connection.settings_dict["NAME"] == ":memory:":
            text = f"DISTLOCK[{self.alias!r}]: the database {using!r} is in memory, where each connection has its own."
            hint = "Use a file, or LocMemBackend within one process."
            return [Error(text, hint=hint, id="distlock.E002")]
        return [*self.check_driver(), *self.check_installed()]

    def _watch(self, request: Request, bell: Bell) -> None:
        """Ask the watcher to ring the bell when the lock is free."""
        if self._watcher is not None:
            keys = tuple(each.key for each in request.holdings)
            self._watcher.expect(request.owner, keys, bell)
