"""Locks in the admin: who holds which, of every alias, and the rows of the database as history."""

from .history import MethodLockAdmin
from .live import HeldLockAdmin

__all__ = ["HeldLockAdmin", "MethodLockAdmin"]
