"""@distributed_lock over a real backend; tests/unit/test_decorators.py has its every shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator

import pytest

from django_distlock import LockNotAcquired, distributed_lock, skip

from .rivals import Rival

Rivals = Callable[..., Rival]


def test_a_function_runs_only_while_it_holds_the_lock(using: str, name: str, rival: Rivals) -> None:
    other = rival(of=f"{name}:7")

    @distributed_lock(name + ":{number}", using=using, timeout=0)
    def work(number: int) -> bool:
        return other.tries()

    assert work(7) is False
    assert other.tries()
    with pytest.raises(LockNotAcquired):
        work(7)
    assert work(8)


async def test_a_coroutine_function_runs_only_while_it_holds_the_lock(
    using: str, name: str, rival: Rivals
) -> None:
    other = rival()

    @distributed_lock(name, using=using, timeout=0, on_busy=skip("skipped"))
    async def work() -> object:
        return await asyncio.to_thread(other.tries)

    assert await work() is False
    assert await asyncio.to_thread(other.tries)
    assert await work() == "skipped"


def test_a_generator_holds_the_lock_until_it_is_closed(
    using: str, name: str, rival: Rivals
) -> None:
    other = rival()

    @distributed_lock(name, using=using)
    def count() -> Iterator[int]:
        yield 1
        yield 2

    numbers = count()
    assert other.tries()
    other.leaves()
    assert next(numbers) == 1
    assert not other.tries()
    assert list(numbers) == [2]
    assert other.tries()


async def test_an_asynchronous_generator_holds_the_lock_until_it_is_closed(
    using: str, name: str, rival: Rivals
) -> None:
    other = rival()

    @distributed_lock(name, using=using)
    async def count() -> AsyncGenerator[int]:
        yield 1
        yield 2

    numbers = count()
    assert await anext(numbers) == 1
    assert not await asyncio.to_thread(other.tries)
    await numbers.aclose()
    assert await asyncio.to_thread(other.tries)
