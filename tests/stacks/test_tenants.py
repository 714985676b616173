"""django-tenants: each tenant has locks of its own, on PostgreSQL and on Redis, in one thread and in two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.fixtures.postgres import PostgreSQL
from tests.fixtures.processes import Child
from tests.fixtures.redis import Redis

ACTS = "tests.stacks.tenants.acts"
USING = ("default", "rowlock", "advisory", "redis", "cache")

Act = Callable[..., Child]


@pytest.fixture(scope="module")
def environment(postgres: PostgreSQL, redis: Redis) -> Iterator[dict[str, str]]:
    """A database with the schemas of two tenants, and a shared one that is not PostgreSQL's own."""
    with postgres.admin() as connection:
        connection.execute("CREATE DATABASE tenants OWNER distlock")
    known = {
        "DJANGO_SETTINGS_MODULE": "tests.stacks.tenants.settings",
        "DISTLOCK_POSTGRES_PORT": str(postgres.port),
        "DISTLOCK_REDIS_PORT": str(redis.port),
    }
    with closing(Child(f"{ACTS}:migrate", environment=known)) as child:
        child.result(120)
    yield known
    with redis.client(7) as client:
        client.flushall()


@pytest.fixture
def act(environment: dict[str, str]) -> Iterator[Act]:
    """Begins an act in a process of its own."""
    children: list[Child] = []

    def begin(name: str, *switches: str, **arguments: str) -> Child:
        known = {**environment, **dict.fromkeys(switches, "1")}
        children.append(Child(f"{ACTS}:{name}", environment=known, **dict[str, Any](arguments)))
        return children[-1]

    yield begin
    for child in children:
        child.close()


@pytest.mark.parametrize("using", USING)
def test_one_thread_holds_the_lock_of_both_tenants(act: Act, using: str) -> None:
    assert act("nest", using=using).result() == ["import:7"]


@pytest.mark.parametrize("using", USING)
def test_processes_of_one_tenant_exclude_each_other_whatever_they_did_before(
    act: Act, using: str
) -> None:
    one = act("hold", first="north", then="north", using=using)
    one.expect("held")

    other = act("hold", first="south", then="north", using=using)
    of_south = act("hold", first="north", then="south", using=using)

    other.expect("busy")
    of_south.expect("held")
    for child in (one, other, of_south):
        child.tell("end")
        child.result()


def test_transactions_of_tenants_do_not_wait_for_each_other(act: Act) -> None:
    north = act("hold_in_transaction")
    north.expect("held")

    assert act("in_transactions").result() == "north busy south taken"

    north.tell("end")
    north.result()


def test_the_checks_are_content(act: Act) -> None:
    assert act("check").result() == []


def test_the_checks_tell_of_locks_that_all_tenants_share(act: Act) -> None:
    aliases = ", ".join(
        f"DISTLOCK['{each}']" for each in ("default", "rowlock", "advisory", "redis")
    )

    assert act("check", "NO_PREFIX").result() == [f"distlock.W005 {aliases}"]


def test_the_checks_tell_of_tables_that_only_tenants_would_have(act: Act) -> None:
    aliases = ", ".join(f"DISTLOCK['{each}']" for each in ("default", "rowlock", "advisory"))

    assert act("check", "NOT_SHARED").result() == [f"distlock.E009 {aliases}"]
