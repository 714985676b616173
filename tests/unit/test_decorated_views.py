"""@distributed_lock on class-based views, synchronous and not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from django.contrib.syndication.views import Feed
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, AsyncRequestFactory, Client, RequestFactory
from django.urls import path
from django.utils.decorators import async_only_middleware, sync_only_middleware
from pytest_django.fixtures import Settings

from django_distlock import LockTerms, distributed_lock, lock, respond
from tests.unit.conftest import own_lease

pytestmark = pytest.mark.usefixtures("memory")
ONCE_A_MINUTE: LockTerms = {"timeout": 0, "min_hold": 60, "free_on_error": True}


def _is_held(name: str) -> bool:
    return lock(name).locked()


def test_a_view_may_be_an_object() -> None:
    class Latest(Feed):  # type: ignore[type-arg]  # Django's has no types
        title = link = description = "latest"

        def items(self, obj: object) -> list[bool]:
            return [_is_held("a")]

        def item_title(self, item: object) -> str:
            return f"held: {item}"

        def item_link(self, item: object) -> str:
            return "/"

    view = distributed_lock("a", on_busy=respond())(Latest())

    assert b"held: True" in view(RequestFactory().get("/")).content


@pytest.mark.parametrize(
    ("status", "is_reserved"), [(200, True), (302, True), (400, False), (500, False)]
)
def test_a_view_that_fails_reserves_nothing(status: int, is_reserved: bool) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(status=status)

    async def aview(request: HttpRequest) -> HttpResponse:
        return view(request)

    distributed_lock("a", **ONCE_A_MINUTE)(view)(RequestFactory().get("/"))
    asyncio.run(distributed_lock("b", **ONCE_A_MINUTE)(aview)(AsyncRequestFactory().get("/")))

    assert (_is_held("a"), _is_held("b")) == (is_reserved, is_reserved)


def test_a_stream_that_fails_reserves_nothing() -> None:
    def parts() -> Iterator[str]:
        yield "one"
        raise ZeroDivisionError

    @distributed_lock("a", **ONCE_A_MINUTE)
    def view(request: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse(parts())

    response = view(RequestFactory().get("/"))
    with closing(response), pytest.raises(ZeroDivisionError):
        response.getvalue()

    assert not _is_held("a")


def test_the_holder_of_what_is_no_view_says_which_function_runs() -> None:
    @distributed_lock("a")
    def work() -> str:
        return own_lease().holder.purpose

    assert work().endswith("work")


# Django crosses from threads to tasks and back where middleware and views are not of one kind.

HERE = "tests.unit.test_decorated_views"


@sync_only_middleware
def in_a_lock(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    def middleware(request: HttpRequest) -> HttpResponse:
        with lock("request"):
            return get_response(request)

    return middleware


@async_only_middleware
def in_an_async_lock(get_response: Callable[[HttpRequest], Awaitable[HttpResponse]]) -> Any:
    async def middleware(request: HttpRequest) -> HttpResponse:
        async with lock("request"):
            return await get_response(request)

    return middleware


def sync_view(request: HttpRequest) -> HttpResponse:
    with lock("request", timeout=0) as lease:
        return HttpResponse(lease.name)


async def async_view(request: HttpRequest) -> HttpResponse:
    async with lock("request", timeout=0) as lease:
        return HttpResponse(lease.name)


async def view_that_spawns(request: HttpRequest) -> HttpResponse:
    refused = await asyncio.create_task(lock("request").aacquire(timeout=0)) is None
    return HttpResponse(f"refused: {refused}")


urlpatterns = [
    path("sync/", sync_view),
    path("async/", async_view),
    path("spawning/", view_that_spawns),
]


@pytest.fixture(params=["in_a_lock", "in_an_async_lock"])
def _request_in_a_lock(request: pytest.FixtureRequest, settings: Settings) -> None:
    settings.ROOT_URLCONF = HERE
    settings.MIDDLEWARE = [f"{HERE}.{request.param}"]


@pytest.mark.usefixtures("_request_in_a_lock")
@pytest.mark.parametrize(
    ("url", "said"),
    [("/sync/", b"request"), ("/async/", b"request"), ("/spawning/", b"refused: True")],
)
class TestMiddlewareThatHoldsALock:
    def test_a_view_enters_it_again_under_wsgi(self, url: str, said: bytes) -> None:
        assert Client().get(url).content == said

    async def test_a_view_enters_it_again_under_asgi(self, url: str, said: bytes) -> None:
        assert (await AsyncClient().get(url)).content == said
