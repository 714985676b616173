"""Locks in Redis, or in Valkey."""

from .backend import CacheRedisBackend, RedisBackend
from .sources import RedisCacheOptions, RedisOptions

__all__ = ["CacheRedisBackend", "RedisBackend", "RedisCacheOptions", "RedisOptions"]
