"""The stacks: packages as their own documentation installs them, and the acts to run among them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

#: Where the agents would send what they collect: nobody listens there.
NOWHERE = "http://127.0.0.1:9"
#: The aliases whose locks are tested, and the fixture of the server that each needs.
ALIASES = {
    "default": "databases",
    "postgres": "postgres",
    "rowlock": "postgres",
    "advisory": "postgres",
    "bare": "postgres",
    "mariadb": "mariadb",
    "getlock": "mariadb",
    "redis": "redis",
    "memcached": "memcached",
}
ON_POSTGRES = ("postgres", "rowlock", "advisory")


@dataclass(frozen=True)
class Stack:
    """Packages that a team has installed together.

    *first* are apps before Django's own, *apps* after them. *settings* replace those of the test project.
    *command* stands before the interpreter. *acts* are the files to run, *aliases* those of the locks.
    *database*: the one of the test project that is the default one.
    """

    name: str
    acts: tuple[str, ...]
    apps: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ("default",)
    settings: dict[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    database: str = "default"


def _program(name: str) -> str:
    """Return the path of a program beside the interpreter."""
    return str(Path(sys.executable).parent / name)


#: Where an act is that is no file of this folder: DRF, django-ninja and Django's tasks have their tests.
UNIT = Path(__file__).parents[1] / "unit"
ELSEWHERE = {"apis": UNIT / "test_frameworks.py", "django_tasks": UNIT / "test_django_tasks.py"}

AGENT = ("locks", "transactions", "rows", "pages", "commands", "tasks", "apis")
THEME = ("pages",)
POOL = {"POOL_OPTIONS": {"POOL_SIZE": 2, "MAX_OVERFLOW": 0, "TIMEOUT": 10}}

DDTRACE = Stack(
    "ddtrace",
    AGENT,
    aliases=tuple(ALIASES),
    command=(_program("ddtrace-run"),),
    environment={
        "DD_TRACE_AGENT_URL": NOWHERE,
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
        "DD_CRASHTRACKING_ENABLED": "false",
        "DD_PYTEST_ENABLED": "false",
    },
)

MODELS = Stack(
    "models",
    ("rows", "models", "pages"),
    apps=(
        "polymorphic",
        "model_utils",
        "parler",
        "guardian",
        "reversion",
        "simple_history",
        "import_export",
    ),
    settings={
        "AUTHENTICATION_BACKENDS": [
            "django.contrib.auth.backends.ModelBackend",
            "guardian.backends.ObjectPermissionBackend",
        ],
        "PARLER_LANGUAGES": {None: ({"code": "en"}, {"code": "de"}), "default": {}},
    },
)

STACKS = (
    DDTRACE,
    replace(
        DDTRACE,
        name="ddtrace-drivers",  # those that Django prefers to psycopg 3 and PyMySQL, or supports beside them
        acts=("locks", "transactions"),
        aliases=("postgres", "rowlock", "mariadb", "getlock"),
        environment={
            **DDTRACE.environment,
            "DISTLOCK_POSTGRES_DRIVER": "psycopg2",
            "DISTLOCK_MYSQL_DRIVER": "mysqlclient",
        },
    ),
    Stack(
        "newrelic",
        AGENT,
        aliases=tuple(ALIASES),
        command=(_program("newrelic-admin"), "run-program"),
        environment={
            "NEW_RELIC_DEVELOPER_MODE": "true",  # it sends nothing
            "NEW_RELIC_LICENSE_KEY": "0" * 40,
            "NEW_RELIC_APP_NAME": "stacks",
            "NEW_RELIC_LOG": os.devnull,
        },
    ),
    Stack(
        "elastic",
        AGENT,
        apps=("elasticapm.contrib.django",),
        aliases=tuple(ALIASES),
        # Without this, it does nothing while tests run.
        environment={"ELASTIC_APM_INSTRUMENT_TESTS": "1"},
        settings={
            "ELASTIC_APM": {
                "SERVICE_NAME": "stacks",
                "SERVER_URL": NOWHERE,
                "DISABLE_SEND": True,
                "CENTRAL_CONFIG": False,
                "CLOUD_PROVIDER": "none",
                "DEBUG": True,
            }
        },
    ),
    Stack(
        "opentelemetry",
        AGENT,
        aliases=tuple(ALIASES),
        command=(_program("opentelemetry-instrument"),),
        environment={
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
            "DJANGO_SETTINGS_MODULE": "tests.stacks.settings",
        },
    ),
    Stack("sentry", AGENT, aliases=tuple(ALIASES)),
    MODELS,
    replace(MODELS, name="models-postgres", database="postgres"),
    Stack("firefox", ("firefox",), settings={"ROOT_URLCONF": "tests.integration.edit_site"}),
    Stack("unfold", THEME, first=("unfold",)),
    Stack("jazzmin", THEME, first=("jazzmin",)),
    Stack("grappelli", THEME, first=("grappelli",)),
    Stack(
        "django-db-connection-pool",
        ("locks", "transactions", "pools"),
        aliases=("postgres", "rowlock", "mariadb", "getlock"),
        settings={
            "postgres": {"ENGINE": "dj_db_conn_pool.backends.postgresql", **POOL},
            "mariadb": {"ENGINE": "dj_db_conn_pool.backends.mysql", **POOL},
        },
    ),
    Stack(
        "sqlalchemy",
        ("locks", "transactions", "pools"),
        aliases=("mariadb", "getlock"),
        settings={"mariadb": {"ENGINE": "tests.fixtures.pooling_engine"}},
    ),
    Stack(
        "psycopg-pool",
        ("locks", "transactions", "pools", "rows", "commands"),
        aliases=ON_POSTGRES,
        settings={"postgres": {"OPTIONS": {"pool": {"min_size": 1, "max_size": 2}}}},
    ),
    Stack("django-redis", ("locks",), aliases=("redis",)),
    Stack("django-tasks", ("django_tasks",), apps=("django_tasks",)),
    Stack(
        "django-valkey",
        ("locks",),
        aliases=("redis",),
        settings={"cache": {"BACKEND": "django_valkey.cache.ValkeyCache"}},
    ),
    # Their projects have settings of their own: tests/stacks/schemas and tests/stacks/tenants.
    Stack("tenants", ("migrations", "tenants")),
)
BY_NAME = {stack.name: stack for stack in STACKS}
