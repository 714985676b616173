"""A lock that many callers hold as one owner, as unique tasks with debounce note their calls."""

from __future__ import annotations

from django_distlock.contrib.once import Once
from django_distlock.ground.clock import postmark
from tests.fixtures.eventually import eventually, never

from .profiles import lacks, needs

pytestmark = [needs("detach"), lacks("variant")]


def test_a_call_is_noted_until_so_long_after_the_last_one(
    using: str, name: str, tick: float
) -> None:
    quiet = 10 * tick
    callers = [
        Once(lambda: None, name, 60, using, is_bound=False, debounce=quiet, at_most=99 * quiet)
        for _ in range(2)
    ]
    first = postmark()
    assert callers[0].wait_left(name, first) == 0

    for _ in range(2):  # the second time the lock was held before
        for caller in callers:
            caller.note_call(name)
            assert quiet / 2 < callers[0].wait_left(name, first) < 1.1 * quiet
            never(lambda: callers[0].wait_left(name, first) == 0, quiet / 2)
        eventually(lambda: callers[0].wait_left(name, first) == 0, quiet)
