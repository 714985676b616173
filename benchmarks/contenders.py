"""Who is measured: one way to take and give back a lock on one server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: One acquire and release.
Cycle = Callable[[], None]


@dataclass(frozen=True)
class Contender:
    """A way to take and give back a lock; the first one on a server is what others are compared with.

    *alias* is the backend whose hand-off to a waiter of another process is measured too.
    """

    name: str
    cycle: Cycle
    alias: str = ""


def ours(alias: str) -> Contender:
    """Return one acquire and release through the whole public API."""
    from django_distlock import lock

    recipe = lock("benchmark", using=alias)

    def cycle() -> None:
        with recipe:
            pass

    return Contender(f"django_distlock {alias}", cycle, alias)
