"""@distributed_lock in Django REST framework and django-ninja: refusals in JSON, and holders that say which request."""

import json
from typing import Any

import pytest
from django.db import connections
from django.db.transaction import non_atomic_requests
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import ResolverMatch, include, path, resolve
from django.utils.decorators import method_decorator
from ninja import NinjaAPI, Schema
from ninja.decorators import decorate_view
from pytest_django.fixtures import Settings
from rest_framework.decorators import action, api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_distlock import distributed_lock, lock, respond
from django_distlock.decorators import RequestTransactions, find_request
from tests.contract.crew import held_in_thread
from tests.unit.conftest import own_lease

locked = distributed_lock("fee:{account_id}", timeout=0, on_busy=respond())


def said() -> dict[str, str]:
    return {"purpose": own_lease("fee:7").holder.purpose}


class Method(APIView):
    @locked
    def post(self, request: Request, account_id: int) -> Response:
        return Response(said())


class Plain(APIView):
    def post(self, request: Request, account_id: int) -> Response:
        return Response(said())


@method_decorator(locked, name="post")
class DecoratedMethod(Plain): ...


@method_decorator(locked, name="dispatch")
class Dispatch(Plain): ...


def charge(request: Request, account_id: int) -> Response:
    return Response(said())


inside = api_view(["POST"])(locked(charge))
outside = locked(api_view(["POST"])(charge))


class Accounts(ViewSet):
    lookup_field = "account_id"

    @locked
    def update(self, request: Request, account_id: str) -> Response:
        return Response(said())

    @action(detail=True, methods=["post"])
    @locked
    def below(self, request: Request, account_id: str) -> Response:
        return Response(said())

    @locked
    @action(detail=True, methods=["post"])
    def above(self, request: Request, account_id: str) -> Response:
        return Response(said())


class Rate(Schema):
    rate: float = 0.03


ninja = NinjaAPI()


@ninja.post("/operation/{account_id}")
@locked
def operation(request: HttpRequest, account_id: int, rate: Rate) -> dict[str, str]:
    return said()


@ninja.post("/async/{account_id}")
@locked
async def async_operation(request: HttpRequest, account_id: int) -> dict[str, str]:
    return said()


@ninja.post("/view/{account_id}")
@decorate_view(locked)
def operation_as_a_view(request: HttpRequest, account_id: int, rate: Rate) -> dict[str, str]:
    return said()


@locked
async def async_view(request: HttpRequest, account_id: int) -> HttpResponse:
    return JsonResponse(said())


router = SimpleRouter()
router.register("accounts", Accounts, basename="account")
urlpatterns = [
    path("method/<int:account_id>", Method.as_view()),
    path("decorated-method/<int:account_id>", DecoratedMethod.as_view()),
    path("dispatch/<int:account_id>", Dispatch.as_view()),
    path("inside/<int:account_id>", inside),
    path("outside/<int:account_id>", outside),
    path("viewset/", include(router.urls)),
    path("ninja/", ninja.urls),
    path("async-view/<int:account_id>", async_view),
]
#: Where Django REST framework asks the client before the lock is taken.
ASKED = [
    *("/method/7", "/decorated-method/7", "/inside/7"),
    *("/viewset/accounts/7/below/", "/viewset/accounts/7/above/"),
]
ALL = [
    *(*ASKED, "/dispatch/7", "/outside/7", "/async-view/7"),
    *("/ninja/operation/7", "/ninja/async/7", "/ninja/view/7"),
]
JSON = {"accept": "application/json"}


@pytest.fixture(autouse=True)
def _urls(memory: object, settings: Settings) -> None:
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = []


def post(url: str, **headers: str) -> Any:
    return Client().post(url, {"rate": 1}, "application/json", headers=headers)


@pytest.mark.parametrize("url", ALL)
def test_the_holder_says_which_request_it_serves(url: str) -> None:
    response = post(url, **JSON)

    assert response.status_code == 200
    assert json.loads(response.content) == {"purpose": f"POST {url}"}
    assert not lock("fee:7").locked()


@pytest.mark.parametrize("url", ALL)
def test_a_refusal_is_of_the_type_that_the_client_takes_or_has_sent(url: str) -> None:
    with held_in_thread(lock("fee:7", ttl=20)):
        refused, *others = post(url, **JSON), post(url), post(url, accept="*/*")
        in_text = post(url, accept="text/html,application/xhtml+xml,*/*;q=0.8")

    assert json.loads(refused.content)["status"] == 409
    assert int(refused["Retry-After"]) >= 1
    for each in (refused, *others):
        assert (each.status_code, each["Content-Type"]) == (409, "application/problem+json")
    assert (in_text.status_code, in_text["Content-Type"]) == (409, "text/plain; charset=utf-8")


@pytest.mark.parametrize("url", ["/ninja/async/7", "/async-view/7"])
async def test_a_client_of_json_is_refused_so_under_asgi(url: str) -> None:
    with held_in_thread(lock("fee:7", ttl=20)):
        response = await AsyncClient().post(url, headers=JSON)

    assert (response.status_code, response["Content-Type"]) == (409, "application/problem+json")


@pytest.mark.parametrize("url", ASKED)
def test_what_the_rest_framework_has_settled_with_the_client_counts(url: str) -> None:
    with held_in_thread(lock("fee:7", ttl=20)):
        by_the_view = Client().post(url, {"rate": 1})
        by_the_url = Client().post(f"{url}?format=json", headers={"accept": "*/*"})
        for_a_browser = Client().post(f"{url}?format=api", headers={"accept": "*/*"})

    assert by_the_view["Content-Type"] == "application/problem+json"
    assert by_the_url["Content-Type"] == "application/problem+json"
    assert for_a_browser["Content-Type"] == "text/plain; charset=utf-8"


def test_the_other_methods_of_a_viewset_are_views_too() -> None:
    with held_in_thread(lock("fee:7", ttl=20)):
        assert Client().put("/viewset/accounts/7/").status_code == 409


def test_the_request_of_the_rest_framework_has_djangos_inside() -> None:
    request = RequestFactory().get("/")

    assert find_request((Request(request),)) is request
    assert find_request((object(), Request(request))) is request


@pytest.mark.parametrize(("url", "begins"), [("/inside/7", False), ("/outside/7", True)])
def test_transactions_begin_only_in_the_view_that_django_leaves_them_to(
    monkeypatch: pytest.MonkeyPatch, url: str, begins: bool
) -> None:
    def body(*args: Any) -> None: ...

    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    request = RequestFactory().post(url)
    request.resolver_match = resolve(url)
    run = RequestTransactions(body).inside

    for args in [(request,), (Request(request),), (object(), Request(request))]:
        assert (run(args) is not body) == begins

    # In a middleware, no address is resolved yet, and Django may begin the transaction of the view later.
    assert run((RequestFactory().post(url),)) is body


def test_a_function_that_a_view_calls_begins_no_transaction_that_the_view_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(*args: Any) -> None: ...
    def view(*args: Any) -> None: ...
    def exempt(*args: Any) -> None: ...

    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    request = RequestFactory().post("/")
    for resolved, begins in [(view, True), (non_atomic_requests(exempt), False)]:
        request.resolver_match = ResolverMatch(distributed_lock("view")(resolved), (), {})
        assert (RequestTransactions(body).inside((request,)) is not body) == begins
