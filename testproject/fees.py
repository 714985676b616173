"""Fees, and how many of them a balance has lost: arithmetic, no I/O."""

from __future__ import annotations

from decimal import Decimal

RATE = Decimal("0.03")
CENT = Decimal("0.01")


def fee_on(balance: Decimal) -> Decimal:
    """Return 3 % of *balance*, in whole cents."""
    return (balance * RATE).quantize(CENT)


def after(charges: int, opening: Decimal) -> Decimal:
    """Return what *charges* fees, one after the other, leave of *opening*."""
    balance = opening
    for _ in range(charges):
        balance -= fee_on(balance)
    return balance


def charges_between(opening: Decimal, balance: Decimal) -> int:
    """Return how many fees, one after the other, led from *opening* to *balance*.

    Exact even when updates got lost: what is written is always a balance once read, less its fee.
    """
    charges, left = 0, opening
    while left > balance and fee_on(left):
        left -= fee_on(left)
        charges += 1
    return charges
