"""How long to pause: never past the end, never for ever, and not all at once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from django_distlock.engine import waiting
from django_distlock.engine.values import Busy
from django_distlock.engine.waiting import Wait, Waiting, Way
from tests.fixtures.clocks import StoppedClock


def test_a_wait_counts_down_to_zero_and_no_further(wait_clock: StoppedClock) -> None:
    wait, began = Wait(5), wait_clock.now

    for waited, left in [(0, 5), (3, 2), (5, 0), (105, 0)]:
        wait_clock.now = began + waited
        assert (wait.waited, wait.left, wait.is_over) == (waited, left, left == 0)


def test_no_timeout_is_over_at_once(wait_clock: StoppedClock) -> None:
    wait = Wait(0)

    assert wait.is_over
    assert wait.next_pause() == 0


def test_a_wait_for_ever_is_never_over(wait_clock: StoppedClock) -> None:
    wait = Wait(None)
    wait_clock.now += 1e9

    assert wait.left is None
    assert not wait.is_over
    assert wait.bounded(1e6) == 1e6


def test_pauses_never_reach_past_the_end(wait_clock: StoppedClock) -> None:
    for _ in range(200):
        timeout = random.uniform(0, 2)
        wait = Wait(timeout)
        while not wait.is_over:
            pause = wait.next_pause(random.choice([None, random.uniform(0, 1)]))
            assert 0 <= pause <= timeout - wait.waited + 1e-9
            wait_clock.now += pause + 0.001


def test_pauses_grow_from_short_ones_to_the_longest_each_at_most_threefold(
    wait_clock: StoppedClock,
) -> None:
    wait = Wait(None)
    pauses = [wait.next_pause() for _ in range(500)]

    assert all(waiting.SHORTEST_PAUSE <= pause <= waiting.LONGEST_PAUSE for pause in pauses)
    assert max(pauses) > 0.9 * waiting.LONGEST_PAUSE
    assert all(pause <= 3 * before for before, pause in pairwise([waiting.SHORTEST_PAUSE, *pauses]))


def test_a_pause_is_bounded_by_what_is_known_of_the_holder(wait_clock: StoppedClock) -> None:
    wait = Wait(60)
    for _ in range(50):
        wait.next_pause()

    assert wait.next_pause(None, 0.001) == 0.001
    assert wait.next_pause(None, 0.0) == 0


def test_who_is_woken_looks_again_after_a_fixed_time_or_when_the_lease_ends(
    wait_clock: StoppedClock,
) -> None:
    waits = Waiting(way=Way.LISTEN, look_again=0.2)

    assert waits.pause(Wait(60), Busy()) == 0.2
    assert waits.pause(Wait(60), Busy(remaining=0.1)) == 0.1
    assert waits.pause(Wait(60), Busy(remaining=9)) == 0.2
    assert waits.pause(Wait(0.125), Busy()) == 0.125


def test_a_wait_on_the_server_is_as_long_as_the_timeout_unless_it_is_limited(
    wait_clock: StoppedClock,
) -> None:
    waits = Waiting(way=Way.ON_SERVER)

    assert waits.on_server(Wait(60)) == 60
    assert waits.on_server(Wait(None)) is None


def test_a_limited_wait_on_the_server_is_longer_for_who_has_waited_for_long(
    wait_clock: StoppedClock,
) -> None:
    wait, waits = Wait(None), Waiting(way=Way.ON_SERVER, look_again=10)

    first = [waits.on_server(wait) or 0 for _ in range(50)]
    wait_clock.now += 30
    later = [waits.on_server(wait) or 0 for _ in range(50)]

    assert all(4.5 <= each <= 5 for each in first)
    assert all(9 <= each <= 10 for each in later)
    assert len({*first}) > 1
    assert waits.on_server(Wait(2)) == 2


@pytest.mark.parametrize(
    ("way", "longest"),
    [
        (Way.POLL, waiting.LONGEST_PAUSE),
        (Way.LOOK, waiting.LONGEST_PAUSE),
        (Way.LISTEN, waiting.LONGEST_WAKEABLE_PAUSE),
    ],
)
def test_only_who_is_woken_may_pause_for_long(
    wait_clock: StoppedClock, way: Way, longest: float
) -> None:
    wait, waits = Wait(None), Waiting(way=way)

    pauses = []
    for _ in range(300):
        pauses.append(waits.pause(wait, Busy()))
        wait_clock.now += pauses[-1]

    assert 0.9 * longest < max(pauses) <= longest
    assert all(waits.pause(wait, Busy(remaining=0.001)) == 0.001 for _ in range(10))
