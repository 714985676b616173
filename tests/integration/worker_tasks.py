"""Celery tasks that hold a lock for as long as they are told, or wait for it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from celery import shared_task
from celery.exceptions import SoftTimeLimitExceeded

from django_distlock import lock
from testproject import celery  # noqa: F401 - it takes the tasks

STEP = 0.05
#: Seconds that a task of ours may wait before Celery raises in it.
SOFT_LIMIT = 1


@shared_task
def hold(name: str, seconds: float, **terms: Any) -> list[float]:
    """Return when the lock was held."""
    with lock(name, **terms) as lease:
        entered = _now()
        while _now() < entered + seconds:
            time.sleep(STEP)
            lease.check()
        return [entered, _now()]


@shared_task(soft_time_limit=SOFT_LIMIT)
def wait(name: str, using: str) -> float:
    """Return how long a wait for the lock lasted until the soft time limit ended it."""
    began = _now()
    with suppress(SoftTimeLimitExceeded):
        lock(name, using=using, timeout=60).acquire()
    return _now() - began


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
