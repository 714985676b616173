"""How long to pause: never past the end, never for ever, not all at once; and who lets others go first."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from django_distlock.engine import waiting
from django_distlock.engine.values import Busy, batches
from django_distlock.engine.waiting import (
    LONGEST_POLL as LONGEST,
    MOST_KNOWN,
    SHORTEST_POLL as SHORTEST,
    YIELDS,
    ContestedLocks,
    Wait,
    Waiting,
    Way,
    poll_pause,
)
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


# Where nothing wakes a waiter.


@pytest.mark.parametrize("seen", [0.0, 0.05, 1.0, 2.5, 3600.0])
def test_a_pause_is_about_a_tenth_of_the_time_that_the_holder_was_seen_for(seen: float) -> None:
    longest = min(LONGEST, max(SHORTEST, seen / 10))

    drawn = [poll_pause(seen) for _ in range(1_000)]

    assert longest / 2 <= min(drawn) < longest * 0.55
    assert longest * 0.95 < max(drawn) <= longest


def test_the_pauses_of_a_wait_grow_while_the_holder_stays(wait_clock: StoppedClock) -> None:
    wait, asked = Wait(None), 0
    while wait.waited < 10.0:
        wait_clock.now += wait.pause_behind("the holder")
        asked += 1

    assert wait.pause_behind("the holder") >= LONGEST / 2
    assert asked < 150


@pytest.mark.parametrize("after", ["another holder", None])
def test_they_are_short_again_when_it_changes_hands(
    wait_clock: StoppedClock, after: object
) -> None:
    wait = Wait(None)
    wait.pause_behind("the holder")
    wait_clock.now += 10.0
    assert wait.pause_behind("the holder") > SHORTEST

    assert wait.pause_behind(after) <= SHORTEST
    wait_clock.now += 0.01
    assert wait.pause_behind(after) <= SHORTEST


def test_nobody_lets_others_go_first_who_was_never_refused() -> None:
    contested = ContestedLocks()

    assert "key" not in contested.wanted
    contested.granted("key", 1.0)
    contested.released("key", 2.0)

    assert contested.first_pause("key", 2.0) == 0.0


def hold(contested: ContestedLocks, begins: float, ends: float) -> None:
    """Hold the lock for so long."""
    assert "key" in contested.wanted
    contested.granted("key", begins)
    contested.released("key", ends)


def test_who_was_refused_lets_others_go_first_after_each_hold_as_one_of_them() -> None:
    contested = ContestedLocks()
    contested.refused("key")
    assert contested.first_pause("key", 1.0) == 0.0, "it has not held the lock yet"
    hold(contested, 1.0, 3.0)

    assert 0.1 <= contested.first_pause("key", 3.0) <= 0.2
    assert contested.first_pause("key", 3.2) == 0.0, "the time since the release counts"
    assert contested.first_pause("another", 3.0) == 0.0


def test_who_was_never_refused_lets_others_go_first_that_waited_meanwhile() -> None:
    contested = ContestedLocks()
    contested.waited_for("key", 2.0, 3.0)
    contested.released("key", 3.1)

    assert 0.1 <= contested.first_pause("key", 3.0) <= 0.2


def test_a_release_to_others_counts_until_a_try_must_find_out_who_is_there() -> None:
    contested = ContestedLocks()
    contested.refused("key")
    assert contested.last_release("key", 3.0) == (0.0, math.inf), "it had no turn yet"
    hold(contested, 1.0, 3.0)

    found = [contested.last_release("key", 3.5) for _ in range(YIELDS + 1)]

    assert found == [(2.0, 0.5)] * YIELDS + [(0.0, math.inf)]
    assert contested.last_release("another", 3.5) == (0.0, math.inf)


def test_not_more_locks_are_known_than_a_process_can_bear() -> None:
    contested = ContestedLocks()
    for number in range(3 * MOST_KNOWN):
        contested.refused(f"key:{number}")

    assert 0 < len(contested.wanted) <= MOST_KNOWN


def test_of_eight_who_want_it_at_once_each_has_it_about_as_often(wait_clock: StoppedClock) -> None:
    """Simulated: holds of a millisecond, by processes that want it again a moment after they had it."""
    random.seed(1)
    contested, waits = [ContestedLocks() for _ in range(8)], [Wait(None) for _ in range(8)]
    next_look, served = [0.0] * 8, list[int]()
    holding, ends, owner = -1, 0.0, 0
    while len(served) < 2_000:
        who = min(range(8), key=next_look.__getitem__)
        now = wait_clock.now = next_look[who]
        if now < ends:
            contested[who].refused("key")
            next_look[who] = now + waits[who].pause_behind((holding, owner))
            continue
        holding, ends, owner = who, now + 0.001, owner + 1
        served.append(who)
        waits[who] = Wait(None)
        contested[who].granted("key", now)
        contested[who].released("key", ends)
        next_look[who] = ends + max(0.0002, contested[who].first_pause("key", ends))

    assert _jain(served) > 0.95
    # Of so many the long run is fair by chance, even if each takes it many times in a row.
    assert all(_jain(some) > 0.9 for some in batches(served, 200))


def _jain(served: Sequence[int]) -> float:
    """Return Jain's index of fairness for who of the eight was served."""
    counts = [served.count(who) for who in range(8)]
    return sum(counts) ** 2 / (8 * sum(count**2 for count in counts))
