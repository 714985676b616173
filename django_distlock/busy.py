"""What a decorated function does instead when its lock is held by somebody else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, HttpResponse, JsonResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from .exceptions import LockNotAcquired

    Policy = Callable[..., Any]


def skip(value: Any = None) -> Policy:
    """Return *value* instead of running the function."""

    def policy(busy: LockNotAcquired, *args: Any, **kwargs: Any) -> Any:
        return value

    return policy


def respond(status: int = 409) -> Policy:
    """Answer the request with *status*, and ``Retry-After`` where the holder's lease tells when.

    Clients that ask for JSON get problem details (RFC 9457).
    """

    def policy(busy: LockNotAcquired, *args: Any, **kwargs: Any) -> HttpResponse:
        response = _response(find_request(args), status)
        if busy.remaining is not None:
            response["Retry-After"] = str(max(1, math.ceil(busy.remaining)))
        return response

    return policy


def retry(countdown: float | None = None, **options: Any) -> Policy:
    """Have the Celery task retried after *countdown* seconds; *options* go to ``Task.retry()``.

    Without *countdown*: when the holder's lease ends, as far as that is known.
    """

    def policy(busy: LockNotAcquired, *args: Any, **kwargs: Any) -> Any:
        from celery import current_task

        if not current_task:
            raise busy
        later = countdown if countdown is not None else busy.remaining
        raise current_task.retry(exc=busy, countdown=later, **options)

    return policy


def find_request(args: tuple[Any, ...]) -> HttpRequest | None:
    """Return the request that a view was called with: its first argument, or a method's second."""
    return next((arg for arg in args[:2] if isinstance(arg, HttpRequest)), None)


def _response(request: HttpRequest | None, status: int) -> HttpResponse:
    title = "This is being worked on already; try again later."
    if request is not None and _wants_json(request):
        problem = {"type": "about:blank", "title": title, "status": status}
        return JsonResponse(problem, status=status, content_type="application/problem+json")
    return HttpResponse(title, status=status, content_type="text/plain; charset=utf-8")


def _wants_json(request: HttpRequest) -> bool:
    best = request.get_preferred_type(["text/html", "application/json", "application/problem+json"])
    return best is not None and best.endswith("json")
