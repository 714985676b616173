"""Lease rows in a database: the default backend."""

from .backend import DatabaseBackend

__all__ = ["DatabaseBackend"]
