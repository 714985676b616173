"""Mutexes, which no exception of a signal keeps from other threads."""

from __future__ import annotations

import itertools
from _thread import RLock
from collections.abc import Callable
from contextlib import suppress

import pytest

from django_distlock.ground.mutexes import Taken, new_mutex, owned, run_in
from tests.contract.crew import elsewhere
from tests.fixtures.interruption import OURS, StopAt, TimeLimit


def run(mutex: RLock) -> None:
    run_in(mutex, int)


def take_twice(mutex: RLock) -> None:
    with mutex, mutex:
        assert owned(mutex)


# As code of the library, whose steps count.
take_twice.__code__ = take_twice.__code__.replace(co_filename=f"{OURS}/take_twice.py")


@pytest.mark.parametrize("use", [run, take_twice])
def test_an_exception_at_any_step_leaves_the_mutex_to_other_threads(
    use: Callable[[RLock], None],
) -> None:
    for number in itertools.count(1):
        mutex = new_mutex()
        with suppress(TimeLimit), StopAt(number) as step:
            use(mutex)

        assert elsewhere(lambda: run_in(mutex, int)) == 0  # noqa: B023 - called in this turn
        if step.calls < number:
            break


def test_a_mutex_that_does_not_come_free_stays_its_owners() -> None:
    mutex = new_mutex()

    def ask() -> int:
        return run_in(mutex, int, 0.01)

    with mutex:
        with pytest.raises(Taken):
            elsewhere(ask)
        assert ask() == 0

    assert elsewhere(ask) == 0
