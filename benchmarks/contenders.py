"""Who is measured: one way to take and give back a lock on one server."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

Act = Callable[[], object]
#: By what is measured: contenders, the raw commands first.
Field = dict[str, list["Contender"]]


@dataclass(frozen=True)
class Contender:
    """A way to take a lock and give it back.

    *wait* takes it when somebody else may have it; None where that is not measured.
    *alias* is the backend, where the way is ours, and *limit* that of the lock. *spent* returns the microseconds that the server has
    spent on its commands so far; None where servers do not tell.
    """

    name: str
    take: Act
    free: Act
    wait: Act | None = None
    alias: str = ""
    spent: Callable[[], float] | None = None
    limit: int | None = None


def ours(
    alias: str, spent: Callable[[], float] | None = None, *, limit: int | None = None
) -> Contender:
    """Return the whole public API; with a *limit*, any of so many places."""
    from django_distlock import lock

    recipe = lock("benchmark", using=alias, timeout=60, limit=limit)
    name = f"django_distlock {alias}" + (f", limit={limit}" if limit else "")
    take = recipe.__enter__
    return Contender(name, take, _left(recipe), take, alias, spent, limit)


def peer(
    name: str,
    lock: Callable[[], AbstractContextManager[object]],
    *,
    waits: bool = True,
    spent: Callable[[], float] | None = None,
) -> Contender:
    """Return what a user would pick instead: a new lock is made for each ``with``."""
    held: list[AbstractContextManager[object]] = []

    def take() -> None:
        held.append(lock())
        held[-1].__enter__()

    def free() -> None:
        held.pop().__exit__(None, None, None)

    return Contender(name, take, free, take if waits else None, spent=spent)


def polled(take: Callable[[], bool]) -> Act:
    """Return how to wait where nothing wakes: a try each millisecond."""

    def wait() -> None:
        while not take():
            time.sleep(0.001)

    return wait


def _left(recipe: AbstractContextManager[object]) -> Act:
    return lambda: recipe.__exit__(None, None, None)
