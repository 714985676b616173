"""distributed_lock(): runs a function, view, task or generator while it holds a lock; what is done if it is busy."""

from __future__ import annotations

import functools
import inspect
import math
from contextlib import AsyncExitStack, ExitStack, aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse

from .engine.naming import NameTemplate, checked_name, title_of
from .exceptions import LockNotAcquired
from .lock import Lock, LockTerms, Terms

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator

    from .lease import Lease

    Policy = Callable[..., Any]

_F = TypeVar("_F", bound="Callable[..., Any]")
_T = TypeVar("_T")


class Decorator(Protocol):
    """Returns a function with the same signature."""

    def __call__(self, function: _F, /) -> _F:
        """Return *function* with a lock around each call."""


@overload
def distributed_lock(function: _F, /) -> _F: ...
@overload
def distributed_lock(
    name: str | None = None, /, *, on_busy: Policy | None = None, **terms: Unpack[LockTerms]
) -> Decorator: ...
def distributed_lock(
    name: Any = None, /, *, on_busy: Policy | None = None, **terms: Unpack[LockTerms]
) -> Any:
    """Run the decorated function only while it holds a lock.

    *name* may have fields for arguments of the call: ``"fee:{account_id}"``, ``"{account.pk}"``.
    Without *name*, the lock has the module and the qualified name of the function.
    If the lock is busy, *on_busy* is called with LockNotAcquired and the arguments of the call,
    and its result is returned (see skip(), respond() and retry()); without *on_busy*, LockNotAcquired is raised.
    See LockTerms for *terms*.

    Works on functions, coroutine functions, views and generators. Generators and streaming
    responses hold the lock until they are exhausted or closed. Under ATOMIC_REQUESTS, a view's
    transaction begins inside the lock and is committed before the release.
    """
    if callable(name):
        return _decorate(name, None, Terms.of(terms, "distributed_lock()"), on_busy)
    checked = Terms.of(terms, "distributed_lock()")
    return lambda function: _decorate(function, name, checked, on_busy)


def _decorate(function: _F, name: str | None, terms: Terms, on_busy: Policy | None) -> _F:
    locked = _Locked(function, name, terms, on_busy)
    for is_kind, wrap in _KINDS:
        if is_kind(function):
            return functools.wraps(function)(wrap(locked))  # type: ignore[return-value]
    wrapped = functools.wraps(function)(_sync(locked))
    locked.transactions.mark(wrapped)
    return wrapped  # type: ignore[return-value]  # all four wrappers keep the signature


class _Locked:
    """The decorated function with the terms of its lock."""

    def __init__(
        self, function: Callable[..., Any], name: str | None, terms: Terms, on_busy: Policy | None
    ) -> None:
        self.function = function
        title = title_of(function)
        self.transactions = RequestTransactions(function)
        self._on_busy = on_busy
        self._own_name = checked_name(title)
        self._shows_request = not terms.purpose
        self._terms = terms if terms.purpose else replace(terms, purpose=title)
        self._template = None if name is None else NameTemplate(name, function)

    def lock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lock:
        """Return the lock for one call; its purpose is the request of a view, else the function."""
        name = self._template.name_for(args, kwargs) if self._template else self._own_name
        terms = self._terms
        if self._shows_request and (request := find_request(args)) is not None:
            terms = replace(terms, purpose=f"{request.method} {request.path}")
        return Lock.on_terms(name, terms)

    def refuse(self, busy: LockNotAcquired, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what *on_busy* returns, or raise *busy*."""
        if self._on_busy is None:
            raise busy
        return self._on_busy(busy, *args, **kwargs)


def _sync(locked: _Locked) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            try:
                lease = stack.enter_context(locked.lock(args, kwargs))
            except LockNotAcquired as busy:
                return locked.refuse(busy, args, kwargs)
            result = locked.transactions.inside(args)(*args, **kwargs)
            if inspect.isawaitable(result):
                return _awaited(result, stack.pop_all())
            if getattr(result, "streaming", False):
                hold_until_closed(result, lease, stack.pop_all().close)
            return result

    return call


def _async(locked: _Locked) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        locked.transactions.refuse_async(args)
        async with AsyncExitStack() as stack:
            try:
                lease = await stack.enter_async_context(locked.lock(args, kwargs))
            except LockNotAcquired as busy:
                refused = locked.refuse(busy, args, kwargs)
                return await refused if inspect.isawaitable(refused) else refused
            result = await locked.function(*args, **kwargs)
            if getattr(result, "streaming", False):
                stack.pop_all()
                hold_until_streamed(result, lease)
            return result

    return call


def _generator(locked: _Locked) -> Callable[..., Any]:
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with ExitStack() as stack:
            try:
                stack.enter_context(locked.lock(args, kwargs))
            except LockNotAcquired as busy:
                return locked.refuse(busy, args, kwargs)
            return (yield from locked.function(*args, **kwargs))

    return generate


def _async_generator(locked: _Locked) -> Callable[..., Any]:
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(locked.lock(args, kwargs))
            except LockNotAcquired as busy:
                refused = locked.refuse(busy, args, kwargs)
                if inspect.isawaitable(refused):
                    await refused
                return
            async with aclosing(locked.function(*args, **kwargs)) as items:
                with suppress(StopAsyncIteration):
                    item = await items.asend(None)
                    while True:
                        try:
                            sent = yield item
                        except Exception as error:  # noqa: BLE001 - the generator handles it
                            item = await items.athrow(error)
                        else:
                            item = await items.asend(sent)

    return generate


def _is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call returns a coroutine: asgiref says so, or it is an async view's dispatch()."""
    return iscoroutinefunction(function) or is_async_view(function)


_KINDS = (
    (inspect.isasyncgenfunction, _async_generator),
    (_is_async, _async),
    (inspect.isgeneratorfunction, _generator),
)


async def _awaited(result: Awaitable[_T], stack: ExitStack) -> _T:
    """Hold the lock until the awaitable that a plain function returned is done."""
    with stack:
        return await result


_TITLE = "Somebody else is already working on this; try again later."
_TYPES = ["text/html", "application/json", "application/problem+json"]


def skip(value: Any = None) -> Policy:
    """Return *value* instead of running the function."""

    def policy(busy: LockNotAcquired, *args: Any, **kwargs: Any) -> Any:
        return value

    return policy


def respond(status: int = 409) -> Policy:
    """Answer the request with *status*, and with ``Retry-After`` if the end of the holder's lease is known.

    Clients that prefer JSON get problem details (RFC 9457).
    """

    def policy(busy: LockNotAcquired, *args: Any, **kwargs: Any) -> HttpResponse:
        request = find_request(args)
        best = request and request.get_preferred_type(_TYPES)
        response: HttpResponse
        if best and best.endswith("json"):
            problem = {"type": "about:blank", "title": _TITLE, "status": status}
            response = JsonResponse(problem, status=status, content_type=_TYPES[2])
        else:
            plain = "text/plain; charset=utf-8"
            response = HttpResponse(_TITLE, status=status, content_type=plain)
        if busy.remaining is not None:
            response["Retry-After"] = str(max(1, math.ceil(busy.remaining)))
        return response

    return policy


def retry(countdown: float | None = None, **options: Any) -> Policy:
    """Retry the Celery task after *countdown* seconds; *options* are passed to ``Task.retry()``.

    Without *countdown*, it is retried when the holder's lease ends, if that is known.
    """

    def policy(busy: LockNotAcquired, *args: Any, **kwargs: Any) -> Any:
        from celery import current_task

        if not current_task:
            raise busy
        later = countdown if countdown is not None else busy.remaining
        raise current_task.retry(exc=busy, countdown=later, **options)

    return policy


def find_request(args: tuple[Any, ...]) -> HttpRequest | None:
    """Return the request of a view: the first argument, or the second one of a method."""
    return next((arg for arg in args[:2] if isinstance(arg, HttpRequest)), None)


class _EveryAlias(set[str]):
    """Contains every database, so Django begins no ATOMIC_REQUESTS; iterates over those exempt before."""

    def __contains__(self, alias: object) -> bool:
        return True


class RequestTransactions:
    """The transactions of ATOMIC_REQUESTS: begun inside the lock, committed before its release."""

    def __init__(self, view: Callable[..., Any]) -> None:
        self._view = view
        self._marked = _EveryAlias(getattr(view, "_non_atomic_requests", ()))

    def mark(self, wrapped: Callable[..., Any]) -> None:
        """Keep Django from beginning the transactions of *wrapped*."""
        wrapped._non_atomic_requests = self._marked  # type: ignore[attr-defined]  # noqa: SLF001 - Django's marker

    def inside(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the view inside the transactions of its request; without a request, the function itself."""
        body = self._view
        for alias in self._aliases(args):
            body = transaction.atomic(using=alias)(body)
        return body

    def refuse_async(self, args: tuple[Any, ...]) -> None:
        """Raise Django's error for async views, which our mark on dispatch() prevents."""
        if is_async_view(self._view) and self._aliases(args):
            msg = "You cannot use ATOMIC_REQUESTS with async views."
            raise RuntimeError(msg)

    def _aliases(self, args: tuple[Any, ...]) -> list[str]:
        if find_request(args) is None:
            return []
        exempt = set(self._marked)
        databases = connections.settings.items()
        return [
            alias for alias, known in databases if known["ATOMIC_REQUESTS"] and alias not in exempt
        ]


def is_async_view(function: Callable[..., Any]) -> bool:
    """Return whether method_decorator() has bound *function* to a class-based view that is async."""
    view = getattr(getattr(function, "func", function), "__self__", None)
    return bool(getattr(view, "view_is_async", False))


def hold_until_closed(response: Any, lease: Lease, release: Callable[[], object]) -> None:
    """Keep the lock until a streaming response is closed, which any thread of the server may do."""
    lease.caller = None
    close = response.close

    def close_and_release() -> None:
        try:
            close()
        finally:
            release()

    response.close = close_and_release


def hold_until_streamed(response: Any, lease: Lease) -> None:
    """As hold_until_closed(), in async code: an asynchronous stream may also end without being closed."""
    if response.is_async:
        response.streaming_content = _until_the_end(response.streaming_content, lease)
    # It may be closed in the event loop, and release() would block that.
    hold_until_closed(response, lease, lease.release_later)


async def _until_the_end(parts: Any, lease: Lease) -> AsyncIterator[bytes]:
    async with lease, aclosing(parts):
        async for part in parts:
            yield part
