"""The settings of the tests, and an alias for each backend that is measured."""

from __future__ import annotations

import os

from testproject.redis_aliases import five_caches
from testproject.settings import *  # noqa: F403 - settings are names of a module
from testproject.settings import DATABASES, DISTLOCK, INSTALLED_APPS
from tests.fixtures.environment import etcd_endpoints, zookeeper_hosts

# With it on, Django keeps the text of every statement.
DEBUG = False
BACKENDS = "django_distlock.backends"
# django-db-mutex keeps to the database "default".
INSTALLED_APPS += ["db_mutex"]
DATABASES |= {"sqlite": DATABASES["default"], "default": DATABASES["postgres"]}
if os.environ["DISTLOCK_BENCH_DISK"]:
    DATABASES["sqlite"]["OPTIONS"]["init_command"] = (
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL"
    )
DISTLOCK["sqlite"] = {**DISTLOCK["default"], "OPTIONS": {"using": "sqlite"}}
for vendor in ("postgres", "mariadb"):
    for kind, backend in {"rowlock": "RowLockBackend", "advisory": "AdvisoryBackend"}.items():
        DISTLOCK[f"{vendor}-{kind}"] = {
            "BACKEND": f"{BACKENDS}.{kind}.{backend}",
            "OPTIONS": {"using": vendor},
        }
DISTLOCK["redis-fair"] = {
    **DISTLOCK["redis"],
    "OPTIONS": {**DISTLOCK["redis"].get("OPTIONS", {}), "fair": True},
}
# These servers have not been up for long, and need not survive a restart.
servers = list(five_caches(os.environ["DISTLOCK_REDIS_FIVE_PORTS"]))
DISTLOCK["redlock"] = {
    "BACKEND": f"{BACKENDS}.redlock.RedlockBackend",
    "OPTIONS": {"servers": servers, "restart_guard": False},
}
DISTLOCK["zookeeper"] = {
    "BACKEND": f"{BACKENDS}.zookeeper.ZooKeeperBackend",
    "OPTIONS": {"hosts": zookeeper_hosts()},
}
DISTLOCK["etcd"] = {
    "BACKEND": f"{BACKENDS}.etcd.EtcdBackend",
    "OPTIONS": {"endpoints": etcd_endpoints()},
}
for vendor in ("postgres", "mariadb"):
    DISTLOCK[f"{vendor}-bare"] = {
        "BACKEND": f"{BACKENDS}.advisory.AdvisoryBackend",
        "OPTIONS": {"using": vendor, "fencing": False},
    }
for name, backend in {"dummy": "DummyBackend", "locmem": "LocMemBackend"}.items():
    DISTLOCK[name] = {"BACKEND": f"{BACKENDS}.{name}.{backend}"}
