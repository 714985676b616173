"""Tasks of a stack, for a worker that its agent watches."""

from __future__ import annotations

from celery import shared_task

from django_distlock import current_lease, distributed_lock
from django_distlock.contrib.celery import unique_task


@shared_task
@distributed_lock("task:{name}", using="redis", timeout=10)
def locked_task(name: str) -> bool:
    """Return whether the lease of this call is known inside it."""
    lease = current_lease()
    return lease is not None and lease.name == f"task:{name}"


@unique_task("once:{name}", using="redis")
def once(name: str) -> str:
    """Return *name*."""
    return name
