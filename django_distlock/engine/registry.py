"""Every attempt and every holding of this process, from before its first request to its end."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

from . import clock
from .forks import forks

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_distlock.holding import Holding


class Registry:
    """The leases of this process that have not ended; who watches is told of each grant."""

    def __init__(self) -> None:
        self._leases: dict[int, weakref.ref[Holding]] = {}
        #: Those whose thread or task may yet release them, though nobody has a reference.
        self._kept: dict[int, Holding] = {}
        self._watchers: list[Callable[[Holding], None]] = []

    def add(self, lease: Holding) -> None:
        """Remember *lease*, pending or held."""
        self._kept[id(lease)] = lease
        self._leases[id(lease)] = weakref.ref(lease)

    def let_go(self, lease: Holding) -> None:
        """Keep *lease* no longer than others do: its thread or task has ended."""
        self._kept.pop(id(lease), None)

    def discard(self, lease: Holding) -> None:
        """Forget *lease*, which has ended."""
        self._leases.pop(id(lease), None)
        self._kept.pop(id(lease), None)

    def leases(self) -> list[Holding]:
        """Return the leases of now."""
        known = [lease() for lease in list(self._leases.values())]
        return [lease for lease in known if lease is not None]

    def watch(self, watcher: Callable[[Holding], None]) -> None:
        """Have *watcher* called with each lease as it is granted."""
        self._watchers.append(watcher)

    def granted(self, lease: Holding) -> None:
        """Tell the watchers."""
        for watcher in self._watchers:
            watcher(lease)

    def disown(self) -> None:
        """Make every lease inert: a forked child holds nothing of its parent's."""
        for lease in self.leases():
            lease.disown()
        self._leases, self._kept = {}, {}

    def release_all(self, seconds: float = 2.0) -> None:
        """Give back all that is held or may be, one after the other, in so many seconds at most."""
        forks.notice()
        ends = clock.wait_time() + seconds
        for lease in self.leases():
            if clock.wait_time() < ends:
                with contextlib.suppress(Exception):
                    lease.abandon()


registry = Registry()
forks.in_child(registry.disown)
