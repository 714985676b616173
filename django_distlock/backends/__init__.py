"""The backends, and the names that the author of another one needs."""

from django_distlock.conf import BackendSettings
from django_distlock.engine.bells import Bell
from django_distlock.engine.values import Busy, Grant, Held, Purged, Release, Request, digest
from django_distlock.engine.waiting import Queueing, Waiting, Way
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, NotSupported
from django_distlock.ground.holder import Holder

from .base import BaseLockBackend

__all__ = [
    "BackendSettings",
    "BaseLockBackend",
    "Bell",
    "Busy",
    "Grant",
    "Held",
    "Holder",
    "LockBackendError",
    "LockOutcomeUnknown",
    "NotSupported",
    "Purged",
    "Queueing",
    "Release",
    "Request",
    "Waiting",
    "Way",
    "digest",
]
