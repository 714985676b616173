"""Locks in memcached, through an alias of CACHES."""

from .backend import CacheMemcachedBackend

__all__ = ["CacheMemcachedBackend"]
