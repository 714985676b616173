"""Charging a fee without a lock and with it, and the audit that tells the difference."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asgiref.sync import sync_to_async
from django.db import transaction
from django.db.models import Count

from django_distlock import distributed_lock

from .fees import after, charges_between, fee_on
from .models import Account, Fee

if TYPE_CHECKING:
    from decimal import Decimal

#: Seconds between reading the balance and writing it: they stand for the real work of a request.
WORK = 0.04


def open_account(name: str, amount: Decimal) -> Account:
    """Return a new account that holds *amount*."""
    return Account.objects.create(name=name, opening_balance=amount, balance=amount)


def charge_fee(account_id: int, *, work: float = WORK) -> Decimal:
    """Take the fee from the account and return it: read, reckon, write."""
    account = Account.objects.get(pk=account_id)
    fee = fee_on(account.balance)
    time.sleep(work)
    book(account, fee)
    return fee


#: The lock is the only difference. Its timeout lets a whole crowd of servers go first.
charge_fee_locked = distributed_lock("fee:{account_id}", timeout=60)(charge_fee)


async def acharge_fee(account_id: int, *, work: float = WORK) -> Decimal:
    """See charge_fee()."""
    account = await Account.objects.aget(pk=account_id)
    fee = fee_on(account.balance)
    await asyncio.sleep(work)
    await sync_to_async(book)(account, fee)
    return fee


def book(account: Account, fee: Decimal) -> None:
    """Write the new balance and the receipt, both or neither."""
    account.balance -= fee
    with transaction.atomic():
        account.save(update_fields=["balance"])
        Fee.objects.create(account=account, amount=fee)


@dataclass(frozen=True, slots=True)
class Audit:
    """The fees charged to an account, how many of them its balance lacks, and the balances: found and expected."""

    made: int
    lost: int
    balance: Decimal
    expected: Decimal

    @property
    def wrong(self) -> Decimal:
        """How much money the account has too much."""
        return self.balance - self.expected


def audit(account_id: int) -> Audit:
    """Compare the account's balance with the fees charged."""
    # One query: a fee that is charged meanwhile is in both numbers, or in none.
    account = Account.objects.annotate(made=Count("fees")).get(pk=account_id)
    applied = charges_between(account.opening_balance, account.balance)
    return Audit(
        made=account.made,
        lost=account.made - applied,
        balance=account.balance,
        expected=after(account.made, account.opening_balance),
    )
