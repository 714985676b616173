"""Others at work on the same rows: waited for, asked past, and never taken for a holder of the lock."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from django.db import DatabaseError, connections, transaction

from django_distlock import lock, locks
from django_distlock.models import FencingCounter, MethodLock
from tests.backends.conftest import isolated
from tests.contract.crew import start, together
from tests.fixtures.eventually import eventually, never

from .session_tools import KINDS

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

DATABASE = "django_distlock.backends.database.DatabaseBackend"
THREADS, ROUNDS = 8, 6


@dataclass(frozen=True)
class Kind:
    """A backend on a server; *fixtures* start that."""

    name: str
    fixtures: tuple[str, ...]
    path: str = DATABASE
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def using(self) -> str:
        return self.fixtures[-1]


SERVERS = (("postgres",), ("mariadb",))
POOLED = ("postgres", "pgbouncer")
EVERY = [
    *(Kind(servers[0], servers) for servers in SERVERS),
    *(Kind(f"{servers[0]}-fair", servers, options={"fair": True}) for servers in SERVERS),
    *(Kind(f"{servers[0]}-{kind}", servers, KINDS[kind]) for servers in SERVERS for kind in KINDS),
    Kind("pgbouncer", POOLED, options={"listen": False}),
]


@pytest.fixture
def kind(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Kind]:
    """A backend as the alias "locks", where whoever does not ask for less is serializable."""
    found: Kind = request.param
    server, *_ = [request.getfixturevalue(name) for name in found.fixtures]
    settings.DISTLOCK = {
        "locks": {"BACKEND": found.path, "OPTIONS": {"using": found.using, **found.options}}
    }
    with serializable(found, server):
        yield found
        locks.close()


@contextmanager
def serializable(kind: Kind, server: Any) -> Iterator[None]:
    """Have new sessions be serializable."""
    if kind.using == "mariadb":
        with isolated("mariadb", "serializable"):
            yield
        return
    with server.admin() as admin:
        prefer(admin, kind.using, "serializable")
        yield
        prefer(admin, kind.using, "read committed")
        admin.execute("ALTER ROLE distlock RESET default_transaction_isolation")


def prefer(admin: Any, using: str, level: str) -> None:
    """Have new sessions be of that isolation, also those that a pooler keeps."""
    admin.execute(f"ALTER ROLE distlock SET default_transaction_isolation = '{level}'")
    admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'distlock'"
    )
    eventually(partial(has_level, using, level))


def has_level(using: str, level: str) -> bool:
    connections[using].close()
    try:
        with connections[using].cursor() as cursor:
            cursor.execute("SHOW default_transaction_isolation")
            return bool(cursor.fetchone() == (level,))
    except DatabaseError:  # the pooler has not noticed yet
        return False
    finally:
        connections[using].close()


def kinds(every: list[Kind]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", every, ids=lambda kind: kind.name, indirect=True)


@kinds(EVERY)
def test_a_free_lock_is_never_busy_whatever_isolation_the_role_prefers(
    kind: Kind, name: str
) -> None:
    def work(thread: int) -> int:
        refused = 0
        for turn in range(ROUNDS):
            lease = lock(f"{name}:{thread}:{turn}", using="locks", timeout=0).acquire()
            refused += lease is None
            if lease is not None:
                lease.release()
        return refused

    refused = together(*(partial(work, thread) for thread in range(THREADS)))

    assert refused == [0] * THREADS


READERS = [
    each for each in EVERY if each.path in KINDS.values() and each.name != "mariadb-advisory"
]


@pytest.fixture
def many_readers(kind: Kind, settings: Settings) -> int:
    """Have connections enough for so many readers."""
    options = {"using": kind.using, "max_connections": 24, "io_timeout": 5.0}
    settings.DISTLOCK = {"locks": {"BACKEND": kind.path, "OPTIONS": options}}
    return 24


@kinds(READERS)
def test_readers_that_come_at_once_are_not_in_each_others_way(
    kind: Kind, many_readers: int, name: str
) -> None:
    everybody = threading.Barrier(many_readers)

    def read() -> bool:
        lease = lock(name, using="locks", timeout=0, shared=True).acquire()
        everybody.wait(20)
        if lease is not None:
            lease.release()
        return lease is not None

    for _ in range(5):
        assert together(*[read] * many_readers) == [True] * many_readers


PURGED = [each for each in EVERY if each.path == DATABASE and each.using != "pgbouncer"]


@kinds(PURGED)
def test_a_lock_whose_record_is_being_deleted_is_waited_for(kind: Kind, name: str) -> None:
    with lock(name, using="locks") as lease:
        key = lease.request.key

    # As a purge goes about it; it is a moment late with its commit.
    with transaction.atomic(using=kind.using):
        MethodLock.objects.using(kind.using).filter(method_name=key).delete()
        FencingCounter.objects.using(kind.using).filter(method_name=key).delete()
        taking = start(lambda: lock(name, using="locks", timeout=0).acquire())
        never(taking.done, 0.2)

    taken = taking.result(20)
    assert taken is not None
    taken.backend.abandon(taken.request)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Have objects be gone with their last reference only."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@kinds([kind for kind in EVERY if kind.name in {"postgres", "mariadb"}])
def test_a_thread_that_waited_for_a_row_and_ended_has_its_lock_released(
    kind: Kind, name: str
) -> None:
    with lock(name, using="locks") as lease:
        key = lease.request.key

    with transaction.atomic(using=kind.using):
        MethodLock.objects.using(kind.using).select_for_update().get(method_name=key)
        taking = start(lambda: bool(lock(name, using="locks", ttl=60, timeout=20).acquire()))
        never(taking.done, 0.2)

    assert taking.result(20)
    eventually(lambda: not lock(name, using="locks").locked(), 20)
