"""The same question to all servers, from a task: for the tasks of one event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from django_distlock.exceptions import first_line

from .nodes import BROKEN
from .task_lines import TaskLine
from .votes import Count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_distlock.backends.redis.sources import Source

    from .votes import Poll, Question

_T = TypeVar("_T")


class TaskNodes:
    """All the servers, for the tasks of one event loop. See rounds.Nodes."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._lines = [TaskLine(source) for source in sources]
        self._tasks: set[asyncio.Task[None]] = set()

    async def hold(self, poll: Poll[_T]) -> _T:
        """See rounds.Nodes.hold()."""
        try:
            question = next(poll)
            while True:
                question = poll.send(await self._ask(question))
        except StopIteration as end:
            result: _T = end.value
            return result

    async def aclose(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for line in self._lines:
            await line.aclose()

    async def _ask(self, question: Question) -> Count:
        count = Count(frozenset(question.calls))
        pending = {self._start(server, question, count) for server in question.calls}
        while pending and not question.is_decided(count):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        # Those who are late go on without us, each within its own time.
        return count.closed()

    def _start(self, server: int, question: Question, count: Count) -> asyncio.Task[None]:
        task = asyncio.create_task(self._ask_one(server, question, count))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask_one(self, server: int, question: Question, count: Count) -> None:
        line = self._lines[server]
        try:
            await line.open(question.connecting)
        except BROKEN as error:
            cause = _cause(error, "no connection to it", question.connecting)
            count.miss(server, cause, error, was_asked=False)
            return
        try:
            count.take(server, await line.ask(question.calls[server], question.within))
        except BROKEN as error:
            cause = _cause(error, "it did not answer", question.within)
            count.miss(server, cause, error, was_asked=True)


def _cause(error: Exception, what: str, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"{what} within {seconds:.3g} s"
    return f"{what}: {first_line(error)}"
