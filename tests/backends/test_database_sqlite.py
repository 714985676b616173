"""SQLite, whose file has one writer at a time: that of others is waited for, our caller's own is told."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from django_distlock import LockBackendError, LockError, lock, locks
from django_distlock.engine.steps import settled
from django_distlock.models import LockWaiter
from tests.backends.conftest import backend
from tests.contract.crew import start, take_and_release
from tests.contract.rivals import Rival
from tests.fixtures.databases import migrate
from tests.fixtures.eventually import eventually, in_time, never

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

#: Longer than a request is usually waited for.
LONG = 2.5
_numbers = itertools.count(1)


@pytest.fixture(params=["delete", "wal"])
def journal(request: pytest.FixtureRequest) -> str:
    """Each journal mode."""
    return str(request.param)


@pytest.fixture
def database() -> str:
    """The alias of the file, another one in each test: what is given back late must not write in the next file."""
    return f"busy{next(_numbers)}"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all tables, to be copied: to make them takes half a second."""
    path = tmp_path_factory.mktemp("tables") / "db.sqlite3"
    connections.settings["tables"] = {**connections["default"].settings_dict, "NAME": str(path)}
    connections.settings["tables"]["OPTIONS"] = {}
    migrate("tables")
    connections["tables"].close()
    del connections["tables"], connections.settings["tables"]
    return path


@pytest.fixture
def file(
    journal: str, database: str, tables: Path, tmp_path: Path, settings: Settings
) -> Iterator[str]:
    """A database file of our own for the locks of the alias "busy"; its path."""
    path = str(shutil.copy(tables, tmp_path))
    begin = f"PRAGMA journal_mode = {journal}"
    connections.settings[database] = {
        **connections["default"].settings_dict,
        "NAME": path,
        "OPTIONS": {"timeout": 20, "init_command": begin},
    }
    connections[database].ensure_connection()  # which sets the journal mode while nobody writes
    settings.DISTLOCK = {"busy": {"OPTIONS": {"using": database, "io_timeout": 0.5}}}
    yield path
    locks.close()
    connections[database].close()
    del connections[database], connections.settings[database]


@contextmanager
def written_by_another(
    file: str, seconds: float, mode: str = "IMMEDIATE"
) -> Iterator[threading.Event]:
    """Have somebody else, as another process would, write the file for so long, or until the event is set."""
    begun, over = threading.Event(), threading.Event()

    def write() -> None:
        with closing(sqlite3.connect(file, isolation_level=None, timeout=20)) as writer:
            writer.execute(f"BEGIN {mode}")
            writer.execute("UPDATE django_distlock_lockwaiter SET channel = ''")
            begun.set()
            over.wait(seconds)
            writer.execute("COMMIT")

    writing = start(write)
    eventually(lambda: begun.is_set() or writing.done())
    yield over
    over.set()
    writing.result(20)


def test_another_writer_is_waited_for_within_the_timeout(file: str, name: str) -> None:
    with written_by_another(file, LONG), lock(name, using="busy", timeout=30) as lease:
        assert lease.held


def test_a_file_that_others_keep_from_being_read_is_watched_all_the_same(
    file: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = backend("busy")._watcher
    assert watcher is not None
    rival = Rival.of(locks["busy"], name, ttl=60)
    rival.takes()
    taking = start(lambda: take_and_release("busy", name))
    watching = eventually(lambda: watcher._connection, 10)

    with written_by_another(file, LONG, "EXCLUSIVE"):
        never(lambda: watcher._connection is not watching, LONG / 2)
    settled(rival.leaves)

    assert taking.result(20)
    assert "Waiters poll" not in caplog.text


def test_a_guard_that_finds_another_writer_does_not_blame_its_transaction(
    file: str, database: str, name: str
) -> None:
    with lock(name, using="busy") as lease, transaction.atomic(using=database):
        connections[database].connection.execute("PRAGMA busy_timeout = 100")
        with (
            written_by_another(file, LONG),
            pytest.raises(LockBackendError, match="busy with other writers"),
        ):
            lease.guard(using=database)


@pytest.mark.parametrize("journal", ["wal"], indirect=True)
def test_a_guard_refuses_a_transaction_that_has_read_before_the_lock(
    file: str, database: str, name: str
) -> None:
    with transaction.atomic(using=database):
        LockWaiter.objects.using(database).first()
        with lock(name, using="busy", release="on_commit") as lease:
            with pytest.raises(LockError, match="before lock"):
                lease.guard(using=database)


@pytest.mark.parametrize("mode", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_file_that_stays_busy_is_an_error_and_not_a_busy_lock(
    file: str, name: str, mode: str
) -> None:
    def refused(timeout: float) -> Callable[[], None]:
        def ask() -> None:
            with pytest.raises(LockBackendError, match="busy with other writers"):
                lock(name, using="busy", timeout=timeout).acquire()

        return ask

    with written_by_another(file, 60, mode):
        in_time(refused(0), 0.3, 2)
        in_time(refused(1), 1, 3)


def test_a_caller_whose_own_transaction_has_written_is_told_at_once(
    file: str, name: str, database: str
) -> None:
    with transaction.atomic(using=database):
        LockWaiter.objects.using(database).update(channel="")

        in_time(lambda: told_of_own_transaction(name), 0, 0.3)
        transaction.set_rollback(True, using=database)
    assert lock(name, using="busy").locked() is False


def test_a_caller_is_told_at_once_of_a_transaction_that_is_no_atomic_block(
    file: str, name: str, database: str
) -> None:
    transaction.set_autocommit(False, using=database)
    LockWaiter.objects.using(database).update(channel="")

    in_time(lambda: told_of_own_transaction(name), 0, 0.3)
    transaction.rollback(using=database)
    transaction.set_autocommit(True, using=database)


def test_an_init_command_does_not_make_sqlite_wait_for_the_caller_itself(
    file: str, name: str, database: str
) -> None:
    connections.settings[database]["OPTIONS"]["init_command"] += "; PRAGMA busy_timeout = 5000"
    with transaction.atomic(using=database):
        LockWaiter.objects.using(database).update(channel="")

        in_time(lambda: told_of_own_transaction(name), 0, 0.3)


def told_of_own_transaction(name: str) -> None:
    with pytest.raises(LockBackendError, match=r"own transaction .* outside atomic"):
        lock(name, using="busy", timeout=30).acquire()


def test_a_transaction_that_has_read_is_in_the_way_only_where_readers_are(
    file: str, name: str, database: str, journal: str
) -> None:
    with written_by_another(file, LONG), transaction.atomic(using=database):
        LockWaiter.objects.using(database).count()

        if journal == "delete":
            told_of_own_transaction(name)
        else:
            with lock(name, using="busy", timeout=30, release="on_commit") as lease:
                assert lease.held


@pytest.fixture
def own_file(tmp_path: Path, settings: Settings) -> Iterator[str]:
    """A file with the tables of locks alone behind the alias "own"; its path."""
    path = str(tmp_path / "locks.sqlite3")
    own = {**connections["default"].settings_dict, "NAME": path, "OPTIONS": {"timeout": 20}}
    connections.settings["own"] = own
    call_command("migrate", "django_distlock", database="own", verbosity=0)
    settings.DISTLOCK = {"own": {"OPTIONS": {"using": "own"}}}
    yield path
    locks.close()
    connections["own"].close()
    del connections["own"], connections.settings["own"]


def modes(path: str) -> tuple[str, int]:
    """Return the journal mode of a file, and how a connection of locks waits for the disk: 1 normal, 2 full."""
    backend: Any = locks["own"]
    with backend._own.cursor() as cursor:
        (level,) = cursor.execute("PRAGMA synchronous").fetchone()
    with closing(sqlite3.connect(path)) as other:
        return other.execute("PRAGMA journal_mode").fetchone()[0], level


def test_locks_in_a_file_of_their_own_wait_for_no_disk(own_file: str, name: str) -> None:
    with lock(name, using="own") as lease:
        assert lease.held

    assert modes(own_file) == ("wal", 1)


def test_a_file_that_is_no_database_is_a_lock_error(own_file: str, name: str) -> None:
    connections["own"].close()
    Path(own_file).write_text("no database" * 100)

    with pytest.raises(LockBackendError, match="not a database"):
        lock(name, using="own", timeout=0).acquire()
