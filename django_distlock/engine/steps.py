"""One way to write what threads and asyncio tasks both do: a generator yields requests, and is sent the answers.

The generator does no I/O. What carries a request out may block in run(), and is awaited in arun();
its errors are raised in the generator, where the request was yielded.

And asking once more when a reply was lost, for verbs that may be carried out twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

from . import clock

_T = TypeVar("_T")
_Ask = TypeVar("_Ask")
#: Yields requests, is sent answers, and returns a result.
Steps = Generator[_Ask, Any, _T]
#: Seconds within which a reply must have been lost: to ask a server that hangs again would take as long once more.
SETTLE = 0.5


def run(steps: Steps[_Ask, _T], carry_out: Callable[[_Ask], Any]) -> _T:
    """Return what *steps* return, having each request carried out in this thread."""
    try:
        request = next(steps)
        while True:
            try:
                answer = carry_out(request)
            except BaseException as error:  # noqa: BLE001 - the generator decides
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        result: _T = end.value
        return result


async def arun(steps: Steps[_Ask, _T], carry_out: Callable[[_Ask], Awaitable[Any]]) -> _T:
    try:
        request = next(steps)
        while True:
            try:
                answer = await carry_out(request)
            except BaseException as error:  # noqa: BLE001 - as above
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        result: _T = end.value
        return result


def is_worth_asking_again(
    failed: LockBackendError, began: float, within: float | None = None
) -> bool:
    """Return whether to ask again what *failed* and had *began* then, in lease time. *within*: see settled()."""
    longest = SETTLE if within is None else within
    return isinstance(failed, LockOutcomeUnknown) and clock.lease_time() - began <= longest


def asking_again(ask: _Ask, failed: LockBackendError) -> Steps[_Ask, Any]:
    """Ask once more what *failed*; LockOutcomeUnknown if that fails too."""
    try:
        return (yield ask)
    except LockBackendError as error:
        raise LockOutcomeUnknown(*error.args) from failed


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
        answer: _T = run(asking_again(ask, lost), lambda again: again())
        return answer


async def asettled(ask: Callable[[], Awaitable[_T]]) -> _T:
    began = clock.lease_time()
    try:
        return await ask()
    except LockOutcomeUnknown as lost:
        if not is_worth_asking_again(lost, began):
            raise
        answer: _T = await arun(asking_again(ask, lost), lambda again: again())
        return answer
