"""Pages of every framework that charge an account once for each Idempotency-Key, and die where a test says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

from asgiref.sync import sync_to_async
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.db import DatabaseCache
from django.core.cache.backends.redis import RedisCache
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.decorators import decorate_view
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rest_framework.exceptions import ValidationError
from rest_framework.parsers import DataAndFiles, FileUploadParser, JSONParser, MultiPartParser
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.views import APIView

from django_distlock import current_lease, force_release
from django_distlock.contrib.idempotency import idempotent
from testproject.models import Fee
from tests.integration.worker_site import error, ping

once = idempotent(cache="answers", scope="test")


def die(request: Any, where: str) -> None:
    """End this process if the request says so."""
    if request.headers.get("x-die") == where:
        os.kill(os.getpid(), signal.SIGKILL)


class Dying(BaseCache):
    """A cache whose process dies instead of storing the answer to a request that says so."""

    def add(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> bool:
        if '"X-Die": "store"' in value:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().add(key, value, *args, **kwargs)


class DyingRedisCache(Dying, RedisCache): ...


class DyingDatabaseCache(Dying, DatabaseCache): ...


def lose() -> None:
    lease = current_lease()
    assert lease
    force_release(lease.name)


def charge(request: Any, pk: int) -> dict[str, int]:
    if request.headers.get("x-fail") == "lose":
        lose()  # before the write, which locks the file of SQLite
    fee = Fee.objects.create(account_id=pk, amount=1)
    if request.headers.get("x-fail") == "raise":
        raise ZeroDivisionError
    if request.headers.get("x-fail") == "lose at the commit":
        transaction.on_commit(lose)
    die(request, "view")
    transaction.on_commit(lambda: die(request, "commit"))
    return {"fee": fee.pk}


def answer(request: Any, pk: int) -> HttpResponse:
    headers = {"X-Die": request.headers["x-die"]} if "x-die" in request.headers else {}
    return JsonResponse(charge(request, pk), headers=headers)


@csrf_exempt
@once
def function(request: HttpRequest, pk: int) -> HttpResponse:
    return answer(request, pk)


@csrf_exempt
def unprotected(request: HttpRequest, pk: int) -> HttpResponse:
    return answer(request, pk)


@transaction.non_atomic_requests
@csrf_exempt
@transaction.atomic
@once
def own_transaction(request: HttpRequest, pk: int) -> HttpResponse:
    return answer(request, pk)


@transaction.non_atomic_requests
@csrf_exempt
@once
def without_transaction(request: HttpRequest, pk: int) -> HttpResponse:
    return answer(request, pk)


@method_decorator([csrf_exempt, once], name="dispatch")
class Dispatch(View):
    def post(self, request: HttpRequest, pk: int) -> HttpResponse:
        return answer(request, pk)


@method_decorator(csrf_exempt, name="dispatch")
class Method(View):
    @method_decorator(once)
    def post(self, request: HttpRequest, pk: int) -> HttpResponse:
        return answer(request, pk)


class LooksAtTheBody(BasePermission):
    def has_permission(self, request: Any, view: Any) -> bool:
        return request.data is not None


class Rest(APIView):
    permission_classes = (LooksAtTheBody,)

    @once
    def post(self, request: Any, pk: int) -> Response:
        return Response(charge(request, pk))

    put = post


class RestUpload(Rest):
    parser_classes = (FileUploadParser,)


class JSONPart(MultiPartParser):
    """Parses files and a part in JSON."""

    def parse(self, *args: Any, **kwargs: Any) -> Any:
        parsed = super().parse(*args, **kwargs)
        return DataAndFiles(json.loads(parsed.data["data"]), parsed.files)


class RestParsed(APIView):
    parser_classes: tuple[Any, ...] = (JSONPart,)

    @once
    def post(self, request: Any, pk: int) -> Response:
        return Response({**charge(request, pk), "name": request.data["owner"]["name"]})


@method_decorator(csrf_exempt, name="dispatch")
class OwnAttribute(View):
    """Has an attribute of the name that requests of Django REST framework have."""

    _request = None

    @method_decorator(once)
    def post(self, request: HttpRequest, pk: int) -> HttpResponse:
        return answer(request, pk)


class RestOfJSON(RestParsed):
    parser_classes = (JSONParser,)


@method_decorator(once, name="dispatch")
class RestDispatch(APIView):
    def post(self, request: Any, pk: int) -> Response:
        if request.data.get("amount") == "wrong":
            charge(request, pk)
            raise ValidationError({"amount": "wrong"})
        return Response(charge(request, pk))


@api_view(["POST"])
@authentication_classes([])
@permission_classes([LooksAtTheBody])
@once
def rest_below(request: Any, pk: int) -> Response:
    return Response(charge(request, pk))


@once
@api_view(["POST"])
def rest_above(request: Any, pk: int) -> Response:
    return Response(charge(request, pk))


ninja = NinjaAPI(urls_namespace="idempotent")


@ninja.post("/{pk}/")
@decorate_view(once)
def operation(request: HttpRequest, pk: int) -> dict[str, int]:
    return charge(request, pk)


@transaction.non_atomic_requests
@csrf_exempt
@once
async def slow(request: HttpRequest, pk: int) -> HttpResponse:
    await asyncio.sleep(1)
    return await sync_to_async(answer)(request, pk)


handler500 = error
urlpatterns = [
    path("ping/", ping),
    path("function/<int:pk>/", function),
    path("unprotected/<int:pk>/", unprotected),
    path("without-transaction/<int:pk>/", without_transaction),
    path("own-transaction/<int:pk>/", own_transaction),
    path("dispatch/<int:pk>/", Dispatch.as_view()),
    path("method/<int:pk>/", Method.as_view()),
    path("rest/<int:pk>/", Rest.as_view()),
    path("rest-upload/<int:pk>/", RestUpload.as_view()),
    path("own-attribute/<int:pk>/", OwnAttribute.as_view()),
    path("rest-parsed/<int:pk>/", RestParsed.as_view()),
    path("rest-of-json/<int:pk>/", RestOfJSON.as_view()),
    path("rest-dispatch/<int:pk>/", RestDispatch.as_view()),
    path("rest-below/<int:pk>/", rest_below),
    path("rest-above/<int:pk>/", rest_above),
    path("ninja/", ninja.urls),
    path("slow/<int:pk>/", slow),
]
