"""The settings of a project whose tenants each have a schema of PostgreSQL."""

from __future__ import annotations

import os

SECRET_KEY = "for tests only"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
APP = "tests.stacks.tenants"

SHARED_APPS = ["django_tenants", "django_distlock", "django.contrib.contenttypes", APP]
TENANT_APPS = ["django.contrib.contenttypes"]
if "NOT_SHARED" in os.environ:
    SHARED_APPS.remove("django_distlock")
    TENANT_APPS.append("django_distlock")
INSTALLED_APPS = [*SHARED_APPS, *(app for app in TENANT_APPS if app not in SHARED_APPS)]
TENANT_MODEL, TENANT_DOMAIN_MODEL = "tenants.Shop", "tenants.Domain"
PUBLIC_SCHEMA_NAME = "main"
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
DATABASES = {
    "default": {
        "ENGINE": "django_tenants.postgresql_backend",
        "HOST": "127.0.0.1",
        "PORT": os.environ["DISTLOCK_POSTGRES_PORT"],
        "NAME": "tenants",
        "USER": "distlock",
        "PASSWORD": "distlock",
    }
}
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    "locks": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": f"redis://127.0.0.1:{os.environ['DISTLOCK_REDIS_PORT']}/7",
        "KEY_FUNCTION": "django_tenants.cache.make_key",
        "REVERSE_KEY_FUNCTION": "django_tenants.cache.reverse_key",
    },
}
_PREFIX = {} if "NO_PREFIX" in os.environ else {"KEY_PREFIX": f"{APP}.locks.tenant"}
_BACKENDS = "django_distlock.backends."
DISTLOCK = {
    "default": {**_PREFIX, "OPTIONS": {"io_timeout": 5.0}},
    "rowlock": {**_PREFIX, "BACKEND": f"{_BACKENDS}rowlock.RowLockBackend"},
    "advisory": {**_PREFIX, "BACKEND": f"{_BACKENDS}advisory.AdvisoryBackend"},
    "redis": {
        **_PREFIX,
        "BACKEND": f"{_BACKENDS}redis.RedisBackend",
        "OPTIONS": {"location": f"redis://127.0.0.1:{os.environ['DISTLOCK_REDIS_PORT']}/8"},
    },
    "cache": {"BACKEND": f"{_BACKENDS}cache.CacheBackend", "OPTIONS": {"cache": "locks"}},
}
