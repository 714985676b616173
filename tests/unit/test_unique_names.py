"""The name of a unique task that was given none: its function and all its arguments."""

from __future__ import annotations

import enum
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from django_distlock.contrib.once import LONGEST_CALL, Once
from testproject.models import Account


def export(shop_id: Any, *rest: Any, month: str = "May", **more: Any) -> None: ...


def bound(self: Any, shop_id: int) -> None: ...


ONCE = Once(export, None, 60, "default", is_bound=False)


def name_for(*args: Any, **kwargs: Any) -> str:
    return ONCE.name_for(args, kwargs)


class Colour(enum.Enum):
    RED = 1


def test_it_tells_the_function_and_each_argument_with_its_default() -> None:
    assert name_for(7) == name_for(shop_id=7) == name_for(7, month="May")
    assert name_for(7) == f'{__name__}.export(shop_id=7, rest=[], month="May", more={{}})'
    once = Once(bound, None, 60, "default", is_bound=True)
    assert once.name_for((7,), {}) == f"{__name__}.bound(shop_id=7)"


def test_the_order_of_words_makes_no_other_name() -> None:
    assert name_for(7, a=1, b=2) == name_for(7, b=2, a=1)
    assert name_for({"a": 1, "b": 2}) == name_for({"b": 2, "a": 1})


DIFFERENT: list[Any] = [
    *(7, 8, "7", True, None, 7.5, [7], [7, 8], {"7": 7}, "é", "e\u0301", 'a", month="June'),
    date(2026, 1, 2),
    datetime(2026, 1, 2, tzinfo=UTC),
    datetime(2026, 1, 2, microsecond=1, tzinfo=UTC),
    Decimal("7.10"),
    UUID(int=7),
    Account.from_db("default", ["id"], [9]),
]


def test_different_arguments_make_different_names() -> None:
    assert len({name_for(each) for each in DIFFERENT}) == len(DIFFERENT)
    assert name_for("a", "b") != name_for("a, b")
    assert name_for(7, month="June") != name_for(7) != name_for(7, "May")


def test_a_long_one_is_cut_and_ends_with_its_digest() -> None:
    first, second = name_for("x" * 20_000 + "a"), name_for("x" * 20_000 + "b")

    assert first != second
    assert len(first) == len(second) == LONGEST_CALL + 68
    assert first.startswith(f'{__name__}.export(shop_id="xxx')


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        (object(), "object has no text that is the same in every process"),
        (Colour.RED, "Colour has no text"),
        ({7}, "set has no text"),
        ({(1, 2): 3}, "keys must be str"),
        ({1: 2, "a": 3}, "not supported between"),
        (Account(), "not saved"),
    ],
)
def test_what_has_no_such_text_is_refused(argument: Any, problem: str) -> None:
    with pytest.raises(
        TypeError, match=rf"cannot name .*\.export\(\) by .*{problem}.*give it a name"
    ):
        name_for(argument)


def test_wrong_arguments_are_those_of_the_function() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'shop_id'"):
        name_for()
