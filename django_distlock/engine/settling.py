"""Asking once more when a reply was lost: for verbs that may be carried out twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

from . import clock

_T = TypeVar("_T")

#: Seconds within which a reply must have been lost: to ask a server that hangs again would take as long once more.
SETTLE = 0.5


def is_worth_asking_again(
    failed: LockBackendError, began: float, within: float | None = None
) -> bool:
    """Return whether to ask again what *failed* and had *began* then, in lease time. *within*: see settled()."""
    longest = SETTLE if within is None else within
    return isinstance(failed, LockOutcomeUnknown) and clock.lease_time() - began <= longest


def settled(ask: Callable[[], _T], within: float | None = None) -> _T:
    """Return the answer of a verb that may be carried out twice; LockOutcomeUnknown if both are lost.

    *within*: seconds that the first one may have taken; SETTLE by default.
    """
    began = clock.lease_time()
    try:
        return ask()
    except LockOutcomeUnknown as lost:
        if not is_worth_asking_again(lost, began, within):
            raise
        try:
            return ask()
        except LockBackendError as error:
            raise LockOutcomeUnknown(*error.args) from lost


async def asettled(ask: Callable[[], Awaitable[_T]]) -> _T:
    began = clock.lease_time()
    try:
        return await ask()
    except LockOutcomeUnknown as lost:
        if not is_worth_asking_again(lost, began):
            raise
        try:
            return await ask()
        except LockBackendError as error:
            raise LockOutcomeUnknown(*error.args) from lost
