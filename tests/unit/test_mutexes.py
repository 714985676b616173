"""Mutexes, which no exception of a signal keeps from other threads."""

from __future__ import annotations

import itertools
from _thread import RLock
from contextlib import suppress

import pytest

from django_distlock.ground.mutexes import Taken, new_mutex, owned, run_in
from tests.contract.crew import elsewhere
from tests.fixtures.interruption import StopAt, TimeLimit


def test_an_exception_at_any_step_leaves_the_mutex_to_other_threads() -> None:
    for number in itertools.count(1):
        mutex = new_mutex()
        with suppress(TimeLimit), StopAt(number) as step:
            run_in(mutex, int)

        assert elsewhere(lambda: run_in(mutex, int)) == 0  # noqa: B023 - called in this turn
        if step.calls < number:
            break


def test_an_exception_at_any_step_of_with_leaves_the_mutex_to_other_threads() -> None:
    for number in itertools.count(1):
        mutex = new_mutex()
        with suppress(TimeLimit), StopAt(number) as step:
            take_twice(mutex)

        assert elsewhere(lambda: run_in(mutex, int)) == 0  # noqa: B023 - called in this turn
        if step.calls < number:
            break


def take_twice(mutex: RLock) -> None:
    with mutex, mutex:
        assert owned(mutex)


def test_a_mutex_that_does_not_come_free_stays_its_owners() -> None:
    mutex = new_mutex()

    def ask() -> int:
        return run_in(mutex, int, 0.01)

    with mutex:
        with pytest.raises(Taken):
            elsewhere(ask)
        assert ask() == 0

    assert elsewhere(ask) == 0
