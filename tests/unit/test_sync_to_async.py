"""What asgiref and asyncio keep of a call that crosses between threads and tasks.

If this file fails after an upgrade, `django_distlock/ground/sync_to_async.py` is what to adapt: until then, a
task and the thread that it awaits are two callers, and the second waits for the lock of the first.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncGenerator
from contextvars import Context
from typing import Any

import pytest
from asgiref.sync import AsyncToSync, async_to_sync, sync_to_async

from django_distlock import lock
from django_distlock.ground.sync_to_async import _call_here, _inside, _is_begun_by_asgiref


async def test_a_coroutine_that_awaits_a_thread_has_the_list_of_the_call_and_its_context() -> None:
    may_end, seen = threading.Event(), list[object]()

    def work() -> None:
        seen.extend(_call_here())
        may_end.wait(20)

    awaiting: Any = sync_to_async(work)()
    task = asyncio.create_task(awaiting)
    await asyncio.sleep(0)
    referents = gc.get_referents(awaiting)
    cells = [each.cell_contents for each in referents if hasattr(each, "cell_contents")]
    may_end.set()
    await task

    assert seen[1] is asyncio.get_running_loop()
    assert any(each is seen[0] for each in referents)
    assert any(isinstance(each, Context) for each in [*referents, *cells])


def test_a_task_of_asgiref_is_known_by_its_code_and_names_the_thread_that_waits() -> None:
    async def look() -> tuple[bool, bool]:
        me: Any = asyncio.current_task()
        is_here = AsyncToSync.executors.current._work_thread is waiting
        return _is_begun_by_asgiref(me), is_here

    waiting = threading.current_thread()

    assert async_to_sync(look)() == (True, True)
    assert asyncio.run(sync_to_async(lambda: async_to_sync(look)()[0])())


def test_the_steps_of_an_async_generator_lead_to_it() -> None:
    async def parts() -> AsyncGenerator[int, int]:
        yield 1

    generator = parts()
    steps = [anext(generator), generator.asend(1), generator.athrow(OSError), generator.aclose()]
    whole = anext(generator, None)

    assert [_inside(step) for step in steps] == [generator] * len(steps)
    assert _inside(_inside(whole)) is generator
    for step in [*steps, whole]:
        step.close()


async def test_a_thread_may_begin_long_before_its_task_awaits_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    at_once = loop.run_in_executor

    def late(*call: Any) -> Any:
        running = at_once(*call)
        time.sleep(0.1)
        return running

    def enter() -> bool:
        with lock("late", using="locmem", timeout=0):
            return True

    monkeypatch.setattr(loop, "run_in_executor", late)

    async with lock("late", using="locmem"):
        assert await sync_to_async(enter)()
