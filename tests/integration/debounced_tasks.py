"""Celery tasks that wait for quiet: their bodies write down how many calls they have seen."""

from __future__ import annotations

from functools import partial

from django_distlock.contrib.celery import unique_task
from testproject import celery  # noqa: F401 - it takes the tasks
from tests.fixtures.calls import Calls

from .celery_tasks import body

#: Seconds: a body begins so long after the last call, and at the latest so long after the first one.
QUIET, AT_MOST = 1, 3
debounced = partial(
    unique_task, "once:{page}", using="redis", lease=60, debounce=QUIET, at_most=AT_MOST
)


@debounced()
def see(page: str) -> None:
    Calls(page).see()


@debounced(debounce=0.05, at_most=0.2)
def see_soon(page: str) -> None:
    Calls(page).see()


@debounced()
def quiet(page: str) -> str:
    return body(page)
