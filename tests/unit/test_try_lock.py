"""try_lock(): what stands after ``with`` gets a lease, or None if the lock is busy."""

from __future__ import annotations

import time

import pytest

from django_distlock import lock, try_lock
from django_distlock.testing import held_elsewhere


def test_a_free_lock_is_held_in_the_block_and_free_after_it() -> None:
    with try_lock("nightly", ttl=5, purpose="a report") as lease:
        assert lease is not None
        assert lease.held
        assert lease.holder.purpose == "a report"

    assert not lock("nightly").locked()


async def test_a_task_holds_it_too() -> None:
    async with try_lock("nightly") as lease:
        assert lease is not None
        assert lease.held

    assert not await lock("nightly").alocked()


def test_a_busy_lock_is_tried_once_unless_a_timeout_is_given() -> None:
    with held_elsewhere("nightly"):
        with try_lock("nightly") as lease:
            assert lease is None
        began = time.monotonic()
        with try_lock("nightly", timeout=0.05) as lease:
            assert lease is None

    assert time.monotonic() - began >= 0.05


def test_the_caller_that_holds_it_enters_again() -> None:
    with lock("nightly") as outer:
        with try_lock("nightly") as lease:
            assert lease is outer
        assert outer.held


def test_an_error_of_the_block_goes_up_and_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), try_lock("nightly"):
        raise ZeroDivisionError
    assert not lock("nightly").locked()

    with held_elsewhere("nightly"), pytest.raises(ZeroDivisionError), try_lock("nightly"):
        raise ZeroDivisionError


def test_it_is_for_one_block() -> None:
    nightly = try_lock("nightly")
    with held_elsewhere("nightly"), nightly as lease:
        assert lease is None

    with pytest.raises(RuntimeError, match="for one block"), nightly:
        pass
    assert not lock("nightly").locked()
