"""DatabaseBackend: leases as rows, taken and given back by one statement each."""

from __future__ import annotations

import math
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from django.core.checks import Error
from django.db import connections

from django_distlock import conf
from django_distlock.engine.steps import settled
from django_distlock.engine.values import Busy, Grant, Release, batches
from django_distlock.engine.waiting import Place, Waiting, Way
from django_distlock.exceptions import Contended, LockBackendError

from . import purge, records
from .base import BaseDatabaseBackend, ConnectionOptions
from .engine import COUNTER, LOCK, WAITER
from .mysql import MySQL
from .portable import Portable, is_guarded
from .postgresql import PostgreSQL
from .sqlite import SQLite
from .waiters import Notified, Places, Watcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from django.core.checks import CheckMessage

    from django_distlock.conf import BackendSettings
    from django_distlock.engine.bells import Bell, TaskBell, ThreadBell
    from django_distlock.engine.values import Held, Purged, Request

    from .engine import Engine

_ENGINES: dict[str, type[Engine]] = {"postgresql": PostgreSQL, "mysql": MySQL, "sqlite": SQLite}
#: What OPTIONS "engine" may be.
_ENGINE_NAMES = ("auto", "portable")
#: RETURNING came with it.
_LEAST_SQLITE = (3, 35, 0)
#: Requests in one statement.
BATCH = 500


@dataclass(frozen=True, slots=True)
class DatabaseOptions(ConnectionOptions):
    """OPTIONS of DatabaseBackend.

    fair: first come, first served, also between processes.
    engine: "auto" takes what is written for the server; "portable" takes SELECT FOR UPDATE.
    listen: wake waiters by one more connection: LISTEN and NOTIFY on PostgreSQL (not through PgBouncer),
        looks for all of this process on MariaDB, MySQL and SQLite.
    """

    max_connections: int = 8
    fair: bool = False
    engine: str = "auto"
    listen: bool = True

    def __post_init__(self) -> None:
        ConnectionOptions.__post_init__(self)
        if self.engine not in _ENGINE_NAMES:
            msg = f"'engine' must be one of {', '.join(map(repr, _ENGINE_NAMES))}, not {self.engine!r}."
            raise ValueError(msg)


class DatabaseBackend(BaseDatabaseBackend):
    """Locks in a table of a database that the project has already."""

    options_class = DatabaseOptions
    supports_fencing = True
    supports_fair = True
    supports_listing = True
    supports_purge = True
    supports_detach = True
    supports_delays = True
    options: DatabaseOptions

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._places = Places()
        self._notified: Notified | None = None
        self._watcher: Watcher | None = None
        listens = self.options.listen and not conf.tests_run()  # as in OwnConnections
        if listens and isinstance(self.engine, PostgreSQL):
            self._notified = Notified(self._own)
        elif listens and self.engine.pauses:
            self._watcher = Watcher(self._own, self.engine)
        self._listeners = [one for one in (self._notified, self._watcher) if one is not None]
        # Who claims an order gives each waiter a place of its own on the server, from when it came.
        is_fair, listens = self.options.fair, self._notified is not None
        looks = self.engine.looks_before_retry and not is_fair
        self.waiting = Waiting(
            way=Way.LISTEN if listens else Way.LOOK if looks else Way.POLL,
            place=Place.ENQUEUE if listens or is_fair else Place.NONE,
            in_line=not is_fair,
        )

    def make_engine(self, vendor: str) -> Engine:
        options = self.options
        chosen = Portable if options.engine == "portable" else _ENGINES.get(vendor, Portable)
        return chosen(fair=options.fair)

    def try_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
    ) -> Grant | Busy:
        try:
            return self._own.ask(self.engine.try_acquire, request, queued)
        except Contended as error:
            return self._busy(request) or self._ask_again(error, 0.0, self._try, request, queued)

    def _try(self, request: Request, queued: int) -> Grant | Busy:
        try:
            return self._own.ask(self.engine.try_acquire, request, queued)
        except Contended:
            if busy := self._busy(request):
                return busy
            raise

    def _busy(self, request: Request) -> Busy | None:
        # A guard() locks the counter, but not the row of the lock.
        return Busy() if self._ask(is_guarded, self.engine, request.key) else None

    def release(self, request: Request) -> Release:
        released: Release = self._persist(request.ttl, self._own.ask, self.engine.release, request)
        if self.options.fair:
            self._places.ring_first(request.key)
        return released

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend all, in as few statements as the server lets us."""
        kept: list[bool] = []
        for batch in batches(requests, BATCH):
            patience = min(request.ttl for request in batch)
            kept += self._persist(patience, self._own.ask, self.engine.extend, batch)
        return kept

    def take_over(self, request: Request, former: str) -> bool:
        ask, verb = self._own.ask, self.engine.take_over
        is_ours: bool = self._persist(request.ttl, ask, verb, request, former)
        return is_ours

    def probe(self, request: Request) -> Busy | None:
        busy: Busy | None = self._persist(0.0, self._own.ask, self.engine.probe, request)
        return busy

    def enqueue(self, request: Request, bell: Bell) -> None:
        channel = ""
        if self._notified is not None:
            self._notified.expect(request.owner, None, bell)
            channel = self._notified.channel
        ask = partial(self._own.ask, self.engine.enqueue, request, channel)
        ticket = settled(partial(self._persist, 0.0, ask), within=math.inf)
        if self._notified is not None:
            self._notified.ring_for(request.owner, ticket)
        if self.options.fair:
            self._places.add(request, ticket, bell)

    def is_behind(self, request: Request) -> bool:
        return self._places.is_behind(request)

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        """Keep the places of those who do not look, and wait."""
        self._watch(request, bell)
        self._keep_places(self._places.to_keep(request))
        super().sleep(request, bell, seconds)

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        self._watch(request, bell)
        if owners := self._places.to_keep(request):
            await self._threads.run_release(partial(self._keep_places, owners))
        await super().asleep(request, bell, seconds)

    def dequeue(self, request: Request) -> None:
        self.forget_bell(request)
        self._persist(0.0, self._own.ask, self.engine.dequeue, request)

    def forget_bell(self, request: Request) -> None:
        for listener in self._listeners:
            listener.forget_bell(request.owner)
        self._places.drop(request)

    def held(self, key: str | None = None) -> Iterable[Held]:
        has_places = self.waiting.place is not Place.NONE
        return self._insist(records.held, self.keeps, key, has_places)

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._press(records.force_release, key, owner_digest)

    def purge(
        self, older_than: float, *, batch_size: int = 1000, dry_run: bool = False
    ) -> Iterator[Purged]:
        """Delete, each batch in a short transaction of its own; ValueError for sizes out of range."""
        limits = purge.Limits(older_than, batch_size, dry_run)
        return purge.purge(self._insist, self.keeps, limits)

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        """Say what this database cannot do; with *databases*, whether it can be used."""
        if databases is None:
            return self._check_settings()
        if self.options.using not in databases:
            return []
        is_sqlite = connections[self.options.using].vendor == "sqlite"
        if is_sqlite and sqlite3.sqlite_version_info < _LEAST_SQLITE:
            text = f"DISTLOCK[{self.alias!r}]: SQLite {sqlite3.sqlite_version} has no RETURNING."
            return [Error(text, hint="Install SQLite 3.35 or later.", id="distlock.E004")]
        return self.check_tables((LOCK, COUNTER, WAITER))

    def close(self) -> None:
        super().close()
        for listener in self._listeners:
            listener.close()

    def abandon_after_fork(self) -> None:
        super().abandon_after_fork()
        for listener in self._listeners:
            listener.abandon()
        self._places.forget()

    def _check_settings(self) -> list[CheckMessage]:
        using, connection = self.options.using, connections[self.options.using]
        if connection.vendor == "sqlite" and connection.settings_dict["NAME"] == ":memory:":
            text = f"DISTLOCK[{self.alias!r}]: the database {using!r} is in memory, where each connection has its own."
            hint = "Use a file, or LocMemBackend within one process."
            return [Error(text, hint=hint, id="distlock.E002")]
        if not connection.features.has_select_for_update and connection.vendor != "sqlite":
            text = f"DISTLOCK[{self.alias!r}]: the database {using!r} has no SELECT ... FOR UPDATE."
            return [Error(text, hint="Choose another backend or database.", id="distlock.E003")]
        return []

    def _keep_places(self, owners: Sequence[str]) -> None:
        # A server that fails is told of by the next look.
        with suppress(LockBackendError):
            for batch in batches(owners, BATCH):
                self._own.ask(self.engine.keep_places, batch)

    def _watch(self, request: Request, bell: Bell) -> None:
        """Have the bell rung when the lock has come free; with others of this process before us, theirs is."""
        if self._watcher is not None and not self._places.is_behind(request):
            self._watcher.expect(request.owner, request.key, bell)
