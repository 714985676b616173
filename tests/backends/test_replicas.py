"""A replica: its locks are its own, so nobody gets one there beside a holder on the primary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.db import transaction

from django_distlock import LockBackendError, lock, locks, transaction_lock
from django_distlock.checks import check_servers
from tests.contract.crew import taken
from tests.fixtures.databases import migrate, reached_by
from tests.fixtures.eventually import eventually
from tests.fixtures.mariadb import MariaDB
from tests.fixtures.postgres import PostgreSQL

from .session_tools import aliases

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

pytestmark = pytest.mark.server


class Standby(PostgreSQL):
    """A hot standby of *primary*."""

    def __init__(self, primary: PostgreSQL) -> None:
        super().__init__()
        self.primary = primary

    def prepare(self) -> None:
        """Copy the primary, and follow it."""
        copy = self.binary("/usr/lib/postgresql/*/bin/pg_basebackup", "pg_basebackup")
        source = f"--dbname=postgresql://postgres@{self.primary.host}:{self.primary.port}"
        how = "--checkpoint=fast", "--no-sync", "--write-recovery-conf"
        self.run(copy, source, f"--pgdata={self.folder / 'data'}", *how)

    def after_first_start(self) -> None:
        """Everything is there."""


@pytest.fixture(scope="module", params=["postgres", "mariadb"])
def replica(request: pytest.FixtureRequest) -> Iterator[str]:
    """The alias of a replica; that of its primary is the first part of it."""
    database, alias = request.param, f"{request.param}-replica"
    server = request.getfixturevalue(database)
    made = Standby(server) if database == "postgres" else MariaDB(settings={"read-only": "ON"})
    with made, reached_by(alias, database, made):
        yield alias


@pytest.fixture(scope="module")
def former(mariadb: MariaDB) -> Iterator[tuple[MariaDB, str]]:
    """A primary that becomes a replica, and its alias."""
    with MariaDB() as made, reached_by("former", "mariadb", made) as alias:
        migrate(alias)
        yield made, alias
        locks.close()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("rowlock", {}), ("advisory", {}), ("advisory", {"fencing": False})],
    ids=str,
)
def test_locks_of_a_replica_are_refused_at_first_use_and_by_check(
    replica: str, kind: str, options: dict[str, Any], settings: Settings, name: str
) -> None:
    there = aliases(replica, kind, **options)["locks"]
    primary = replica.removesuffix("-replica")
    settings.DISTLOCK = {**aliases(primary, kind, **options), "there": there}

    with lock(name, using="locks"):
        for timeout in (0, 2):
            with pytest.raises(LockBackendError, match=rf"'{replica}' is .*the primary"):
                lock(name, using="there", timeout=timeout).acquire()

    [message] = check_servers(databases=[replica])
    assert message.id == "distlock.E005"
    assert "primary" in (message.hint or "")


def test_a_lock_in_a_transaction_on_a_replica_is_refused(replica: str, name: str) -> None:
    with (
        transaction.atomic(using=replica),
        pytest.raises(LockBackendError, match=r"read-only"),
    ):
        transaction_lock(name, using=replica)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("rowlock", {}), ("advisory", {}), ("advisory", {"fencing": False})],
    ids=str,
)
def test_a_holder_on_a_primary_that_becomes_a_replica_is_told(
    kind: str, options: dict[str, Any], former: tuple[MariaDB, str], settings: Settings, name: str
) -> None:
    """Its connection stays open, and the new primary grants the same lock."""
    server, alias = former
    settings.DISTLOCK = aliases(alias, kind, **options)
    with server.admin() as admin, admin.cursor() as cursor:
        cursor.execute("SET GLOBAL read_only = 0")
        lease = taken(name, using="locks", ttl=3)
        cursor.execute("SET GLOBAL read_only = 1")

    eventually(lambda: lease.lost, 20)
    with pytest.raises(LockBackendError, match="read-only"):
        lock(name, using="locks", timeout=5).acquire()
