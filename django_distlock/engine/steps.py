"""One body of code for threads and for asyncio tasks: a generator yields requests and is sent their answers.

The generator does no I/O. run() calls *carry_out* for each request, arun() awaits it;
an error of *carry_out* is raised in the generator, at the yield.

settled() repeats a request whose reply was lost, for verbs that may be carried out twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown
from django_distlock.ground import clock

_T = TypeVar("_T")
_Ask = TypeVar("_Ask")
#: A generator that yields requests, is sent their answers, and returns a result.
Steps = Generator[_Ask, Any, _T]
#: Seconds: a request that failed later than this is not repeated, because a server that hangs would hang again.
SETTLE = 0.5


def run(steps: Steps[_Ask, _T], carry_out: Callable[[_Ask], Any]) -> _T:
    """Run *steps* to their end in this thread, calling *carry_out* for each request; return their result."""
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
    """Return True if the reply was lost soon enough after the request *began* (lease time), or on an idle connection.

    *within*: see settled().
    """
    longest = SETTLE if within is None else within
    return isinstance(failed, LockOutcomeUnknown) and (
        failed.was_idle or clock.lease_time() - began <= longest
    )


def asking_again(ask: _Ask, failed: LockBackendError) -> Steps[_Ask, Any]:
    """Repeat the request *ask*, whose first attempt *failed*; LockOutcomeUnknown if it fails again."""
    try:
        return (yield ask)
    except LockBackendError as error:
        raise LockOutcomeUnknown(*error.args) from failed


def settled(
    ask: Callable[[], _T],
    within: float | None = None,
    is_sure: Callable[[_T], bool] = lambda _: True,
) -> _T:
    """Call *ask*, a verb that may be carried out twice, and repeat it if its reply is lost.

    Raise LockOutcomeUnknown if both replies are lost. *within*: a first call on a new connection is not
    repeated if it took more seconds than that, by default SETTLE. *is_sure*: whether to believe an answer
    although the first call may have been carried out long before.
    """
    began = clock.lease_time()
    try:
        return ask()
    except LockOutcomeUnknown as lost:
        if not is_worth_asking_again(lost, began, within):
            raise
        answer: _T = run(asking_again(ask, lost), lambda again: again())
        if lost.was_idle and not is_sure(answer):
            raise
        return answer


async def asettled(
    ask: Callable[[], Awaitable[_T]], is_sure: Callable[[_T], bool] = lambda _: True
) -> _T:
    began = clock.lease_time()
    try:
        return await ask()
    except LockOutcomeUnknown as lost:
        if not is_worth_asking_again(lost, began):
            raise
        answer: _T = await arun(asking_again(ask, lost), lambda again: again())
        if lost.was_idle and not is_sure(answer):
            raise
        return answer
