"""Locks in a majority of independent Redis servers."""

from .backend import RedlockBackend
from .quorum import RedlockOptions

__all__ = ["RedlockBackend", "RedlockOptions"]
