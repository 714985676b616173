"""distributed_lock(): runs a function, view, task or generator while it holds a lock."""

from __future__ import annotations

import functools
import inspect
from contextlib import AsyncExitStack, ExitStack, aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction

from . import views
from .busy import find_request
from .engine.naming import NameTemplate, checked_name
from .exceptions import LockNotAcquired
from .lock import Lock, LockTerms, Terms

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

    from .busy import Policy

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
    and its result is returned (see busy.py); without *on_busy*, LockNotAcquired is raised.
    See LockTerms for *terms*.

    Works on functions, coroutine functions, views and generators. Generators and streaming
    responses hold the lock until they are exhausted or closed. Under ATOMIC_REQUESTS, a view's
    transaction begins inside the lock and is committed before the release.
    """
    if callable(name):
        return _decorate(name, None, Terms.of(terms), on_busy)
    checked = Terms.of(terms)
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
        title = f"{function.__module__}.{function.__qualname__}"
        self.transactions = views.RequestTransactions(function)
        self._on_busy = on_busy
        self._own_name = checked_name(title)
        self._shows_request = not terms.purpose
        self._terms = terms if terms.purpose else replace(terms, purpose=title)
        self._template = None if name is None else NameTemplate(name, _signature(function))

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
                views.hold_until_closed(result, lease, stack.pop_all().close)
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
                views.hold_until_streamed(result, lease)
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
    return iscoroutinefunction(function) or views.is_async_view(function)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature; method_decorator() makes a partial whose __wrapped__ has another one."""
    is_partial = isinstance(function, functools.partial)
    return inspect.signature(function, follow_wrapped=not is_partial)


_KINDS = (
    (inspect.isasyncgenfunction, _async_generator),
    (_is_async, _async),
    (inspect.isgeneratorfunction, _generator),
)


async def _awaited(result: Awaitable[_T], stack: ExitStack) -> _T:
    """Hold the lock until the awaitable that a plain function returned is done."""
    with stack:
        return await result
