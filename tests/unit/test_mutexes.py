"""run_in(): a mutex for a time, which no exception of a signal keeps from other threads."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress

import pytest

from django_distlock.ground.mutexes import Taken, run_in
from tests.contract.crew import elsewhere
from tests.fixtures.interruption import StopAt, TimeLimit


def test_an_exception_at_any_step_leaves_the_mutex_to_other_threads() -> None:
    for number in itertools.count(1):
        mutex = threading.RLock()
        with suppress(TimeLimit), StopAt(number) as step:
            run_in(mutex, int)

        assert elsewhere(lambda: run_in(mutex, int)) == 0  # noqa: B023 - called in this turn
        if step.calls < number:
            break


def test_a_mutex_that_does_not_come_free_stays_its_owners() -> None:
    mutex = threading.RLock()

    def ask() -> int:
        return run_in(mutex, int, 0.01)

    with mutex:
        with pytest.raises(Taken):
            elsewhere(ask)
        assert ask() == 0

    assert elsewhere(ask) == 0
