"""Celery tasks that wait for quiet: their bodies write down how many calls they have seen."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from django_distlock.contrib.celery import unique_task
from testproject import celery  # noqa: F401 - it takes the tasks

from .celery_tasks import body

#: Seconds: a body begins so long after the last call, and at the latest so long after the first one.
QUIET, AT_MOST = 0.5, 2
debounced = partial(
    unique_task, "once:{page}", using="redis", lease=60, debounce=QUIET, at_most=AT_MOST
)


class Calls:
    """The calls of a task, counted in a file of its own *folder*, and what its bodies have seen of them."""

    def __init__(self, folder: str) -> None:
        self._calls, self._seen = Path(folder, "calls"), Path(folder, "seen")

    def add(self) -> None:
        """Count a call, before it is sent."""
        with self._calls.open("ab") as file:
            file.write(b"x")

    def see(self) -> None:
        """Write down how many there are."""
        with self._seen.open("a") as file:
            file.write(f"{self.number}\n")

    @property
    def number(self) -> int:
        return self._calls.stat().st_size

    @property
    def seen(self) -> list[int]:
        """What each body has seen."""
        return [*map(int, self._seen.read_text().split())] if self._seen.exists() else []

    def are_seen(self) -> bool:
        """Return whether the last body has seen the last call."""
        return self.seen[-1:] == [self.number]


@debounced()
def see(page: str) -> None:
    Calls(page).see()


@debounced(debounce=0.05, at_most=0.2)
def see_soon(page: str) -> None:
    Calls(page).see()


@debounced()
def quiet(page: str) -> str:
    return body(page)
