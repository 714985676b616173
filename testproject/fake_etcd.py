"""An etcd server in the memory of one process, with the requests that EtcdBackend sends.

It has leases with a ttl, transactions that compare and write, revisions, and watches. The real
etcd counts a ttl in whole seconds; this one takes fractions of a second too.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class KeyValue:
    """A key. *create_revision* is the number of the transaction that made it."""

    key: str
    value: str
    create_revision: int
    lease: int


@dataclass(frozen=True)
class Put:
    """Write a key, which ends with *lease*; 0: never."""

    key: str
    value: str
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Delete a key."""

    key: str


class FakeEtcd:
    """One server."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._numbers = itertools.count(1)
        self._revision = 0
        self._keys: dict[str, KeyValue] = {}
        self._leases: dict[int, tuple[float, float]] = {}  # ttl, end
        self._watchers: dict[int, tuple[str, Callable[[], object]]] = {}

    def grant(self, ttl: float) -> int:
        """Make a lease of *ttl* seconds and return its number."""
        with self._mutex:
            number = next(self._numbers)
            self._leases[number] = ttl, _now() + ttl
            return number

    def keep_alive(self, lease: int) -> bool:
        """Extend a lease to its ttl from now; return False if it has ended before."""
        with self._mutex:
            self._expire()
            ttl, _ = self._leases.get(lease, (0.0, 0.0))
            if ttl:
                self._leases[lease] = ttl, _now() + ttl
            return bool(ttl)

    def time_to_live(self, lease: int) -> tuple[float, float]:
        """Return the ttl of a lease and the rest of it, in seconds; 0 if it has ended."""
        with self._mutex:
            self._expire()
            ttl, end = self._leases.get(lease, (0.0, 0.0))
            return ttl, max(0.0, end - _now())

    def revoke(self, lease: int) -> None:
        """End a lease, and delete its keys."""
        with self._mutex:
            self._leases.pop(lease, None)
            self._expire()

    def get(self, key: str) -> KeyValue | None:
        """Return a key."""
        return next((found for found in self.get_prefix(key) if found.key == key), None)

    def get_prefix(self, prefix: str) -> list[KeyValue]:
        """Return all keys that begin with *prefix*."""
        with self._mutex:
            self._expire()
            return [found for key, found in self._keys.items() if key.startswith(prefix)]

    def transaction(
        self, key: str, expected: str | None, *changes: Put | Delete
    ) -> tuple[bool, KeyValue | None]:
        """Make the *changes* if *key* has the value *expected* (None: does not exist).

        Return whether they were made, and what *key* is now.
        """
        with self._mutex:
            self._expire()
            found = self._keys.get(key)
            if (found.value if found else None) != expected:
                return False, found
            self._revision += 1
            for change in changes:
                if isinstance(change, Delete):
                    self._delete(change.key)
                else:
                    self._put(change)
            return True, self._keys.get(key)

    def watch(self, key: str, callback: Callable[[], object]) -> Callable[[], object]:
        """Call *callback* whenever *key* is deleted, until the function that is returned is called."""
        with self._mutex:
            number = next(self._numbers)
            self._watchers[number] = key, callback
        return lambda: self._watchers.pop(number, None)

    def _put(self, change: Put) -> None:
        if change.lease and change.lease not in self._leases:
            raise KeyError("requested lease not found")
        old = self._keys.get(change.key)
        created = old.create_revision if old else self._revision
        self._keys[change.key] = KeyValue(change.key, change.value, created, change.lease)

    def _delete(self, key: str) -> None:
        if self._keys.pop(key, None) is not None:
            for watched, callback in list(self._watchers.values()):
                if watched == key:
                    callback()

    def _expire(self) -> None:
        now = _now()
        self._leases = {n: (ttl, end) for n, (ttl, end) in self._leases.items() if end > now}
        for found in list(self._keys.values()):
            if found.lease and found.lease not in self._leases:
                self._delete(found.key)


def _now() -> float:
    # Tests that stop the clock of their process do not stop that of a server.
    return time.clock_gettime(time.CLOCK_MONOTONIC)


_servers: dict[str, FakeEtcd] = {}
# A forked child must not use its parent's connections; this fake has no others.
os.register_at_fork(after_in_child=_servers.clear)


def connect(endpoint: str) -> FakeEtcd:
    """Return the server of this process with this name."""
    return _servers.setdefault(endpoint, FakeEtcd())
