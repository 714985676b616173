"""The testproject's pages, and some that hold locks for as long as the test says: by WSGI and by ASGI."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import include, path

from django_distlock import Lease, lock

wsgi, asgi = get_wsgi_application(), get_asgi_application()
_kept: list[Lease | None] = []
#: The names that the async view was asked for.
_asked: list[str] = []
STEP = 0.05


def now() -> float:
    """Return seconds on the clock that all processes of the machine share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def ping(request: HttpRequest) -> JsonResponse:
    held = [lease.name for lease in _kept if lease and lease.held]
    return JsonResponse({"pid": os.getpid(), "held": held, "asked": len(_asked)})


def hold(request: HttpRequest, name: str) -> JsonResponse:
    with lock(name, **_terms(request)) as lease:
        entered = now()
        while now() < entered + _seconds(request):
            time.sleep(STEP)
            lease.check()
        return _answer(entered)


async def ahold(request: HttpRequest, name: str) -> JsonResponse:
    _asked.append(name)
    async with lock(name, **_terms(request)) as lease:
        entered = now()
        while now() < entered + _seconds(request):
            await asyncio.sleep(STEP)
            lease.check()
        return _answer(entered)


def keep(request: HttpRequest, name: str) -> JsonResponse:
    """Take a lock for as long as the process lives."""
    _kept.append(lock(name, **_terms(request)).acquire())
    return ping(request)


def _terms(request: HttpRequest) -> dict[str, Any]:
    return {term: float(request.GET[term]) for term in ("ttl", "timeout")}


def _seconds(request: HttpRequest) -> float:
    return float(request.GET["seconds"])


def _answer(entered: float) -> JsonResponse:
    return JsonResponse({"pid": os.getpid(), "entered": entered, "left": now()})


# What is done at the import is done once by all workers that a server forks afterwards.
if "DISTLOCK_WORKERS_AT_START" in os.environ:
    _kept.append(lock(os.environ["DISTLOCK_WORKERS_AT_START"], ttl=30).acquire())


def error(request: HttpRequest) -> JsonResponse:
    """Answer with what a view raised."""
    return JsonResponse({"error": repr(sys.exc_info()[1])}, status=500)


handler500 = error
urlpatterns = [
    path("", include("testproject.urls")),
    path("ping/", ping),
    path("hold/<str:name>/", hold),
    path("ahold/<str:name>/", ahold),
    path("keep/<str:name>/", keep),
]
