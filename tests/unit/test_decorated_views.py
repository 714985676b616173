"""@distributed_lock on class-based views, synchronous and not."""

from __future__ import annotations

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.utils.decorators import method_decorator
from django.views import View

from django_distlock import current_lease, distributed_lock, lock
from django_distlock.backends.locmem import LocMemBackend

pytestmark = pytest.mark.usefixtures("memory")


def _is_held(name: str) -> bool:
    return lock(name).locked()


def test_dispatch_of_a_view_holds_it() -> None:
    @method_decorator(distributed_lock("a"), name="dispatch")
    class Held(View):
        def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse(str(_is_held("a")))

    response = Held.as_view()(RequestFactory().get("/"))

    assert isinstance(response, HttpResponse)
    assert response.content == b"True"
    assert not _is_held("a")


async def test_dispatch_of_an_asynchronous_view_holds_it() -> None:
    @method_decorator(distributed_lock("a"), name="dispatch")
    class Held(View):
        async def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse(str(await lock("a").alocked()))

    response = await Held.as_view()(AsyncRequestFactory().get("/"))  # type: ignore[misc]  # a coroutine

    assert response.content == b"True"
    assert not await lock("a").alocked()


async def test_a_decorated_asynchronous_view_holds_it() -> None:
    class Held(View):
        async def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse(str(await lock("a").alocked()))

    view = distributed_lock("a")(Held.as_view())
    response = await view(AsyncRequestFactory().get("/"))  # type: ignore[misc]  # a coroutine

    assert response.content == b"True"
    assert not await lock("a").alocked()


def test_the_holder_says_which_request_it_serves(memory: LocMemBackend) -> None:
    @distributed_lock("a")
    def view(request: HttpRequest) -> str:
        lease = current_lease()
        assert lease
        return lease.holder.purpose

    @distributed_lock("b")
    def work() -> str:
        lease = current_lease()
        assert lease
        return lease.holder.purpose

    assert view(RequestFactory().post("/fees/7/?secret=1")) == "POST /fees/7/"
    assert work().endswith("work")
