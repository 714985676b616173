"""What a backend is asked and what it answers."""

from __future__ import annotations

from functools import partial

from django_distlock.engine.values import (
    REMEMBERED,
    Held,
    Recent,
    Request,
    digest,
    digest_of_reservation,
)
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import LONGEST_LISTED
from tests.contract.crew import together

#: How many threads add texts at once.
THREADS = 4


def test_the_digest_of_an_owner_is_the_same_in_every_version() -> None:
    # Processes of two releases of this package compare theirs.
    assert digest("0123456789abcdef") == "9f9f5111f7b27a78"


def test_an_operator_sees_the_whole_name_and_no_more_than_that() -> None:
    whole, cut = (Held("x" * length, "fee", None, 1.0, None, "") for length in (9_999, 200_000))

    assert whole.name == "x" * 9_999
    assert len(cut.name) == LONGEST_LISTED


def test_the_digest_of_a_reservation_is_the_same_in_every_version() -> None:
    assert digest_of_reservation(7) == digest("reserved 7") != digest_of_reservation(8)


def test_a_request_for_any_place_may_hold_each_of_them() -> None:
    waiter = Request("a", "a", 10, Holder.current()).with_limit(3)

    assert [each.place for each in waiter.holdings] == [0, 1, 2]


def test_owners_that_ended_lately_are_remembered_until_they_are_many() -> None:
    recent = Recent()
    for number in range(2 * REMEMBERED):
        recent.add(str(number))

    assert all(str(number) in recent for number in range(2 * REMEMBERED))
    recent.add("one more")
    assert str(REMEMBERED) not in recent
    assert str(REMEMBERED + 1) in recent
    assert recent.pop("one more", False)
    assert not recent.pop("one more", False)
    assert "one more" not in recent


def test_many_threads_may_add_and_remove_texts_at_once() -> None:
    recent, texts = Recent(), range(4 * REMEMBERED)

    def add(thread: int) -> None:
        for number in texts:
            recent.add(f"{thread} {number}")
            if number % 3 == 0:
                recent.pop(f"{thread} {number}")

    together(*(partial(add, thread) for thread in range(THREADS)))

    known = [f"{thread} {number}" in recent for thread in range(THREADS) for number in texts]
    assert REMEMBERED // 2 <= sum(known) <= 2 * REMEMBERED
