"""The threads in which blocking verbs run for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from django_distlock.engine.values import Request

_T = TypeVar("_T")

#: Threads in which tasks wait on a server that keeps the queue: one for each lock waited for.
WAITS = 64


class Lanes:
    """The threads in which the verbs of one backend run for asyncio: one lane for tries, one for ends.

    A release never stands behind the tries that wait for it.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._mutex = threading.Lock()
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._tries: dict[str, Future[Any]] = {}

    async def run_try(self, request: Request, verb: Callable[[], _T]) -> _T:
        """Run *verb* in the lane of tries; whatever comes after() it waits for its end."""
        return await self._run(self._pool("try", 4), request, verb)

    async def run_wait(self, request: Request, verb: Callable[[], _T]) -> _T:
        return await self._run(self._pool("wait", WAITS), request, verb)

    async def _run(self, pool: ThreadPoolExecutor, request: Request, verb: Callable[[], _T]) -> _T:
        future = pool.submit(verb)
        self._tries[request.owner] = future
        future.add_done_callback(lambda _: self._tries.pop(request.owner, None))
        return await asyncio.wrap_future(future)

    async def run_release(self, verb: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._pool("release", 2).submit(verb))

    def after(self, request: Request, job: Callable[[], None]) -> None:
        """Run *job* once no try of *request* is under way: a cancelled task leaves its thread running."""
        if future := self._tries.get(request.owner):
            future.add_done_callback(lambda _: job())
        else:
            job()

    def close(self) -> None:
        with self._mutex:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.shutdown(wait=False)

    def _pool(self, name: str, size: int) -> ThreadPoolExecutor:
        with self._mutex:
            if name not in self._pools:
                prefix = f"distlock-{self._alias}-{name}"
                self._pools[name] = ThreadPoolExecutor(size, thread_name_prefix=prefix)
            return self._pools[name]
