"""Hold a lock around functions, views, tasks and generators; policies for a busy lock."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import random
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AsyncContextDecorator,
    AsyncExitStack,
    ContextDecorator,
    ExitStack,
    aclosing,
    suppress,
)
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, overload

from asgiref.sync import iscoroutinefunction
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.utils.translation import gettext_lazy

from .conf import checked_limit, seconds
from .exceptions import LockNotAcquired
from .ground.naming import name_maker, signature_of, title_of
from .handler import declared

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator
    from datetime import timedelta

    from .backends.base import BaseLockBackend
    from .engine.lease import Lease
    from .lock import Lock, Terms

    Name = str | Callable[..., str] | None

_F = TypeVar("_F", bound="Callable[..., Any]")
_G = TypeVar("_G", bound="Callable[..., Iterator[Any] | AsyncIterator[Any]]")
_T = TypeVar("_T")
_V_co = TypeVar("_V_co", covariant=True)
_P = ParamSpec("_P")


class Policy(Protocol):
    """The type of *on_busy*: skip(), respond(), retry(), or a function of yours.

    A policy is called with LockNotAcquired and the arguments of the call; its result becomes the result of the call.
    """

    def __call__(self, busy: LockNotAcquired, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the decorated call."""


class Decorator(Protocol):
    """A decorator that returns a function with the same signature."""

    def __call__(self, function: _F, /) -> _F:
        """Return *function* with a lock around each call."""


class SkippingDecorator(Protocol[_V_co]):
    """A decorator whose function may also return the value of skip(); a busy generator yields nothing."""

    @overload
    def __call__(self, function: staticmethod[_P, _T], /) -> staticmethod[_P, _T | _V_co]: ...  # type: ignore[overload-overlap]  # it is a callable, too
    @overload
    def __call__(
        self, function: classmethod[Any, _P, _T], /
    ) -> classmethod[Any, _P, _T | _V_co]: ...
    @overload
    def __call__(self, function: _G, /) -> _G: ...
    @overload
    def __call__(
        self, function: Callable[_P, Coroutine[Any, Any, _T]], /
    ) -> Callable[_P, Coroutine[Any, Any, _T | _V_co]]: ...
    @overload
    def __call__(self, function: Callable[_P, _T], /) -> Callable[_P, _T | _V_co]: ...


def decorated(
    function: _F,
    name: Name,
    terms: Terms,
    on_busy: Policy | None,
) -> _F:
    """Return *function* with a lock around each call; without *name*, the lock has the name of the function."""
    if isinstance(function, (staticmethod, classmethod)):
        inside = decorated(function.__func__, name, terms, on_busy)
        return type(function)(inside)
    _check_function(function, name)
    if on_busy is not None:
        _check_policy(on_busy, function)
    locked = _Locked(function, name, terms, on_busy)
    wrap = next((wrap for is_kind, wrap in _KINDS if is_kind(function)), _sync)
    if terms.cancel_when_lost and wrap is not _async:
        msg = f"cancel_when_lost=True is for coroutine functions, which {title_of(function)}() is not."
        raise TypeError(msg)
    wrapped = functools.wraps(function)(wrap(locked))
    if wrap is _sync:
        locked.transactions.begin_inside(wrapped)
    return wrapped  # type: ignore[return-value]  # all four wrappers keep the signature


def _check_function(function: object, name: Name) -> None:
    """Raise TypeError for an object that cannot be decorated."""
    if not callable(function):
        msg = f"A lock decorates functions, not {function!r}; put it below @property and the like."
    elif isinstance(function, type):
        msg = (
            f"A lock decorates functions, and {title_of(function)} is a class; decorate its methods, "
            'or a view by @method_decorator(distributed_lock(...), name="dispatch").'
        )
    elif hasattr(function.__class__, "apply_async"):
        msg = f"A lock decorates functions, and {function!r} is a Celery task; put it below @shared_task."
    elif name is None and not hasattr(function, "__qualname__"):
        msg = f"{function!r} has no name to lock; give one: distributed_lock('name')."
    else:
        return
    raise TypeError(msg)


def _check_policy(on_busy: object, function: Callable[..., Any]) -> None:
    """Raise TypeError for an *on_busy* that would fail as soon as the lock is busy."""
    title, kind = title_of(function), getattr(on_busy, "func", None)
    first_two = [*signature_of(function).parameters.values()][:2] if kind else []
    typed = [p for p in first_two if "Request" in str(p.annotation)]
    named = [p for p in first_two if p.name.strip("_") in {"request", "req", ""}]
    if on_busy in (skip, respond, retry):
        right = f"on_busy={getattr(on_busy, '__name__', '')}"
        msg = f"{right} lacks its parentheses; write {right}()."
    elif not callable(on_busy):
        msg = f"on_busy must be skip(), respond(), retry() or a function, not {on_busy!r}."
    elif kind is _respond and not (
        typed or named or any(p.kind is p.VAR_POSITIONAL for p in first_two)
    ):
        msg = (
            f"respond() answers requests, and {title}() takes none; use skip(), or retry() in a Celery "
            "task. If it is a view, call its first argument request."
        )
    elif kind is _retry and (typed or any(p.annotation is p.empty for p in named)):
        msg = f"retry() is for Celery tasks, and {title}() takes a request; use respond()."
    elif kind is _retry and any(is_kind(function) for is_kind, _ in _KINDS):
        msg = f"retry() is for Celery tasks, and {title}() is async or a generator; use skip()."
    elif iscoroutinefunction(on_busy) and not _may_be_async(function):
        msg = f"on_busy is async, and {title}() is not: nobody would await its result."
    else:
        return
    raise TypeError(msg)


class _Locked:
    """The decorated function with the terms of its lock."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: Name,
        terms: Terms,
        on_busy: Policy | None,
    ) -> None:
        self.function = function
        self.title = title = title_of(function)
        self.transactions = RequestTransactions(function)
        self._on_busy = on_busy
        self._shows_request = not terms.purpose
        self._name_for, template = name_maker(title if name is None else name, function)
        self._terms = replace(terms, purpose=terms.purpose or title, template=template)
        self.using = self._terms.using
        declared.add(self)

    def check_against(self, backend: BaseLockBackend) -> None:
        self._terms.check_against(backend)

    def lock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lock:
        """Return the lock for one call; its purpose is the request of a view, or the function's name."""
        name, terms = self._name_for(args, kwargs), self._terms
        if terms.limit_for is not None:
            what = f"the limit of {title_of(self.function)}()"
            terms = replace(terms, limit=checked_limit(terms.limit_for(*args, **kwargs), what))
        if self._shows_request and (request := find_request(args)) is not None:
            terms = replace(terms, purpose=f"{request.method} {request.path}")
        return terms.lock(name)

    def refuse(self, busy: LockNotAcquired, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of *on_busy*; without a policy, raise *busy*."""
        task = getattr(sys.modules.get("celery"), "current_task", None)
        if task and not isinstance(busy, task.throws):
            # Celery logs errors in `throws` in one line, without a traceback.
            task.throws = (task.throws, LockNotAcquired)
        if self._on_busy is None:
            raise busy
        return self._on_busy(busy, *args, **kwargs)


def _sync(locked: _Locked) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            try:
                lease = _entered(stack, locked.lock(args, kwargs))
            except LockNotAcquired as busy:
                return locked.refuse(busy, args, kwargs)
            result = locked.transactions.inside(args)(*args, **kwargs)
            refuse_unfinished(result, locked.title)
            if isinstance(result, HttpResponseBase) and result.status_code >= BAD_REQUEST:
                lease.note_failure()
            if isinstance(result, StreamingHttpResponse):
                hold_until_closed(result, lease, stack.pop_all().close, find_request(args))
            return result

    return of_view(locked.function, call, _async(locked))


def _entered(stack: ExitStack, lock: Lock) -> Lease:
    """Enter *lock* in *stack*, which also frees it if an asynchronous exception ends its __exit__() at the first step."""
    stack.callback(lock.finish_blocks)
    return stack.enter_context(lock)


def _async(locked: _Locked) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        locked.transactions.refuse_async(args)
        async with AsyncExitStack() as stack:
            lock = locked.lock(args, kwargs)
            try:
                lease = await stack.enter_async_context(lock)
            except LockNotAcquired as busy:
                refused = locked.refuse(busy, args, kwargs)
                return await refused if inspect.isawaitable(refused) else refused
            result = await locked.function(*args, **kwargs)
            if isinstance(result, HttpResponseBase) and result.status_code >= BAD_REQUEST:
                lease.note_failure()
            if isinstance(result, StreamingHttpResponse):
                await lock.end_cancelling()
                stack.pop_all()
                # The registry then ends the lease if nobody closes the response.
                lock.keep_acquired(lease)
                # The event loop may close the response, and release() would block the loop.
                hold_until_closed(result, lease, lease.give_back_later, find_request(args))
            return result

    return call


def _generator(locked: _Locked) -> Callable[..., Any]:
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with ExitStack() as stack:
            try:
                _entered(stack, locked.lock(args, kwargs))
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
                        except GeneratorExit:
                            raise
                        except BaseException as error:  # noqa: BLE001 - the generator handles it
                            item = await items.athrow(error)
                        else:
                            item = await items.asend(sent)

    return generate


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for a coroutine function, and for dispatch() of an async view, which is none."""
    return iscoroutinefunction(function) or _is_async_view(function)


def _may_be_async(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return inspect.isasyncgenfunction(function) or is_async(function) or name in _HANDLERS


#: The methods of Django's View that are no coroutine functions, but return a coroutine if the view is async.
_HANDLERS = {"dispatch", "options", "http_method_not_allowed"}
_KINDS = (
    (inspect.isasyncgenfunction, _async_generator),
    (is_async, _async),
    (inspect.isgeneratorfunction, _generator),
)


def refuse_unfinished(result: Any, title: str, right: str = "") -> None:
    """Raise TypeError for a *result* that runs, or goes on, after the release; *right* is what to write instead."""
    is_manager = isinstance(result, (ContextDecorator, AsyncContextDecorator))
    of = getattr(result, "gen", None) if is_manager else result  # of a @contextmanager function
    if inspect.isawaitable(result):
        what = "something to await"
        right = right or (
            "decorate the coroutine function itself, or mark this one with asgiref's markcoroutinefunction()"
        )
    elif inspect.isgenerator(of) or inspect.isasyncgen(of):
        what = "a context manager" if is_manager else "a generator"
        right = right or (
            "put the lock directly above the generator function, below all other decorators"
        )
    else:
        return
    if inspect.iscoroutine(result):
        result.close()  # otherwise Python warns that it was never awaited
    elif asyncio.isfuture(result):
        result.cancel()
    msg = f"{title}() returned {what}, which would run without the lock; {right}."
    raise TypeError(msg)


#: Most seconds of Retry-After: the holder of a renewed lease may be done at any time.
LONGEST_RETRY_AFTER = 5
#: Number of retries after which the pauses no longer grow.
LAST_GROWTH = 6

#: The lowest status that is an error, after which free_on_error frees the lock.
BAD_REQUEST = 400
_TITLE = gettext_lazy("Somebody else is already working on this; try again later.")
_TYPES = ["text/html", "application/json", "application/problem+json"]


@dataclass(frozen=True, slots=True)
class Skip(Generic[_T]):
    """The policy of skip(): it returns *value*."""

    value: _T

    def __call__(self, *args: object, **kwargs: object) -> _T:
        return self.value


@overload
def skip() -> Skip[None]: ...
@overload
def skip(value: _T) -> Skip[_T]: ...
def skip(value: Any = None) -> Skip[Any]:
    """Return *value* instead of running the function."""
    return Skip(value)


def respond(status: int = 409, *, template: str = "") -> Policy:
    """Answer the request with *status*, and with ``Retry-After`` if the end of the holder's lease is known.

    Retry-After is at most 5 seconds, as a holder that renews its lease may be done at any time. If min_hold
    reserves the lock, Retry-After is the rest of that time.
    Clients that prefer JSON get problem details (RFC 9457). Others get one sentence as plain text, or
    *template*, rendered with the LockNotAcquired as ``busy``.
    TypeError or ValueError for a *status* that is not a number from 400 to 599.
    """
    if isinstance(status, bool) or not isinstance(status, int):
        raise TypeError(f"The status of respond() must be a number, not {status!r}.")
    if not BAD_REQUEST <= status < 600:
        raise ValueError(f"The status of respond() must be an error, 400 to 599, not {status!r}.")
    return functools.partial(_respond, status, template)


def _respond(
    status: int, template: str, busy: LockNotAcquired, /, *args: Any, **kwargs: Any
) -> HttpResponse:
    response: HttpResponse
    request = find_request(args)
    if template and request is not None and not _wants_json(args):
        # Django renders a TemplateResponse after the view, outside the event loop if the view is async.
        response = TemplateResponse(request, template, {"busy": busy}, status=status)
    else:
        response = problem(args, status, _TITLE)
    if later := retry_after(busy):
        response["Retry-After"] = later
    return response


def problem(
    args: tuple[Any, ...], status: int, title: object, kind: str = "about:blank"
) -> HttpResponse:
    """Return an error response: problem details of the type *kind* if the client prefers JSON, else *title* as text."""
    if _wants_json(args):
        details = {"type": kind, "title": title, "status": status}
        return JsonResponse(details, status=status, content_type=_TYPES[2])
    return HttpResponse(title, status=status, content_type="text/plain; charset=utf-8")


def retry_after(busy: LockNotAcquired) -> str:
    """Return the value of Retry-After; "" if the end of the holder's lease is not known."""
    if busy.remaining is None:
        return ""
    longest = math.inf if busy.reserved_until else LONGEST_RETRY_AFTER
    return str(max(1, math.ceil(min(busy.remaining, longest))))


def retry(countdown: float | timedelta | None = None, **options: Any) -> Policy:
    """Retry the Celery task after *countdown* seconds; *options* are passed to ``Task.retry()``.

    Without *countdown*, the task is retried after about 1, 2, 4 ... 64 seconds, but at the latest when the
    holder's lease ends. If min_hold reserves the lock, the task is retried when the reservation ends.
    TypeError or ValueError for a *countdown* that is not a number of seconds, 0 or more.
    """
    later = None if countdown is None else seconds(countdown, "countdown", zero=True)
    return functools.partial(_retry, later, options)


def _retry(
    countdown: float | None,
    options: dict[str, Any],
    busy: LockNotAcquired,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    from celery import current_task

    if not current_task:
        raise busy
    later = countdown
    if later is None:
        later = 2.0 ** min(current_task.request.retries, LAST_GROWTH) * random.uniform(0.5, 1)  # noqa: S311
        if busy.remaining is not None:
            later = busy.remaining if busy.reserved_until else min(later, busy.remaining)
    raise current_task.retry(exc=busy, countdown=later, **options)


def _wants_json(args: tuple[Any, ...]) -> bool:
    request = find_request(args)
    if request is None:
        return False
    for arg in args[:2]:
        # Django REST framework has already negotiated the type, also by other means than headers.
        if negotiated := getattr(arg, "accepted_media_type", None):
            return "json" in negotiated
    # A client that accepts any type gets the type that it sends.
    types = _TYPES[::-1] if (request.content_type or "").endswith("json") else _TYPES
    return (request.get_preferred_type(types) or "").endswith("json")


def find_request(args: tuple[Any, ...]) -> HttpRequest | None:
    """Return Django's request: the first argument of a view, or the second one of a method.

    The request of Django REST framework is another class, which contains Django's.
    """
    for arg in args[:2]:
        request = getattr(arg, "_request", arg)
        if isinstance(request, HttpRequest):
            return request
    return None


class _EveryAlias(frozenset[str]):
    """Contains every alias, so that Django begins no transaction; its items are those exempt before.

    Views that other decorators make of ours share it. It has no add(), for which non_atomic_requests() looks, so that
    the view which it marks gets a set of its own.
    """

    def __contains__(self, alias: object) -> bool:
        return True


class RequestTransactions:
    """The transactions of ATOMIC_REQUESTS: begun inside the lock, committed before its release."""

    def __init__(self, view: Callable[..., Any]) -> None:
        self._view = view
        self._exempt = _EveryAlias(getattr(view, "_non_atomic_requests", ()))

    def begin_inside(self, wrapped: object) -> None:
        """Keep Django from beginning the transactions before it calls *wrapped*, the decorated view."""
        wrapped._non_atomic_requests = self._exempt  # type: ignore[attr-defined]  # noqa: SLF001 - Django's marker

    def inside(
        self, args: tuple[Any, ...], body: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return *body*, by default the view, inside the transactions of its request; unchanged without a request."""
        body = body or self._view
        for alias in self._aliases(args):
            body = transaction.atomic(using=alias)(body)
        return body

    def refuse_async(self, args: tuple[Any, ...]) -> None:
        """Raise Django's error for async views with ATOMIC_REQUESTS; our marker on dispatch() keeps Django from raising it."""
        # Django itself raises it for a coroutine function, unless method_decorator() has bound it.
        of_class = () if iscoroutinefunction(self._view) else args
        if _is_async_view(self._view, of_class) and self._aliases(args):
            msg = "You cannot use ATOMIC_REQUESTS with async views."
            raise RuntimeError(msg)

    def _aliases(self, args: tuple[Any, ...]) -> list[str]:
        request = find_request(args)
        if request is None:
            return []
        view = request.resolver_match and request.resolver_match.func
        of_view = getattr(view, "_non_atomic_requests", ())
        if not isinstance(of_view, _EveryAlias):
            return []  # in a middleware; or Django has begun the transactions itself, or the view is exempt
        exempt = self._exempt.union(of_view)
        databases = connections.settings.items()
        return [
            alias for alias, known in databases if known["ATOMIC_REQUESTS"] and alias not in exempt
        ]


def of_view(
    function: Callable[..., Any], call: Callable[..., Any], acall: Callable[..., Any]
) -> Callable[..., Any]:
    """Return *call*, for *function*; if it is dispatch() of a view, use *acall* for an async view."""
    if getattr(function, "__name__", "") not in _HANDLERS:
        return call

    def handle(*args: Any, **kwargs: Any) -> Any:
        return (acall if _is_async_view(function, args) else call)(*args, **kwargs)

    return handle


def _is_async_view(function: Callable[..., Any], args: tuple[Any, ...] = ()) -> bool:
    """Return True if *function* is bound to an async view, as by method_decorator(), or is its dispatch(), called with *args*."""
    view = _bound_to(inspect.unwrap(function, stop=lambda each: _bound_to(each) is not None))
    if view is None and args and getattr(function, "__name__", "") in _HANDLERS:
        view = args[0]
    return getattr(view, "view_is_async", False) is True


def _bound_to(function: Callable[..., Any]) -> Any:
    return getattr(getattr(function, "func", function), "__self__", None)


def hold_until_closed(
    response: Any, lease: Lease, release: Callable[[], object], request: Any
) -> None:
    """Keep the lock until a streaming response, or another one in its place, is closed; any thread of the server may close it.

    The code that generates the content counts as the holder, in any thread or task.
    """
    lease.caller = None  # any thread or task continues the work in lent()
    close = response.close
    if getattr(response, "file_to_stream", None) is None:  # some servers send a file themselves
        parts = response.streaming_content
        response.streaming_content = (
            _amade_under(lease, parts) if response.is_async else _made_under(lease, parts)
        )

    def close_and_release() -> None:
        vars(response).pop("close", None)
        try:
            with lease.lent():
                close()
        finally:
            release()

    response.close = close_and_release
    if request is not None:
        end_request = request.close

        def close_request() -> None:
            end_request()
            if "close" in vars(response):  # a middleware has replaced the response
                release()

        request.close = close_request  # Django calls it when it closes the response that was sent


def _made_under(lease: Lease, parts: Iterator[bytes]) -> Iterator[bytes]:
    while True:
        try:
            with lease.lent():
                part = next(parts, None)
        except BaseException:
            lease.note_failure()
            raise
        if part is None:
            return
        yield part


async def _amade_under(lease: Lease, parts: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """Generate the content, and release the lock at its end: an async stream may end without being closed."""
    async with lease, aclosing(parts):
        while True:
            with lease.lent():
                part = await anext(parts, None)
            if part is None:
                return
            yield part
