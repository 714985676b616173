"""Distributed locks for Django, over the servers a project already runs."""

from .backends.rowlock import transaction_lock
from .decorators import respond, retry, skip
from .exceptions import (
    InvalidLockBackend,
    LockBackendError,
    LockDeadlock,
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockNotOwned,
    LockOutcomeUnknown,
    NotSupported,
    ReleasedBeforeCommit,
    SnapshotBeforeLock,
    StaleFencingToken,
)
from .handler import locks
from .lease import Lease
from .lock import Lock, current_lease, distributed_lock, lock, lock_all
from .operators import force_release

__all__ = [
    "InvalidLockBackend",
    "Lease",
    "Lock",
    "LockBackendError",
    "LockDeadlock",
    "LockError",
    "LockLost",
    "LockNotAcquired",
    "LockNotHeld",
    "LockNotOwned",
    "LockOutcomeUnknown",
    "NotSupported",
    "ReleasedBeforeCommit",
    "SnapshotBeforeLock",
    "StaleFencingToken",
    "current_lease",
    "distributed_lock",
    "force_release",
    "lock",
    "lock_all",
    "locks",
    "respond",
    "retry",
    "skip",
    "transaction_lock",
]
