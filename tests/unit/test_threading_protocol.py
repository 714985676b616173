"""Lock keeps to the protocol of threading's locks: each of these is tried on threading.RLock too."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from django_distlock import lock
from django_distlock.backends.locmem import LocMemBackend
from tests.contract.crew import elsewhere


@pytest.fixture(params=["ours", "threading's"])
def each(request: pytest.FixtureRequest, memory: LocMemBackend) -> Any:
    return lock("a") if request.param == "ours" else threading.RLock()


def test_acquire_is_true_or_false_and_release_gives_it_back(each: Any) -> None:
    assert each.acquire()
    assert not elsewhere(lambda: each.acquire(False))
    assert not elsewhere(lambda: each.acquire(timeout=0.01))
    each.release()
    assert elsewhere(lambda: bool(each.acquire(blocking=False)) and each.release() is None)


def test_acquire_takes_its_arguments_by_place_and_by_name(each: Any) -> None:
    for arguments in [(), (True,), (True, 1), (True, -1), (False,)]:
        assert each.acquire(*arguments)
        each.release()
    assert each.acquire(blocking=True, timeout=1)
    each.release()
    assert each.acquire(timeout=-1)
    each.release()


def test_the_longest_timeout_is_that_of_threading(each: Any) -> None:
    assert each.acquire(timeout=threading.TIMEOUT_MAX)
    each.release()

    for longer in (threading.TIMEOUT_MAX * 1.01, float("inf")):
        with pytest.raises(OverflowError):
            each.acquire(timeout=longer)


def test_it_can_be_entered_again_and_each_entry_wants_a_release(each: Any) -> None:
    with each:
        assert each.acquire()
        each.release()
        assert not elsewhere(lambda: each.acquire(blocking=False))


def test_releasing_what_is_not_held_is_a_runtime_error(each: Any) -> None:
    with pytest.raises(RuntimeError):
        each.release()


def test_releasing_what_another_thread_holds_is_a_runtime_error(each: Any) -> None:
    assert each.acquire()

    with pytest.raises(RuntimeError):
        elsewhere(each.release)

    each.release()


@pytest.mark.parametrize("arguments", [(False, 1), (True, -2)])
def test_a_timeout_without_blocking_or_below_zero_is_a_value_error(
    each: Any, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(ValueError, match="timeout"):
        each.acquire(*arguments)
