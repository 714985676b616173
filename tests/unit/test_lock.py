"""Lock and its terms: the protocol of threading's locks, and what it refuses."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

import django_distlock
from django_distlock import (
    InvalidLockBackend,
    Lease,
    Lock,
    LockNotAcquired,
    LockNotHeld,
    current_lease,
    force_release,
    lock,
    lock_all,
)
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.engine.registry import registry
from tests.contract.crew import elsewhere, held_in_thread, length_of_line
from tests.fixtures.interruption import is_ours
from tests.integration.aliases import MEMORY

if TYPE_CHECKING:
    from collections.abc import Generator

    from django_distlock import LockTerms


async def test_aacquire_and_arelease_count_as_their_twins_do(memory: LocMemBackend) -> None:
    mine = lock("a")
    assert await mine.aacquire()
    assert await mine.aacquire()

    await mine.arelease()
    assert await mine.alocked()
    await mine.arelease()
    assert not await mine.alocked()
    with pytest.raises(LockNotHeld):
        await mine.arelease()


def test_a_lock_is_a_recipe_that_asks_nobody(settings: Any) -> None:
    settings.DISTLOCK = {"default": {"TTL": 0}}

    mine = lock("a recipe", using="nowhere")

    assert repr(mine) == "<Lock 'a recipe' using='nowhere'>"
    assert "a recipe" not in {each.name for each in registry.leases()}
    with pytest.raises(InvalidLockBackend):
        mine.acquire()


def test_terms_that_are_not_given_come_from_the_alias(settings: Any) -> None:
    settings.DISTLOCK = {"default": {**MEMORY, "TTL": 7, "TIMEOUT": 0}}

    with lock("a") as lease:
        assert lease.ttl == 7
        assert elsewhere(lambda: lock("a").acquire()) is None
        assert lock("a", timeout=None).default_timeout() is None
    with lock("a", ttl=timedelta(seconds=3)) as lease:
        assert lease.ttl == 3


WRONG_TERMS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "ttl of zero": ({"ttl": 0}, ValueError),
    "ttl in text": ({"ttl": "30"}, TypeError),
    "negative timeout": ({"timeout": -1}, ValueError),
    "max_hold of zero": ({"max_hold": 0}, ValueError),
    "negative min_hold": ({"min_hold": -1}, ValueError),
    "release at another time": ({"release": "later"}, ValueError),
    "limit of zero": ({"limit": 0}, ValueError),
    "limit of True": ({"limit": True}, TypeError),
    "limit of readers": ({"limit": 2, "shared": True}, django_distlock.NotSupported),
    "shared as a number": ({"shared": 1}, TypeError),
    "a word misspelt": ({"timout": 5}, TypeError),
    "a word of the inside": ({"has_timeout": True}, TypeError),
}


@pytest.mark.parametrize("what", WRONG_TERMS)
def test_wrong_terms_are_refused_where_they_are_written(what: str) -> None:
    terms, error = WRONG_TERMS[what]

    for make in (lock, lock_all, Lock, django_distlock.distributed_lock):
        with pytest.raises(error):
            make("a", **terms)


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (None, TypeError), (42, TypeError)])
def test_wrong_names_are_refused_where_they_are_written(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        lock(name)
    with pytest.raises(error):
        lock_all("a", name)


@pytest.mark.parametrize("make", [lock, Lock, django_distlock.distributed_lock])
def test_what_stands_behind_the_name_is_a_keyword(make: Any) -> None:
    with pytest.raises(TypeError, match=r"write 5 as timeout=\.\.\. or ttl=\.\.\."):
        make("a", 5)
    with pytest.raises(TypeError, match=r"for several, write lock_all\('a', 'b'\)"):
        make("a", "b")


@pytest.mark.parametrize(
    ("locks", "terms", "error", "problem"),
    [
        ([["a", "b"]], {}, TypeError, r"write lock_all\(\*names\)"),
        (["a", lock("b", timeout=5)], {}, ValueError, "give it timeout=..., and the lock 'b' none"),
        (
            [lock("a"), lock("b")],
            {"timeout": 5, "ttl": 30},
            TypeError,
            r"has only locks, .* write lock\(\.\.\., ttl=\.\.\.\)",
        ),
        (["a", "b", lock("a", shared=True)], {}, ValueError, "the lock 'a' twice, with different"),
        (["a", "b", lock("a", ttl=5)], {}, ValueError, "the lock 'a' twice, with different"),
        ([lock("c", limit=2), lock("c", limit=3)], {}, ValueError, "twice"),
    ],
)
def test_what_cannot_be_locked_together_is_refused(
    locks: list[Any], terms: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        lock_all(*locks, **terms)


def test_one_lock_on_the_same_terms_is_locked_once(memory: LocMemBackend) -> None:
    with lock_all("a", lock("a"), lock("a"), timeout=0) as leases:
        assert len({*leases}) == 1
    assert not lock("a").locked()


def test_lock_all_without_a_timeout_waits_as_long_as_the_shortest_of_the_aliases(
    settings: Any,
) -> None:
    settings.DISTLOCK = {
        "default": {**MEMORY, "TIMEOUT": 20},
        "patient": {**MEMORY, "TIMEOUT": None, "KEY_PREFIX": "patient"},
        "brief": {**MEMORY, "TIMEOUT": 0.02, "KEY_PREFIX": "brief"},
    }
    three = lock_all("a", lock("a", using="brief"), lock("a", using="patient"))

    with held_in_thread(lock("a")):
        with pytest.raises(LockNotAcquired) as caught, three:
            pytest.fail("one of them is held by somebody else")
        assert caught.value.waited < 10


def test_the_current_lease_is_the_one_taken_last(memory: LocMemBackend) -> None:
    assert current_lease() is None
    with lock("a") as first, lock("b") as second:
        assert current_lease() is second
        assert current_lease("a") is first
        assert current_lease("c") is None
        assert elsewhere(current_lease) is None
    assert current_lease() is None


def test_a_thread_that_ends_the_last_reentry_frees_the_lock(memory: LocMemBackend) -> None:
    lease = lock("a").acquire()
    assert lease
    assert lock("a").acquire() is lease

    elsewhere(lease.release)
    assert lock("a").locked()
    elsewhere(lease.release)
    assert not lock("a").locked()


def test_whatever_fails_while_it_gives_up_it_holds_up_nobody(
    memory: LocMemBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "try_acquire", fail)
        patch.setattr(memory, "abandon_later", fail)
        with pytest.raises(ValueError, match="a bug"):
            lock("a").acquire()

    assert length_of_line(memory, "a") == 0
    with lock("a", timeout=0.5) as lease:
        assert lease.held


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("expire", "use ttl"),
        ("blocking", "use timeout=0 to try once"),
        ("on_commit", 'use release="on_commit"'),
        ("id", "leave it out: every lease has a secret owner"),
        ("timout", "use timeout"),
        (
            "template",
            "it takes cancel_when_lost, free_on_error, limit, max_hold, min_hold, purpose, reentrant, release, renew, shared, timeout, ttl, using",
        ),
    ],
)
def test_a_word_that_lock_does_not_have_is_refused_with_the_right_one(
    word: str, advice: str
) -> None:
    wrong: Any = {word: 5}

    for call in (lock, lock_all, Lock):
        with pytest.raises(TypeError) as caught:
            call("a", **wrong)
        name = "lock_all()" if call is lock_all else "lock()"
        assert str(caught.value) == f"{name} has no {word!r}; {advice}"


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("expire", "use ttl of lock()"),
        ("ttl", "use ttl of lock()"),
        ("blocking_timeout", "use timeout"),
        ("token", "leave it out: every lease has a secret owner"),
        ("colour", "it takes blocking, timeout"),
    ],
)
async def test_a_word_that_acquire_does_not_have_is_refused_too(word: str, advice: str) -> None:
    wrong: Any = {word: 5}
    said = re.escape(f"Lock.acquire() has no {word!r}; {advice}") + "$"

    with pytest.raises(TypeError, match=said):
        lock("a").acquire(**wrong)
    with pytest.raises(TypeError, match=said):
        await lock("a").aacquire(**wrong)


def test_an_acquire_does_not_look_at_all_that_its_context_holds(memory: LocMemBackend) -> None:
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and is_ours(frame)

    with ExitStack() as stack:
        sys.setprofile(count)
        try:
            for number in range(2000):
                stack.enter_context(lock(f"a:{number}"))
        finally:
            sys.setprofile(None)
        assert current_lease() is current_lease("a:1999")
        assert current_lease("a:7")
        with lock("a:7", timeout=0) as again:
            assert again is current_lease("a:7")

    assert calls / 2000 < 200
    assert current_lease("a:7") is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_lease_or_lock_is_refused(
    memory: LocMemBackend, copied: Callable[[Any], object]
) -> None:
    mine = lock("a")
    with mine as lease:
        for original in (lease, mine):
            with pytest.raises(TypeError, match=r"detach\(\)"):
                copied(original)
        gc.collect()

        assert lease.held
        assert elsewhere(mine.locked)


# One object for many holders.


@pytest.mark.parametrize("terms", [{"shared": True}, {"limit": 2}])
def test_who_leaves_in_another_function_leaves_its_own_lease(
    memory: LocMemBackend, terms: LockTerms
) -> None:
    """Whatever the size of the frames, which decides where in memory they are."""
    recipe = lock("a", **terms)

    def enter(stack: ExitStack) -> Lease:
        return stack.enter_context(recipe)

    def leave(stack: ExitStack) -> None:
        stack.close()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for sizes in itertools.product(range(8), repeat=2):
            _resize(enter, sizes[0])
            _resize(leave, sizes[1])
            mine, theirs = ExitStack(), ExitStack()
            lease = one.submit(enter, mine).result()
            innocent = other.submit(enter, theirs).result()

            one.submit(leave, mine).result()

            assert (lease.held, innocent.held) == (False, True), sizes
            other.submit(leave, theirs).result()


def _resize(function: Any, more: int) -> None:
    code = function.__code__
    function.__code__ = code.replace(co_stacksize=10 + more)


def test_a_generator_that_has_lost_its_lease_leaves_no_later_one(memory: LocMemBackend) -> None:
    def holding() -> Generator[Lease]:
        with recipe as lease:
            yield lease

    recipe = lock("a")
    generator = holding()
    lease = next(generator)
    assert force_release("a")
    assert lease.lost

    with recipe as later:
        generator.close()

        later.check()
