"""Locks in the memory of one process: every promise holds among the threads and tasks of that process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from django.db import connections

from django_distlock import conf
from django_distlock.conf import BackendSettings
from django_distlock.engine.values import (
    Busy,
    Grant,
    Held,
    Purged,
    Recent,
    Release,
    Request,
    digest,
    digest_of_reservation,
)
from django_distlock.engine.waiting import Waiting, Way
from django_distlock.exceptions import StaleFencingToken
from django_distlock.ground import clock
from django_distlock.ground.mutexes import owned, section
from django_distlock.ground.naming import lock_of
from django_distlock.transactions import Block

from .base import BaseLockBackend, memory

if TYPE_CHECKING:
    from _thread import RLock


#: Up to so many records are kept without looking for old ones.
FEW = 1000


@dataclass(slots=True)
class _Holding:
    request: Request
    token: int
    acquired: float
    expires: float

    def held(self, mark: str, waiters: int, now: float) -> Held:
        request = self.request
        return Held(
            request.name,
            request.key,
            request.holder,
            self.expires - now,
            self.token,
            mark,
            request.shared,
            waiters,
            age=now - self.acquired,
        )


@dataclass(slots=True)
class _MemoryRecord:
    """One lock. Times are on the lease clock. *last*: the holding that was acquired last."""

    available: float = 0.0
    last: _Holding | None = None
    holdings: dict[str, _Holding] = field(default_factory=dict)
    #: The transactions for which guard() keeps later holders out.
    guarded: list[Block] = field(default_factory=list)

    def expire(self, now: float) -> None:
        for owner, holding in list(self.holdings.items()):
            if holding.expires <= now:
                del self.holdings[owner]

    def is_free_for(self, request: Request, now: float) -> bool:
        if now < self.available:
            return False
        if not self.holdings:
            return not self.is_guarded()
        return request.shared and all(held.request.shared for held in self.holdings.values())

    def is_guarded(self) -> bool:
        if self.guarded:
            self.guarded = [block for block in self.guarded if block.is_open]
        return bool(self.guarded)

    def busy(self, now: float) -> Busy:
        last = max(self.holdings.values(), key=lambda holding: holding.expires, default=None)
        ends = max([self.available] + [holding.expires for holding in self.holdings.values()])
        left = ends - now if ends > now else None
        return Busy(last.request.holder if last else None, left, reserved=bool(left and not last))

    def is_over(self, now: float) -> bool:
        """Return True if nobody holds the lock, and no reservation lasts at *now*."""
        return not (self.holdings or self.is_guarded()) and self.available <= now

    def listed(self, waiters: int, now: float) -> list[Held]:
        """Return the holdings for operators, or the reservation (min_hold) of the last holder."""
        last = self.last
        if last is None:
            return []
        if self.holdings or self.available <= now:
            return [each.held(digest(owner), waiters, now) for owner, each in self.holdings.items()]
        shown = last.held(digest_of_reservation(last.token), waiters, now)
        left = self.available - now
        return [replace(shown, holder=None, remaining=left, shared=False, reserved=True, age=None)]


@dataclass(slots=True)
class _Memory:
    """The locks of one alias."""

    mutex: RLock = field(default_factory=section)
    records: dict[str, _MemoryRecord] = field(default_factory=dict)
    released: Recent = field(default_factory=Recent)
    token: int = 0
    #: How many records there may be before make_room() drops old ones.
    room: int = FEW

    def make_room(self, now: float) -> None:
        """Drop the records of ended reservations and leases, for which no release comes."""
        if len(self.records) <= self.room:
            return
        for key, record in list(self.records.items()):
            record.expire(now)
            if record.is_over(now):
                self.records.pop(key, None)  # a signal handler may have removed it already
        self.room = max(FEW, 2 * len(self.records))


class LocMemBackend(BaseLockBackend):
    """Locks in memory, first come, first served, with readers and writers; they exclude no other process."""

    supports_fencing = True
    supports_shared = True
    supports_fair = True
    supports_listing = True
    supports_detach = True
    supports_min_hold = True
    #: "In order", because all waiters are in this process.
    waiting = Waiting(way=Way.LISTEN, look_again=1.0, writers_first=True, is_in_order=True)

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        # A purge is possible only in tests, whose commands run in this process and so share the memory.
        self.supports_purge = conf.tests_run()
        self._memory: _Memory = memory.setdefault(settings.alias, _Memory())

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        if owned(self._memory.mutex):
            return Busy()  # this signal handler has interrupted another verb in its thread
        with self._memory.mutex:
            now = clock.lease_time()
            record = self._record(request.key)
            record.expire(now)
            if request.owner not in record.holdings:
                if not record.is_free_for(request, now):
                    return record.busy(now)
                self._grant(record, request, now)
            return Grant(record.holdings[request.owner].token)

    def _grant(self, record: _MemoryRecord, request: Request, now: float) -> None:
        self._memory.records[request.key] = record
        self._memory.token = token = max(self._memory.token + 1, time.time_ns() // 1000)
        record.last = record.holdings[request.owner] = _Holding(
            request, token, now, now + request.ttl
        )
        in_hold = max(record.available, now + request.min_hold)
        record.available = 0.0 if request.shared else in_hold
        self._memory.make_room(now)

    def _record(self, key: str) -> _MemoryRecord:
        return self._memory.records.get(key) or _MemoryRecord()

    def release(self, request: Request) -> Release:
        with self._memory.mutex:
            record, now = self._record(request.key), clock.lease_time()
            record.expire(now)
            holding = record.holdings.pop(request.owner, None)
            if holding is None and request.owner in self._memory.released:
                return Release.RELEASED
            if holding is None:
                return Release.TAKEN if record.holdings else Release.GONE
            self._memory.released.add(request.owner)
            reserved = holding.acquired + request.min_hold
            record.available = max(record.available, reserved) if request.shared else reserved
            if record.is_over(now):
                del self._memory.records[request.key]
            self.queue.look_again(request.line)
            return Release.RELEASED

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        with self._memory.mutex:
            return [self._extend(request) for request in requests]

    def take_over(self, request: Request, former: str) -> bool:
        with self._memory.mutex:
            record, now = self._record(request.key), clock.lease_time()
            record.expire(now)
            if (holding := record.holdings.pop(former, None)) is not None:
                changed = replace(holding, request=request, expires=now + request.ttl)
                record.holdings[request.owner] = changed
            return self._extend(request)

    def guard(self, request: Request, token: int, using: str) -> None:
        """Refuse the next holder until the caller's transaction ends, on any database."""
        block = Block(connections[using], "guard()")
        with self._memory.mutex:
            record = self._record(request.key)
            last = record.holdings.get(request.owner, record.last)
            found = last.token if last else None
            if found != token:
                raise StaleFencingToken(request.name, token, "a later holder has the lock", found)
            record.guarded.append(block)

    def probe(self, request: Request) -> Busy | None:
        with self._memory.mutex:
            record, now = self._record(request.key), clock.lease_time()
            record.expire(now)
            return record.busy(now) if record.holdings or record.available > now else None

    def held(self, key: str | None = None) -> Iterable[Held]:
        with self._memory.mutex:
            now = clock.lease_time()
            # A copy, because a signal handler may release a lock meanwhile.
            known = list(self._memory.records.items())
            is_meant = self.keeps if key is None else key.__eq__
            records = [(each, record) for each, record in known if is_meant(each)]
            for _, record in records:
                record.expire(now)
            return [
                held
                for key, record in records
                for held in record.listed(self.queue.waiters(key), now)
            ]

    def end_holding(self, key: str, owner_digest: str) -> bool:
        with self._memory.mutex:
            record = self._record(key)
            shown = {held.owner_digest for held in record.listed(0, clock.lease_time())}
            for owner in [each for each in record.holdings if digest(each) == owner_digest]:
                del record.holdings[owner]
            if owner_digest in shown and not record.holdings:
                record.available = 0.0  # free at once, without its min_hold
            self.queue.look_again(lock_of(key))
            return owner_digest in shown

    def purge(
        self, older_than: float, *, batch_size: int = 1000, dry_run: bool = False
    ) -> Iterator[Purged]:
        if not self.supports_purge:
            super().purge(older_than)
        with self._memory.mutex:
            now, records = clock.lease_time(), list(self._memory.records.items())
            for _, record in records:
                record.expire(now)
            over = [key for key, record in records if record.is_over(now - older_than)]
            for key in () if dry_run else over:
                del self._memory.records[key]
        yield Purged(len(records), len(over), 1.0)

    def abandon_after_fork(self) -> None:
        """Start empty: the child holds none of the parent's locks."""
        self._memory = _Memory()

    def _extend(self, request: Request) -> bool:
        record, now = self._record(request.key), clock.lease_time()
        record.expire(now)
        holding = record.holdings.get(request.owner)
        if holding is not None:
            holding.expires = max(holding.expires, now + request.ttl)
        return holding is not None
