"""What a decorated function does instead while somebody else holds its lock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from django_distlock import LockNotAcquired, distributed_lock, lock, respond, retry, skip
from tests.contract.crew import held_in_thread

pytestmark = pytest.mark.usefixtures("memory")


@pytest.fixture
def busy() -> Iterator[str]:
    """The name of a lock that somebody else holds."""
    with held_in_thread(lock("busy", ttl=20)):
        yield "busy"


def test_it_raises_by_default(busy: str) -> None:
    @distributed_lock(busy, timeout=0)
    def work() -> None:
        pytest.fail("held by another thread")

    with pytest.raises(LockNotAcquired) as caught:
        work()
    assert caught.value.name == busy


def test_skip_returns_a_value_instead(busy: str) -> None:
    @distributed_lock(busy, timeout=0, on_busy=skip())
    def nothing() -> object:
        pytest.fail("held by another thread")

    @distributed_lock(busy, timeout=0, on_busy=skip("later"))
    def something() -> object:
        pytest.fail("held by another thread")

    assert nothing() is None
    assert something() == "later"


def test_a_callable_is_given_the_error_and_the_arguments(busy: str) -> None:
    def instead(error: LockNotAcquired, *args: object, **kwargs: object) -> object:
        return error.name, args, kwargs

    @distributed_lock(busy, timeout=0, on_busy=instead)
    def work(*args: object, **kwargs: object) -> object:
        pytest.fail("held by another thread")

    assert work(1, 2, x=3) == (busy, (1, 2), {"x": 3})


async def test_a_coroutine_function_may_be_the_policy_of_one(busy: str) -> None:
    async def instead(error: LockNotAcquired) -> str:
        await asyncio.sleep(0)
        return error.name

    @distributed_lock(busy, timeout=0, on_busy=instead)
    async def work() -> str:
        pytest.fail("held by another thread")

    @distributed_lock(busy, timeout=0, on_busy=skip("later"))
    async def skipped() -> str:
        pytest.fail("held by another thread")

    assert await work() == busy
    assert await skipped() == "later"


async def test_generators_that_are_skipped_are_empty(busy: str) -> None:
    @distributed_lock(busy, timeout=0, on_busy=skip())
    def count() -> Iterator[int]:
        yield 1

    @distributed_lock(busy, timeout=0, on_busy=skip())
    async def acount() -> AsyncGenerator[int]:
        yield 1

    assert list(count()) == []
    assert [number async for number in acount()] == []


def test_respond_answers_with_a_status_and_when_to_try_again(busy: str) -> None:
    @distributed_lock(busy, timeout=0, on_busy=respond())
    def view(request: HttpRequest) -> HttpResponse:
        pytest.fail("held by another thread")

    response = view(RequestFactory().get("/"))

    assert response.status_code == 409
    assert 15 <= int(response["Retry-After"]) <= 20
    assert response["Content-Type"] == "text/plain; charset=utf-8"


def test_respond_answers_in_json_whom_asks_for_it(busy: str) -> None:
    @distributed_lock(busy, timeout=0, on_busy=respond(423))
    def view(request: HttpRequest) -> HttpResponse:
        pytest.fail("held by another thread")

    response = view(RequestFactory().get("/", headers={"accept": "application/json"}))

    assert response.status_code == 423
    assert response["Content-Type"] == "application/problem+json"
    assert json.loads(response.content)["status"] == 423


def test_retry_outside_of_a_task_raises(busy: str) -> None:
    pytest.importorskip("celery")

    @distributed_lock(busy, timeout=0, on_busy=retry(5))
    def work() -> None:
        pytest.fail("held by another thread")

    with pytest.raises(LockNotAcquired):
        work()
