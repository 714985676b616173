"""Pages of every framework under ATOMIC_REQUESTS: each adds 1 to a balance by reading and writing, under a lock."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, cast

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from rest_framework.decorators import api_view
from rest_framework.response import Response
from rest_framework.views import APIView

from django_distlock import distributed_lock, lock
from testproject.models import Account
from tests.integration.worker_site import error, ping

if TYPE_CHECKING:
    from django_distlock.lock import LockTerms

TERMS = cast(
    "LockTerms", {"timeout": 40, "release": os.environ.get("DISTLOCK_ATOMIC_RELEASE", "auto")}
)
locked = distributed_lock("balance:{pk}", **TERMS)


def raise_balance(pk: int) -> dict[str, Any]:
    account = Account.objects.get(pk=pk)
    time.sleep(0.002)
    Account.objects.filter(pk=pk).update(balance=account.balance + 1)
    return {"pid": os.getpid()}


@csrf_exempt
def with_lock(request: HttpRequest, pk: int) -> HttpResponse:
    with lock(f"balance:{pk}", **TERMS):
        answer = raise_balance(pk)
    time.sleep(0.005)  # what else a view does
    return JsonResponse(answer)


@csrf_exempt
@locked
def decorated(request: HttpRequest, pk: int) -> HttpResponse:
    return JsonResponse(raise_balance(pk))


@method_decorator(csrf_exempt, name="dispatch")
class DecoratedPost(View):
    @method_decorator(locked)
    def post(self, request: HttpRequest, pk: int) -> HttpResponse:
        return JsonResponse(raise_balance(pk))


class Rest(APIView):
    @locked
    def post(self, request: Any, pk: int) -> Response:
        return Response(raise_balance(pk))


class RestByMethodDecorator(APIView):
    @method_decorator(locked)
    def post(self, request: Any, pk: int) -> Response:
        return Response(raise_balance(pk))


@api_view(["POST"])
@locked
def rest_outside(request: Any, pk: int) -> Response:
    return Response(raise_balance(pk))


@locked
@api_view(["POST"])
def rest_inside(request: Any, pk: int) -> Response:
    return Response(raise_balance(pk))


ninja = NinjaAPI()


@ninja.post("/{pk}/")
@locked
def operation(request: HttpRequest, pk: int) -> dict[str, Any]:
    return raise_balance(pk)


handler500 = error
urlpatterns = [
    path("ping/", ping),
    path("with-lock/<int:pk>/", with_lock),
    path("decorated/<int:pk>/", decorated),
    path("decorated-post/<int:pk>/", DecoratedPost.as_view()),
    path("rest/<int:pk>/", Rest.as_view()),
    path("rest-method-decorator/<int:pk>/", RestByMethodDecorator.as_view()),
    path("rest-outside/<int:pk>/", rest_outside),
    path("rest-inside/<int:pk>/", rest_inside),
    path("ninja/", ninja.urls),
]
