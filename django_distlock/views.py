"""Django's views under the decorator: their transactions and streaming responses."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from .busy import find_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from .lease import Lease


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
