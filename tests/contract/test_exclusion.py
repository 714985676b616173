"""At most one holder: with the lock no update is lost, and without it some are."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from django_distlock import lock
from django_distlock.backends.base import BaseLockBackend
from tests.fixtures.eventually import eventually
from tests.fixtures.processes import Child, Spawn

from .acts import WIDTH, WORK
from .crew import together
from .profiles import lacks, needs
from .rivals import Children, Rival

WORKERS, ROUNDS = 4, 12


class Account:
    """Reads a balance, works, writes it back: of two that do so at once, one is lost."""

    def __init__(self) -> None:
        self.balance = 0
        self.inside = 0
        self.most_inside = 0

    def raise_balance(self) -> None:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        balance = self.balance
        time.sleep(WORK)
        self.balance = balance + 1
        self.inside -= 1

    async def araise_balance(self) -> None:
        balance = self.balance
        await asyncio.sleep(WORK)
        self.balance = balance + 1


Guard = Callable[[], AbstractContextManager[Any]]


def _raise_by_threads(guards: Sequence[Guard]) -> Account:
    account = Account()

    def work(guard: Guard) -> None:
        for _ in range(ROUNDS):
            with guard():
                account.raise_balance()

    together(*(partial(work, guard) for guard in guards))
    return account


def test_threads_without_a_lock_lose_updates() -> None:
    account = _raise_by_threads([nullcontext] * WORKERS)

    assert account.balance < WORKERS * ROUNDS
    assert account.most_inside > 1


def test_servers_of_one_application_lose_nothing(sites: list[str], name: str) -> None:
    for site in sites[:WORKERS]:
        with lock(f"{name}:another", using=site):
            pass  # connected, so that all begin at once

    # One of them is used by two threads.
    asked = [*sites[:WORKERS], sites[0]]
    account = _raise_by_threads([partial(lock, name, using=site, timeout=30) for site in asked])

    assert account.balance == len(asked) * ROUNDS
    assert account.most_inside == 1


async def test_tasks_without_a_lock_lose_updates() -> None:
    account = Account()

    await asyncio.gather(*(account.araise_balance() for _ in range(WORKERS * ROUNDS)))

    assert account.balance < WORKERS * ROUNDS


def test_threads_and_the_tasks_of_several_loops_exclude_each_other(using: str, name: str) -> None:
    account = Account()

    def in_thread() -> None:
        for _ in range(ROUNDS):
            with lock(name, using=using, timeout=30):
                account.raise_balance()

    async def in_task() -> None:
        for _ in range(ROUNDS):
            async with lock(name, using=using, timeout=30):
                await account.araise_balance()

    async def in_tasks() -> None:
        await asyncio.gather(in_task(), in_task())

    together(in_thread, lambda: asyncio.run(in_tasks()), lambda: asyncio.run(in_tasks()))

    assert account.balance == 5 * ROUNDS


def _raise_by_processes(spawned: Sequence[Child], path: Path) -> int:
    for each in spawned:
        each.expect("ready")
    for each in spawned:
        each.tell("go")
    for each in spawned:
        each.result(40)
    return int(path.read_text())


@pytest.fixture
def balance(tmp_path: Path) -> Path:
    path = tmp_path / "balance"
    path.write_text("0" * WIDTH)
    return path


def test_processes_without_a_lock_lose_updates(spawn: Spawn, balance: Path) -> None:
    aliases = {"free": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"}}
    raising = {"aliases": aliases, "using": "free", "name": "x", "path": str(balance), "rounds": 60}
    spawned = [spawn("tests.contract.acts:raise_balance", **raising) for _ in range(3)]

    assert _raise_by_processes(spawned, balance) < 3 * 60


@needs("cross_process")
def test_processes_with_a_lock_lose_nothing(
    child: Children, using: str, name: str, balance: Path
) -> None:
    raising = {"using": using, "name": name, "path": str(balance), "rounds": 15, "timeout": 30}
    spawned = [child("raise_balance", **raising) for _ in range(3)]

    assert _raise_by_processes(spawned, balance) == 3 * 15


@needs("cross_process")
def test_the_key_prefix_of_an_alias_keeps_its_locks_apart(using: str, name: str) -> None:
    with lock(name, using=using, timeout=0):
        with lock(name, using="prefixed", timeout=0):
            pass
        assert not lock(name, using="site0", timeout=0).acquire()


@lacks("whole_seconds")
@needs("leased")
def test_racers_for_an_expired_lease_have_one_winner_and_a_higher_token(
    backend: BaseLockBackend, name: str, tick: float
) -> None:
    for number in range(20):
        before = Rival.of(backend, f"{name}:{number}", ttl=tick / 2)
        before.takes()
        racers = [Rival.of(backend, f"{name}:{number}") for _ in range(3)]
        over = threading.Event()

        won = together(*(partial(_race, racer, over) for racer in racers))

        [winner] = [racer for racer, has_won in zip(racers, won, strict=True) if has_won]
        assert not before.holds
        assert before.token is None or (winner.token or 0) > before.token


def _race(racer: Rival, over: threading.Event) -> bool:
    """Try until it is ours, and once more after another racer has won."""
    has_won = False

    def is_decided() -> bool:
        nonlocal has_won
        was_over = over.is_set()
        if has_won := racer.tries():
            over.set()
        return has_won or was_over

    eventually(is_decided)
    return has_won
