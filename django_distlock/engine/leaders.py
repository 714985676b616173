"""The waiters of this process with places on the server: the first one for each lock, its leader, acts for all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from django_distlock.ground import clock
from django_distlock.ground.mutexes import section

if TYPE_CHECKING:
    from .bells import Bell
    from .values import Request


class _Sleeper(NamedTuple):
    ticket: int
    request: Request
    bell: Bell


@dataclass(slots=True)
class _Group:
    """The waiters for one lock by owner; the first one is the leader."""

    waiters: dict[str, _Sleeper] = field(default_factory=dict)
    #: Owners of those that were rung and have not slept since: they keep their places themselves.
    rung: set[str] = field(default_factory=set)
    #: When the leader last said that it leads, and when it last kept the places of the others.
    led_at: float = field(default_factory=clock.wait_time)
    kept_at: float = field(default_factory=clock.wait_time)

    @property
    def leader(self) -> str | None:
        return next(iter(self.waiters), None)


class Leaders:
    """Choose for each lock the waiter of this process that asks the server and keeps the places of the others. No I/O.

    *keep*: seconds between two times that places are kept. *stale*: seconds without a word from the leader after which
    another waiter leads, as the leader's event loop may be blocked.
    """

    def __init__(self, keep: float, stale: float = math.inf) -> None:
        self._keep, self._stale = keep, stale
        self.forget()

    def forget(self) -> None:
        """Start without waiters."""
        self._mutex = section()
        self._groups: dict[str, _Group] = {}

    def add(self, request: Request, bell: Bell, ticket: int = 0) -> None:
        """Add a waiter, which *bell* wakes; lower tickets come first, and among equal ones who came first."""
        with self._mutex:
            group = self._groups.setdefault(request.line, _Group())
            last = next(reversed(group.waiters.values()), None)
            comes_last = request.owner not in group.waiters and (not last or last.ticket <= ticket)
            group.waiters[request.owner] = _Sleeper(ticket, request, bell)
            if not comes_last:
                by_ticket = sorted(group.waiters.items(), key=lambda item: item[1].ticket)
                group.waiters = dict(by_ticket)

    def leads(self, request: Request, bell: Bell) -> bool:
        """Note that a waiter sleeps from now on, and add it if it is new; return whether it is the leader."""
        with self._mutex:
            group = self._groups.setdefault(request.line, _Group())
            group.rung.discard(request.owner)
            known = group.waiters.setdefault(request.owner, _Sleeper(0, request, bell))
            if self._is_silent(group):
                group.waiters = {request.owner: known, **group.waiters}
            if group.leader != request.owner:
                return False
            group.led_at = clock.wait_time()
            return True

    def has_leader(self, request: Request) -> bool:
        """Return whether another waiter leads this one."""
        with self._mutex:
            group = self._groups.get(request.line)
            leader = group.leader if group and not self._is_silent(group) else None
            return leader not in {None, request.owner}

    def owners(self, key: str, most: int) -> list[str]:
        """Return the owners of the first waiters, at most so many."""
        with self._mutex:
            return [*islice(self._groups[key].waiters, most)]

    def to_keep(self, request: Request) -> list[Request]:
        """Return the waiters whose places must be kept now, if *request* leads them."""
        with self._mutex:
            group, now = self._groups.get(request.line), clock.wait_time()
            if group is None or group.leader != request.owner or now - group.kept_at < self._keep:
                return []
            group.kept_at = now
            absent = {request.owner, *group.rung}
            return [each.request for owner, each in group.waiters.items() if owner not in absent]

    def ring(self, key: str, owner: str) -> None:
        """Wake a waiter; remove it if its event loop has ended."""
        with self._mutex:
            group = self._groups[key]
            if owner in group.waiters:
                group.rung.add(owner)
                if not group.waiters[owner].bell.ring():
                    self._drop(group, group.waiters[owner].request)

    def ring_leader(self, key: str) -> None:
        with self._mutex:
            if group := self._groups.get(key):
                self._ring_leader(key, group)

    def drop(self, request: Request) -> None:
        """Remove a waiter; if it was the leader, wake the next one, which leads from now on."""
        with self._mutex:
            if group := self._groups.get(request.line):
                self._drop(group, request)

    def _drop(self, group: _Group, request: Request) -> None:
        was_leader = group.leader == request.owner
        group.waiters.pop(request.owner, None)
        group.rung.discard(request.owner)
        if was_leader or not group.waiters:
            self._ring_leader(request.line, group)

    def _is_silent(self, group: _Group) -> bool:
        return clock.wait_time() - group.led_at >= self._stale

    def _ring_leader(self, key: str, group: _Group) -> None:
        # A waiter whose event loop has ended cannot lead.
        while owner := group.leader:
            if group.waiters[owner].bell.ring():
                return
            del group.waiters[owner]
        del self._groups[key]
