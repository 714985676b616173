"""migrate_locked, and migrate by its app, where each tenant has a schema of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from django_distlock.management.base import BUSY, LOST
from tests.fixtures.eventually import eventually
from tests.fixtures.pods import WAITS, Pods

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.postgres import PostgreSQL

TENANTS = ["ants", "bees", "crabs"]


@pytest.fixture
def sql(pods: Pods, postgres: PostgreSQL) -> Callable[[str], list[Any]]:
    """What runs a statement in the database of the pods, in which three tenants have an empty schema."""
    pods.settings = "tests.stacks.schemas.settings"
    assert pods.start("migrate_schemas", "--shared", "-v0").wait(60) == 0

    def run(statement: str) -> list[Any]:
        with postgres.admin(pods.databases["default"]["NAME"]) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    for name in TENANTS:
        run(f"CREATE SCHEMA {name} AUTHORIZATION distlock")
        run(f"INSERT INTO schemas_client (schema_name) VALUES ('{name}')")
    return run


@pytest.mark.parametrize("pods", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    "command",
    [["migrate"], ["migrate_locked", "--executor", "multiprocessing"]],
    ids=["migrate", "processes"],
)
def test_one_pod_migrates_all_tenants_while_the_others_wait(
    pods: Pods, sql: Callable[[str], list[Any]], command: list[str]
) -> None:
    pods.start(*command)
    pods.began()
    others = [pods.start(*command) for _ in range(2)]
    eventually(lambda: all(WAITS in pods.output(pod) for pod in others), 60)

    pods.let_go()

    assert pods.wait() == [0] * 4, pods.output(others[0])
    tables = "SELECT schemaname FROM pg_tables WHERE tablename = 'pods_parcel' ORDER BY 1"
    assert [name for (name,) in sql(tables)] == TENANTS
    assert len(pods.began()) == len(TENANTS)


@pytest.mark.parametrize("pods", ["postgres"], indirect=True)
def test_without_the_lock_nothing_is_created(pods: Pods, postgres: PostgreSQL) -> None:
    pods.settings = "tests.stacks.schemas.settings"
    backend = "django_distlock.backends.advisory.AdvisoryBackend"
    options = {"using": "default", "fencing": False}
    pods.distlock["migrations"] = {"BACKEND": backend, "OPTIONS": options}
    name = pods.databases["default"]["NAME"]
    holds = ["sh", "-c", "echo held; sleep 600"]
    holder = pods.start("run_locked", f"migrate:{name}", "--using", "migrations", "--", *holds)
    eventually(lambda: pods.output(holder) == "held\n", 60)

    pod = pods.migrate("--using", "migrations", "--wait", "0")

    assert pod.wait(60) == BUSY
    with postgres.admin(name) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        assert tables.fetchall() == []


@pytest.mark.parametrize("pods", ["postgres"], indirect=True)
def test_after_the_lock_is_lost_no_other_tenant_is_migrated(
    pods: Pods, sql: Callable[[str], list[Any]]
) -> None:
    pod = pods.migrate()
    pods.began()
    sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'distlock%'"
    )

    pods.let_go()

    assert pod.wait(60) == LOST
    assert len(pods.began()) == 1
