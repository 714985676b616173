"""A node of a Galera cluster: its locks are its own, so that only leases exclude callers on other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from django.db import connections, transaction

from django_distlock import LockBackendError, lock, transaction_lock
from django_distlock.backends.database.connections import Unusable
from django_distlock.backends.session.mysql import MODES, ONE_PRIMARY, must_know_all_locks
from django_distlock.checks import check_servers
from tests.fixtures.databases import migrate
from tests.fixtures.mariadb import MariaDB

from .session_tools import KINDS, aliases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_django.fixtures import Settings

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("galera")]


@pytest.fixture(scope="module")
def galera(mariadb: MariaDB) -> Iterator[None]:
    """A server that says it is a node of a cluster, behind the alias "galera" of DATABASES."""
    with MariaDB(settings={"wsrep-on": "ON"}) as node:
        direct = connections.settings["mariadb"]
        connections.settings["galera"] = {**direct, "PORT": str(node.port)}
        migrate("galera")
        yield
        connections["galera"].close()
        del connections["galera"], connections.settings["galera"]


@pytest.mark.parametrize("kind", KINDS)
def test_locks_of_a_node_are_refused_at_first_use_and_by_check(
    kind: str, settings: Settings, name: str
) -> None:
    settings.DISTLOCK = aliases("galera", kind)

    for timeout in (0, 2):
        with pytest.raises(
            LockBackendError, match=r"'locks'.*'galera' is a Galera cluster.*leases"
        ):
            lock(name, using="locks", timeout=timeout).acquire()

    [message] = check_servers(databases=["galera"])
    assert message.id == "distlock.E005"
    assert "Galera" in message.msg
    assert message.hint is not None
    assert message.hint.startswith("Use leases: DatabaseBackend")


def test_a_member_of_group_replication_is_refused_if_there_are_several_primaries(
    mariadb: MariaDB,
) -> None:
    with mariadb.admin() as admin, admin.cursor() as cursor:
        cursor.execute(MODES)
        modes = dict(cursor.fetchall())
    must_know_all_locks("mysql", modes)  # MariaDB has no such variable
    must_know_all_locks("mysql", {**modes, ONE_PRIMARY: "ON"})

    with pytest.raises(Unusable, match=r"is a Group Replication with several primaries.*leases"):
        must_know_all_locks("mysql", {**modes, ONE_PRIMARY: "OFF"})


def test_a_lock_in_the_callers_transaction_is_refused(name: str) -> None:
    with transaction.atomic(using="galera"):
        with pytest.raises(LockBackendError, match="is a Galera cluster"):
            transaction_lock(name, using="galera")
        # The transaction can go on.
        with connections["galera"].cursor() as cursor:
            cursor.execute("SELECT 1")


def test_leases_work_there(settings: Settings, name: str) -> None:
    settings.DISTLOCK = {"leases": {"OPTIONS": {"using": "galera"}}}

    with lock(name, using="leases"):
        assert not lock(name, using="leases", timeout=0, reentrant=False).acquire()

    assert check_servers(databases=["galera"]) == []
