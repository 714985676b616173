"""Charging a fee in a Celery task: the task is outside, the lock inside."""

from __future__ import annotations

from celery import shared_task
from django.conf import settings

from django_distlock import distributed_lock, retry, skip

# Whoever sends a task sends it by this application.
from . import celery  # noqa: F401
from .services import WORK, charge_fee

#: Where there is no Redis, the locks are in the database.
USING = "redis" if "redis" in settings.DISTLOCK else "default"
CHARGED = "charged"
SKIPPED = "skipped"


@shared_task
def charge(account_id: int, work: float = WORK) -> str:
    """Charge it at once, whoever else does."""
    charge_fee(account_id, work=work)
    return CHARGED


@shared_task
@distributed_lock("fee:{account_id}", using=USING, timeout=60)
def charge_in_turn(account_id: int, work: float = WORK) -> str:
    """Wait for the others: a worker process is busy with it meanwhile."""
    charge_fee(account_id, work=work)
    return CHARGED


@shared_task
@distributed_lock("fee:{account_id}", using=USING, timeout=0, on_busy=skip(SKIPPED))
def charge_or_skip(account_id: int, work: float = WORK) -> str:
    """Leave it if somebody else does it now; the result says so."""
    charge_fee(account_id, work=work)
    return CHARGED


# By default a task is retried three times, and then fails.
@shared_task(max_retries=None)
@distributed_lock("fee:{account_id}", using=USING, timeout=0, on_busy=retry(countdown=0.05))
def charge_or_retry(account_id: int, work: float = WORK) -> str:
    """Go back to the queue if somebody else does it now: the worker process is free for others."""
    charge_fee(account_id, work=work)
    return CHARGED
