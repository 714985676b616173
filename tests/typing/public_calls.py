"""Each public call once, as users write it: type-checked by mypy --strict, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from threading import Event
from typing import Any, Unpack, assert_type

from django.contrib.admin import ModelAdmin
from django.db.models import Model, QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils.decorators import method_decorator
from django.views import View
from ninja import NinjaAPI
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from django_distlock import (
    Holder,
    InvalidLockBackend,
    Lease,
    Lock,
    LockBackendError,
    LockDeadlock,
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockNotOwned,
    LockOutcomeUnknown,
    LockTerms,
    NotSupported,
    Policy,
    ReleasedBeforeCommit,
    SnapshotBeforeLock,
    StaleFencingToken,
    alead,
    current_lease,
    distributed_lock,
    force_release,
    lead,
    lock,
    lock_all,
    locked,
    locks,
    preload,
    respond,
    retry,
    skip,
    transaction_lock,
)
from django_distlock.admin import ObjectLocksMixin
from django_distlock.backends.base import BaseLockBackend
from django_distlock.contrib import tasks
from django_distlock.contrib.cache import aget_or_compute, get_or_compute
from django_distlock.contrib.celery import attached, handover, unique_task
from django_distlock.contrib.editing import EditLock, edit_lock
from django_distlock.contrib.editing.admin import EditLockMixin
from django_distlock.contrib.health_check import Locks
from django_distlock.contrib.idempotency import idempotent
from django_distlock.engine.values import Held
from django_distlock.lock_set import LockSet
from django_distlock.models import FencedModel
from django_distlock.signals import (
    backend_failed,
    lock_acquired,
    lock_busy,
    lock_detached,
    lock_extended,
    lock_forced,
    lock_lost,
    lock_released,
)
from django_distlock.testing import (
    assert_held,
    assert_not_held,
    held_elsewhere,
    override_locks,
    reset_locks,
)
from testproject.models import Account


def take_a_lock(account: Account) -> None:
    assert_type(lock("a"), Lock)
    assert_type(Lock("a"), Lock)
    lock(
        "a",
        using="redis",
        timeout=5,
        ttl=30,
        shared=True,
        reentrant=False,
        renew=False,
        max_hold=None,
        min_hold=0.5,
        free_on_error=True,
        release="on_commit",
        purpose="the yearly report",
    )
    lock("a", limit=4)
    lock("a", timeout=None, ttl=timedelta(minutes=1), max_hold=timedelta(hours=1))

    with lock("a") as lease:
        assert_type(lease, Lease)
    assert_type(lock("a").acquire(False), Lease | None)
    assert_type(lock("a").acquire(blocking=True, timeout=timedelta(seconds=5)), Lease | None)
    assert_type(lock("a").acquire(timeout=None), Lease | None)
    lock("a").release()
    assert_type(lock("a").locked(), bool)
    assert_type(lock_all("a", "b"), LockSet)
    assert_type(lock_all("a").acquire(), tuple[Lease, ...] | None)
    lock_all("a").release()
    with lock_all("a", lock("b", shared=True), lock("c", limit=20), timeout=5) as leases:
        assert_type(leases, tuple[Lease, ...])
    assert_type(current_lease(), Lease | None)
    assert_type(current_lease("a"), Lease | None)
    transaction_lock("a", using="default", timeout=5)


async def take_a_lock_in_a_task() -> None:
    async with lock("a") as lease:
        assert_type(lease, Lease)
    async with lock_all("a", "b") as leases:
        assert_type(leases, tuple[Lease, ...])
    assert_type(await lock("a").aacquire(timeout=5), Lease | None)
    await lock("a").arelease()
    assert_type(await lock("a").alocked(), bool)
    assert_type(await lock_all("a").aacquire(), tuple[Lease, ...] | None)
    await lock_all("a").arelease()

    await lease.aextend(timedelta(minutes=1))
    assert_type(await lease.adetach(60), str)
    assert_type(await Lease.aattach("text", "report"), Lease)
    await lease.arelease()
    async with lease as entered:
        assert_type(entered, Lease)


def use_a_lease(lease: Lease, account: Account, accounts: QuerySet[Account]) -> None:
    assert_type(lease.name, str)
    assert_type(lease.using, str)
    assert_type(lease.ttl, float)
    assert_type(lease.shared, bool)
    assert_type(lease.place, int | None)
    assert_type(lease.holder, Holder)
    assert_type(lease.fencing_token, int | None)
    assert_type(lease.checked_token(), int)
    assert_type(lease.held, bool)
    assert_type(lease.lost, bool)
    assert_type(lease.in_jeopardy, bool)
    assert_type(lease.reason, str)
    assert_type(lease.remaining, float)
    assert_type(lease.deadline, float)
    lease.check()
    lease.on_lost(lambda reason: reason.upper())
    lease.extend()
    lease.extend(timedelta(minutes=1))
    assert_type(lease.detach(timedelta(minutes=5)), str)
    assert_type(Lease.attach("text"), Lease)
    lease.release()
    with lease as entered:
        assert_type(entered, Lease)

    lease.guard()
    lease.guard(using="default")
    lease.save(account, update_fields=["balance"])
    assert_type(lease.update(accounts, balance=0), int)
    assert issubclass(Account, FencedModel)


def claim_gives_back_what_it_is_given(
    lease: Lease, account: Account, accounts: QuerySet[Account]
) -> None:
    assert_type(lease.claim(account), Account)
    assert_type(lease.claim(accounts), QuerySet[Account])
    assert_type(lease.claim(Account.objects.filter(balance=0)).count(), int)
    lease.claim(account).money = 1  # type: ignore[attr-defined]  # no such field
    lease.claim(7)  # type: ignore[type-var]  # neither an instance nor a queryset


@unique_task(
    "index:{shop_id}", using="redis", acks_late=True, debounce=30, at_most=timedelta(minutes=5)
)
def index_shop(shop_id: int) -> None: ...


@unique_task(lambda shop_id: f"import:{shop_id}", bind=True, lease=timedelta(hours=2))
def go_on(self: Any, shop_id: int) -> None:
    with attached(self) as lease:
        assert_type(lease, Lease)


@tasks.unique_task(
    "count:{shop_id}",
    lease=timedelta(hours=2),
    using="redis",
    debounce=timedelta(seconds=30),
    at_most=300,
    queue_name="slow",
)
def count_orders(shop_id: int) -> int:
    return shop_id


def enqueue_a_task() -> None:
    assert_type(count_orders, tasks.UniqueTask)
    assert_type(tasks.unique_task()(bare), tasks.UniqueTask)
    tasks.unique_task(bare)
    unique_task(bare)
    if result := count_orders.enqueue(7):
        assert_type(result.id, str)


class AccountAdmin(EditLockMixin, ModelAdmin):  # type: ignore[type-arg]  # as Django has it at run time
    edit_lock_using = "redis"
    edit_lock_ttl = timedelta(minutes=2)

    def has_take_over_permission(self, request: HttpRequest, obj: Model) -> bool:
        return request.user.is_active and super().has_take_over_permission(request, obj)


class ShopAdmin(ObjectLocksMixin, ModelAdmin):  # type: ignore[type-arg]  # as above
    object_locks_using = ("redis",)

    def get_object_locks(self, request: HttpRequest, obj: Model) -> list[str | Model]:
        return [obj, f"fee:{obj.pk}"]


def compute_a_value() -> str:
    return "report"


async def acompute_a_value() -> int:
    return 7


async def get_a_value() -> None:
    assert_type(get_or_compute("a", compute_a_value, timeout=60, stale=timedelta(hours=1)), str)
    assert_type(await aget_or_compute("a", acompute_a_value, timeout=60, stale=0), int)
    get_or_compute(
        "a",
        compute_a_value,
        timeout=60,
        stale=60,
        cache="other",
        using="redis",
        wait=None,
        if_down="compute",
    )


def scope_of(request: HttpRequest) -> str:
    return request.path


@idempotent(keep=timedelta(days=1), cache="answers", using="redis", scope=scope_of)
def idempotent_view(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse(number)


@idempotent(keep=60, scope="all", header="X-GitHub-Delivery", required=False, if_down="run")
async def idempotent_async_view(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@method_decorator(idempotent(), name="dispatch")
class IdempotentView(View): ...


async def call_idempotent_views(request: HttpRequest) -> None:
    assert_type(idempotent_view(request, 7), HttpResponse)
    assert_type(await idempotent_async_view(request), HttpResponse)


def edit_an_object(request: HttpRequest, account: Account, form: ModelForm[Account]) -> None:
    edit = edit_lock(request, account, using="redis", ttl=timedelta(hours=1), may_take_over=False)
    assert_type(edit, EditLock)
    assert_type(edit.is_read_only, bool)
    assert_type(edit.accepts(form), bool)
    edit.release()


def send_a_task(lease: Lease) -> None:
    assert_type(handover(lease), dict[str, str])
    go_on.apply_async((7,), headers=handover(lease, ttl=timedelta(minutes=2)))


@distributed_lock
def bare(account_id: int, *, rate: float = 0.03) -> str:
    return f"{account_id} {rate}"


@distributed_lock("fee:{account_id}", timeout=5, on_busy=skip("later"))
def named(account_id: int) -> str:
    return str(account_id)


@distributed_lock(ttl=60, max_hold=timedelta(hours=1), on_busy=retry(countdown=5, max_retries=3))
def with_terms(account_id: int) -> None: ...


@distributed_lock("report", using="redis", on_busy=respond(status=423, template="busy.html"))
def view(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse(str(pk))


@distributed_lock("report")
async def in_a_task(number: int) -> list[int]:
    return [number]


@distributed_lock("report")
def numbers(upto: int) -> Iterator[int]:
    yield upto


@distributed_lock("report")
async def numbers_in_a_task(upto: int) -> AsyncIterator[int]:
    yield upto


@distributed_lock(name=lambda account: f"fee:{account.pk}")
def named_by_a_lambda(account: Account) -> int:
    return account.pk or 0


def name_of(account: Account, month: str) -> str:
    return f"{account.pk}:{month}"


@distributed_lock(name_of, timeout=5)
def named_by_a_function(account: Account, month: str) -> int:
    return len(month)


def instead(busy: LockNotAcquired, *args: Any, **kwargs: Any) -> str:
    return busy.name


class Shop:
    pk = 7

    @distributed_lock("shop:{self.pk}", on_busy=instead)
    def charge(self, month: str) -> int:
        return len(month)

    @classmethod
    @distributed_lock
    def open(cls, name: str) -> Shop:
        return cls()

    @staticmethod
    @distributed_lock("count")
    def count(upto: int) -> int:
        return upto

    @distributed_lock("above")
    @staticmethod
    def static_below(number: int) -> int:
        return number

    @distributed_lock
    @classmethod
    def class_below(cls, number: int) -> Shop:
        return cls()


@method_decorator(distributed_lock("report"), name="dispatch")
class Report(View):
    @method_decorator(distributed_lock)
    def get(self, request: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse([request.path])


class Charge(APIView):
    @distributed_lock("fee:{pk}", on_busy=respond())
    def post(self, request: Request, pk: int) -> Response:
        return Response()


@NinjaAPI().post("/charge/{pk}")
@distributed_lock("fee:{pk}", on_busy=respond())
def operation(request: HttpRequest, pk: int) -> dict[str, int]:
    return {"pk": pk}


@distributed_lock("report", on_busy=skip())
def skipped(number: int, *, month: str = "May") -> str:
    return month * number


@distributed_lock("report", on_busy=skip(0))
async def skipped_in_a_task(number: int) -> str:
    return str(number)


@distributed_lock(name="report", on_busy=skip())
def skipped_numbers(upto: int) -> Iterator[int]:
    yield upto


class Skipped:
    @distributed_lock("report", on_busy=skip())
    def method(self, number: int) -> str:
        return str(number)

    @distributed_lock("report", on_busy=skip())
    @staticmethod
    def static(number: int) -> str:
        return str(number)

    @distributed_lock("report", on_busy=skip())
    @classmethod
    def of_class(cls, number: int) -> str:
        return str(number)


async def what_is_skipped_returns_the_value_of_skip() -> None:
    assert_type(skipped(7, month="May"), str | None)
    assert_type(await skipped_in_a_task(7), str | int)
    assert_type(skipped_numbers(7), Iterator[int])
    assert_type(Skipped().method(7), str | None)
    assert_type(Skipped.static(7), str | None)
    assert_type(Skipped.of_class(7), str | None)
    skipped("7")  # type: ignore[arg-type]  # an error is seen through it, too


def terms_are_passed_on(name: str, on_busy: Policy, **terms: Unpack[LockTerms]) -> Lock:
    distributed_lock(name, on_busy=on_busy, **terms)
    return lock(name, **terms)


async def objects_leaders_and_holders(account: Account) -> None:
    with locked(account, timeout=5) as found:
        assert_type(found, Account)
    async with locked(account) as found:
        assert_type(found, Account)
    with lock(account), lock_all(account, "b"):
        force_release(account)
    assert_type(current_lease(account), Lease | None)
    assert_type(lock("a").holder(), Holder | None)
    assert_type(await lock("a").aholder(), Holder | None)
    assert_type(lead("a", lambda lease: lease.name, stop=Event(), limit=2), str | None)

    async def work(lease: Lease) -> int:
        lease.on_lost(print)
        lease.off_lost(print)
        return 7

    assert_type(await alead("a", work, ttl=5), int)
    async with lock("a", cancel_when_lost=True) as lease:
        assert_type(lease, Lease)


async def a_decorated_function_keeps_its_signature(shop: Shop, request: HttpRequest) -> None:
    assert_type(bare(7, rate=0.1), str)
    assert_type(distributed_lock()(bare)(7), str)
    assert_type(named(account_id=7), str)  # skip("later"), a text too
    with_terms(7)
    assert_type(view(request, 7), HttpResponse)
    assert_type(await in_a_task(7), list[int])
    assert_type(numbers(7), Iterator[int])
    assert_type([number async for number in numbers_in_a_task(7)], list[int])
    assert_type(shop.charge("May"), int)
    assert_type(Shop.open("name"), Shop)
    assert_type(shop.count(7), int)
    assert_type(Charge().post(Request(request), 7), Response)
    assert_type(operation(request, 7), dict[str, int])
    assert_type(shop.static_below(7), int)
    assert_type(Shop.class_below(7), Shop)
    assert_type(lock("report", timeout=5)(bare)(7), str)
    assert_type(await lock("report")(in_a_task)(7), list[int])
    assert_type(named_by_a_lambda(Account()), int)
    assert_type(named_by_a_function(Account(), "May"), int)
    bare("7")  # type: ignore[arg-type]  # an error is seen through the decorator
    shop.charge()  # type: ignore[call-arg]  # as above


def what_is_wrong_is_seen() -> None:
    lock("a", timout=5)  # type: ignore[call-arg]  # a word misspelt
    lock("a", expire=5)  # type: ignore[call-arg]  # a word of another library
    lock("a").acquire(blocking_timeout=5)  # type: ignore[arg-type]  # as above
    lock("a", ttl="30")  # type: ignore[arg-type]  # text
    lock("a", ttl=None)  # type: ignore[arg-type]  # every lease ends
    lock("a", release="later")  # type: ignore[arg-type]  # there are two
    lock_all(["a", "b"])  # type: ignore[arg-type]  # names, not a list of them
    lock("report")(bare)("7")  # type: ignore[arg-type]  # seen through lock(), too
    named_by_a_lambda(7)  # type: ignore[arg-type]  # as above
    distributed_lock("a", on_busy="skip")  # type: ignore[call-overload]  # skip()
    distributed_lock("a", timout=5)  # type: ignore[call-overload]  # a word misspelt
    transaction_lock("a", "default")  # type: ignore[call-arg]  # by name only


def look_after_locks() -> None:
    assert_type(locks["default"], BaseLockBackend)
    aliases: list[str] = list(locks)
    for alias in aliases:
        for held in locks[alias].held():
            assert_type(held, Held)
            assert_type(held.holder, Holder | None)
            assert_type(locks[alias].force_release(held.key, held.owner_digest), bool)
    assert_type(force_release("a"), int)
    assert_type(force_release("a", using="default"), int)
    locks.close()
    preload()
    Locks(using="redis").run()


def receive(sender: type[BaseLockBackend], *, name: str, using: str, **facts: Any) -> None: ...


def listen() -> None:
    for signal in (lock_acquired, backend_failed, lock_busy, lock_detached, lock_extended):
        signal.connect(receive)
    for signal in (lock_forced, lock_lost, lock_released):
        signal.connect(receive)


def catch(work: Callable[[], None]) -> None:
    try:
        work()
    except LockNotAcquired as busy:
        assert_type(busy.name, str)
        assert_type(busy.waited, float)
        assert_type(busy.holder, Holder | None)
        assert_type(busy.remaining, float | None)
    except LockNotOwned as taken:
        assert_type(taken.reason, str)
    except LockLost as gone:
        assert_type(gone.reason, str)
    except LockNotHeld as never_held:
        assert_type(never_held.name, str)


def catch_more(work: Callable[[], None]) -> None:
    try:
        work()
    except LockOutcomeUnknown as unknown:
        assert_type(unknown.alias, str)
    except LockBackendError as failed:
        assert_type(failed.causes, dict[str, str])
    except StaleFencingToken as stale:
        assert_type(stale.token, int)
        assert_type(stale.fence, int | None)
    except NotSupported as missing:
        assert_type(missing.what, str)
    except (LockDeadlock, ReleasedBeforeCommit, SnapshotBeforeLock, LockError, InvalidLockBackend):
        raise


@override_locks(free=True)
def use_kit(distlock: object) -> None:
    with held_elsewhere("a", using="default", shared=True, ttl=5):
        assert_held("a", using="default")
    with override_locks(busy=True):
        assert_not_held()
        assert_not_held("a", using="default")
    reset_locks()
