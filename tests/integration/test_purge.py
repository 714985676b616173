"""Purge: what it deletes, what it leaves alone, and what happens beside it."""

from __future__ import annotations

import io
import json
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.utils import timezone

from django_distlock import Lease, NotSupported, lock, locks
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.database.purge import LARGEST_BATCH
from django_distlock.engine.values import Busy, LockState
from django_distlock.management.commands.purge_stale_locks import Command as PurgeCommand
from django_distlock.models import FencingCounter, LockWaiter, MethodLock
from tests.contract.crew import taken
from tests.fixtures import tenancy
from tests.fixtures.tenancy import tenant

from .aliases import MEMORY
from .lock_rows import DAY, HOLDER, put_old, put_waiter, reread
from .terminal import Terminal

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from django_distlock.engine.values import Purged

#: Each purge of these tests sees only the locks of its own prefix.
ALIAS = "purge"
GRACE = DAY.total_seconds()
#: Rounds of the races.
ROUNDS = 60
Old = Callable[..., MethodLock]


@pytest.fixture
def prefix() -> str:
    return uuid.uuid4().hex[:12]


@pytest.fixture(autouse=True)
def using(request: pytest.FixtureRequest, settings: Settings) -> Iterator[str]:
    """An alias over the database of the test, with a prefix of its own."""
    [*databases] = {"database", "server_database"} & {*request.fixturenames}
    database = request.getfixturevalue(databases[0]) if databases else "default"
    prefix = request.getfixturevalue("prefix")
    options = {"using": database, "io_timeout": 10.0}
    settings.DISTLOCK = {ALIAS: {"KEY_PREFIX": prefix, "OPTIONS": options}}
    yield ALIAS
    locks.close()


@pytest.fixture
def old(database: str, prefix: str) -> Old:
    """Makes locks of the alias that were last used two days ago."""

    def make(name: str, state: LockState = LockState.FREE, **columns: Any) -> MethodLock:
        return put_old(database, name, state, method_name=f"{prefix}|{name}", **columns)

    return make


def purge(older_than: float = GRACE, **sizes: Any) -> list[Purged]:
    return list(locks[ALIAS].purge(older_than, **sizes))


def deleted(batches: list[Purged]) -> int:
    return sum(batch.deleted for batch in batches)


def names(database: str, prefix: str) -> set[str]:
    """Return the names of the locks that are left."""
    rows = MethodLock.objects.using(database).filter(method_name__startswith=f"{prefix}|")
    return set(rows.values_list("description", flat=True))


def counters(database: str, prefix: str) -> set[str]:
    rows = FencingCounter.objects.using(database).filter(method_name__startswith=f"{prefix}|")
    return {key.partition("|")[2] for key in rows.values_list("method_name", flat=True)}


def database_backend() -> DatabaseBackend:
    backend = locks[ALIAS]
    assert isinstance(backend, DatabaseBackend)
    return backend


def age(database: str, prefix: str, *, is_held: bool = False) -> None:
    """Make the free locks (or the held ones) as old as if nobody had used them for two days."""
    then = timezone.now() - 2 * DAY
    times = dict.fromkeys(("available_at", "expires_at", "updated_at"), then)
    token = int(then.timestamp() * 1_000_000)
    mine = {"method_name__startswith": f"{prefix}|"}
    skips = connections[database].features.has_select_for_update_skip_locked
    with transaction.atomic(using=database):
        rows = MethodLock.objects.using(database).filter(**mine, owner__isnull=not is_held)
        if rows.update(**times, fencing_token=token):
            counters = FencingCounter.objects.using(database).filter(**mine)
            for counter in counters.select_for_update(skip_locked=skips):
                counters.filter(pk=counter.pk).update(value=token)


# What it deletes


def test_what_may_be_needed_stays(database: str, prefix: str, old: Old) -> None:
    soon = timezone.now() + timedelta(hours=1)
    lately = timezone.now() - timedelta(hours=23)
    old("held", LockState.STALE, expires_at=soon, available_at=soon)
    old("held, by the clock of nothing but its end", LockState.STALE, expires_at=soon)
    old("reserved", available_at=soon)
    old("delayed", LockState.STALE, available_at=soon)
    old("stale of late", LockState.STALE, expires_at=lately, available_at=lately)
    old("free of late", updated_at=lately)
    old("token ahead of the clock", fencing_token=int(soon.timestamp() * 1_000_000))
    put_waiter(database, old("waited for"))
    with lock("used", using=ALIAS):
        pass
    kept = names(database, prefix)

    assert deleted(purge()) == 0

    assert names(database, prefix) == kept
    assert len(kept) == 9


def test_grace_is_what_is_asked_for(database: str, prefix: str, old: Old) -> None:
    old("x", age=timedelta(seconds=100))

    assert deleted(purge(110)) == 0
    assert deleted(purge(90)) == 1


def test_locks_of_other_aliases_stay(database: str, prefix: str, old: Old) -> None:
    mine = old("x")
    others = [
        put_old(database, "x", method_name=key)
        for key in (prefix, f"row|{prefix}|x", f"{prefix}2|x", f"x|{prefix}")
    ]

    assert deleted(purge()) == 1

    assert reread(mine) is None
    assert [reread(row) for row in others] == others


def test_dead_waiters_go_without_a_grace(database: str, prefix: str, old: Old) -> None:
    row = old("x", age=timedelta(minutes=5))
    put_waiter(database, row, -2 * DAY)
    put_waiter(database, row, timedelta(seconds=-15))
    # Who looked a moment ago may be at it again.
    looked = put_waiter(database, row, timedelta(seconds=-1))

    would, did, then = run("--dry-run"), run(), run()

    for said, number in ((would, 2), (did, 2), (then, 0)):
        assert said.startswith(f"{ALIAS}: {number} of ")
    left = LockWaiter.objects.using(database).filter(method_name=row.method_name)
    assert list(left) == [looked]
    assert names(database, prefix) == {"x"}


def test_new_holding_of_a_purged_name_has_a_higher_token(
    database: str, prefix: str, old: Old
) -> None:
    row = old("x", LockState.STALE)
    purge()

    with lock("x", using=ALIAS) as lease:
        assert lease.fencing_token is not None
        assert lease.fencing_token > row.fencing_token


# How it goes about it


def test_batches_are_bounded_and_pass_no_row_twice(database: str, prefix: str, old: Old) -> None:
    for number in range(25):
        old(f"{number}")
    before = rows_of_all(database)

    batches = purge(batch_size=10)

    assert deleted(batches) == 25
    assert max(batch.looked_at for batch in batches) == 10
    looked_at = sum(batch.looked_at for batch in batches)
    least, most = sorted([before, rows_of_all(database) + deleted(batches)])
    assert least <= looked_at <= most
    assert [batch.progress for batch in batches] == sorted(batch.progress for batch in batches)
    assert batches[-1].progress == 1


def rows_of_all(database: str) -> int:
    """Return how many rows there are, whoever's they may be."""
    return sum(model.objects.using(database).count() for model in (MethodLock, LockWaiter))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        *(({"older_than": seconds}, "10 seconds or more") for seconds in (9.9, float("nan"))),
        *(({"batch_size": size}, "batch_size") for size in (0, LARGEST_BATCH + 1)),
    ],
)
def test_a_grace_shorter_than_a_statement_can_live_and_a_batch_size_out_of_range_are_errors(
    words: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        purge(**words)


def test_backend_that_leaves_nothing_behind_cannot_be_purged(settings: Settings) -> None:
    settings.DISTLOCK = {ALIAS: MEMORY}

    with pytest.raises(NotSupported, match="purge"):
        purge()


# Beside others


@contextmanager
def once_it_has_looked(call: Callable[[], object]) -> Iterator[None]:
    """Call when the purge has seen what is old, and has not begun to delete."""
    purge()
    [connection] = database_backend()._own._idle
    calls = [call]

    def watch(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        found = execute(sql, *args)
        if "LIMIT" in sql and calls:
            calls.pop()()
        return found

    connection.execute_wrappers.append(watch)
    yield
    assert not calls


def test_lock_taken_after_the_look_is_not_deleted(database: str, prefix: str, old: Old) -> None:
    leases: list[Lease] = []

    with once_it_has_looked(lambda: leases.append(taken("x", using=ALIAS, ttl=60))):
        old("x", LockState.STALE)
        old("y", LockState.STALE)
        assert deleted(purge()) == 1

    assert names(database, prefix) == {"x"}
    leases[0].extend()
    leases[0].release()


def test_counter_that_guard_holds_is_left_and_not_waited_for(
    server_database: str, prefix: str
) -> None:
    row = put_old(server_database, "x", method_name=f"{prefix}|x")
    backend = database_backend()

    with transaction.atomic(using=server_database), connections[server_database].cursor() as cursor:
        found = backend.dialect.guard(cursor, "", row.method_name, row.fencing_token)
        assert found == row.fencing_token
        began = time.monotonic()
        assert deleted(purge()) == 1
        assert time.monotonic() - began < 3.5  # it would wait for 10 s

        rival = backend.request("x", ttl=5, holder=HOLDER)
        assert isinstance(backend.try_acquire(rival, queued=False), Busy)
    assert counters(server_database, prefix) == {"x"}


def test_two_purges_at_once_delete_each_row_once(database: str, prefix: str, old: Old) -> None:
    for number in range(100):
        old(f"{number}")

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(purge, batch_size=7) for _ in range(2)]

    assert sum(deleted(run.result()) for run in runs) == 100
    assert names(database, prefix) == counters(database, prefix) == set()


def test_locks_in_use_are_taken_and_given_back_meanwhile(
    database: str, prefix: str, old: Old
) -> None:
    for number in range(200):
        old(f"{number}")
    over = threading.Event()

    def use() -> list[float]:
        times = []
        while not over.is_set():
            began = time.monotonic()
            with lock("live", using=ALIAS):
                times.append(time.monotonic() - began)
        return times

    with ThreadPoolExecutor(1) as pool:
        times = pool.submit(use)
        call_command("purge_stale_locks", batch_size=20, stdout=io.StringIO())
        over.set()

    assert names(database, prefix) == {"live"}
    assert len(times.result()) > 1
    assert max(times.result()) < 5


@pytest.mark.timeout(180)
def test_first_acquire_of_a_name_races_its_release_and_its_purge(
    database: str, prefix: str, settings: Settings
) -> None:
    # Each site goes to the server by itself, as other processes would.
    sites = ["site0", "site1"]
    settings.DISTLOCK = dict.fromkeys([ALIAS, *sites], settings.DISTLOCK[ALIAS])
    start = threading.Barrier(len(sites) + 1, timeout=30)
    is_purged = threading.Event()
    inside: list[str] = []
    tokens: list[int | None] = []

    def use(site: str) -> None:
        for number in range(ROUNDS):
            start.wait()
            if number % 10 == 0:
                # At times the purge is sure to be first, however slow the machine is.
                assert is_purged.wait(30)
            # Never does a round begin in the millisecond whose token age() has just taken back.
            time.sleep(random.choice([0.002, random.uniform(0.002, 0.01), 0.05]))
            with lock("x", using=site, timeout=30) as lease:
                inside.append(site)
                tokens.append(lease.fencing_token)
                assert inside == [site]
                inside.remove(site)
            start.wait()

    with ThreadPoolExecutor(len(sites)) as pool:
        users = [pool.submit(use, site) for site in sites]
        purged = 0
        for _ in range(ROUNDS):
            age(database, prefix)
            is_purged.clear()
            start.wait()
            purged += deleted(purge())
            is_purged.set()
            start.wait()

    assert [user.result() for user in users] == [None] * len(sites)
    assert tokens == sorted(set(tokens))  # type: ignore[type-var]  # a backend with fencing gives numbers
    assert len(tokens) == ROUNDS * len(sites)
    assert 0 < purged < ROUNDS


# The command


def run(*arguments: str, stdout: io.StringIO | None = None) -> str:
    """Run the command, and return what it said."""
    out = stdout or io.StringIO()
    call_command("purge_stale_locks", *arguments, stdout=out)
    return out.getvalue()


def test_what_was_free_or_stale_for_longer_than_the_grace_goes_with_its_counter_and_the_command_says_so(
    database: str, prefix: str, old: Old
) -> None:
    old("x")
    old("y", LockState.STALE)

    would, did, then = run("--dry-run"), run(), run()

    told = rf"{ALIAS}: %s of [\d,]+ records %s in [\d.]+ s\n"
    assert re.fullmatch(told % (2, "would be deleted"), would)
    assert re.fullmatch(told % (2, "deleted"), did)
    assert re.fullmatch(told % (0, "deleted"), then)
    assert names(database, prefix) == counters(database, prefix) == set()


def test_rows_of_all_tenants_are_purged_whoever_asks(prefix: str, settings: Settings) -> None:
    settings.DISTLOCK = {ALIAS: {"KEY_PREFIX": tenancy.PREFIX}}
    with tenant("north"), lock(f"{prefix}:held", using=ALIAS):
        for key in (f"{prefix}-a|x", f"{prefix}-b|x", f"{prefix}:x"):
            put_old("default", key, method_name=key)
        put_old("default", "of another kind", method_name=f"row|{prefix}|x")

        purge()

    left = MethodLock.objects.filter(method_name__contains=prefix)
    assert {row.method_name for row in left} == {f"north|{prefix}:held", f"row|{prefix}|x"}
    left.delete()


def test_command_without_verbosity_says_nothing_but_errors(
    prefix: str, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    put_old("default", "x", method_name=f"{prefix}|x")

    assert run("-v0", stdout=Terminal()) == ""
    assert names("default", prefix) == set()

    settings.DISTLOCK = {"broken": {"BACKEND": "no.such.Backend"}}
    with pytest.raises(CommandError, match=r"Not purged: broken\."):
        run("-v0")
    assert "no.such.Backend" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--json"], ["--json", "-v0"], ["--json", "--dry-run"]])
def test_command_tells_programs_in_one_json_object(
    prefix: str, settings: Settings, arguments: list[str]
) -> None:
    put_old("default", "x", method_name=f"{prefix}|x")

    report = json.loads(run(*arguments, stdout=Terminal()))

    [told] = report.pop("purged")
    assert report == {"dry_run": "--dry-run" in arguments, "failed": []}
    assert told.keys() == {"alias", "looked_at", "deleted", "seconds"}
    assert (told["alias"], told["deleted"]) == (ALIAS, 1)
    assert told["looked_at"] >= 1
    assert 0 < told["seconds"] < 60


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("--using=default --dry-run", 0),
        ("--using=locmem", 1),
        ("--using=nope", 2),
        ("--older-than=soon", 2),
    ],
)
def test_exit_status_tells_cron(arguments: str, status: int, settings: Settings) -> None:
    settings.DISTLOCK = {"default": {}, "locmem": MEMORY}
    with pytest.raises(SystemExit) if status else nullcontext() as ended:
        PurgeCommand().run_from_argv(["manage.py", "purge_stale_locks", *arguments.split()])

    assert (ended.value.code if ended else 0) == status
