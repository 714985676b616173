"""One way to write what threads and asyncio tasks both do: a generator yields requests, and is sent the answers.

The generator does no I/O. What carries a request out may block in run(), and is awaited in arun();
its errors are raised in the generator, where the request was yielded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

_T = TypeVar("_T")
_Ask = TypeVar("_Ask")
#: Yields requests, is sent answers, and returns a result.
Steps = Generator[_Ask, Any, _T]


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
