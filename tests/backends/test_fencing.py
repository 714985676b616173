"""Fenced data: what the row itself refuses."""

from __future__ import annotations

import copy
import pickle
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections, transaction
from django.db.models import Count, F, Window
from django.db.models.functions import RowNumber
from django.db.models.signals import post_save

from django_distlock import NotSupported, StaleFencingToken, lock
from testproject.models import Account
from tests.backends.conftest import SERVERS, apart, isolated
from tests.contract.crew import listening

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import QuerySet

    from django_distlock import Lease

    Holders = tuple[Lease, Lease]


def test_many_rows_are_claimed_and_updated_by_statements_that_every_server_takes(
    database: str, name: str
) -> None:
    accounts = Account.objects.using(database)
    accounts.bulk_create([Account(name=name, balance=1, opening_balance=1) for _ in range(1200)])
    mine = accounts.filter(name=name)
    most = 0

    def count(execute: Callable[..., Any], sql: str, params: Any, *rest: Any) -> Any:
        nonlocal most
        most = max(most, len(params or ()))
        return execute(sql, params, *rest)

    with lock(name, using=database) as lease, connections[database].execute_wrapper(count):
        lease.claim(mine)
        updated = lease.update(mine, balance=2)

    assert updated == 1200
    assert mine.filter(balance=2).count() == 1200
    assert most < 999
    mine.delete()


def test_a_refused_claim_of_many_rows_raises_no_fence(
    database: str, account: Account, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_distlock.engine.fencing.BATCH", 1)
    accounts = Account.objects.using(database)
    other = accounts.create(name="other", balance=1, opening_balance=1)
    first, second = holders
    second.claim(other)

    with pytest.raises(StaleFencingToken):
        first.claim(accounts.filter(pk__in=[account.pk, other.pk]).order_by("pk"))

    assert accounts.get(pk=account.pk).fence == account.fence
    other.delete()


def test_rows_that_a_window_function_selects_are_refused_before_a_fence_is_raised(
    database: str, name: str, account: Account
) -> None:
    number = Window(RowNumber(), partition_by="name", order_by=F("pk").asc())
    rows = Account.objects.using(database).annotate(number=number).filter(number=1)

    with lock(name, using=database) as lease, pytest.raises(ValueError, match="window function"):
        lease.claim(rows)

    assert rows.get(pk=account.pk).fence == account.fence


def pickled(account: Account) -> Account:
    again: Account = pickle.loads(pickle.dumps(account))
    return again


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_that_is_made_while_it_is_saved_is_refused_like_a_later_one(
    database: str, account: Account, holders: Holders, duplicate: Callable[[Account], Account]
) -> None:
    copies: list[Account] = []

    def keep(instance: Account, **_: object) -> None:
        copies.append(duplicate(instance))

    first, second = holders
    mine = first.claim(account)
    with listening(post_save, keep):
        mine.save()
    second.claim(account).save()

    with pytest.raises(StaleFencingToken):
        copies[0].save()


SLICES: dict[str, Callable[[QuerySet[Account]], QuerySet[Account]]] = {
    "filter": lambda rows: rows,
    "slice": lambda rows: rows.order_by("-balance")[:1],
    "annotated": lambda rows: rows.annotate(number=Count("fees")).filter(number=0),
}


@pytest.mark.parametrize("form", SLICES)
def test_rows_that_begin_to_match_after_the_claim_are_not_in_it(
    database: str, name: str, account: Account, form: str
) -> None:
    accounts = Account.objects.using(database)
    other = accounts.create(name="", balance=500, opening_balance=1)
    with lock(name, using=database) as lease:
        claimed = lease.claim(SLICES[form](accounts.filter(name=account.name)))

        accounts.filter(pk=other.pk).update(name=account.name)

        assert [row.pk for row in claimed] == [account.pk]
        assert lease.update(claimed, balance=3) == 1
    other.delete()


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_rows_that_begin_to_match_while_the_fences_are_raised_are_not_in_the_claim(
    database: str, name: str, account: Account, another: Callable[[str], BaseDatabaseWrapper]
) -> None:
    accounts = Account.objects.using(database)
    other = accounts.create(name="", balance=1, opening_balance=1)
    elsewhere = another(database)

    def meanwhile(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE"):
            with elsewhere.cursor() as cursor:
                rename = "UPDATE testproject_account SET name = %s WHERE id = %s"
                cursor.execute(rename, [account.name, other.pk])
        return execute(sql, *rest)

    with lock(name, using=database) as lease, transaction.atomic(using=database):
        with connections[database].execute_wrapper(meanwhile):
            claimed = lease.claim(accounts.filter(name=account.name))

        assert [row.fence for row in claimed] == [lease.fencing_token]
    assert accounts.filter(name=account.name).count() == 2
    other.delete()


def update(late: Lease, account: Account) -> None:
    late.update(Account.objects.using("mariadb").filter(pk=account.pk), balance=7)


def delete(_late: Lease, account: Account) -> None:
    account.delete()


def save(_late: Lease, account: Account) -> None:
    account.save()


def save_by_the_lease(late: Lease, account: Account) -> None:
    late.save(account)


def claim_again(late: Lease, account: Account) -> None:
    late.claim(account)


def claim_rows(late: Lease, account: Account) -> None:
    list(late.claim(Account.objects.using("mariadb").filter(pk=account.pk)))


@pytest.mark.server
@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@pytest.mark.parametrize(
    "write", [update, delete, save, save_by_the_lease, claim_again, claim_rows]
)
def test_a_late_holder_is_refused_in_a_transaction_that_still_reads_its_own_fence(
    account: Account, holders: Holders, write: Callable[[Lease, Account], None]
) -> None:
    late, next_one = holders

    def take_over() -> None:
        theirs = next_one.claim(Account.objects.using("mariadb").get(pk=account.pk))
        theirs.balance = 50
        theirs.save()

    with isolated("mariadb", "repeatable read"):
        mine = late.claim(account)
        with pytest.raises(StaleFencingToken), transaction.atomic(using="mariadb"):
            Account.objects.using("mariadb").get(pk=account.pk)
            apart("mariadb", take_over)
            write(late, mine)
        connections["mariadb"].close()
    account.refresh_from_db()
    assert account.balance == 50


def test_new_row_is_born_with_the_fence_of_its_holder(database: str, name: str) -> None:
    with lock(name, using=database) as lease:
        born = Account(name=uuid.uuid4().hex, balance=1, opening_balance=1)
        lease.save(born, using=database)

    born.refresh_from_db()
    assert born.fence == lease.fencing_token
    born.delete()


def test_backend_without_tokens_says_so(settings: pytest.FixtureRequest, name: str) -> None:
    settings.DISTLOCK = {"default": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"}}  # type: ignore[attr-defined]

    with lock(name) as lease, pytest.raises(NotSupported, match="fencing tokens"):
        lease.claim(Account(pk=1))
