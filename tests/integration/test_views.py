"""Views under @distributed_lock: sync, async, class-based, streaming; and transactions."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any, cast

import pytest
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import AsyncClient, Client
from django.urls import include, path, reverse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from pytest_django.fixtures import Settings
from rest_framework.decorators import api_view
from rest_framework.request import Request

from django_distlock import current_lease, distributed_lock, lock, locks
from django_distlock.signals import lock_acquired, lock_released
from testproject.fees import after
from testproject.models import Account
from testproject.services import audit, open_account
from tests.contract.crew import listening, waiting_for
from tests.fixtures.eventually import aeventually, eventually

OPENING = Decimal("1000.00")
NAME = "integration:view"
JSON = {"accept": "application/json"}

#: What happened to the lock and in the body, and whether a transaction was open then.
Journal = list[tuple[str, bool]]
journal: Journal = []


def note(what: str) -> HttpResponse:
    journal.append((what, connection.in_atomic_block))
    return HttpResponse("done")


@distributed_lock(NAME)
def function_view(request: HttpRequest) -> HttpResponse:
    return note("body")


@transaction.non_atomic_requests
@distributed_lock(NAME)
def non_atomic_outside(request: HttpRequest) -> HttpResponse:
    return note("body")


@distributed_lock(NAME)
@transaction.non_atomic_requests
def non_atomic_inside(request: HttpRequest) -> HttpResponse:
    return note("body")


@method_decorator(transaction.non_atomic_requests, name="dispatch")
class NonAtomicGet(View):
    @distributed_lock(NAME)
    def get(self, request: HttpRequest) -> HttpResponse:
        return note("body")


@method_decorator([transaction.non_atomic_requests, distributed_lock(NAME)], name="dispatch")
class NonAtomicDispatchOutside(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return note("body")


@method_decorator([distributed_lock(NAME), transaction.non_atomic_requests], name="dispatch")
class NonAtomicDispatchInside(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return note("body")


@transaction.non_atomic_requests
def non_atomic_with_a_service(request: HttpRequest) -> HttpResponse:
    return DecoratedMethod().dispatch(request)


@transaction.non_atomic_requests
@api_view(["GET"])
@distributed_lock(NAME)
def non_atomic_rest(request: Request) -> HttpResponse:
    return note("body")


@distributed_lock(NAME)
@api_view(["GET"])
def rest(request: Request) -> HttpResponse:
    return note("body")


@method_decorator(distributed_lock(NAME), name="dispatch")
class DecoratedDispatch(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return note("body")


class DecoratedMethod(View):
    @distributed_lock(NAME)
    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return note("body")


@distributed_lock(NAME)
def failing_view(request: HttpRequest, account_id: int) -> HttpResponse:
    Account.objects.filter(pk=account_id).update(balance=0)
    raise ZeroDivisionError


@distributed_lock(NAME)
def writing_view(request: HttpRequest, account_id: int) -> HttpResponse:
    Account.objects.filter(pk=account_id).update(balance=0)
    return note("body")


async def is_held() -> HttpResponse:
    return JsonResponse({"held": await lock(NAME).alocked()})


@distributed_lock(NAME)
async def async_view(request: HttpRequest) -> HttpResponse:
    return await is_held()


@method_decorator(distributed_lock(NAME), name="dispatch")
class AsyncDispatch(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return await is_held()


@method_decorator([distributed_lock(NAME), csrf_exempt], name="dispatch")
class AsyncList(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return await is_held()


class AsyncMethod(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return await is_held()

    @distributed_lock(NAME)
    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return super().dispatch(request, *args, **kwargs)


@distributed_lock(NAME)
async def async_stream(request: HttpRequest) -> StreamingHttpResponse:
    async def lines() -> AsyncIterator[str]:
        yield "one\n"
        yield "two\n"

    return StreamingHttpResponse(lines(), headers={"ETag": '"one"'})


@distributed_lock("integration:around")
@distributed_lock(NAME)
def stream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(["one\n", "two\n"], headers={"ETag": '"one"'})


def told() -> str:
    """Tell what the code of a body has of the lock of its view: it enters it again."""
    with lock(NAME, timeout=0) as lease:
        return f"{current_lease(NAME) is lease} {lease.held}\n"


def lines_under_the_lock() -> Iterator[str]:
    try:
        yield told()
        with lock(NAME, timeout=0):
            yield told()
    finally:
        note(told())  # an error here would be seen by nobody: Django drops those of close()


@distributed_lock(NAME)
def stream_that_locks(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(lines_under_the_lock())


urlpatterns = [
    path("", include("testproject.urls")),
    path("function/", function_view),
    path("non-atomic-outside/", non_atomic_outside),
    path("non-atomic-inside/", non_atomic_inside),
    path("non-atomic-get/", NonAtomicGet.as_view()),
    path("non-atomic-dispatch-outside/", NonAtomicDispatchOutside.as_view()),
    path("non-atomic-dispatch-inside/", NonAtomicDispatchInside.as_view()),
    path("non-atomic-url/", transaction.non_atomic_requests(DecoratedDispatch.as_view())),
    path("non-atomic-again/", transaction.non_atomic_requests(csrf_exempt(function_view))),
    path("non-atomic-service/", non_atomic_with_a_service),
    path("non-atomic-rest/", non_atomic_rest),
    path("rest/", rest),
    path("decorated-dispatch/", DecoratedDispatch.as_view()),
    path("decorated-method/", DecoratedMethod.as_view()),
    path("failing/<int:account_id>/", failing_view),
    path("writing/<int:account_id>/", writing_view),
    path("async/", async_view),
    path("async-dispatch/", AsyncDispatch.as_view()),
    path("async-method/", AsyncMethod.as_view()),
    path("async-list/", AsyncList.as_view()),
    path("async-stream/", async_stream),
    path("stream/", stream),
    path("locking/", stream_that_locks),
]
pytestmark = pytest.mark.urls(__name__)

ATOMIC_KINDS = ("/function/", "/rest/", "/decorated-dispatch/", "/decorated-method/")
ASYNC_KINDS = ("/async/", "/async-dispatch/", "/async-method/", "/async-list/")


@pytest.fixture
def account() -> Account:
    return open_account("Ada", OPENING)


@pytest.fixture
def events() -> Iterator[Journal]:
    """The journal, in which receivers of the signals write too."""

    def acquired(name: str, **_: Any) -> None:
        if name == NAME:
            note("acquired")

    def released(name: str, **_: Any) -> None:
        if name == NAME:
            note("released")

    journal.clear()
    with listening(lock_acquired, acquired), listening(lock_released, released):
        yield journal


@pytest.fixture
def atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)


def content(answer: object) -> Iterator[bytes]:
    # The stubs' answers of clients know no streams.
    assert isinstance(answer, StreamingHttpResponse)
    assert not answer.is_async
    return iter(cast("Iterator[bytes]", answer.streaming_content))


def balance_elsewhere(account: Account) -> Decimal:
    """Return what another connection sees: what is committed."""

    def look() -> Decimal:
        try:
            return Account.objects.get(pk=account.pk).balance
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as other:
        return other.submit(look).result()


def charge_at_once(kinds: list[str], account: Account, *, each: int) -> list[int]:
    """Post to each kind of view in a thread of its own, *each* times; return the statuses."""

    def post(kind: str) -> list[int]:
        client, url = Client(headers=JSON), reverse(kind, args=[account.pk])
        try:
            return [eventually(lambda: accepted(client, url), 30) for _ in range(each)]
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(kinds)) as pool:
        return [status for statuses in pool.map(post, kinds) for status in statuses]


def accepted(client: Client, url: str) -> int:
    """Return the status of an answer, or 0 if the fee is to be asked for again."""
    status = client.post(url).status_code
    return 0 if status == 409 else status


# The demo's pages.


@pytest.mark.parametrize("kind", ["charge", "acharge", "charge-unlocked"])
def test_each_request_charges_one_fee(client: Client, account: Account, kind: str) -> None:
    url = reverse(kind, args=[account.pk])

    answers = [client.post(url, headers=JSON).json() for _ in range(2)]

    assert answers == [{"fee": "30.00"}, {"fee": "29.10"}]
    account.refresh_from_db()
    assert account.balance == after(2, OPENING) == Decimal("940.90")


def test_sync_and_async_requests_at_once_lose_no_update(account: Account) -> None:
    statuses = charge_at_once(["charge", "acharge", "charge", "acharge"], account, each=4)

    assert statuses == [200] * 16
    assert audit(account.pk).lost == 0
    assert audit(account.pk).balance == after(16, OPENING)


def test_unlocked_requests_at_once_do_lose_updates(account: Account) -> None:
    statuses = charge_at_once(["charge-unlocked"] * 4, account, each=4)

    assert statuses == [200] * 16
    assert audit(account.pk).lost > 0
    assert audit(account.pk).wrong > 0


# Transactions.


@pytest.mark.parametrize("url", ATOMIC_KINDS)
@pytest.mark.parametrize("is_atomic", [True, False])
def test_the_transaction_of_atomic_requests_is_inside_the_lock(
    client: Client, events: Journal, url: str, is_atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", is_atomic)

    client.get(url)

    assert events == [("acquired", False), ("body", is_atomic), ("released", False)]


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize(
    "url",
    [
        "/non-atomic-outside/",
        "/non-atomic-inside/",
        "/non-atomic-get/",
        "/non-atomic-dispatch-outside/",
        "/non-atomic-dispatch-inside/",
        "/non-atomic-url/",
        "/non-atomic-again/",
        "/non-atomic-service/",
        "/non-atomic-rest/",
    ],
)
def test_a_view_marked_non_atomic_stays_so(client: Client, events: Journal, url: str) -> None:
    client.get(url)

    assert events == [("acquired", False), ("body", False), ("released", False)]


@pytest.mark.usefixtures("atomic_requests")
def test_what_a_view_wrote_is_committed_when_the_lock_is_released(
    client: Client, account: Account
) -> None:
    seen: list[Decimal] = []

    def look(**_: Any) -> None:
        seen.append(balance_elsewhere(account))

    with listening(lock_released, look):
        client.get(f"/writing/{account.pk}/")

    assert seen == [Decimal(0)]


@pytest.mark.usefixtures("atomic_requests")
def test_what_a_failed_view_wrote_is_rolled_back_before_the_lock_is_released(
    client: Client, events: Journal, account: Account
) -> None:
    with pytest.raises(ZeroDivisionError):
        client.get(f"/failing/{account.pk}/")

    assert events == [("acquired", False), ("released", False)]
    assert balance_elsewhere(account) == OPENING
    assert not lock(NAME).locked()


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("url", ASYNC_KINDS)
async def test_django_refuses_async_views_under_atomic_requests_as_ever(
    async_client: AsyncClient, url: str
) -> None:
    with pytest.raises(RuntimeError, match="cannot use ATOMIC_REQUESTS with async views"):
        await async_client.get(url)

    assert not await lock(NAME).alocked()


@pytest.mark.parametrize("url", ASYNC_KINDS)
async def test_an_async_view_holds_the_lock_while_it_runs(
    async_client: AsyncClient, url: str
) -> None:
    answer = await async_client.get(url)

    assert answer.json() == {"held": True}
    assert not await lock(NAME).alocked()


@pytest.mark.parametrize("url", ASYNC_KINDS)
async def test_an_async_view_that_waits_does_not_keep_the_event_loop_from_releasing_the_lock(
    async_client: AsyncClient, url: str
) -> None:
    async with lock(NAME):
        asking = asyncio.create_task(async_client.get(url))
        await aeventually(lambda: waiting_for(locks["default"], NAME))

    assert (await asking).json() == {"held": True}


@pytest.mark.parametrize("url", ASYNC_KINDS)
def test_an_async_view_served_by_wsgi_holds_the_lock_as_well(client: Client, url: str) -> None:
    answer = client.get(url)

    assert answer.json() == {"held": True}
    assert not lock(NAME).locked()


# Streaming.


def test_a_streaming_response_holds_the_lock_until_its_last_line_or_its_end(
    client: Client, account: Account
) -> None:
    url, fee = reverse("statement", args=[account.pk]), lock(f"fee:{account.pk}")

    lines = content(client.get(url))
    assert next(lines) == b"charged at,amount\n"
    assert fee.locked()
    assert list(lines) == [b"balance,1000.00\n"]
    assert not fee.locked()

    unread = client.get(url)
    assert fee.locked()
    unread.close()
    assert not fee.locked()


async def test_an_async_stream_holds_the_lock_until_its_last_line(
    async_client: AsyncClient,
) -> None:
    answer = await async_client.get("/async-stream/")

    assert await lock(NAME).alocked()
    assert isinstance(answer, StreamingHttpResponse)
    assert [line async for line in answer] == [b"one\n", b"two\n"]
    assert not await lock(NAME).alocked()


@pytest.mark.parametrize("url", ["/stream/", "/async-stream/"])
def test_a_stream_that_a_middleware_replaces_releases_the_lock(
    client: Client, settings: Settings, events: Journal, url: str
) -> None:
    settings.MIDDLEWARE = ["django.middleware.http.ConditionalGetMiddleware"]

    assert client.get(url, headers={"if-none-match": '"one"'}).status_code == 304
    assert eventually(lambda: [what for what, _ in events] == ["acquired", "released"])


def test_the_body_of_a_stream_holds_the_lock_of_its_view(client: Client) -> None:
    answer = client.get("/locking/")

    # The server may make each part in another thread.
    lines = content(answer)
    with ThreadPoolExecutor(1) as pool:
        assert [next(lines), pool.submit(next, lines).result()] == [b"True True\n"] * 2
    assert lock(NAME).acquire(timeout=0) is None
    assert list(lines) == []
    assert not lock(NAME).locked()
