"""Locks in a majority of independent Redis servers."""

from .backend import RedlockBackend
from .options import RedlockOptions

__all__ = ["RedlockBackend", "RedlockOptions"]
