"""What asgiref and asyncio keep in their local variables, which tells who is suspended for whom.

If this file fails after an upgrade, `django_distlock/ground/sync_to_async.py` is what to adapt: until then, a
task and the thread that it awaits are two callers, and the second waits for the lock of the first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from types import CodeType
from typing import Any

import pytest
from asgiref.sync import AsyncToSync, SyncToAsync, sync_to_async

from django_distlock import lock
from django_distlock.ground.sync_to_async import _inside


def test_asgiref_keeps_the_variables_that_reentry_reads() -> None:
    awaits_thread, in_thread = SyncToAsync.__call__.__code__, SyncToAsync.thread_handler.__code__
    awaits_task = AsyncToSync.__call__.__code__
    wrappers = [each for each in awaits_task.co_consts if isinstance(each, CodeType)]

    assert "task_context" in _variables(awaits_thread)
    assert "task_context" in _variables(in_thread)
    assert "awaitable" in _variables(awaits_task)
    assert any("awaitable" in _variables(each) for each in wrappers)


def test_asyncio_keeps_the_coroutine_that_run_waits_for() -> None:
    assert "coro" in _variables(asyncio.Runner.run.__code__)


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


def _variables(code: CodeType) -> set[str]:
    return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
