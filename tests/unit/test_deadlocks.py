"""Who leaves a circle of waiting callers: one of each, whoever looks."""

from __future__ import annotations

import itertools

import pytest

from django_distlock.backends.session.sessions import is_victim


def victims(*waits: tuple[str, str]) -> set[str]:
    return {caller for caller in set(itertools.chain(*waits)) if is_victim(caller, waits)}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_circle_has_one_victim(size: int) -> None:
    callers = "abcde"[:size]

    assert victims(*zip(callers, callers[1:] + callers[0], strict=True)) == {callers[-1]}


def test_a_line_has_none() -> None:
    assert victims(("a", "b"), ("b", "c"), ("d", "c")) == set()


def test_who_waits_for_itself_is_none() -> None:
    assert victims(("a", "a"), ("b", "a")) == set()


def test_who_only_waits_for_a_circle_is_none() -> None:
    assert victims(("a", "b"), ("b", "a"), ("z", "a")) == {"b"}


def test_each_of_two_circles_has_one() -> None:
    assert victims(("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"), ("a", "c")) == {"b", "d"}


def test_one_that_stands_in_two_circles_is_enough_if_it_is_the_last_of_both() -> None:
    assert victims(("a", "z"), ("z", "a"), ("b", "z"), ("z", "b")) == {"z"}
