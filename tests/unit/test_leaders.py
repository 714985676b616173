"""The leader of the waiters of one process: who it is, and whom it wakes."""

from __future__ import annotations

import pytest

from django_distlock.engine.bells import ThreadBell
from django_distlock.engine.leaders import Leaders
from django_distlock.engine.values import Request
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder


@pytest.fixture
def leaders() -> Leaders:
    return Leaders(keep=0.5, stale=1.0)


@pytest.fixture
def waiters(leaders: Leaders) -> list[tuple[Request, ThreadBell]]:
    """Three waiters, which sleep; the first one is the leader."""
    found = [(Request("name", "key", 20.0, Holder.current()), ThreadBell()) for _ in range(3)]
    assert [leaders.leads(*each) for each in found] == [True, False, False]
    return found


Waiters = list[tuple[Request, ThreadBell]]


def test_next_one_leads_if_the_leader_leaves_before_it_has_led(
    leaders: Leaders, waiters: Waiters
) -> None:
    (first, _), (second, second_bell), (third, third_bell) = waiters

    leaders.drop(first)
    assert second_bell.wait(0)
    leaders.drop(second)

    assert third_bell.wait(0)
    assert leaders.leads(third, third_bell)


def test_nobody_is_rung_while_the_leader_stays(leaders: Leaders, waiters: Waiters) -> None:
    leaders.drop(waiters[1][0])

    assert not any(bell.wait(0) for _, bell in waiters)


def test_another_one_leads_once_the_leader_is_silent(
    leaders: Leaders, waiters: Waiters, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, first_bell), (second, _), (third, third_bell) = waiters
    assert leaders.has_leader(third)
    later = clock.wait_time() + 1.5
    monkeypatch.setattr(clock, "wait_time", lambda: later)

    assert not leaders.has_leader(third)
    assert leaders.leads(third, third_bell)

    assert leaders.has_leader(first)
    assert not leaders.leads(first, first_bell)
    assert leaders.has_leader(second)


def test_places_are_kept_by_the_leader_in_time_for_those_that_sleep(
    leaders: Leaders, waiters: Waiters, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (request for request, _ in waiters)
    assert leaders.to_keep(first) == []
    later = clock.wait_time() + 0.6
    monkeypatch.setattr(clock, "wait_time", lambda: later)
    leaders.ring("key", third.owner)

    assert leaders.to_keep(second) == []
    assert leaders.to_keep(first) == [second]
    assert leaders.to_keep(first) == []


def test_lowest_ticket_leads_whoever_came_first() -> None:
    leaders, bells = Leaders(keep=0.5), [ThreadBell(), ThreadBell()]
    late, early = (Request("name", "key", 20.0, Holder.current()) for _ in range(2))
    leaders.add(late, bells[0], 2)
    leaders.add(early, bells[1], 1)

    leaders.ring_leader("key")

    assert [bell.wait(0) for bell in bells] == [False, True]
    assert leaders.has_leader(late)
    assert not leaders.has_leader(early)
