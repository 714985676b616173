"""@idempotent: which requests are repetitions, what is stored, and what clients are told."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import AnonymousUser, Group, User
from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.test.client import encode_multipart
from django.utils import translation
from django.utils.asyncio import async_unsafe
from django.utils.functional import SimpleLazyObject
from django.views import View
from django.views.decorators.csrf import csrf_exempt, ensure_csrf_cookie

from django_distlock import LockLost, distributed_lock, force_release, respond
from django_distlock.contrib.idempotency import LARGEST, idempotent
from tests.contract.crew import start
from tests.integration.aliases import DOWN
from tests.unit.conftest import own_lease

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

pytestmark = pytest.mark.usefixtures("memory")
ADA, BOB = User(pk=7), User(pk=8)
JSON = "application/json"
#: How often views have run.
runs: itertools.count[int]


class BrokenCache(LocMemCache):
    """Fails at the call of a method: of get(), or of add()."""

    broken = ""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken == "get once":
            BrokenCache.broken = ""
            return None
        if self.broken == "second get":
            BrokenCache.broken = "get"
            return None
        if self.broken == "get":
            raise ConnectionError("the cache is down")
        return super().get(*args, **kwargs)

    def add(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken == "add":
            raise ConnectionError("the cache is down")
        return self.broken != "silent add" and super().add(*args, **kwargs)


@pytest.fixture(autouse=True)
def cache(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> BrokenCache:
    """An empty cache, which a test may break."""
    settings.CACHES = {"default": {"BACKEND": f"{__name__}.BrokenCache"}}
    monkeypatch.setattr(BrokenCache, "broken", "")
    found = caches["default"]
    assert isinstance(found, BrokenCache)
    found.clear()
    global runs  # noqa: PLW0603 - counted by the views below
    runs = itertools.count(1)
    return found


def request(
    body: Any = '{"amount": 5}',
    path: str = "/pay/",
    key: str | None = "k",
    *,
    method: str = "POST",
    user: Any = ADA,
    type: str = JSON,  # noqa: A002
    **headers: str,
) -> Any:
    if key is not None:
        headers["idempotency-key"] = key
    made: Any = RequestFactory().generic(method, path, body, type, headers=headers)
    made.user = user
    return made


def charge(request: HttpRequest) -> HttpResponse:
    return HttpResponse(f"paid {next(runs)}", status=201)


async def acharge(request: HttpRequest) -> HttpResponse:
    return charge(request)


pay, apay = idempotent()(charge), idempotent()(acharge)


def content(response: Any) -> tuple[int, str]:
    return response.status_code, response.content.decode()


def texts(*responses: Any) -> list[str]:
    return [content(response)[1] for response in responses]


def titled(response: Any) -> tuple[int, str]:
    """Return the status, and the end of the problem's type."""
    details = json.loads(response.content)
    assert response["Content-Type"] == "application/problem+json"
    assert details["status"] == response.status_code
    return response.status_code, details["type"].rpartition("/")[2]


# Repetitions.


def test_of_two_decorators_the_outer_one_counts() -> None:
    async def inner(request: HttpRequest) -> HttpResponse:
        return pay(request)

    twice = idempotent(scope="all")(pay)
    atwice = idempotent()(idempotent(scope="all")(inner))
    asked = request()
    for call in (twice, async_to_sync(atwice)):
        first, second = call(asked), call(asked)
        assert content(first) == content(second)
        assert first.status_code == 201
        assert second["Idempotency-Replayed"] == "true"


def test_another_view_with_a_key_of_its_own_has_its_own_answers() -> None:
    @idempotent()
    def pay_all(request: HttpRequest) -> HttpResponse:
        part = copy.copy(request)
        part.META = {**request.META, "HTTP_IDEMPOTENCY_KEY": "part"}
        vars(part).pop("headers", None)
        return HttpResponse(" and ".join(texts(pay(part), pay(part))))

    assert content(pay_all(request())) == (200, "paid 1 and paid 1")


@pytest.mark.parametrize("header", ["", "X Key", "HTTP_X_KEY", 5])
def test_a_header_that_no_client_can_send_is_refused(header: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"such as Idempotency-Key, not {header!r}")):
        idempotent(header=header)


def test_a_repetition_gets_the_answer_of_the_first_request_whatever_its_bytes() -> None:
    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        response = HttpResponse([bytes(range(256)), next(runs)], status=207)
        del response["Content-Type"]
        response["X-Name"] = "Zoë"
        return response

    first, second = view(request()), view(request())

    assert (second.content, second.status_code) == (first.content, 207)
    assert "Idempotency-Replayed" not in first
    assert second.headers == {**first.headers, "Idempotency-Replayed": "true"}


def test_each_key_and_each_user_has_an_answer() -> None:
    # A key may be a string of structured fields; a user that is no User may have the number of one.
    lazy_ada, group = SimpleLazyObject(lambda: ADA), Group(pk=ADA.pk)
    same = [request(), request(key='"k"'), request(key=" k "), request(user=lazy_ada)]
    others = [request(key="K"), request(key="~" * 255), request(user=BOB), request(user=group)]

    assert texts(*map(pay, same)) == ["paid 1"] * 4
    assert texts(*map(pay, others)) == ["paid 2", "paid 3", "paid 4", "paid 5"]


@pytest.mark.parametrize(
    "key", ["", '""', "a b", "a,b", '"a", "b"', 'a"', "a\\b", '"k";p=1', "é", "x" * 256]
)
def test_a_wrong_key_is_refused(key: str) -> None:
    assert titled(pay(request(key=key))) == (400, "idempotency.html#wrong-key")


def test_the_key_may_be_in_another_header() -> None:
    view = idempotent(header="X-GitHub-Delivery")(charge)

    def send(delivery: str, **terms: Any) -> Any:
        return view(request(**{"x-github-delivery": delivery}, **terms))

    assert texts(send("a"), send("a", key="another"), send("b")) == ["paid 1", "paid 1", "paid 2"]
    missing, reused = (
        json.loads(refused.content)["title"] for refused in (view(request()), send("a", body="{}"))
    )
    assert missing == "This request needs the header X-GitHub-Delivery."
    assert reused.startswith("This X-GitHub-Delivery was used for a different request")


def test_without_a_key_a_request_is_refused_or_passes() -> None:
    view = idempotent(required=False)(charge)

    assert titled(pay(request(key=None))) == (400, "idempotency.html#missing-key")
    assert texts(view(request(key=None)), view(request(key=None))) == ["paid 1", "paid 2"]
    assert texts(view(request()), view(request())) == ["paid 3", "paid 3"]


def test_people_are_told_in_their_language() -> None:
    with translation.override("de"):
        refused = pay(request(key=None, type="text/plain", accept="text/html"))

    assert content(refused) == (400, "Diese Anfrage braucht den Header Idempotency-Key.")
    assert refused["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_safe_methods_pass(method: str) -> None:
    asked = request("", method=method, key=None)

    assert texts(pay(asked), pay(asked)) == ["paid 1", "paid 2"]


@pytest.mark.parametrize(
    "other",
    [
        {"body": '{"amount": 6}'},
        {"path": "/refund/"},
        {"path": "/pay/?now=1"},
        {"method": "PUT"},
        {"type": "text/json"},
    ],
)
def test_another_request_with_the_key_is_refused(other: dict[str, Any]) -> None:
    pay(request())

    refused = pay(request(**{"accept": JSON, **other}))

    assert titled(refused) == (422, "idempotency.html#other-request")
    assert content(pay(request())) == (201, "paid 1")


def form(file: bytes, boundary: str, method: str, **fields: str) -> Any:
    data = {"file": SimpleUploadedFile("a.txt", file), **fields}
    body = encode_multipart(boundary, data)
    return request(body, method=method, type=f"multipart/form-data; boundary={boundary}")


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_form_with_files_is_the_same_with_another_boundary(method: str) -> None:
    read: list[bytes] = []

    @idempotent()
    def view(request: Any) -> HttpResponse:
        read.extend(file.read() for file in request.FILES.values())
        return HttpResponse()

    assert view(form(b"1", "aaa", method, to="x")).status_code == 200
    assert view(form(b"1", "bbb", method, to="x")).headers["Idempotency-Replayed"] == "true"
    assert view(form(b"2", "aaa", method, to="x")).status_code == 422
    assert view(form(b"1", "aaa", method, to="y")).status_code == 422
    assert read == [b"1"] * (method == "POST")


def test_a_form_is_compared_also_if_it_was_read_before() -> None:
    for file, status in [(b"1", 201), (b"1", 201), (b"2", 422)]:
        sent = form(file, "aaa", "POST")
        assert sent.POST is not None
        assert pay(sent).status_code == status


# Whose keys.


@pytest.mark.parametrize("user", [AnonymousUser(), None])
def test_a_request_of_nobody_is_an_error_that_says_what_to_do(user: Any) -> None:
    with pytest.raises(ValueError, match=r"charge\(\): a request is of nobody .*, or give scope="):
        pay(request(user=user))


@pytest.mark.parametrize("found", ["", None, 7])
def test_so_is_one_whose_scope_is_no_text(found: Any) -> None:
    with pytest.raises(ValueError, match="is of nobody"):
        idempotent(scope=lambda request: found)(charge)(request())


def test_a_scope_is_a_text_or_a_function_of_the_request() -> None:
    shared = idempotent(scope="webhooks")(charge)
    by_token = idempotent(scope=lambda request: request.headers["authorization"])(charge)

    answers = texts(
        shared(request()),
        shared(request(user=BOB)),
        by_token(request(authorization="a")),
        by_token(request(authorization="b")),
        by_token(request(authorization="a", user=BOB)),
        idempotent(scope="7")(charge)(request()),
        pay(request()),
    )
    assert [int(text.removeprefix("paid ")) for text in answers] == [1, 1, 2, 3, 2, 4, 5]


# What is stored.


def test_cookies_are_for_the_first_client_alone() -> None:
    @idempotent(scope="shared")
    @ensure_csrf_cookie
    def view(request: HttpRequest) -> HttpResponse:
        response = HttpResponse()
        response.set_cookie("sessionid", "secret")
        response.headers["Set-Cookie"] = "other=secret"
        return response

    first, second = view(request()), view(request(user=BOB))

    assert set(first.cookies) == {"csrftoken", "sessionid"}
    assert not second.cookies
    assert "Set-Cookie" not in second.headers
    assert second["Vary"] == "Cookie"


def test_in_the_cache_it_is_a_text_that_shows_no_key_and_no_scope(
    cache: BrokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[Any] = []

    def add(self: BrokenCache, *args: Any) -> bool:
        stored.append(args)
        return True

    monkeypatch.setattr(BrokenCache, "add", add)
    view = idempotent(keep=timedelta(minutes=1), scope=lambda request: "secret")(charge)

    view(request(key="hidden"))

    [(entry, text, seconds)] = stored
    assert isinstance(text, str)
    assert seconds == 60
    assert "secret" not in f"{entry}{text}"
    assert "hidden" not in f"{entry}{text}"


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        *((status, {}) for status in (200, 204, 302, 400, 403, 404, 422)),
        (202, {"Retry-After": "9"}),
    ],
)
def test_answers_are_kept(status: int, headers: dict[str, str]) -> None:
    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        next(runs)
        return HttpResponse(status=status, headers=headers)

    assert {view(request()).status_code for _ in range(2)} == {status}
    assert next(runs) == 2


def test_a_redirect_can_be_followed_by_the_test_client() -> None:
    @idempotent()
    def view(request: HttpRequest) -> Any:
        return HttpResponseRedirect("/done/")

    assert [view(request()).url for _ in range(2)] == ["/done/", "/done/"]
    assert not hasattr(pay(request(key="other")), "url")


@pytest.mark.parametrize(
    "response",
    [
        *(HttpResponse(status=status) for status in (401, 408, 409, 423, 425, 429, 500, 503)),
        HttpResponse(status=403, headers={"Retry-After": "9"}),
    ],
    ids=lambda response: response.status_code,
)
def test_answers_that_ask_to_send_it_again_are_not_kept(response: HttpResponse) -> None:
    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        return response if next(runs) == 1 else HttpResponse("done")

    assert view(request()) is response
    assert content(view(request())) == (200, "done")


def test_of_an_answer_that_is_too_large_a_repetition_learns_that_it_was_done() -> None:
    largest: Any = idempotent()(lambda request: HttpResponse(b"x" * LARGEST))
    larger: Any = idempotent()(lambda request: HttpResponse(b"x" * (LARGEST + 1)))

    assert [len(largest(request()).content) for _ in range(2)] == [LARGEST] * 2
    assert len(larger(request(key="a")).content) == LARGEST + 1
    assert titled(larger(request(key="a"))) == (410, "idempotency.html#too-large")


def test_a_streaming_response_is_refused_and_closed() -> None:
    closed = threading.Event()

    @idempotent()
    def view(request: HttpRequest) -> Any:
        response = StreamingHttpResponse([b"x"])
        response._resource_closers.append(closed.set)  # type: ignore[attr-defined]  # as files are closed
        return response

    with pytest.raises(TypeError, match=r"view\(\) returned .*idempotent\(\) cannot store it"):
        view(request())
    assert closed.is_set()


def test_what_is_no_response_is_refused() -> None:
    with pytest.raises(TypeError, match=r"returned dict, no response.*decorate_view"):
        idempotent()(lambda request: {"paid": 5})(request())


def test_a_template_is_rendered_before_it_is_stored(settings: Settings) -> None:
    settings.TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates"}]

    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        template: Any = engines["django"].from_string("paid {{ number }}")
        return TemplateResponse(request, template, {"number": next(runs)})

    assert content(view(request())) == content(view(request())) == (200, "paid 1")


# While it runs.


def test_while_the_first_request_runs_others_are_told_to_come_again() -> None:
    begun, over = threading.Event(), threading.Event()

    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        begun.set()
        over.wait(20)
        return charge(request)

    first = start(lambda: view(request()))
    assert begun.wait(20)

    refused = view(request())
    assert titled(refused) == (409, "idempotency.html#under-way")
    assert 1 <= int(refused["Retry-After"]) <= 5
    over.set()
    assert content(first.result(20)) == content(view(request())) == (201, "paid 1")


def test_what_was_stored_before_the_lock_was_free_is_found_under_it() -> None:
    pay(request())
    BrokenCache.broken = "get once"

    assert pay(request())["Idempotency-Replayed"] == "true"


def test_the_holder_says_which_request_it_serves() -> None:
    view: Any = idempotent()(lambda request: HttpResponse(own_lease().holder.purpose))

    assert content(view(request())) == (200, "POST /pay/")


def lose(request: HttpRequest) -> HttpResponse:
    force_release(own_lease().name)
    return charge(request)


async def alose(request: HttpRequest) -> HttpResponse:
    return lose(request)


@pytest.mark.parametrize(
    "view", [idempotent()(lose), async_to_sync(idempotent()(alose))], ids=["sync", "async"]
)
def test_a_lost_lock_is_an_error_and_work_without_a_transaction_is_not_done_again(
    view: Callable[..., Any],
) -> None:
    with pytest.raises(LockLost):
        view(request())
    assert content(view(request())) == (201, "paid 1")


@pytest.mark.parametrize("view", [lose, alose], ids=["sync", "async"])
def test_a_release_that_fails_keeps_no_answer_of_a_view_that_ran_without_the_cache(
    view: Any,
) -> None:
    once = idempotent(if_down="run")(view)
    pays = async_to_sync(once) if view is alose else once

    BrokenCache.broken = "second get"  # under the lock

    assert content(pays(request())) == (201, "paid 1")


# Servers that are down.


@pytest.mark.parametrize("down", ["cache", "locks"])
def test_without_the_cache_or_the_locks_it_is_run_only_if_that_is_said(
    down: str, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    view = idempotent(if_down="run")(charge)
    if down == "cache":
        BrokenCache.broken = "get"
    else:
        settings.DISTLOCK = {"default": DOWN}

    assert titled(pay(request())) == (503, "idempotency.html#unavailable")
    assert "Whether POST /pay/ was done before is not known: " in caplog.text
    assert content(view(request())) == (201, "paid 1")
    assert content(view(request())) == (201, "paid 2" if down == "cache" else "paid 1")


@pytest.mark.parametrize("broken", ["add", "silent add"])
def test_if_the_cache_fails_after_the_view_the_client_gets_the_answer(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    BrokenCache.broken = broken

    assert content(pay(request())) == (201, "paid 1")
    [record] = [each for each in caplog.records if each.name == "django_distlock"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("The answer to POST /pay/ was not stored, a repetition")
    assert content(pay(request())) == (201, "paid 2")


# Decorators and classes.


class BareMethod(View):
    @idempotent()
    def post(self, request: HttpRequest) -> HttpResponse:
        return charge(request)


locked: Any = distributed_lock("work", timeout=0, on_busy=respond())
above: Any = csrf_exempt(idempotent()(locked(charge)))
below: Any = locked(idempotent()(csrf_exempt(charge)))


@pytest.mark.parametrize(
    "view", [BareMethod.as_view(), above, below], ids=["method", "above", "below"]
)
def test_beside_other_decorators_views_are_run_once(view: Callable[..., Any]) -> None:
    assert content(view(request())) == content(view(request())) == (201, "paid 1")
    assert content(view(request(user=BOB))) == (201, "paid 2")


def test_marks_of_other_decorators_stay() -> None:
    assert above.csrf_exempt
    assert below.csrf_exempt


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"keep": 0}, ValueError),
        ({"keep": "1d"}, TypeError),
        ({"scope": 7}, TypeError),
        ({"if_down": "pass"}, ValueError),
    ],
)
def test_wrong_words_are_refused(words: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(words))):
        idempotent(**words)


def test_a_class_and_what_takes_no_request_are_refused() -> None:
    with pytest.raises(TypeError, match="method_decorator"):
        idempotent()(BareMethod)
    with pytest.raises(TypeError, match="got no request"):
        pay("no request")  # type: ignore[arg-type]


# Async views.


def arequest(**headers: str) -> Any:
    made: Any = AsyncRequestFactory().post(
        "/pay/", "{}", JSON, headers={"idempotency-key": "k", **headers}
    )
    made.user = SimpleLazyObject(found_by_query)
    made.auser = sync_to_async(found_by_query)
    return made


@async_unsafe
def found_by_query() -> User:
    return ADA


async def test_an_async_view_is_run_once() -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @idempotent()
    async def slow(request: HttpRequest) -> HttpResponse:
        has_begun.set()
        await asyncio.wait_for(may_end.wait(), 20)
        return charge(request)

    first = asyncio.create_task(slow(arequest()))
    await asyncio.wait_for(has_begun.wait(), 20)
    refused = await asyncio.gather(*(slow(arequest()) for _ in range(2)))
    may_end.set()

    assert [each.status_code for each in refused] == [409, 409]
    assert content(await first) == content(await slow(arequest())) == (201, "paid 1")


async def test_dispatch_of_an_async_view_is_one() -> None:
    class Pay(View):
        async def post(self, request: HttpRequest) -> HttpResponse:
            return charge(request)

        @idempotent()
        def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(request, *args, **kwargs)

    view: Any = Pay.as_view()
    answers = [content(await view(arequest())) for _ in range(2)]

    assert answers == [(201, "paid 1"), (201, "paid 1")]


async def test_an_async_request_is_of_the_user_that_a_middleware_has_set() -> None:
    one, other = arequest(), arequest()
    other.user = BOB  # request.auser() is still the user of the session

    assert [content(await apay(each))[1] for each in (one, other)] == ["paid 1", "paid 2"]


async def test_an_async_scope_is_awaited() -> None:
    async def scope(request: HttpRequest) -> str:
        return request.headers["authorization"]

    view = idempotent(scope=scope)(acharge)
    answers = [await view(arequest(authorization=token)) for token in "aab"]

    assert texts(*answers) == ["paid 1", "paid 1", "paid 2"]


async def test_an_async_view_goes_on_if_its_client_does_not_wait() -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    @idempotent()
    async def view(request: HttpRequest) -> HttpResponse:
        begun.set()
        await over.wait()
        return charge(request)

    first = asyncio.create_task(view(arequest()))
    await begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first

    assert (await view(arequest())).status_code == 409
    over.set()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
    assert (await view(arequest()))["Idempotency-Replayed"] == "true"


async def test_an_async_view_refuses_as_others_do() -> None:
    @idempotent()
    async def view(request: HttpRequest) -> Any:
        return StreamingHttpResponse()

    with pytest.raises(TypeError, match="cannot store it"):
        await view(arequest())
    BrokenCache.broken = "get"
    assert (await view(arequest())).status_code == 503
