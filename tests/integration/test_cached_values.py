"""get_or_compute() and aget_or_compute(): one caller computes a value, the others get the old one."""

from __future__ import annotations

import asyncio
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.cache import caches
from django.db import transaction

from django_distlock import LockBackendError, LockNotAcquired, force_release, lock, locks
from django_distlock.contrib.cache import aget_or_compute, get_or_compute
from tests.contract.crew import elsewhere, held_in_thread, start, waiting_for
from tests.fixtures.eventually import eventually
from tests.fixtures.interruption import StopAt, TimeLimit
from tests.fixtures.processes import Spawn

from .aliases import DOWN

if TYPE_CHECKING:
    from pytest_django import Settings

    from tests.fixtures.redis import Redis

    Get = Callable[..., Any]

#: A cache that keeps what is fresh no longer, and the locks beside it.
CACHE, USING = "django_redis", "redis"
WORDS: dict[str, Any] = {"timeout": 60, "stale": 60, "cache": CACHE, "using": USING}


@pytest.fixture(autouse=True)
def server(redis: Redis, settings: Settings) -> None:
    settings.DISTLOCK = {**settings.DISTLOCK, "down": DOWN}


@pytest.fixture
def key() -> str:
    return f"report:{uuid.uuid4().hex}"


@pytest.fixture(params=["get_or_compute", "aget_or_compute"])
def get(request: pytest.FixtureRequest, key: str) -> Get:
    """Gets the value of the test by one of the two; a new value is "new", and old ones are kept for a minute."""

    def get(compute: Callable[[], Any] = lambda: "new", **words: Any) -> Any:
        async def acompute() -> Any:
            return compute()

        words = {**WORDS, "wait": 20, **words}
        if request.param == "get_or_compute":
            return get_or_compute(key, compute, **words)
        return asyncio.run(aget_or_compute(key, acompute, **words))

    return get


def put_old(key: str) -> None:
    put(key, "old", until=0.0)


def put(key: str, value: str, until: float = 1e12) -> None:
    caches[CACHE].set(key, (value, until, "django_distlock"), 60)


def name_of(key: str) -> str:
    return f"cache:{CACHE}:{caches[CACHE].make_key(key)}"


def fails() -> str:
    raise LookupError("no report")


def unwanted() -> None:
    pytest.fail("a fresh value is not computed")


def test_of_many_processes_one_computes_and_the_others_wait_for_it(
    spawn: Spawn, key: str, settings: Settings
) -> None:
    caches[CACHE].set(f"{key}:computed", 0)
    act = "tests.integration.cached_values:get_report"
    children = [spawn(act, key=key, cache=CACHE, using=USING) for _ in range(4)]
    for child in children:
        child.expect("ready")
    for child in children:
        child.tell("go")

    assert [child.result() for child in children] == ["report 1"] * 4


def test_while_one_computes_the_others_get_the_old_value(get: Get, key: str) -> None:
    begun, over = threading.Event(), threading.Event()
    put_old(key)

    def compute() -> str:
        begun.set()
        over.wait(20)
        return "new"

    first = start(lambda: get(compute))
    assert begun.wait(20)

    assert get(unwanted) == "old"
    assert lock(name_of(key), using=USING).locked()
    over.set()
    assert first.result(20) == get(unwanted) == "new"
    assert not lock(name_of(key), using=USING).locked()


@pytest.mark.parametrize("value", [None, {"a": [1]}])
def test_any_value_is_kept(get: Get, value: object) -> None:
    assert get(lambda: value) == value
    assert get(unwanted) == value


def test_it_is_fresh_for_the_timeout_and_kept_for_the_stale_time_too(get: Get, key: str) -> None:
    assert get(timeout=timedelta(minutes=1), stale=30) == "new"
    cached: Any = caches[CACHE]
    assert 85 < cached.ttl(key) <= 90

    assert get(lambda: "first", timeout=0.001) == "new"  # that of the value which is there
    caches[CACHE].delete(key)
    assert get(lambda: "first", timeout=0.001) == "first"
    eventually(lambda: get(lambda: "second") == "second")
    caches[CACHE].delete(key)
    get(timeout=0.3, stale=0.2)
    assert cached.ttl(key) == 1  # the least that it takes


def test_without_an_old_value_a_busy_lock_is_told_after_the_wait(get: Get, key: str) -> None:
    with held_in_thread(lock(name_of(key), using=USING)):
        with pytest.raises(LockNotAcquired) as caught:
            get(unwanted, wait=0.1)
        assert caught.value.waited >= 0.1
        assert caught.value.holder


def test_what_others_have_stored_meanwhile_is_not_computed(get: Get, key: str) -> None:
    with held_in_thread(lock(name_of(key), using=USING)):
        waiter = start(lambda: get(unwanted))
        put(key, "of another")

    assert waiter.result(20) == "of another"


def test_what_is_stored_when_the_wait_is_over_is_taken(get: Get, key: str) -> None:
    with held_in_thread(lock(name_of(key), using=USING)):
        waiter = start(lambda: get(unwanted, wait=2))
        eventually(lambda: waiting_for(locks[USING], name_of(key)))
        put(key, "of another")
        assert waiter.result(20) == "of another"


@pytest.mark.django_db(transaction=True)
def test_inside_a_transaction_the_lock_is_free_as_soon_as_the_value_is_stored(
    key: str, settings: Settings
) -> None:
    strict = {**settings.DISTLOCK[USING], "STRICT": True}
    settings.DISTLOCK = {**settings.DISTLOCK, USING: strict}
    with transaction.atomic():
        assert get_or_compute(key, lambda: "new", **WORDS) == "new"
        assert not lock(name_of(key), using=USING).locked()


@pytest.mark.parametrize("stored", [7, "ab", (1, 2), ("of another", 1e12), (1, 1e12, 3)])
def test_what_others_have_stored_counts_as_missing(get: Get, key: str, stored: object) -> None:
    caches[CACHE].set(key, stored, 60)

    assert get() == get(unwanted) == "new"


def test_a_value_of_another_cache_may_be_computed_from_that_of_the_same_key(key: str) -> None:
    def of_far() -> str:
        return get_or_compute(key, lambda: "far", wait=0, **WORDS)

    assert caches["default"].make_key(key) == caches[CACHE].make_key(key)
    words = {**WORDS, "cache": "default"}
    assert get_or_compute(key, of_far, wait=0, **words) == "far"


def test_an_error_comes_out_and_the_next_caller_computes(get: Get, key: str) -> None:
    put_old(key)

    with pytest.raises(LookupError, match="no report"):
        get(fails)

    assert elsewhere(get) == "new"


def test_while_the_lock_server_is_down_the_old_value_is_taken(get: Get, key: str) -> None:
    with pytest.raises(LockBackendError):
        get(unwanted, using="down")
    put_old(key)

    assert get(unwanted, using="down") == "old"


def test_or_each_caller_computes_if_that_is_said(get: Get, key: str) -> None:
    put_old(key)

    assert get(using="down", if_down="compute") == "new"
    assert get(unwanted, using="down") == "new"
    caches[CACHE].delete(key)
    assert get(using="down", if_down="compute") == "new"


def test_an_exception_at_any_step_of_the_release_goes_up_and_leaves_the_lock_free(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", id)  # finalizers drop what they raise

    def calls_until(number: int) -> int:
        with ExitStack() as stack, suppress(TimeLimit):
            step = StopAt(number)
            compute = lambda: bool(stack.enter_context(step))  # noqa: E731
            get_or_compute(key, compute, **{**WORDS, "stale": 0})
        caches[CACHE].delete(key)
        return step.calls

    for number in range(1, calls_until(0)):
        calls_until(number)
        with lock(name_of(key), using=USING, timeout=6):
            pass


def test_a_lost_lock_keeps_the_value_out_of_the_cache_and_not_from_the_caller(
    get: Get, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    def compute() -> str:
        assert force_release(name_of(key), using=USING) == 1
        return "late"

    put_old(key)

    assert get(compute) == "late"
    assert f"Leaving lock {name_of(key)}" in caplog.text
    assert get() == "new"


def test_a_value_that_needs_itself_is_an_error_and_no_endless_loop(key: str) -> None:
    def again() -> str:
        return get_or_compute(key, again, wait=0, **WORDS)

    with pytest.raises(LockNotAcquired):
        again()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"timeout": "60"}, TypeError),
        ({"timeout": 0}, ValueError),
        ({"stale": -1}, ValueError),
        ({"if_down": "wait"}, ValueError),
        ({"wait": "60"}, TypeError),
    ],
)
def test_wrong_words_are_refused(get: Get, words: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        get(**words)


def test_a_coroutine_function_is_refused_where_none_is_awaited(key: str) -> None:
    async def compute() -> None: ...

    with pytest.raises(TypeError, match="await aget_or_compute"):
        get_or_compute(key, compute, timeout=60, stale=60)  # type: ignore[unused-coroutine]  # refused


def test_what_would_run_after_the_lock_is_refused_and_not_stored(key: str) -> None:
    async def wait(seconds: int) -> None: ...

    for compute in (lambda: wait(1), lambda: (row for row in "ab")):
        with pytest.raises(TypeError, match="return the value itself"):
            get_or_compute(key, compute, **WORDS)

    async def awaited() -> object:
        return (row for row in "ab")

    with pytest.raises(TypeError, match="return the value itself"):
        asyncio.run(aget_or_compute(key, awaited, **WORDS))
    assert caches[CACHE].get(key) is None
    assert not lock(name_of(key), using=USING).locked()


def test_a_function_that_cannot_be_awaited_is_refused(key: str) -> None:
    def compute() -> Any:
        return "new"

    with pytest.raises(TypeError, match=r"write get_or_compute\("):
        asyncio.run(aget_or_compute(key, compute, **WORDS))
    assert caches[CACHE].get(key) is None
