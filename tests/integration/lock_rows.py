"""Lock rows in every state, as locks leave them behind, written without waiting for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone

from django_distlock.engine.values import LockState, new_owner
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import server_key, stored
from django_distlock.models import FencingCounter, LockWaiter, MethodLock

HOLDER = Holder("web-1", 4711, "MainThread", purpose="GET /fees/")
DAY = timedelta(days=1)


def put(database: str, name: str, state: LockState = LockState.FREE, **columns: Any) -> MethodLock:
    """Write a lock in *state*, last used a minute ago, and its counter; *columns* win."""
    then = timezone.now() - timedelta(minutes=1)
    until = timedelta(hours=2) if state in {LockState.HELD, LockState.RESERVED} else timedelta()
    is_owned = state in {LockState.HELD, LockState.STALE}
    values: dict[str, Any] = {
        "method_name": server_key(name),
        "description": stored(name),
        "owner": new_owner() if is_owned else None,
        "last_owner": new_owner(),
        "holder": HOLDER.to_json() if is_owned else None,
        "fencing_token": int(then.timestamp() * 1_000_000),
        "acquired_at": then,
        "expires_at": then + until,
        "available_at": then + until,
        "updated_at": then,
    }
    row = MethodLock.objects.using(database).create(**{**values, **columns})
    FencingCounter.objects.using(database).create(
        method_name=row.method_name, value=row.fencing_token, holder=HOLDER.to_json()
    )
    return row


def put_old(
    database: str,
    name: str,
    state: LockState = LockState.FREE,
    age: timedelta = 2 * DAY,
    **columns: Any,
) -> MethodLock:
    """Write a lock that was last used *age* ago."""
    then = timezone.now() - age
    times = dict.fromkeys(("acquired_at", "expires_at", "available_at", "updated_at"), then)
    token = int(then.timestamp() * 1_000_000)
    return put(database, name, state, **{**times, "fencing_token": token, **columns})


def put_waiter(
    database: str, lock: MethodLock, lives: timedelta = timedelta(hours=1), channel: str = ""
) -> LockWaiter:
    """Write a place in the queue of *lock* that counts for so long still; below 0: that is dead."""
    return LockWaiter.objects.using(database).create(
        method_name=lock.method_name,
        owner=new_owner(),
        channel=channel,
        expires_at=timezone.now() + lives,
    )


def reread(lock: MethodLock) -> MethodLock | None:
    """Return the row of *lock* as it is now, None if it was deleted."""
    return MethodLock.objects.using(lock._state.db).filter(pk=lock.pk).first()
