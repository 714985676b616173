"""A backend that is always free and keeps nothing: for tests of code around locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_distlock.engine.values import Busy, Grant, Release, Request
from django_distlock.engine.waiting import Waiting

from .base import BaseLockBackend

if TYPE_CHECKING:
    from collections.abc import Sequence


class DummyBackend(BaseLockBackend):
    """Grants everything to everybody: nothing is excluded."""

    supports_shared = True
    supports_detach = True
    supports_delays = True
    clock = "client"
    waiting = Waiting(in_line=False)

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        """Grant it."""
        return Grant(token=None)

    def release(self, request: Request) -> Release:
        """Take it back."""
        return Release.RELEASED

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Keep them all."""
        return [True] * len(requests)

    def take_over(self, request: Request, former: str) -> bool:
        """Keep it."""
        return True

    def probe(self, request: Request) -> Busy | None:
        """Nothing is ever held."""
        return None
