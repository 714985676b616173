"""Locks in the memory of one process: they keep every promise among its threads and tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from django.db import connections

from django_distlock import conf
from django_distlock.conf import BackendSettings
from django_distlock.engine import clock
from django_distlock.engine.bells import Bell
from django_distlock.engine.values import (
    Busy,
    Grant,
    Held,
    Purged,
    RecentOwners,
    Release,
    Request,
    digest,
    digest_of_reservation,
)
from django_distlock.engine.waiting import Place, Waiting, Way
from django_distlock.exceptions import StaleFencingToken
from django_distlock.transactions import Block

from .base import BaseLockBackend


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
class _Record:
    """One lock. Instants are seconds on the lease clock. *last*: who acquired it last."""

    available: float = 0.0
    last: _Holding | None = None
    holdings: dict[str, _Holding] = field(default_factory=dict)
    waiters: dict[str, tuple[Request, Bell]] = field(default_factory=dict)
    #: The transactions that are guarded until they end.
    guarded: list[Block] = field(default_factory=list)

    def expire(self, now: float) -> None:
        for owner, holding in list(self.holdings.items()):
            if holding.expires <= now:
                del self.holdings[owner]
                self.available = max(self.available, holding.expires + holding.request.lock_delay)

    def admits(self, request: Request, now: float) -> bool:
        """Return whether *request* may have it now: free for it, and nobody it must let in first."""
        if now < self.available or self._is_behind(request):
            return False
        if not self.holdings and self.is_guarded():
            return False
        return all(request.shared and holding.request.shared for holding in self.holdings.values())

    def is_guarded(self) -> bool:
        self.guarded = [block for block in self.guarded if block.is_open]
        return bool(self.guarded)

    def busy(self, now: float) -> Busy:
        last = max(self.holdings.values(), key=lambda holding: holding.expires, default=None)
        ends = max([self.available] + [holding.expires for holding in self.holdings.values()])
        left = ends - now if ends > now else None
        return Busy(last.request.holder if last else None, left, reserved=bool(left and not last))

    def is_over(self, now: float) -> bool:
        """Return whether nobody has it or wants it, and nothing has to be remembered since *now*."""
        is_in_use = self.holdings or self.waiters or self.is_guarded()
        return not is_in_use and self.available <= now

    def listed(self, now: float) -> list[Held]:
        """Return, for operators, who has it, or what min_hold or lock_delay of its last holder reserves."""
        waiters, last = len(self.waiters), self.last
        if self.holdings or self.available <= now or last is None:
            return [each.held(digest(owner), waiters, now) for owner, each in self.holdings.items()]
        shown, left = (
            last.held(digest_of_reservation(last.token), waiters, now),
            self.available - now,
        )
        return [replace(shown, holder=None, remaining=left, shared=False, reserved=True, age=None)]

    def wake(self) -> None:
        """Ring the first waiter; with a reader, all the readers before the first writer.

        One whose event loop is gone loses its place.
        """
        has_readers = False
        for owner, (request, bell) in list(self.waiters.items()):
            if has_readers and not request.shared:
                return
            if not bell.ring():
                del self.waiters[owner]
            elif request.shared:
                has_readers = True
            else:
                return

    def _is_behind(self, request: Request) -> bool:
        for owner, (other, _) in self.waiters.items():
            if owner == request.owner:
                return False
            if not (request.shared and other.shared):
                return True
        return False


class LocMemBackend(BaseLockBackend):
    """First come, first served, with readers and writers; nothing leaves this process."""

    supports_fencing = True
    supports_shared = True
    supports_fair = True
    supports_listing = True
    supports_detach = True
    supports_delays = True
    clock = "client"
    waiting = Waiting(
        way=Way.LISTEN, place=Place.ENQUEUE, in_line=False, look_again=1.0, writers_first=True
    )

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        # A command that is run by itself finds nothing here; one that a test calls does.
        self.supports_purge = conf.tests_run()
        self._mutex = threading.Lock()
        self._records: dict[str, _Record] = {}
        self._released = RecentOwners()
        self._token = 0

    def try_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
    ) -> Grant | Busy:
        with self._mutex:
            now, record = clock.lease_time(), self._records.setdefault(request.key, _Record())
            record.expire(now)
            if request.owner not in record.holdings:
                if not (record.holdings or record.admits(request, now)):
                    record.wake()  # those who stand before it may be gone
                if not record.admits(request, now):
                    return record.busy(now)
                self._token = token = max(self._token + 1, time.time_ns() // 1000)
                record.last = _Holding(request, token, now, now + request.ttl)
                record.holdings[request.owner] = record.last
                in_hold = max(record.available, now + request.min_hold)
                record.available = 0.0 if request.shared else in_hold
                record.waiters.pop(request.owner, None)
            return Grant(record.holdings[request.owner].token)

    def release(self, request: Request) -> Release:
        with self._mutex:
            record = self._records.get(request.key, _Record())
            record.expire(clock.lease_time())
            holding = record.holdings.pop(request.owner, None)
            if holding is None and request.owner in self._released:
                return Release.RELEASED
            if holding is None:
                return Release.TAKEN if record.holdings else Release.GONE
            self._released.add(request.owner)
            record.available = max(record.available, holding.acquired + request.min_hold)
            record.wake()
            if record.is_over(clock.lease_time()):
                del self._records[request.key]
            return Release.RELEASED

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        with self._mutex:
            return [self._extend(request) for request in requests]

    def take_over(self, request: Request, former: str) -> bool:
        with self._mutex:
            record, now = self._records.get(request.key, _Record()), clock.lease_time()
            record.expire(now)
            if (holding := record.holdings.pop(former, None)) is not None:
                changed = replace(holding, request=request, expires=now + request.ttl)
                record.holdings[request.owner] = changed
            return self._extend(request)

    def guard(self, request: Request, token: int, using: str) -> None:
        """Let nobody in after this holder before the caller's transaction ends, whatever database it is on."""
        block = Block(connections[using], "guard()")
        with self._mutex:
            record = self._records.get(request.key, _Record())
            last = record.holdings.get(request.owner, record.last)
            found = last.token if last else None
            if found != token:
                raise StaleFencingToken(request.name, token, "a later holder has the lock", found)
            record.guarded.append(block)

    def probe(self, request: Request) -> Busy | None:
        with self._mutex:
            now, record = clock.lease_time(), self._records.get(request.key, _Record())
            record.expire(now)
            return record.busy(now) if record.holdings or record.available > now else None

    def enqueue(self, request: Request, bell: Bell) -> None:
        with self._mutex:
            record = self._records.setdefault(request.key, _Record())
            record.waiters[request.owner] = request, bell

    def dequeue(self, request: Request) -> None:
        """Leave the line; who was behind may be first now."""
        with self._mutex:
            record = self._records.get(request.key)
            if record and record.waiters.pop(request.owner, None):
                record.wake()

    forget_bell = dequeue

    def held(self, key: str | None = None) -> Iterable[Held]:
        with self._mutex:
            now = clock.lease_time()
            records = [self._records[each] for each in self._records if key in {None, each}]
            for record in records:
                record.expire(now)
            return [held for record in records for held in record.listed(now)]

    def end_holding(self, key: str, owner_digest: str) -> bool:
        with self._mutex:
            record = self._records.get(key, _Record())
            shown = {held.owner_digest for held in record.listed(clock.lease_time())}
            for owner in [each for each in record.holdings if digest(each) == owner_digest]:
                del record.holdings[owner]
            if owner_digest in shown and not record.holdings:
                record.available = 0.0  # it is free now, whatever min_hold it had
            record.wake()
            return owner_digest in shown

    def purge(
        self, older_than: float, *, batch_size: int = 1000, dry_run: bool = False
    ) -> Iterator[Purged]:
        if not self.supports_purge:
            super().purge(older_than)
        with self._mutex:
            now, records = clock.lease_time(), list(self._records.items())
            for _, record in records:
                record.expire(now)
            over = [key for key, record in records if record.is_over(now - older_than)]
            for key in () if dry_run else over:
                del self._records[key]
        yield Purged(len(records), len(over), 1.0)

    def abandon_after_fork(self) -> None:
        """Begin empty: the parent's locks are the parent's."""
        self._mutex, self._records = threading.Lock(), {}

    def _extend(self, request: Request) -> bool:
        record, now = self._records.get(request.key, _Record()), clock.lease_time()
        record.expire(now)
        holding = record.holdings.get(request.owner)
        if holding is not None:
            holding.expires = max(holding.expires, now + request.ttl)
        return holding is not None
