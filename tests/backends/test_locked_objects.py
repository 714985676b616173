"""locked(), and claimed instances: read again, saved through the fence, on each database."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from django.db import transaction
from django.db.models import F
from django.utils.functional import SimpleLazyObject

from django_distlock import (
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    StaleFencingToken,
    current_lease,
    lock,
    locked,
)
from django_distlock.engine import fencing
from testproject.models import Account, Fee
from tests.backends.conftest import apart
from tests.contract.crew import elsewhere
from tests.fixtures.eventually import eventually

if TYPE_CHECKING:
    from django.db.models import Model
    from pytest_django.fixtures import Settings

    from django_distlock import Lease


@pytest.fixture
def fee(database: str, account: Account) -> Fee:
    return Fee.objects.using(database).create(account=account, amount=3)


def test_the_instance_itself_is_read_again(database: str, account: Account, fee: Fee) -> None:
    Account.objects.using(database).filter(pk=account.pk).update(balance=50)
    Fee.objects.using(database).filter(pk=fee.pk).update(amount=5)

    with locked(account, using=database) as found:
        assert found is account
        assert account.balance == 50
        lease = current_lease(account)
        assert lease
        assert account.fence == lease.fencing_token
    with locked(fee, using=database, timeout=5):
        assert fee.amount == 5
    assert not lock(fee, using=database).locked()


def test_so_is_a_lazy_instance(database: str, account: Account, fee: Fee) -> None:
    lazy: Any = SimpleLazyObject(lambda: account)
    Account.objects.using(database).filter(pk=account.pk).update(balance=50)
    Fee.objects.using(database).filter(pk=fee.pk).update(amount=5)

    with locked(lazy, using=database, timeout=5):
        assert account.balance == 50
        account.balance -= 3
        with locked(lazy, using=database):
            lazy.balance -= 3
            lazy.save()
        lease = current_lease(lazy)
        assert lease
        lease.save(lazy)
        assert [lease.claim(lazy).balance, account.fence] == [44, lease.fencing_token]
    with locked(SimpleLazyObject(lambda: fee), using=database):  # type: ignore[type-var]  # as request.user is
        assert fee.amount == 5

    with lock(account, using=database) as later:
        later.claim(account)
    with pytest.raises(StaleFencingToken):
        lazy.save()


def test_no_update_is_lost(database: str, account: Account) -> None:
    def charge() -> None:
        for _ in range(5):
            mine = Account.objects.using(database).get(pk=account.pk)
            with locked(mine, using=database, timeout=60):
                mine.balance -= 3
                mine.save()

    apart(database, *[charge] * 4)

    account.refresh_from_db()
    assert account.balance == 40


def test_no_body_begins_if_the_lease_ends_while_the_row_is_read(
    database: str, fee: Fee, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = fencing.read_again

    def read_for_long(lease: Lease, instance: Model) -> None:
        read(lease, instance)
        eventually(lambda: lease.lost)

    monkeypatch.setattr(fencing, "read_again", read_for_long)
    with pytest.raises(LockLost), locked(fee, using=database, ttl=0.2, renew=False):
        pytest.fail("the lease has ended")

    async def work() -> None:
        async with locked(fee, using=database, ttl=0.2, renew=False):
            pytest.fail("the lease has ended")

    if database == "default":
        with pytest.raises(LockLost):
            asyncio.run(work())
    with lock(fee, using=database, timeout=5):
        pass


def test_an_inner_block_keeps_what_the_outer_one_has_changed(
    database: str, account: Account
) -> None:
    with locked(account, using=database):
        account.balance -= 3
        with locked(account, using=database):
            account.balance -= 3
            account.save()
        assert account.balance == 94

    Account.objects.using(database).filter(pk=account.pk).update(balance=50)
    with locked(account, using=database):
        assert account.balance == 50


@pytest.mark.parametrize("is_plain", [True, False])
def test_each_outermost_block_of_a_transaction_reads_again(
    database: str, account: Account, fee: Fee, is_plain: bool
) -> None:
    row: Any = fee if is_plain else account
    field = "amount" if is_plain else "balance"
    rows = type(row)._base_manager.using(database).filter(pk=row.pk)
    rows.update(**{field: 100})

    def charge(amount: int) -> None:
        setattr(row, field, getattr(row, field) - amount)
        row.save()

    with transaction.atomic(using=database):
        with pytest.raises(RuntimeError), transaction.atomic(using=database):
            with locked(row, using=database):
                charge(50)
                raise RuntimeError
        with locked(row, using=database):
            charge(1)
        rows.update(**{field: F(field) - 10})
        setattr(row, field, 5)
        with locked(row, using=database), locked(row, using=database):
            charge(3)

    row.refresh_from_db()
    assert getattr(row, field) == 86


def test_a_block_in_one_of_a_lock_that_has_not_read_it_does(
    database: str, account: Account
) -> None:
    with lock(account, using=database):
        for balance in (50, 60):
            Account.objects.using(database).filter(pk=account.pk).update(balance=balance)
            with locked(account, using=database):
                assert account.balance == balance


def test_another_instance_of_the_row_is_refused_in_the_block(
    database: str, account: Account, fee: Fee
) -> None:
    for row in (account, fee):
        other: Any = type(row)._base_manager.using(database).get(pk=row.pk)
        with locked(row, using=database):
            with pytest.raises(ValueError, match="has locked another instance of 'testproject"):
                with locked(other, using=database):
                    pytest.fail("what it saves would be overwritten")
            assert lock(row, using=database).locked()
        assert not lock(row, using=database).locked()
        with locked(other, using=database):
            pass


@pytest.mark.server
def test_rows_of_two_databases_are_two_although_they_share_a_lock(
    postgres: object, mariadb: object
) -> None:
    both = [
        Account(pk=8_100_000, name=alias, balance=1, opening_balance=1)
        for alias in ("postgres", "mariadb")
    ]
    for row in both:
        row.save(using=row.name)
    here, there = both

    with locked(here, using="postgres"), locked(there, using="postgres"):
        here.balance, there.balance = 2, 3
        here.save()
        there.save()

    for row in both:
        row.refresh_from_db()
        row.delete()
    assert [here.balance, there.balance] == [2, 3]


@pytest.mark.server
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_readers_do_not_refuse_each_other(
    database: str, account: Account, settings: Settings
) -> None:
    advisory = "django_distlock.backends.advisory.AdvisoryBackend"
    settings.DISTLOCK = {"default": {"BACKEND": advisory, "OPTIONS": {"using": database}}}
    rows = Account.objects.using(database).filter(pk=account.pk)

    def read_beside() -> None:
        with locked(rows.get(), shared=True) as another:
            assert another.balance == 50

    rows.update(balance=50)
    with locked(account, shared=True):
        apart(database, read_beside)
        assert account.balance == 50
    assert rows.get().fence == 0


def test_a_busy_or_deleted_one_is_refused_and_nothing_stays_held(
    database: str, account: Account, fee: Fee
) -> None:
    with locked(account, using=database):

        def refused() -> bool:
            with pytest.raises(LockNotAcquired), locked(account, using=database, timeout=0):
                pytest.fail("it is held")
            return True

        assert elsewhere(refused)

    Fee.objects.using(database).filter(pk=fee.pk).delete()
    with pytest.raises(Fee.DoesNotExist), locked(fee, using=database, min_hold=100):
        pytest.fail("it was deleted")
    assert not lock(fee, using=database).locked()
    with lock(fee, using=database, timeout=0):
        pass  # nor is it reserved


def test_a_model_can_demand_the_claim(
    database: str, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Account, "must_be_claimed", True)

    with pytest.raises(LockNotHeld, match="must be claimed before it is saved"):
        account.save()
    with locked(account, using=database):
        account.balance = 10
        account.save()
        lease = current_lease()
        assert lease
        lease.save(account)
    made = Account(name="new", balance=1, opening_balance=1)
    made.save(using=database)
    made.delete()
