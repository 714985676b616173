"""Aliases of DISTLOCK that need no server: locks in memory, locks that exclude nobody, and a server that is down."""

from __future__ import annotations

from typing import Any

MEMORY: dict[str, Any] = {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}
DUMMY: dict[str, Any] = {"BACKEND": "django_distlock.backends.dummy.DummyBackend"}
DOWN: dict[str, Any] = {
    "BACKEND": "django_distlock.backends.redis.RedisBackend",
    "OPTIONS": {"location": "redis://127.0.0.1:1"},
}
