"""Waits end as soon as they can, and fail at their deadline."""

import time

import pytest

from tests.fixtures.eventually import aeventually, eventually, in_time, never


def test_returns_the_first_truthy_result() -> None:
    answers = iter([0, None, "", "found", "later"])

    assert eventually(lambda: next(answers)) == "found"


async def test_async_twin_returns_it_too() -> None:
    answers = iter([0, "found"])

    assert await aeventually(lambda: next(answers)) == "found"


def test_failure_names_what_was_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"^the end did not come true within 0\.02 s$"):
        eventually(lambda: False, 0.02, what="the end")


async def test_async_twin_fails_alike() -> None:
    with pytest.raises(AssertionError, match=r"^the end did not come true within 0\.02 s$"):
        await aeventually(lambda: False, 0.02, what="the end")


def test_never_fails_as_soon_as_it_happens() -> None:
    answers = iter([0, 0, 7])

    with pytest.raises(AssertionError, match=r"^the worst came true: 7$"):
        never(lambda: next(answers), 10, what="the worst")


def test_never_returns_when_nothing_happened() -> None:
    never(lambda: False, 0.02)


def test_what_is_late_once_is_in_time() -> None:
    naps = iter([0.2, 0.0])

    in_time(lambda: time.sleep(next(naps)), 0, 0.1, tries=2)

    assert next(naps, None) is None


def test_what_is_late_each_time_is_not() -> None:
    with pytest.raises(AssertionError, match=r"^0\.01 s or more each time, "):
        in_time(lambda: time.sleep(0.02), 0, 0.01, tries=2)


def test_what_is_too_early_once_is_not_in_time_either() -> None:
    with pytest.raises(AssertionError, match=r"^too early"):
        in_time(lambda: None, 1, 2)
