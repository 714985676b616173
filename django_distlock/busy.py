"""Policies for on_busy: what a decorated function does instead when its lock is busy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, HttpResponse, JsonResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from .exceptions import LockNotAcquired

    Policy = Callable[..., Any]

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
