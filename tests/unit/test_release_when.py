"""When a lock is free that was acquired inside a transaction: after its end, unless told otherwise."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, connection, connections, transaction
from django.db.models.signals import post_delete
from django.test import TestCase
from pytest_django.fixtures import Settings

from django_distlock import (
    LockDeadlock,
    LockLost,
    ReleasedBeforeCommit,
    current_lease,
    distributed_lock,
    lock,
    lock_all,
    transactions,
)
from django_distlock.engine.values import State
from django_distlock.lock import LockTerms
from django_distlock.signals import lock_released
from django_distlock.testing import reset_locks
from testproject.models import Account
from tests.contract.crew import held_in_thread
from tests.fixtures.eventually import eventually
from tests.fixtures.interruption import StopAt, TimeLimit
from tests.integration.aliases import MEMORY

pytestmark = pytest.mark.usefixtures("memory")


class RolledBack(Exception):
    """Ends an atomic block."""


def is_free(name: str = "a") -> bool:
    return not lock(name).locked()


# Every way to leave it.


def by_with() -> None:
    with lock("a"):
        pass


def by_release_of_the_lock() -> None:
    recipe = lock("a")
    assert recipe.acquire()
    recipe.release()


def by_release_of_the_lease() -> None:
    lease = lock("a").acquire()
    assert lease
    lease.release()


def by_release_inside_with() -> None:
    with lock("a") as lease:
        lease.release()


def by_lock_all() -> None:
    with lock_all("b", "a"):
        pass


def by_decorated_function() -> None:
    @distributed_lock("a")
    def work() -> None: ...

    work()


def by_generator() -> None:
    @distributed_lock("a")
    def items() -> Iterator[int]:
        yield 1

    assert list(items()) == [1]


WAYS = [
    *(by_with, by_release_of_the_lock, by_release_of_the_lease, by_release_inside_with),
    *(by_lock_all, by_decorated_function, by_generator),
]


@pytest.mark.parametrize("way", WAYS)
def test_it_is_kept_until_the_commit(way: Callable[[], None]) -> None:
    with transaction.atomic():
        with transaction.atomic():
            way()
        assert not is_free()

    assert is_free()


def fail() -> None:
    raise ZeroDivisionError


def test_it_is_free_after_a_commit_whose_functions_fail() -> None:
    with pytest.raises(ZeroDivisionError) as kept, transaction.atomic():
        transaction.on_commit(fail)
        by_with()
        transaction.on_commit(fail)

    assert kept.value.__traceback__
    assert is_free()


def test_an_exception_of_a_signal_while_the_commit_frees_it_keeps_it_from_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # one may come in a finalizer

    def commit(name: str, number: int) -> list[str]:
        step, calls = StopAt(number), list[str]()

        def count_releases(frame: FrameType, event: str, argument: object) -> None:
            if "django_distlock/engine/" in frame.f_code.co_filename or step.calls:
                calls.append(event)
                step._count(frame, event, argument)

        with suppress(TimeLimit), transaction.atomic():
            with lock(name):
                pass
            gc.disable()  # a finalizer of a lease of another test would begin the count before the release
            sys.setprofile(count_releases)
        sys.setprofile(None)
        gc.enable()
        return calls

    # Nothing has begun at the first one.
    for number in range(2, commit("counted", 0).count("call")):
        commit(f"at:{number}", number)
        eventually(partial(is_free, f"at:{number}"))


def test_another_thread_that_is_refused_to_close_the_connection_does_not_free_it() -> None:
    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        by_with()
        with pytest.raises(DatabaseError, match="same thread"):
            pool.submit(connections["default"].close).result()

        assert not is_free()

    assert is_free()


def test_a_receiver_can_use_the_database_when_it_is_freed() -> None:
    autocommit: list[bool] = []

    def look(**_: Any) -> None:
        autocommit.append(connection.get_autocommit())

    lock_released.connect(look)
    try:
        with transaction.atomic():
            by_with()
        with pytest.raises(RolledBack), transaction.atomic():
            by_with()
            raise RolledBack
    finally:
        lock_released.disconnect(look)

    assert autocommit == [True, True]


def test_a_savepoint_that_is_rolled_back_frees_nothing() -> None:
    with transaction.atomic():
        by_with()
        with pytest.raises(RolledBack), transaction.atomic():
            raise RolledBack

        assert not is_free()
    assert is_free()


def test_a_rollback_is_an_error_after_which_no_min_hold_counts() -> None:
    terms: LockTerms = {"min_hold": 60, "free_on_error": True}

    with pytest.raises(RolledBack), transaction.atomic():
        with lock("a", **terms):
            pass
        raise RolledBack
    with transaction.atomic(), lock("b", **terms):
        pass

    assert is_free("a")
    assert not is_free("b")


def test_without_autocommit_it_is_kept_until_the_next_commit() -> None:
    transaction.set_autocommit(False)
    try:
        with lock("a"), connection.cursor() as cursor:
            cursor.execute("BEGIN")
        assert not is_free()

        transaction.commit()

        assert is_free()
        by_with()
        assert is_free()
    finally:
        transaction.set_autocommit(True)


# Of several, none if one is busy.


def test_locks_that_were_not_all_acquired_are_free_at_once() -> None:
    with held_in_thread(lock("b")), warnings.catch_warnings():
        warnings.simplefilter("error")
        with transaction.atomic():
            assert lock_all("a", "b", timeout=0).acquire() is None
            assert is_free()

            by_with()
            assert lock_all("a", "b", timeout=0).acquire() is None
            assert not is_free()

        assert is_free()


# While it is kept.


def test_its_thread_enters_again_and_others_wait() -> None:
    entered: list[str] = []

    def other() -> None:
        with lock("a", timeout=10):
            entered.append("other")

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            with lock("a") as first:
                pass
            waiting = pool.submit(other)
            with lock("a", timeout=0) as again:
                assert again is first
            with lock("a", timeout=0, reentrant=False) as once_more:
                assert once_more is first
            assert first.held
            assert current_lease() is first
            entered.append("own")
        waiting.result()

    assert entered == ["own", "other"]
    assert not first.held


def test_who_is_inside_at_the_commit_stays_inside() -> None:
    recipe = lock("a")
    with transaction.atomic():
        by_with()
        lease = recipe.acquire()
        assert lease
    assert lease.held

    recipe.release()

    assert is_free()


def test_a_reader_that_becomes_a_writer_is_told_why_it_cannot() -> None:
    with transaction.atomic():
        with lock("a", shared=True):
            pass
        with pytest.raises(LockDeadlock, match="holds it shared, until its transaction ends"):
            lock("a", timeout=5).acquire()
    assert is_free()


def test_an_entry_from_inside_a_transaction_keeps_it_if_the_outer_one_has_ended_before() -> None:
    outer = lock("a").acquire()
    assert outer
    with transaction.atomic():
        with lock("a"):
            outer.release()
        assert not is_free()
    assert is_free()


def test_it_can_be_handed_over_before_the_commit() -> None:
    with transaction.atomic():
        with lock("a") as lease:
            pass
        with pytest.warns(ReleasedBeforeCommit):
            text = lease.detach()

    assert not is_free()
    type(lease).attach(text).release()
    assert is_free()


# Python 3.13 complains of what such a thread leaves.
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_a_thread_that_ends_without_ending_its_transaction_frees_it() -> None:
    def leave_open() -> None:
        transaction.atomic().__enter__()
        by_with()

    thread = threading.Thread(target=leave_open)
    thread.start()
    thread.join()
    gc.collect()  # a connection of Django is in a circle

    eventually(is_free, 5)
    gc.collect()  # what was still looked at by another thread


# A lease that ends before.


def test_one_lost_before_the_exit_is_told_of_there_so_that_the_transaction_rolls_back() -> None:
    with pytest.raises(LockLost), transaction.atomic(), lock("a") as lease:
        lease.end(State.LOST, "a test says so")


def test_one_lost_between_the_exit_and_the_commit_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with transaction.atomic():
        with lock("a") as lease:
            pass
        lease.end(State.LOST, "a test says so")

    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert said == [
        (logging.WARNING, "Lock a was lost: a test says so"),
        (logging.ERROR, "Lock a could not be released after the end of its transaction"),
    ]


# In a TestCase.


class InTestCase(TestCase):
    """Django's own: its blocks are no transactions of the code under test."""

    def code_under_test(self) -> None:
        with transaction.atomic(durable=True):
            by_with()
            transaction.on_commit(lambda: None)
            assert not is_free()

    def test_it_is_free_at_the_end_of_the_outermost_block_of_the_code(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks:
            self.code_under_test()

            assert is_free()
        assert len(callbacks) == 1

    def test_it_is_free_after_its_rollback(self) -> None:
        with pytest.raises(RolledBack), transaction.atomic():
            with transaction.atomic():
                by_with()
            assert not is_free()
            raise RolledBack

        assert is_free()

    def test_a_rollback_is_an_error_after_which_no_min_hold_counts(self) -> None:
        test_a_rollback_is_an_error_after_which_no_min_hold_counts()

    def test_a_savepoint_that_is_rolled_back_frees_nothing(self) -> None:
        test_a_savepoint_that_is_rolled_back_frees_nothing()

    def test_outside_a_block_of_the_code_it_is_free_at_once(self) -> None:
        by_with()
        with lock("b", release="on_commit"):
            pass

        assert is_free()
        assert is_free("b")

    def test_in_a_block_whose_end_nothing_tells_it_is_free_at_once(self) -> None:
        with transaction.atomic(savepoint=False):
            by_with()

        assert is_free()

    def test_a_lock_of_a_delete_signal_is_free_afterwards(self) -> None:
        account = Account.objects.create(name="a", balance=0, opening_balance=0)

        def lock_it(**_: Any) -> None:
            by_with()

        post_delete.connect(lock_it, sender=Account)
        self.addCleanup(post_delete.disconnect, lock_it, sender=Account)
        account.delete()

        assert is_free()


# In async code.


async def test_a_transaction_in_a_thread_of_async_code_keeps_its_locks_alone() -> None:
    def work() -> bool:
        with transaction.atomic():
            by_with()
            return is_free()

    async with lock("b"):
        assert await sync_to_async(work)() is False
    assert not await lock("a").alocked()
    assert not await lock("b").alocked()


# release="at_exit".


def leave_early(name: str) -> None:
    with transaction.atomic():
        with lock(name, release="at_exit"):
            pass
        assert is_free(name)


@distributed_lock("{name}", release="at_exit")
def decorated(name: str) -> None: ...


@distributed_lock("{name}", release="at_exit")
def decorated_too(name: str) -> None: ...


def test_at_exit_is_warned_of_once_for_each_place_whatever_the_names() -> None:
    transactions._told.clear()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for number in range(5):
            leave_early(f"a:{number}")
            with transaction.atomic():
                decorated(f"b:{number}")
                decorated_too(f"c:{number}")

    assert {each.category for each in shown} == {ReleasedBeforeCommit}
    assert {each.filename for each in shown} == {__file__}
    assert [each.lineno for each in shown] == [
        leave_early.__code__.co_firstlineno + 2,
        decorated.__wrapped__.__code__.co_firstlineno,  # type: ignore[attr-defined]
        decorated_too.__wrapped__.__code__.co_firstlineno,  # type: ignore[attr-defined]
    ]
    assert len(transactions._told[__file__]) == len(shown) + 1  # the version of the filters


@pytest.mark.parametrize("leave", ["at exit", "release", "detach"])
def test_what_is_left_before_the_commit_raises_if_strict(settings: Settings, leave: str) -> None:
    settings.DISTLOCK = {"default": {**MEMORY, "STRICT": True}}
    from_before = lock("b").acquire()
    assert from_before

    told = rf"Lock '{'a' if leave == 'at exit' else 'b'}' was released before .* on 'default'"
    with pytest.raises(ReleasedBeforeCommit, match=told):
        if leave == "at exit":
            leave_early("a")
        else:
            with transaction.atomic():
                getattr(from_before, leave)()

    assert is_free("a")
    assert from_before.held is (leave != "release")
    reset_locks()


@pytest.mark.filterwarnings("error")
def test_at_exit_says_nothing_without_a_transaction() -> None:
    with lock("a", release="at_exit"), transaction.atomic():
        pass
    assert is_free()
