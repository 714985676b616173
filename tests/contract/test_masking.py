"""Leaving a with never hides what its body raised, and never hides a lost lease else."""

from __future__ import annotations

import pytest

from django_distlock import Lease, LockLost, LockNotOwned, distributed_lock, lock, lock_all
from django_distlock.lock import LockTerms
from tests.fixtures.eventually import aeventually, eventually

from .crew import taken
from .profiles import needs
from .rivals import Rival, Rivals

pytestmark = needs("leased", "typical")


class BodyError(Exception):
    pass


def _let_end(lease: Lease, other: Rival | None = None) -> None:
    """Wait until the lease is over, and have somebody else take the lock if there is one."""
    eventually(lambda: lease.lost)
    if other:
        other.takes()


async def _alet_end(lease: Lease) -> None:
    await aeventually(lambda: lease.lost)


@pytest.fixture
def terms(using: str, tick: float) -> LockTerms:
    """Terms of a lock that is lost unless it is released soon."""
    return {"using": using, "ttl": 2 * tick, "renew": False}


def _note_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_lost_and_no_error_raises_that_it_was_lost(name: str, terms: LockTerms) -> None:
    with pytest.raises(LockLost), lock(name, **terms) as lease:
        _let_end(lease)


def test_lost_and_an_error_raises_the_error_with_a_note(
    name: str, terms: LockTerms, rival: Rivals
) -> None:
    other = rival()

    with pytest.raises(BodyError) as caught, lock(name, **terms) as lease:
        _let_end(lease, other)
        raise BodyError

    assert name in _note_of(caught.value)
    assert other.holds


def test_taken_by_another_and_no_error_raises_that(
    name: str, terms: LockTerms, rival: Rivals
) -> None:
    other = rival()

    with pytest.raises(LockNotOwned), lock(name, **terms) as lease:
        _let_end(lease, other)

    assert other.holds


async def test_async_with_keeps_to_the_same_rules(name: str, terms: LockTerms) -> None:
    with pytest.raises(LockLost):
        async with lock(name, **terms) as lease:
            await _alet_end(lease)

    with pytest.raises(BodyError) as caught:
        async with lock(name, **terms) as lease:
            await _alet_end(lease)
            raise BodyError
    assert name in _note_of(caught.value)


def test_with_a_lease_keeps_to_the_same_rules(name: str, terms: LockTerms, tick: float) -> None:
    terms["ttl"] = 10 * tick  # it is held when the block begins
    lease = taken(name, **terms)

    with pytest.raises(BodyError) as caught, lease:
        _let_end(lease)
        raise BodyError

    assert name in _note_of(caught.value)


def test_lock_all_keeps_to_the_same_rules(name: str, terms: LockTerms) -> None:
    both = lock_all(f"{name}:a", f"{name}:b", **terms)

    with pytest.raises(LockLost), both as (first, second):
        _let_end(first)
        _let_end(second)
    with pytest.raises(BodyError) as caught, both as (first, second):
        _let_end(first)
        _let_end(second)
        raise BodyError

    assert f"{name}:a" in _note_of(caught.value)
    assert f"{name}:b" in _note_of(caught.value)


def test_the_decorator_keeps_to_the_same_rules(name: str, terms: LockTerms, rival: Rivals) -> None:
    other = rival()

    @distributed_lock(name, **terms)
    def work(*, fails: bool) -> None:
        other.takes()
        if fails:
            raise BodyError

    with pytest.raises(LockNotOwned):
        work(fails=False)
    other.leaves()
    with pytest.raises(BodyError) as caught:
        work(fails=True)

    assert name in _note_of(caught.value)
