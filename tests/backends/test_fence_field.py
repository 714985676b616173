"""The column of the fence: whatever writes into it does not lower it, historical models of migrations too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from django.apps import apps
from django.db import connections, models, transaction
from django.db.migrations.state import ProjectState
from django.db.transaction import TransactionManagementError

from django_distlock import StaleFencingToken, lock, locked
from testproject.models import Account

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_distlock import Lease


def historical(database: str, account: Account) -> Any:
    """Return the row of *account* as a function of RunPython reads it."""
    model: Any = ProjectState.from_apps(apps).apps.get_model("testproject", "Account")
    return model.objects.using(database).get(pk=account.pk)


def current(database: str, account: Account) -> Account:
    return Account.objects.using(database).get(pk=account.pk)


def by_save(row: Any) -> None:
    row.save()


def by_save_of_the_fence(row: Any) -> None:
    row.save(update_fields=["fence"])


def by_raw_save(row: Any) -> None:
    row.save_base(raw=True)


def by_update(row: Any) -> None:
    rows_like(row).filter(pk=row.pk).update(fence=row.fence)


def by_an_expression(row: Any) -> None:
    rows_like(row).filter(pk=row.pk).update(fence=models.F("fence") - 1)


def by_bulk_update(row: Any) -> None:
    rows_like(row).bulk_update([row], ["fence", "balance"])


def by_upsert(row: Any) -> None:
    names = [field.name for field in row._meta.concrete_fields]
    unique = ["pk"] if connections[row._state.db].vendor != "mysql" else None
    rows_like(row).bulk_create(
        [row], update_conflicts=True, update_fields=names[1:], unique_fields=unique
    )


def rows_like(row: Any) -> Any:
    return models.QuerySet(row._meta.model, using=row._state.db)


WAYS = [
    *(by_save, by_save_of_the_fence, by_raw_save, by_update),
    *(by_an_expression, by_bulk_update, by_upsert),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_historical", [True, False])
def test_a_write_beside_the_holder_lets_no_earlier_holder_in(
    database: str,
    account: Account,
    holders: tuple[Lease, Lease],
    way: Callable[[Any], None],
    is_historical: bool,
) -> None:
    first, second = holders
    late = first.claim(account)
    read = historical if is_historical else current
    beside = read(database, account)
    fresh = second.claim(account)

    beside.balance = 7
    way(beside)

    account.refresh_from_db()
    assert account.fence == second.fencing_token
    with pytest.raises(StaleFencingToken, match="a later holder"):
        late.save()
    fresh.save()


def test_an_upsert_of_nothing_but_the_fence_says_what_to_write(
    database: str, account: Account
) -> None:
    unique = ["pk"] if connections[database].vendor != "mysql" else None
    rows, before = Account.objects.using(database), account.fence

    with pytest.raises(ValueError, match=r"update 'fence', which keeps .*: use ignore_conflicts"):
        rows.bulk_create(
            [account], update_conflicts=True, update_fields=["fence"], unique_fields=unique
        )

    rows.bulk_create([account], ignore_conflicts=True)
    account.refresh_from_db()
    assert account.fence == before


def test_a_fence_can_be_raised_by_an_update_of_ones_own(
    database: str, name: str, account: Account
) -> None:
    rows = Account.objects.using(database).filter(pk=account.pk)

    rows.update(fence=models.F("fence") + 5)
    assert rows.get().fence == 5
    rows.update(fence=9)
    assert rows.get().fence == 9


def test_locked_claims_a_historical_row_in_a_transaction(
    database: str, name: str, account: Account
) -> None:
    with lock(name, using=database) as lease:
        late = lease.claim(account)
    row = historical(database, account)

    with transaction.atomic(using=database), locked(row, using=database):
        row.balance = 60
        row.save()

    with pytest.raises(StaleFencingToken):
        late.save()
    account.refresh_from_db()
    assert account.balance == 60


def test_outside_of_one_a_historical_row_is_refused(
    database: str, name: str, account: Account
) -> None:
    row = historical(database, account)

    with pytest.raises(TransactionManagementError, match=r"Account has no save\(\).*atomic\(\)"):
        with locked(row, using=database):
            pytest.fail("its save() would not compare the fence")
    with lock(name, using=database) as lease:
        for target in (row, rows_like(row)):
            with pytest.raises(TransactionManagementError, match="as in a migration"):
                lease.claim(target)
    assert not lock(row, using=database).locked()
