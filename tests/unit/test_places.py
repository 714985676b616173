"""Places: their keys, and what a semaphore of threading and asyncio promises."""

from __future__ import annotations

from typing import Any

import pytest

from django_distlock import LockNotAcquired, distributed_lock, lock
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.engine.values import Busy, first_to_end
from django_distlock.ground.naming import limit_key, lock_of, place_key, place_of, server_key
from django_distlock.testing import held_elsewhere


@pytest.mark.parametrize("name", ["a", "a~", "a~3", "~", "x" * 10_000, "Ärger"])
def test_no_name_has_the_key_of_a_place(name: str) -> None:
    key = server_key(name)

    assert place_of(key) is None
    assert lock_of(key) == key
    place = place_key(limit_key(key), 12)
    assert place_of(place) == 12
    assert place_key(place, 7) == place_key(limit_key(key), 7)
    assert lock_of(place) == lock_of(limit_key(key)) == limit_key(key)
    assert len(place_key(limit_key(server_key(name, prefix=name, kind="kind")), 999)) <= 255


def test_the_place_that_is_free_first_is_told() -> None:
    late, soon, unknown = Busy(remaining=9.0), Busy(remaining=1.0), Busy()

    assert first_to_end([unknown, late, soon]) is soon
    assert first_to_end([unknown, unknown]) is unknown
    assert first_to_end([late, None, soon]) is None


def test_a_refusal_says_that_all_places_are_taken(memory: LocMemBackend) -> None:
    with held_elsewhere("a", limit=2), pytest.raises(LockNotAcquired) as caught:
        lock("a", limit=2, timeout=0).__enter__()

    assert "is taken at all of its 2 places, the first to end held by elsewhere" in str(
        caught.value
    )
    again: Any = type(caught.value)(*caught.value.args)
    assert (again.limit, str(again)) == (2, str(caught.value))


def test_a_limit_may_depend_on_the_call(memory: LocMemBackend) -> None:
    @distributed_lock("a", timeout=0, reentrant=False, limit=lambda number: number)
    def work(number: object) -> bool:
        return lock("a", limit=1, timeout=0, reentrant=False).locked()

    assert work(1)
    for wrong in (None, 0, True, "4"):
        with pytest.raises((TypeError, ValueError), match=r"the limit of .*work\(\) must be"):
            work(wrong)
    with pytest.raises(TypeError, match="limit must be a whole number"):
        lock("a", limit=lambda: 1)  # only a function has calls
