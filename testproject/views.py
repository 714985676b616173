"""The fee as sync and async views, once for each form; the balance, and a statement to download."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    JsonResponse,
    StreamingHttpResponse,
)
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from django_distlock import distributed_lock, lock, respond

from .models import Account
from .services import WORK, acharge_fee, audit, charge_fee

if TYPE_CHECKING:
    from collections.abc import Iterator
    from decimal import Decimal

#: Seconds that a charge takes for people: long enough to ask for two by hand.
PATIENCE = 1.5


@require_GET
def index(request: HttpRequest) -> HttpResponse:
    """List the accounts, and what to try."""
    accounts = Account.objects.all()
    example = accounts.filter(name="Ada").first() or accounts.first()
    return render(request, "testproject/index.html", {"accounts": accounts, "account": example})


@require_GET
def account(request: HttpRequest, account_id: int) -> HttpResponseBase:
    """Show the balance, and whether it is right; as JSON for clients that ask for it."""
    found = get_object_or_404(Account, pk=account_id)
    report = audit(account_id)
    if wants_json(request):
        return JsonResponse(
            {"name": found.name, "balance": report.balance, "updates_lost": report.lost}
        )
    fees = found.fees.all()[:10]
    return render(
        request, "testproject/account.html", {"account": found, "audit": report, "fees": fees}
    )


# There is no log-in, so there is nothing that a forged request could borrow.
@csrf_exempt
@require_POST
def charge_unlocked(request: HttpRequest, account_id: int) -> HttpResponseBase:
    """Take the fee with no lock: what two requests at once get wrong."""
    return charged(request, account_id, charge_fee(account_id, work=work_of(request)))


@csrf_exempt
@require_POST
@distributed_lock("fee:{account_id}", timeout=2, on_busy=respond(409))
def charge(request: HttpRequest, account_id: int) -> HttpResponseBase:
    """Take the fee, one request at a time; after two seconds of waiting, 409 with Retry-After."""
    return charged(request, account_id, charge_fee(account_id, work=work_of(request)))


@csrf_exempt
@require_POST
@distributed_lock("fee:{account_id}", timeout=2, on_busy=respond(409))
async def acharge(request: HttpRequest, account_id: int) -> HttpResponseBase:
    """See charge(): the same lock, so sync and async requests exclude each other."""
    return charged(request, account_id, await acharge_fee(account_id, work=work_of(request)))


@csrf_exempt
@require_http_methods(["GET", "POST"])
def charge_form(request: HttpRequest, account_id: int) -> HttpResponseBase:
    """Show a form with a token of its own, or charge what it, or a program with a key, has sent."""
    found = get_object_or_404(Account, pk=account_id)
    if request.method == "GET":
        return render(
            request, "testproject/form.html", {"account": found, "token": uuid.uuid4().hex}
        )
    token = request.headers.get("Idempotency-Key") or request.POST.get("token", "")
    if not 1 <= len(token) <= 100:
        return JsonResponse({"detail": "Send an Idempotency-Key of 1 to 100 letters."}, status=400)
    return charge_once(request, found, token)


@distributed_lock(
    "form:{account.pk}:{token}",
    timeout=0,
    min_hold=60,
    free_on_error=True,
    on_busy=respond(409, template="testproject/sent_before.html"),
)
def charge_once(request: HttpRequest, account: Account, token: str) -> HttpResponseBase:
    """Charge once for each *token*: the same one is refused for a minute, unless this fails."""
    with lock(f"fee:{account.pk}", timeout=5):
        if "fail" in request.POST:
            context = {"account": account, "token": token, "failed": True}
            return render(request, "testproject/form.html", context, status=503)
        return charged(request, account.pk, charge_fee(account.pk, work=PATIENCE))


@require_GET
@distributed_lock("fee:{account_id}", timeout=2, on_busy=respond(409))
def statement(request: HttpRequest, account_id: int) -> HttpResponseBase:
    """Send all fees as CSV; the lock is held to the last line, so no fee slips in between."""
    found = get_object_or_404(Account, pk=account_id)
    return StreamingHttpResponse(statement_lines(found), content_type="text/csv; charset=utf-8")


def statement_lines(found: Account) -> Iterator[str]:
    """Give the lines of an account's statement."""
    yield "charged at,amount\n"
    for fee in found.fees.order_by("pk").iterator():
        yield f"{fee.charged_at.isoformat()},{fee.amount}\n"
    yield f"balance,{found.balance}\n"


def work_of(request: HttpRequest) -> float:
    """Return the seconds that a charge takes: longer for people, who press a button in two tabs."""
    return PATIENCE if "slowly" in request.POST else WORK


def charged(request: HttpRequest, account_id: int, fee: Decimal) -> HttpResponseBase:
    """Answer that *fee* was taken: JSON for clients that ask for it, else the account's page."""
    if wants_json(request):
        return JsonResponse({"fee": fee})
    return redirect("account", account_id)


def wants_json(request: HttpRequest) -> bool:
    """Return whether the client prefers JSON to a page."""
    return request.get_preferred_type(["text/html", "application/json"]) == "application/json"
