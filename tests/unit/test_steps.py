"""Steps are run alike for threads and for asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from django_distlock.engine.steps import Steps, arun, run

if TYPE_CHECKING:
    from collections.abc import Callable


def _doubled(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return 2 * number


async def _adoubled(number: int) -> int:
    await asyncio.sleep(0)
    return _doubled(number)


def _run(steps: Steps[int, list[int]]) -> list[int]:
    return run(steps, _doubled)


def _arun(steps: Steps[int, list[int]]) -> list[int]:
    return asyncio.run(arun(steps, _adoubled))


@pytest.fixture(params=[_run, _arun], ids=["threads", "asyncio"])
def result_of(request: pytest.FixtureRequest) -> Callable[[Steps[int, list[int]]], list[int]]:
    """What runs steps, either way."""
    found: Callable[[Steps[int, list[int]]], list[int]] = request.param
    return found


def test_each_request_is_answered_and_the_result_returned(
    result_of: Callable[[Steps[int, list[int]]], list[int]],
) -> None:
    def steps() -> Steps[int, list[int]]:
        first = yield 1
        return [first, (yield first)]

    assert result_of(steps()) == [2, 4]


def test_steps_without_a_request_are_run_too(
    result_of: Callable[[Steps[int, list[int]]], list[int]],
) -> None:
    def steps() -> Steps[int, list[int]]:
        yield from ()
        return [7]

    assert result_of(steps()) == [7]


def test_an_error_is_raised_where_the_request_was_yielded_and_may_be_answered_there(
    result_of: Callable[[Steps[int, list[int]]], list[int]],
) -> None:
    def steps() -> Steps[int, list[int]]:
        try:
            yield -1
        except ValueError:
            return [(yield 5)]
        raise AssertionError

    assert result_of(steps()) == [10]


def test_an_error_that_the_steps_do_not_take_reaches_the_caller_and_closes_them(
    result_of: Callable[[Steps[int, list[int]]], list[int]],
) -> None:
    closed = []

    def steps() -> Steps[int, list[int]]:
        try:
            return [(yield -3)]
        finally:
            closed.append(True)

    with pytest.raises(ValueError, match="-3"):
        result_of(steps())
    assert closed == [True]
