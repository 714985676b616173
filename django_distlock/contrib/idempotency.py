"""@idempotent: a request that is sent again with the same Idempotency-Key gets the answer of the first one."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from asgiref.sync import sync_to_async
from django.core.cache import DEFAULT_CACHE_ALIAS, caches
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.db import BaseDatabaseCache
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.filebased import FileBasedCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.checks import CheckMessage, Error, Warning as CheckWarning
from django.core.files.base import File
from django.db import router
from django.http import HttpRequest, HttpResponse
from django.http.request import RawPostDataException
from django.http.response import HttpResponseBase, ResponseHeaders
from django.utils.translation import gettext_lazy

from django_distlock.backends.cache_alias import cache_class
from django_distlock.conf import DEFAULT_ALIAS, flag, seconds
from django_distlock.decorators import (
    Decorator,
    RequestTransactions,
    find_request,
    is_async,
    of_view,
    problem,
    retry_after,
)
from django_distlock.engine.background import kept_task
from django_distlock.exceptions import DOCS, LockBackendError, LockError, LockNotAcquired
from django_distlock.ground.naming import title_of, warn
from django_distlock.handler import declared
from django_distlock.lock import Terms
from django_distlock.transactions import call_at_end, call_at_rollback, still_open

from .cache import noted

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from django_distlock.backends.base import BaseLockBackend
    from django_distlock.engine.lease import Lease

    Seconds = float | timedelta
    Scope = str | Callable[[HttpRequest], str | Awaitable[str]] | None

HEADER, REPLAYED = "Idempotency-Key", "Idempotency-Replayed"
#: Bytes of the largest body that is stored; in the cache it is a third longer, and memcached takes at most 1 MB.
LARGEST = 500_000
_HEADER = re.compile(r"(?!HTTP_)[A-Za-z0-9_-]+")
#: Visible ASCII without quotes, commas and backslashes: so a String of RFC 8941 needs no escapes, and two headers
#: that a server has joined do not pass as one key.
_KEY = re.compile(r"[!#-+\--\[\]-~]{1,255}", re.ASCII)
_SAFE = {"GET", "HEAD", "OPTIONS", "TRACE"}
#: Answers after which a client sends the same request again, after a login or later; they are not stored.
_PASSING = {401, 408, 409, 423, 425, 429}
_PAGE = f"{DOCS}howto/idempotency.html#"
#: The texts of refusals, by their anchors on that page.
_TITLES = {
    "missing-key": gettext_lazy("This request needs the header %(header)s."),
    "wrong-key": gettext_lazy(
        "A value of %(header)s has 1 to 255 visible ASCII characters, without quotes, commas and backslashes."
    ),
    "under-way": gettext_lazy(
        "The first request with this %(header)s is still being worked on; try again later."
    ),
    "other-request": gettext_lazy(
        "This %(header)s was used for a different request; use a new one."
    ),
    "too-large": gettext_lazy("This was done before, but its answer was too large to be kept."),
    "unavailable": gettext_lazy(
        "Whether this was done before cannot be found out now; try again later."
    ),
}
#: The attribute of a request that an idempotent() handles: another idempotent() inside it lets the request pass.
_MARK = "distlock_is_idempotent"


def idempotent(
    *,
    keep: Seconds = timedelta(days=1),
    cache: str = DEFAULT_CACHE_ALIAS,
    using: str = DEFAULT_ALIAS,
    scope: Scope = None,
    header: str = HEADER,
    required: bool = True,
    if_down: Literal["refuse", "run"] = "refuse",
) -> Decorator:
    """Run a view once for each Idempotency-Key; repetitions get the stored answer, for *keep* seconds.

    The answer is stored in the *cache*, under a lock of the alias *using*, after the transaction was committed.
    Each logged-in user has separate keys; with a text as *scope*, all clients share their keys; *scope* may also be
    a function of the request that returns such a text. GET, HEAD, OPTIONS and TRACE pass.

    *header*: the header with the key. *required*: whether a request without a key is refused (400), or passes.
    *if_down*: while the cache or the lock server fails, "refuse" answers 503, "run" runs the view. ValueError for
    a request without a user.
    """
    lifetime = math.ceil(seconds(keep, "keep"))
    if if_down not in {"refuse", "run"}:
        raise ValueError(f'if_down must be "refuse" or "run", not {if_down!r}.')
    if not (scope is None or callable(scope) or isinstance(scope, str)):
        raise TypeError(f"scope must be a text or a function, not {scope!r}.")
    flag(required, "required")
    if not isinstance(header, str) or not _HEADER.fullmatch(header):  # type: ignore[redundant-expr]
        msg = (
            f"header is the name of a header as clients send it, such as {HEADER}, not {header!r}."
        )
        raise ValueError(msg)

    def decorate(view: Any) -> Any:
        once = _Once(view, lifetime, cache, using, scope, header, required, if_down == "run")
        if is_async(view):
            return functools.wraps(view)(_async(once))
        wrapped = functools.wraps(view)(_sync(once))
        once.transactions.begin_inside(wrapped)
        return wrapped

    return decorate


class _Once:
    """A decorated view and the arguments of idempotent()."""

    def __init__(  # noqa: PLR0917 - all of idempotent()
        self,
        view: Callable[..., Any],
        keep: int,
        cache: str,
        using: str,
        scope: Scope,
        header: str,
        required: bool,
        runs_if_down: bool,
    ) -> None:
        if isinstance(view, type):
            msg = f'{title_of(view)} is a class: @method_decorator(idempotent(), name="dispatch").'
            raise TypeError(msg)
        self.view, self.title = view, title_of(view)
        self.transactions = RequestTransactions(view)
        self.keep, self.cache, self.using = keep, cache, using
        self.scope, self._header = scope, header
        self._required, self.runs_if_down = required, runs_if_down
        self.terms = Terms(using=using, timeout=0, reentrant=False, template="idempotent:{key}")
        declared.add(self)

    def check_against(self, backend: BaseLockBackend) -> None:
        self.terms.check_against(backend)

    def check(self) -> Iterator[CheckMessage]:
        """Report a cache that is missing or would lose answers."""
        hint = "Give it the alias of a cache that all processes share and that deletes nothing early: cache=."
        what = f"{self.title}(): its answers are stored in the cache {self.cache!r}, "
        try:
            kind = cache_class(self.cache)
        except (TypeError, ValueError) as error:
            yield Error(f"{self.title}(): {error}", hint=hint, id="distlock.E060")
            return
        is_culled = issubclass(kind, BaseDatabaseCache | FileBasedCache)
        options = caches.settings[self.cache].get("OPTIONS", {})
        if issubclass(kind, DummyCache):
            yield Error(f"{what}which stores nothing.", hint=hint, id="distlock.E060")
        elif issubclass(kind, LocMemCache):
            yield CheckWarning(
                f"{what}which each process has for itself.", hint=hint, id="distlock.W060"
            )
        elif is_culled and "MAX_ENTRIES" not in options:
            text = f"{what}which deletes answers when it has more than 300 entries."
            yield CheckWarning(text, hint="Set OPTIONS 'MAX_ENTRIES'.", id="distlock.W060")

    def checked(self, response: Any) -> Any:
        """Return *response*; TypeError if its content cannot be stored."""
        if not isinstance(response, HttpResponseBase):
            raise TypeError(
                f"{self.title}() returned {type(response).__name__}, no response: @idempotent is for views; "
                "for django-ninja write @decorate_view(idempotent())."
            )
        if response.streaming:
            response.close()
            raise TypeError(
                f"{self.title}() returned {type(response).__name__}, whose content is sent piece by piece: "
                "idempotent() cannot store it; return HttpResponse(content)."
            )
        return response

    def request_in(self, args: tuple[Any, ...]) -> HttpRequest:
        if (request := find_request(args)) is None:
            raise TypeError(f"idempotent() is for views, and {self.title}() got no request.")
        return request

    def key_in(self, args: tuple[Any, ...]) -> str | HttpResponse:
        """Return the key of the request, "" if the request passes without a key, or a response that refuses it."""
        request = self.request_in(args)
        sent = request.headers.get(self._header)
        passes = request.method in _SAFE or getattr(request, _MARK, None) is request.META
        if passes or (sent is None and not self._required):
            return ""
        if sent is None:
            return self.refusal(args, 400, "missing-key")
        key = sent.strip()
        # The draft of the standard puts the key in quotes, and most clients send it bare.
        if len(key) > 1 and key[0] == key[-1] == '"':
            key = key[1:-1]
        return key if _KEY.fullmatch(key) else self.refusal(args, 400, "wrong-key")

    def refusal(self, args: tuple[Any, ...], status: int, kind: str) -> HttpResponse:
        return problem(args, status, _TITLES[kind] % {"header": self._header}, f"{_PAGE}{kind}")

    def owner(self, request: Any) -> str:
        """Return a text for the user or scope that the key belongs to; ValueError without a user and a scope."""
        return self._owned(self._scope(request))

    async def aowner(self, request: Any) -> str:
        if self.scope is None:
            # Not request.auser(): a middleware that sets another user sets request.user.
            return await sync_to_async(self.owner)(request)
        found = self._scope(request)
        return self._owned(await found if inspect.isawaitable(found) else found)

    def _scope(self, request: Any) -> Any:
        if self.scope is None:
            return request.user
        return self.scope(request) if callable(self.scope) else self.scope

    def _owned(self, found: Any) -> str:
        is_user = self.scope is None
        whose = getattr(found, "pk", None) if is_user else found
        if whose is None or whose == "" or not (is_user or isinstance(whose, str)):
            raise ValueError(
                f"{self.title}(): a request is of nobody ({whose!r}), so clients would get each other's answers; "
                "put @idempotent below what logs the user in, or give scope=."
            )
        # A project may authenticate objects of several models, whose primary keys may be equal.
        return f"{title_of(found.__class__) if is_user else 'scope'} {whose}"


class _CacheDown(Exception):
    """The cache did not say whether it has an answer."""


class _Asked:
    """A request with a key: its lock, and its answer in the cache."""

    def __init__(self, once: _Once, args: tuple[Any, ...], key: str, owner: str) -> None:
        self._once, self._args = once, args
        self._request = request = once.request_in(args)
        self.cache: BaseCache = caches[once.cache]
        # Hashed, so that no page shows a token in *owner*.
        digest = hashlib.sha256(json.dumps([owner, key]).encode()).hexdigest()
        self._entry = f"idempotent:{digest}"
        self._fingerprint = fingerprint(args)
        terms = replace(once.terms, purpose=f"{request.method} {request.path}")
        # With the prefix and version of the cache, so that each tenant has its own lock.
        self.lock = terms.lock(f"idempotent:{once.cache}:{self.cache.make_key(digest)}")
        self._lease: Lease | None = None

    def begin(self, stack: ExitStack) -> HttpResponse | Lease | None:
        """Return the stored answer, a refusal, or the lease to run the view under; None: run the view without a lock."""
        self._mark(stack)
        try:
            # In a database cache inside a transaction, look only under the lock: the transaction may repeat its first read.
            if not self._is_in_transaction() and (answer := self._known()):
                return answer
            self._lease = stack.enter_context(self.lock)
            return self._known() or self._lease  # the first request may have ended meanwhile
        except (LockNotAcquired, LockBackendError, _CacheDown) as problem:
            return self._without_lease(problem)

    async def abegin(self, stack: AsyncExitStack) -> HttpResponse | Lease | None:
        self._mark(stack)
        try:
            if answer := await self._aknown():
                return answer
            self._lease = await stack.enter_async_context(self.lock)
            return await self._aknown() or self._lease
        except (LockNotAcquired, LockBackendError, _CacheDown) as problem:
            return self._without_lease(problem)

    def releasing(self) -> AbstractContextManager[None]:
        """Log that the lock could not be released in the block, instead of raising: the answer is there."""
        return nullcontext() if self._lease is None else noted(self._lease)

    def _mark(self, stack: ExitStack | AsyncExitStack) -> None:
        """Mark the request until *stack* is closed."""
        setattr(self._request, _MARK, self._request.META)
        stack.callback(delattr, self._request, _MARK)

    def _known(self) -> HttpResponse | None:
        with _reading():
            return self._answer(self.cache.get(self._entry))

    async def _aknown(self) -> HttpResponse | None:
        with _reading():
            return self._answer(await self.cache.aget(self._entry))

    def _answer(self, stored: Any) -> HttpResponse | None:
        if stored is None:
            return None
        answer = json.loads(stored)
        if answer["request"] != self._fingerprint:
            return self._once.refusal(self._args, 422, "other-request")
        if answer["body"] is None:
            return self._once.refusal(self._args, 410, "too-large")
        response = HttpResponse(base64.b64decode(answer["body"]), status=answer["status"])
        response.headers = ResponseHeaders({**answer["headers"], REPLAYED: "true"})
        if 300 <= answer["status"] < 400 and (url := response.headers.get("Location")):
            response.url = url  # type: ignore[attr-defined]  # for Django's test client, which follows it
        return response

    def _without_lease(self, problem: Exception) -> HttpResponse | None:
        if isinstance(problem, LockNotAcquired):
            response = self._once.refusal(self._args, 409, "under-way")
            response["Retry-After"] = retry_after(problem) or "1"
            return response
        self._warn("Whether %s %s was done before is not known: %s", problem)
        if self._once.runs_if_down:
            return None
        return self._once.refusal(self._args, 503, "unavailable")

    def _to_keep(self, response: Any) -> str | None:
        """Return the text to store; None for an answer after which the client may send the request again."""
        status = response.status_code
        # After 202 with Retry-After, a client asks for the outcome; it does not send the request again.
        is_for_later = status >= 400 and response.has_header("Retry-After")
        if status >= 500 or status in _PASSING or is_for_later:
            return None
        body = None
        if len(response.content) <= LARGEST:
            body = base64.b64encode(response.content).decode()
        # Cookies are for the first client alone; Django keeps them outside the headers.
        headers = {name: value for name, value in response.items() if name.lower() != "set-cookie"}
        answer = {"request": self._fingerprint, "status": status, "headers": headers, "body": body}
        return json.dumps(answer)

    def keep(self, response: Any) -> None:
        """Store the answer when the transactions that are open here are committed."""
        open_ones, kept = still_open(None), self._to_keep(response)
        # Django REST framework turns an exception into a response, and marks the transaction for rollback.
        if kept is None or any(each.needs_rollback for each in open_ones):
            return

        def store(is_committed: bool) -> None:
            if is_committed:
                with self._missing():
                    self._noticed(self._add(kept))

        if not open_ones:
            store(True)
        elif not self._is_in_transaction():
            undone: list[bool] = []
            # Also an inner atomic() block, whose work is undone although the transaction is committed.
            call_at_rollback(lambda: undone.append(True))
            call_at_end(open_ones, lambda is_committed: store(is_committed and not undone))
        elif not self._add(kept):
            # The answer is committed with the work, or both are rolled back.
            msg = f"The answer of {self._once.title}() could not be stored with its work, which is rolled back."
            raise LockError(msg)

    async def akeep(self, response: Any) -> None:
        if (kept := self._to_keep(response)) is not None:
            with self._missing():
                self._noticed(await self.cache.aadd(self._entry, kept, self._once.keep))

    def _add(self, kept: str) -> bool:
        # Unlike set(), add() reports a failure, and keeps an answer that clients may have got.
        return self.cache.add(self._entry, kept, self._once.keep)

    def _is_in_transaction(self) -> bool:
        """Return True if the cache is a table in a database with an open transaction here."""
        if not isinstance(self.cache, BaseDatabaseCache):
            return False
        alias = router.db_for_write(self.cache.cache_model_class)
        return alias in {each.alias for each in still_open(None)}

    def _noticed(self, is_stored: bool) -> None:
        if not is_stored:
            raise LookupError("the cache has not stored it")

    @contextmanager
    def _missing(self) -> Iterator[None]:
        """Log that the answer was not stored, instead of raising: the work is done, and the client gets the answer."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - caches raise anything
            self._warn("The answer to %s %s was not stored, a repetition runs again: %s", error)

    def _warn(self, text: str, error: Exception) -> None:
        of = self._request
        warn(text, of.method, of.path, repr(error), name=self.lock.name, using=self._once.using)


def _sync(once: _Once) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        key = once.key_in(args)
        if isinstance(key, HttpResponse):
            return key
        if not key:
            return once.transactions.inside(args)(*args, **kwargs)
        asked = _Asked(once, args, key, once.owner(once.request_in(args)))
        with ExitStack() as stack:
            found = asked.begin(stack)
            response = found if isinstance(found, HttpResponse) else run(asked, found, args, kwargs)
            with asked.releasing():
                stack.close()
            return response

    def run(asked: _Asked, lease: Lease | None, args: Any, kwargs: Any) -> Any:
        def body(*args: Any, **kwargs: Any) -> Any:
            response = rendered(once.checked(once.view(*args, **kwargs)), args)
            asked.keep(response)
            if lease:
                lease.check()  # LockLost rolls the transaction back; without one, the answer stays stored
            return response

        return once.transactions.inside(args, body)(*args, **kwargs)

    return of_view(once.view, call, _async(once))


def _async(once: _Once) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        once.transactions.refuse_async(args)
        key = once.key_in(args)
        if isinstance(key, HttpResponse):
            return key
        if not key:
            return await once.view(*args, **kwargs)
        # If the client disconnects, Django cancels this task; the view goes on.
        return await asyncio.shield(kept_task(_run(once, key, args, kwargs)))

    return call


async def _run(once: _Once, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    asked = _Asked(once, args, key, await once.aowner(once.request_in(args)))
    async with AsyncExitStack() as stack:
        lease = await asked.abegin(stack)
        if isinstance(lease, HttpResponse):
            response: Any = lease
        else:
            response = once.checked(await once.view(*args, **kwargs))
            if not getattr(response, "is_rendered", True):
                response = await sync_to_async(rendered)(response, args)
            await asked.akeep(response)
            if lease:
                lease.check()
        with asked.releasing():
            await stack.aclose()
        return response


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _CacheDown(repr(error)) from error


def rendered(response: Any, args: tuple[Any, ...]) -> Any:
    """Return *response* rendered: a template response, or one of Django REST framework, has no content before."""
    if getattr(response, "is_rendered", True):
        return response
    for request in args[:2]:
        # Needed by render(); finalize_response() of Django REST framework does the same later.
        if renderer := getattr(request, "accepted_renderer", None):
            response.accepted_renderer = renderer
            response.accepted_media_type = request.accepted_media_type
            response.renderer_context = request.parser_context["view"].get_renderer_context()
            break
    return response.render()


def fingerprint(args: tuple[Any, ...]) -> str:
    """Return a digest of method, address, type and body: the same whenever the client sends the request again."""
    request: Any = find_request(args)
    digest = hashlib.sha256()
    what = [request.method, request.get_full_path(), request.content_type]
    digest.update(json.dumps(what).encode())
    digest.update(_body(request, args))
    return digest.hexdigest()


def _body(request: Any, args: tuple[Any, ...]) -> bytes:
    # The request of Django REST framework parses the body with the parsers of its view.
    framed = next((each for each in args[:2] if _is_of_framework(each)), None)
    if request.content_type == "multipart/form-data" and request.method == "POST":
        # The body may be too large for the memory, and CsrfViewMiddleware has read it.
        if framed is None:
            return _parsed([[*request.POST.lists()], [*request.FILES.lists()]])
        return _parsed_by(framed)
    try:
        body: bytes = request.body
    except RawPostDataException:
        if framed is None:
            raise
        return _parsed_by(framed)  # it has read the body, for example for a permission
    # A client that builds the body again chooses another boundary.
    boundary = request.content_params.get("boundary", "").encode()
    return body.replace(boundary, b"") if boundary else body


def _is_of_framework(request: Any) -> bool:
    is_around = isinstance(getattr(request, "_request", None), HttpRequest)
    return is_around and hasattr(type(request), "data")


def _parsed_by(framed: Any) -> bytes:
    data = framed.data
    return _parsed([*data.lists()] if hasattr(data, "lists") else data)


def _parsed(fields: Any) -> bytes:
    return json.dumps(fields, sort_keys=True, default=_described).encode()


def _described(value: Any) -> Any:
    if not isinstance(value, File):
        return str(value)
    digest = hashlib.sha256()
    for chunk in value.chunks():
        digest.update(chunk)
    value.seek(0)
    return [value.name, digest.hexdigest()]
