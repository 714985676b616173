"""The settings of the test project, and those of the stack that the environment names."""

from __future__ import annotations

import os
from typing import Any

from testproject.settings import *  # noqa: F403
from testproject.settings import CACHES, DATABASES, DISTLOCK, INSTALLED_APPS

from .profiles import BY_NAME

STACK = BY_NAME[os.environ["DISTLOCK_STACK"]]

ROOT_URLCONF = "tests.stacks.urls"
INSTALLED_APPS = [*STACK.first, *INSTALLED_APPS, *STACK.apps, "tests.stacks"]
#: A machine that is busy with tests may stand still for a while.
_PATIENT = {"io_timeout": 5.0}
_BACKENDS = "django_distlock.backends."

if "postgres" in DATABASES:
    DATABASES["postgres"] |= STACK.settings.get("postgres", {})
    _ON_POSTGRES: dict[str, Any] = {"using": "postgres", **_PATIENT}
    DISTLOCK |= {
        "postgres": {"OPTIONS": _ON_POSTGRES},
        "rowlock": {"BACKEND": f"{_BACKENDS}rowlock.RowLockBackend", "OPTIONS": _ON_POSTGRES},
        "advisory": {"BACKEND": f"{_BACKENDS}advisory.AdvisoryBackend", "OPTIONS": _ON_POSTGRES},
        "bare": {
            "BACKEND": f"{_BACKENDS}advisory.AdvisoryBackend",
            "OPTIONS": {**_ON_POSTGRES, "fencing": False},
        },
    }
if "mariadb" in DATABASES:
    DATABASES["mariadb"] |= STACK.settings.get("mariadb", {})
    _ON_MARIADB: dict[str, Any] = {"using": "mariadb", **_PATIENT}
    DISTLOCK |= {
        "mariadb": {"OPTIONS": _ON_MARIADB},
        "getlock": {"BACKEND": f"{_BACKENDS}advisory.AdvisoryBackend", "OPTIONS": _ON_MARIADB},
    }
if "django_redis" in CACHES:
    CACHES["django_redis"] |= STACK.settings.get("cache", {})

DISTLOCK = {alias: DISTLOCK[alias] for alias in ("default", *STACK.aliases)}

DATABASES["default"] = DATABASES[STACK.database]

globals().update({key: value for key, value in STACK.settings.items() if key.isupper()})

if STACK.name == "sentry":
    import sentry_sdk

    sentry_sdk.init(
        "http://key@127.0.0.1:9/1",
        traces_sample_rate=1.0,
        profiles_sample_rate=1.0,
        transport=lambda _envelope: None,
    )
