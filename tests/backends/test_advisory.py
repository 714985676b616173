"""Advisory locks: no ghosts, no rows where none are wanted, and what a server does not have is not faked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from django.db import connections, transaction

from django_distlock import LockBackendError, NotSupported, lock
from django_distlock.backends.database.dialect import COUNTER
from django_distlock.ground.holder import Holder
from tests.backends.conftest import SERVERS
from tests.contract.crew import start
from tests.fixtures.eventually import eventually

from .session_tools import HUNT, SITES, aliases, ask, backend, hunt, waiters

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from tests.fixtures.mariadb import MariaDB
    from tests.fixtures.postgres import PostgreSQL


@pytest.fixture(params=SERVERS)
def database(request: pytest.FixtureRequest, settings: Settings) -> str:
    """Each server, with its advisory locks as the alias "locks"."""
    request.getfixturevalue(request.param)
    settings.DISTLOCK = aliases(request.param, "advisory", io_timeout=10.0)
    return str(request.param)


@pytest.fixture(params=SERVERS)
def bare(request: pytest.FixtureRequest, settings: Settings) -> str:
    """Each server, without fencing."""
    request.getfixturevalue(request.param)
    settings.DISTLOCK = aliases(request.param, "advisory", fencing=False)
    return str(request.param)


@pytest.mark.timeout(180)
def test_a_wait_that_times_out_as_it_is_granted_leaves_no_ghost(database: str, name: str) -> None:
    granted = hunt(database, name, HUNT)

    assert granted > 100
    for site in SITES:
        assert not backend(site)._sessions
    # Their connections are open still: a ghost would sit in one of them.
    assert not lock(name, using="locks").locked()
    with lock(name, using="locks", timeout=0):
        pass


def test_without_fencing_there_are_no_rows_and_no_tokens(bare: str, name: str) -> None:
    statement = "SELECT count(*) FROM django_distlock_fencingcounter WHERE method_name LIKE %s"

    with lock(name, using="locks") as lease:
        assert lease.fencing_token is None
        assert lock(name, using="site0").locked()
        assert not lock(name, using="site0").acquire(timeout=0)

    assert ask(bare, statement, f"%{name}%") == [(0,)]
    with pytest.raises(NotSupported, match="listing"):
        backend().held()


@pytest.mark.server
def test_a_wait_that_an_operator_ends_is_an_error_of_the_alias(
    mariadb: MariaDB, settings: Settings, name: str
) -> None:
    settings.DISTLOCK = aliases("mariadb", "advisory")
    request = backend("site0").request(name, ttl=60.0, holder=Holder.current())

    def end_the_wait() -> None:
        eventually(lambda: waiters("mariadb") == 1)
        session = backend("site0")._sessions[request.owner]
        ask("mariadb", "KILL QUERY %s", session.connection.distlock_number)
        connections["mariadb"].close()  # this thread's

    with lock(name, using="locks"), ThreadPoolExecutor() as threads:
        ended = threads.submit(end_the_wait)
        with pytest.raises(LockBackendError, match=r"^DISTLOCK\['site0'\].*GET_LOCK failed"):
            backend("site0").wait_for(request, 30)
        ended.result()


@pytest.mark.server
def test_who_waits_keeps_nobody_from_changing_the_table_of_the_tokens(
    postgres: PostgreSQL, settings: Settings, name: str
) -> None:
    """A migration would wait for the longest wait, and all who want any lock behind it."""
    settings.DISTLOCK = aliases("postgres", "advisory")
    with lock(name, using="locks"):
        waiting = start(lock(name, using="site0", timeout=30).acquire)
        eventually(lambda: waiters("postgres") == 1)

        with transaction.atomic(using="postgres"), connections["postgres"].cursor() as cursor:
            cursor.execute(f"LOCK TABLE {COUNTER} IN ACCESS EXCLUSIVE MODE NOWAIT")

    lease = waiting.result(20)
    assert lease
    lease.release()


def test_locks_of_other_applications_on_the_same_server_are_others(
    database: str, name: str
) -> None:
    by_others = {
        "postgres": "SELECT pg_advisory_lock(hashtext(%(name)s)), pg_advisory_lock(hashtextextended(%(name)s, 0))",
        "mariadb": "SELECT GET_LOCK(%(name)s, 0)",
    }
    with connections[database].cursor() as cursor:
        cursor.execute(by_others[database], {"name": name})

        with lock(name, using="locks", timeout=0) as lease:
            assert lease.held

        cursor.execute(
            "SELECT pg_advisory_unlock_all()"
            if database == "postgres"
            else "SELECT RELEASE_ALL_LOCKS()"
        )
