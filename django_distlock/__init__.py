"""Distributed locks for Django, over the servers a project already runs."""

from typing import TYPE_CHECKING, Any

from . import checks  # noqa: F401 - registers the checks, even if the app is not installed
from .decorators import Policy, respond, retry, skip
from .engine.lease import Lease
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
from .ground.holder import Holder
from .handler import locks, preload
from .leading import alead, lead
from .lock import Lock, LockTerms, current_lease, distributed_lock, lock, try_lock
from .lock_set import lock_all
from .objects import locked
from .operators import force_release

if TYPE_CHECKING:
    from .backends.rowlock import transaction_lock

__version__ = "1.0.0"
__all__ = [
    "Holder",
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
    "LockTerms",
    "NotSupported",
    "Policy",
    "ReleasedBeforeCommit",
    "SnapshotBeforeLock",
    "StaleFencingToken",
    "alead",
    "current_lease",
    "distributed_lock",
    "force_release",
    "lead",
    "lock",
    "lock_all",
    "locked",
    "locks",
    "preload",
    "respond",
    "retry",
    "skip",
    "transaction_lock",
    "try_lock",
]


#: Names that are looked for here, by the submodule that has them.
_ELSEWHERE = {
    "admin": ("ObjectLocksMixin",),
    "backends": ("BaseLockBackend",),
    "contrib.cache": ("aget_or_compute", "get_or_compute"),
    "contrib.celery": ("attached", "handover", "unique_task"),
    "contrib.debug_toolbar": ("LocksPanel",),
    "contrib.editing": ("EditLock", "edit_lock", "edit_lock_view"),
    "contrib.editing.admin": ("EditLockMixin",),
    "contrib.health_check": ("Locks",),
    "contrib.idempotency": ("idempotent",),
    "contrib.opentelemetry": ("instrument", "uninstrument"),
    "contrib.tasks": ("unique_task",),
    "models": ("FenceField", "FencedModel"),
    "signals": (
        *("backend_failed", "lock_acquired", "lock_busy", "lock_detached"),
        *("lock_extended", "lock_forced", "lock_lost", "lock_released"),
    ),
    "testing": (
        "assert_held",
        "assert_not_held",
        "held_elsewhere",
        "override_locks",
        "reset_locks",
    ),
}


def __getattr__(name: str) -> Any:
    """Load transaction_lock() at its first use: it brings the backends of databases."""
    if name == "transaction_lock":
        from .backends.rowlock import transaction_lock

        globals()[name] = transaction_lock
        return transaction_lock
    ways = [
        f"from {__name__}.{module} import {name}"
        for module, names in _ELSEWHERE.items()
        if name in names
    ]
    if ways:
        # The import statement would replace the text of an AttributeError by its own.
        msg = f"{__name__} has no {name!r}; write: {', or '.join(ways)}"
        raise ImportError(msg)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
