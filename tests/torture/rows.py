"""The data under protection, in a database that no fault reaches: rows, and a receipt for each update of one.

An update and its receipt are one transaction, so a killed process leaves both or none of them. A row
that shows fewer updates than it has receipts has lost some.
"""

from __future__ import annotations

from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING

from django.db import transaction

from testproject.models import Account, Fee

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django_distlock import Lease

#: The database alias of the rows.
STORE = "store"
#: The kinds of rows: written through `Lease.claim()`, and just written.
KINDS = ("claimed", "unfenced")
ONE = Decimal(1)


def make(lock: str) -> None:
    """Make the rows of one lock."""
    for kind in KINDS:
        Account.objects.using(STORE).create(name=f"{lock}:{kind}", opening_balance=0, balance=0)


def raise_claimed(lock: str, lease: Lease, work: Callable[[], object]) -> int:
    """Claim the row, read it by that, *work*, write it one higher and return that; StaleFencingToken if a later holder has claimed it."""
    row = lease.claim(_row(lock, "claimed"))
    work()
    row.balance += ONE
    with _with_receipt(row):
        row.save(using=STORE)
    return int(row.balance)


def raise_unfenced(lock: str, work: Callable[[], object]) -> int:
    """Read the row, *work*, write the row one higher, and return that."""
    row = _row(lock, "unfenced")
    work()
    balance = row.balance + ONE
    with _with_receipt(row):
        Account.objects.using(STORE).filter(pk=row.pk).update(balance=balance)
    return int(balance)


def counts(lock: str) -> dict[str, tuple[int, int]]:
    """Return for each kind of row how many receipts there are, and how many updates the row shows."""
    rows = {kind: _row(lock, kind) for kind in KINDS}
    return {
        kind: (Fee.objects.using(STORE).filter(account=row.pk).count(), int(row.balance))
        for kind, row in rows.items()
    }


def _row(lock: str, kind: str) -> Account:
    return Account.objects.using(STORE).get(name=f"{lock}:{kind}")


@contextmanager
def _with_receipt(row: Account) -> Iterator[None]:
    with transaction.atomic(using=STORE):
        yield
        Fee.objects.using(STORE).create(account_id=row.pk, amount=ONE)
