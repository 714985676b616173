"""preload(): the modules of all aliases are loaded before the first request, and nothing is connected to."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import InvalidLockBackend, preload

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

PROJECT: dict[str, Any] = {
    "INSTALLED_APPS": ["django_distlock"],
    "DATABASES": {
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "preload.sqlite3"},
        "pg": {"ENGINE": "django.db.backends.postgresql", "HOST": "127.0.0.1", "PORT": 1},
        "my": {"ENGINE": "django.db.backends.mysql", "HOST": "127.0.0.1", "PORT": 1},
    },
    "CACHES": {
        "default": {
            "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
            "LOCATION": "127.0.0.1:1",
        },
        "redis": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": "redis://127.0.0.1:1",
        },
    },
    "DISTLOCK": {
        "default": {},
        "rows": "rowlock://pg",
        "names": "advisory://my",
        "redis": "redis://127.0.0.1:1",
        "redlock": "redlock+redis://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3",
        "memcached": "cache://default",
        "redis cache": "cache://redis",
        "zookeeper": "zookeeper://127.0.0.1:1",
        "etcd": "etcd://127.0.0.1:1",
    },
}
BEGINNING = """
import json, sys, threading, warnings
warnings.simplefilter("ignore")
connected = []
events = {"socket.__new__", "socket.getaddrinfo", "sqlite3.connect"}
sys.addaudithook(lambda event, args: connected.append(event) if event in events else None)
from django.conf import settings
settings.configure(**json.loads(sys.argv[1]))
"""
A_SERVER = """
try:
    import MySQLdb
except ImportError:
    import pymysql
    pymysql.install_as_MySQLdb()
import django
django.setup()
from django_distlock import LockError, lock, locks, preload
preload()
print(json.dumps([connected, threading.active_count()]))
loaded = {*sys.modules}
for alias in locks:
    try:
        lock("a", using=alias, timeout=0).acquire()
    except LockError:  # there is no server
        pass
to_connect = "encodings.", "stringprep", "MySQLdb."
print(json.dumps([bool(connected), sorted(each for each in {*sys.modules} - loaded if not each.startswith(to_connect))]))
"""
A_COMMAND = """
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", "makemigrations", "--check", "--dry-run", "--verbosity=0", "--skip-checks"])
drivers = {"redis", "kazoo", "pymemcache", "psycopg", "MySQLdb"}
print(json.dumps(sorted(drivers & {*sys.modules})))
"""


def _run(code: str, folder: Any) -> list[Any]:
    run = subprocess.run(
        [sys.executable, "-c", BEGINNING + code, json.dumps(PROJECT)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_it_connects_to_nothing_and_a_first_lock_loads_no_module(tmp_path: Any) -> None:
    did, still_loaded = _run(A_SERVER, tmp_path)

    assert did == [[], 1]  # no socket, no file of SQLite, and no thread besides the main thread
    assert still_loaded == [True, []]


def test_a_management_command_loads_no_driver(tmp_path: Any) -> None:
    assert _run(A_COMMAND, tmp_path) == [[]]


def test_wrong_settings_are_an_error(settings: Settings) -> None:
    settings.DISTLOCK = {"default": {}, "other": {"BACKEND": "redis"}}

    with pytest.raises(InvalidLockBackend, match="DISTLOCK\\['other'\\]"):
        preload()
