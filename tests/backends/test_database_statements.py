"""How many statements a lock costs, and what a refused one leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import lock, locks
from django_distlock.engine.bells import ThreadBell
from django_distlock.ground.holder import Holder
from django_distlock.models import MethodLock
from django_distlock.signals import lock_acquired
from tests.backends.conftest import backend, counted_statements
from tests.contract.crew import listening
from tests.contract.rivals import Rival

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from tests.fixtures.postgres import PostgreSQL


def test_a_listing_costs_two_statements_however_many_locks_are_held(
    database: str, name: str
) -> None:
    locked, holder = locks[database], Holder.current()
    requests = [locked.request(f"{name}:{number}", ttl=30, holder=holder) for number in range(50)]
    for request in requests:
        locked.try_acquire(request, queued=False)

    with counted_statements(database) as statements:
        found = {held.key for held in locked.held()}

    assert found >= {request.key for request in requests}
    assert len(statements) == 2
    for request in requests:
        locked.release(request)


@pytest.mark.server
def test_refusals_write_nothing_on_postgresql(postgres: PostgreSQL, name: str) -> None:
    held, other = (Rival.of(backend("postgres"), name, ttl=60) for _ in range(2))
    held.takes()

    with postgres.admin("distlock") as watcher:
        state = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text, pg_current_wal_insert_lsn() - '0/0'"

        def cost() -> tuple[int, int]:
            xid_before, wal_before = watcher.execute(state).fetchone() or ("", 0)
            for _ in range(1000):
                assert not other.tries()
            xid_after, wal_after = watcher.execute(state).fetchone() or ("", 0)
            return int(xid_after) - int(xid_before), wal_after - wal_before

        # The server's own work in the background writes now and then.
        costs = [cost() for _ in range(3)]

    # A write for each would be 96 kB.
    assert min(ids for ids, _ in costs) < 20
    assert min(wal for _, wal in costs) < 20_000
    held.leaves()


@pytest.mark.server
def test_refusals_burn_no_ids_on_mariadb(mariadb: object, name: str) -> None:
    held, other = (Rival.of(backend("mariadb"), name, ttl=30) for _ in range(2))
    held.takes()
    before = MethodLock.objects.using("mariadb").create(method_name=f"{name}:before").pk

    for _ in range(300):
        assert not other.tries()

    after = MethodLock.objects.using("mariadb").create(method_name=f"{name}:after").pk
    assert after == before + 1
    held.leaves()


PREPARED = {
    "postgres": "SELECT count(*) FROM pg_prepared_statements",
    "mariadb": "SHOW SESSION STATUS LIKE 'Com_prepare_sql'",
}


@pytest.mark.server
def test_a_server_parses_the_statements_of_a_connection_once(
    server_database: str, name: str
) -> None:
    locks.close()
    for number in range(10):
        with lock(f"{name}:{number}", using=server_database):
            pass

    with backend(server_database)._own.cursor() as cursor:
        cursor.execute(PREPARED[server_database])
        *_, count = cursor.fetchone()

    assert int(count) == 2


def test_who_comes_after_a_dead_waiter_asks_now_and_then(
    database: str, settings: Settings, name: str
) -> None:
    settings.DISTLOCK = {"locks": {"OPTIONS": {"using": database, "fair": True}}}
    fair, asked = locks["locks"], list[int]()
    dead = fair.request(name, ttl=60, holder=Holder.current())
    with lock(name, using="locks"):
        fair.enqueue(dead, ThreadBell())
        fair.forget_bell(dead)

    def note(requests: int, **_: Any) -> None:
        asked.append(requests)

    with listening(lock_acquired, note), lock(name, using="locks", timeout=20):
        pass
    locks.close()

    assert asked[0] < 500  # in 2.5 seconds, and far more than 1,000 without pauses
