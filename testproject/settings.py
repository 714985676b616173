"""Settings of the demo and of the tests: SQLite, and each server whose port the environment names."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from testproject.redis_aliases import cluster_cache, five_caches, sentinel_cache

FOLDER = Path(__file__).resolve().parent

SECRET_KEY = "demo-only: it protects nothing"
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
ASGI_APPLICATION = "testproject.asgi.application"
STATIC_URL = "static/"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_distlock",
    "testproject",
]
# Django 5.2 has tasks by a package.
TASKS_PACKAGE = next(filter(find_spec, ("django.tasks", "django_tasks")), "")
if TASKS_PACKAGE and find_spec("django_tasks_db"):
    INSTALLED_APPS.append("django_tasks_db")
    TASKS = {
        "default": {"BACKEND": f"{TASKS_PACKAGE}.backends.immediate.ImmediateBackend"},
        "dummy": {"BACKEND": f"{TASKS_PACKAGE}.backends.dummy.DummyBackend", "QUEUES": []},
        "database": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": []},
    }
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

DATABASE_BACKEND = "django_distlock.backends.database.DatabaseBackend"
LOCAL_SERVER = {"HOST": "127.0.0.1", "NAME": "distlock", "USER": "distlock", "PASSWORD": "distlock"}

DATABASES: dict[str, dict[str, Any]] = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(
            Path(os.environ.get("DISTLOCK_SQLITE_PATH") or FOLDER / "db.sqlite3").resolve()
        ),
        # Several processes share the file: in WAL mode readers do not stand in the writer's way,
        # and not every commit has to reach the disk.
        "OPTIONS": {
            "timeout": 20,
            "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL",
        },
    }
}
DISTLOCK: dict[str, dict[str, Any]] = {
    "default": {},
    "locmem": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"},
}

CACHES: dict[str, dict[str, Any]] = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
}

if port := os.environ.get("DISTLOCK_POSTGRES_PORT"):
    DATABASES["postgres"] = {
        "ENGINE": "django.db.backends.postgresql",
        **LOCAL_SERVER,
        "PORT": port,
    }
    DISTLOCK["postgres"] = {"BACKEND": DATABASE_BACKEND, "OPTIONS": {"using": "postgres"}}

if port := os.environ.get("DISTLOCK_PGBOUNCER_PORT"):
    DATABASES["pgbouncer"] = {
        "ENGINE": "django.db.backends.postgresql",
        **LOCAL_SERVER,
        "PORT": port,
        # It lends a session of the server for one transaction.
        "DISABLE_SERVER_SIDE_CURSORS": True,
    }

if port := os.environ.get("DISTLOCK_MARIADB_PORT"):
    driver_options: dict[str, Any] = {}
    if os.environ.get("DISTLOCK_MYSQL_DRIVER") != "mysqlclient":
        import pymysql

        # Django asks for the version of mysqlclient, for which PyMySQL stands in.
        pymysql.version_info = (2, 2, 7, "final", 0)
        pymysql.install_as_MySQLdb()
        # This server has no TLS, and PyMySQL would load all certificates of the machine to find that out.
        driver_options["ssl_disabled"] = True
    DATABASES["mariadb"] = {
        "ENGINE": "django.db.backends.mysql",
        **LOCAL_SERVER,
        "PORT": port,
        "OPTIONS": {"charset": "utf8mb4", **driver_options},
    }
    DISTLOCK["mariadb"] = {"BACKEND": DATABASE_BACKEND, "OPTIONS": {"using": "mariadb"}}

if port := os.environ.get("DISTLOCK_REDIS_PORT"):
    CACHES["django_redis"] = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": f"redis://127.0.0.1:{port}/1",
        "OPTIONS": {"CLIENT_CLASS": "django_redis.client.DefaultClient"},
    }
    CACHES["redis_cache"] = {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": f"redis://127.0.0.1:{port}/2",
    }
    CELERY_BROKER_URL = f"redis://127.0.0.1:{port}/5"
    CELERY_RESULT_BACKEND = f"redis://127.0.0.1:{port}/6"
    CELERY_BROKER_TRANSPORT_OPTIONS = json.loads(os.environ.get("DISTLOCK_CELERY_TRANSPORT", "{}"))
    DISTLOCK["redis"] = {
        "BACKEND": "django_distlock.backends.cache.CacheBackend",
        # A machine that is busy with tests may stand still for a while.
        "OPTIONS": {"cache": "django_redis", "connect_timeout": 5.0},
    }

if port := os.environ.get("DISTLOCK_MEMCACHED_PORT"):
    drivers = {"pymemcache": "PyMemcacheCache", "pylibmc": "PyLibMCCache"}
    for alias in filter(find_spec, drivers):  # pylibmc has no binary for the newest Pythons
        CACHES[alias] = {
            "BACKEND": f"django.core.cache.backends.memcached.{drivers[alias]}",
            "LOCATION": f"127.0.0.1:{port}",
        }
    DISTLOCK["memcached"] = {
        "BACKEND": "django_distlock.backends.cache.CacheBackend",
        "OPTIONS": {"cache": "pymemcache"},
    }

if port := os.environ.get("DISTLOCK_REDIS_SENTINEL_PORT"):
    CACHES["redis_sentinel"] = sentinel_cache(port)

if ports := os.environ.get("DISTLOCK_REDIS_CLUSTER_PORTS"):
    CACHES["redis_cluster"] = cluster_cache(ports)

if ports := os.environ.get("DISTLOCK_REDIS_FIVE_PORTS"):
    CACHES |= five_caches(ports)

# More aliases, such as {"etcd": "etcd://127.0.0.1:2379"}.
DISTLOCK |= json.loads(os.environ.get("DISTLOCK_ALIASES", "{}"))
