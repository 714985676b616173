"""Locks in a majority of independent Redis servers."""

from .backend import RedlockBackend
from .verbs import RedlockOptions

__all__ = ["RedlockBackend", "RedlockOptions"]
