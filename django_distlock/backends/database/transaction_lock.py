"""transaction_lock(): a lock in the caller's own transaction, free exactly at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import connections

from django_distlock.conf import DEFAULT_TIMEOUT, optional_seconds
from django_distlock.engine.naming import checked_name
from django_distlock.engine.waiting import Wait
from django_distlock.exceptions import LockError

from .transaction_mysql import OnMySQL
from .transaction_postgresql import OnPostgreSQL

if TYPE_CHECKING:
    from datetime import timedelta

    from .transaction_taker import Taker

_TAKERS: dict[str, type[Taker]] = {"postgresql": OnPostgreSQL, "mysql": OnMySQL}


def transaction_lock(
    name: str, *, using: str = "default", timeout: float | timedelta | None = DEFAULT_TIMEOUT
) -> None:
    """Take the lock *name* in the transaction that is open on *using*, until its commit or rollback.

    LockNotAcquired after *timeout* seconds (0: one try, None: no limit); the transaction can go on.
    It is the lock of a RowLockBackend on *using*. At REPEATABLE READ and above it must be the first
    statement of the outermost atomic block: LockError else.
    """
    name, wait = checked_name(name), Wait(optional_seconds(timeout, "timeout"))
    connection = connections[using]
    if not connection.in_atomic_block:
        msg = f"transaction_lock() needs a transaction: call it inside atomic(using={using!r})."
        raise LockError(msg)
    taker = _TAKERS.get(connection.vendor)
    if taker is None:
        msg = f"transaction_lock() needs PostgreSQL, MariaDB or MySQL: {using!r} is {connection.vendor}."
        raise LockError(msg)
    taker(connection, name, wait).take()
