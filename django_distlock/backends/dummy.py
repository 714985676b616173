"""A backend that always grants and stores nothing, for tests of code that uses locks."""

from __future__ import annotations

from collections.abc import Sequence

from django_distlock.engine.values import Busy, Grant, Release, Request
from django_distlock.engine.waiting import Waiting

from .base import BaseLockBackend


class DummyBackend(BaseLockBackend):
    """Grants every lock to every caller, so it excludes nobody."""

    supports_shared = True
    supports_detach = True
    supports_min_hold = True
    waiting = Waiting(in_line=False)

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        return Grant(token=None)

    def release(self, request: Request) -> Release:
        return Release.RELEASED

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return [True] * len(requests)

    def take_over(self, request: Request, former: str) -> bool:
        return True

    def probe(self, request: Request) -> Busy | None:
        return None
