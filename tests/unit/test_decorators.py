"""@distributed_lock on everything that can be called, and what it does instead when it is busy."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest
from asgiref.sync import markcoroutinefunction

from django_distlock import LockNotAcquired, current_lease, distributed_lock, lock, skip
from tests.contract.crew import elsewhere, held_in_thread

pytestmark = pytest.mark.usefixtures("memory")


def _is_held(name: str) -> bool:
    return lock(name).locked()


@pytest.fixture
def busy() -> Iterator[str]:
    """The name of a lock that somebody else holds."""
    with held_in_thread(lock("busy", ttl=20)):
        yield "busy"


class TestNames:
    def test_bare_it_is_named_after_the_function(self) -> None:
        @distributed_lock
        def work() -> str:
            lease = current_lease()
            assert lease
            return lease.name

        assert (
            work() == f"{__name__}.TestNames.test_bare_it_is_named_after_the_function.<locals>.work"
        )

    def test_with_brackets_but_no_name_it_is_named_the_same(self) -> None:
        @distributed_lock()
        def bare() -> bool:
            return _is_held(f"{__name__}.{bare.__qualname__}")

        @distributed_lock(timeout=0)
        def with_terms() -> bool:
            return _is_held(f"{__name__}.{with_terms.__qualname__}")

        assert bare()
        assert with_terms()

    def test_a_name_may_be_made_of_the_arguments(self) -> None:
        @distributed_lock("fee:{account_id}:{month}")
        def charge(account_id: int, month: str = "May") -> bool:
            return _is_held(f"fee:{account_id}:{month}")

        assert charge(7)
        assert charge(account_id=7, month="June")

    def test_a_name_that_does_not_fit_is_refused_when_it_is_written(self) -> None:
        with pytest.raises(ValueError, match="account_id"):

            @distributed_lock("fee:{account_id}")
            def charge(account: int) -> None: ...

        with pytest.raises(TypeError, match="must be text"):
            distributed_lock(42)(lambda: None)  # type: ignore[call-overload]  # under test

    def test_functions_of_one_name_in_two_classes_have_two_locks(self) -> None:
        class First:
            @distributed_lock(timeout=0)
            def work(self) -> bool:
                return elsewhere(Second().work)

        class Second:
            @distributed_lock(timeout=0)
            def work(self) -> bool:
                return True

        assert First().work()


class TestKinds:
    def test_a_function_holds_it_while_it_runs(self) -> None:
        @distributed_lock("a")
        def work(number: int, *, by: int = 1) -> int:
            """Work."""
            assert _is_held("a")
            return number + by

        assert work(1, by=2) == 3
        assert not _is_held("a")
        assert (work.__name__, work.__doc__) == ("work", "Work.")
        assert list(inspect.signature(work).parameters) == ["number", "by"]

    def test_an_error_of_the_function_goes_up_as_it_is(self) -> None:
        @distributed_lock("a")
        def work() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught:
            work()
        assert not hasattr(caught.value, "__notes__")
        assert not _is_held("a")

    def test_a_busy_lock_inside_the_function_is_the_functions_error(self, busy: str) -> None:
        @distributed_lock("a", on_busy=skip("skipped"))
        def work() -> None:
            with lock(busy, timeout=0):
                pytest.fail("held by another thread")

        with pytest.raises(LockNotAcquired, match="busy"):
            work()

    def test_methods_of_all_kinds_hold_it(self) -> None:
        class Account:
            pk = 7
            kind = "Account"

            @distributed_lock("{self.pk}")
            def method(self) -> bool:
                return _is_held("7")

            @classmethod
            @distributed_lock("{cls.kind}")
            def class_method(cls) -> bool:
                return _is_held("Account")

            @staticmethod
            @distributed_lock("static")
            def static_method() -> bool:
                return _is_held("static")

            @property
            @distributed_lock("property")
            def a_property(self) -> bool:
                return _is_held("property")

        account = Account()
        assert account.method()
        assert account.class_method()
        assert Account.class_method()
        assert account.static_method()
        assert account.a_property

    def test_it_is_reentrant_through_recursion(self) -> None:
        @distributed_lock("a", timeout=0)
        def fall(number: int) -> int:
            return fall(number - 1) + 1 if number else 0

        assert fall(5) == 5

    async def test_a_coroutine_function_holds_it_while_it_runs(self) -> None:
        @distributed_lock("a:{number}")
        async def work(number: int) -> int:
            await asyncio.sleep(0)
            assert await lock(f"a:{number}").alocked()
            return number

        assert inspect.iscoroutinefunction(work)
        assert await work(1) == 1
        assert not await lock("a:1").alocked()

    async def test_what_asgiref_marks_as_a_coroutine_function_is_one(self) -> None:
        async def body() -> bool:
            return await lock("a").alocked()

        @distributed_lock("a")
        @_marked
        def work() -> Coroutine[Any, Any, bool]:
            return body()

        assert await work()
        assert not await lock("a").alocked()

    async def test_a_function_that_returns_something_to_await_holds_it_until_then(self) -> None:
        async def body() -> bool:
            await asyncio.sleep(0)
            return await lock("a").alocked()

        @distributed_lock("a")
        def work() -> Awaitable[bool]:
            return body()

        assert await work()
        assert not await lock("a").alocked()

    def test_a_partial_can_be_decorated(self) -> None:
        def work(number: int) -> bool:
            return _is_held(f"a:{number}")

        named = functools.update_wrapper(functools.partial(work, 7), work)

        assert distributed_lock("a:7")(named)()

    def test_a_generator_holds_it_from_its_first_value_to_its_last(self) -> None:
        @distributed_lock("a")
        def count() -> Generator[int, str, str]:
            heard = yield 1
            assert _is_held("a")
            return heard

        numbers = count()
        assert not _is_held("a")
        assert next(numbers) == 1
        assert _is_held("a")
        with pytest.raises(StopIteration) as stopped:
            numbers.send("word")
        assert stopped.value.value == "word"
        assert not _is_held("a")

    def test_a_generator_that_is_closed_gives_it_back_after_its_own_end(self) -> None:
        @distributed_lock("a")
        def count() -> Iterator[int]:
            try:
                yield 1
            finally:
                held_at_end.append(_is_held("a"))

        held_at_end: list[bool] = []
        numbers = count()
        next(numbers)
        numbers.close()  # type: ignore[attr-defined]  # a generator

        assert held_at_end == [True]
        assert not _is_held("a")

    def test_a_generator_may_be_finished_by_another_thread(self) -> None:
        @distributed_lock("a")
        def count() -> Iterator[int]:
            yield 1
            yield 2

        numbers = count()
        next(numbers)

        assert elsewhere(lambda: list(numbers)) == [2]
        assert not _is_held("a")

    async def test_an_asynchronous_generator_gives_it_back_after_its_own_end(self) -> None:
        @distributed_lock("a")
        async def count() -> AsyncGenerator[int]:
            try:
                yield 1
                yield 2
            finally:
                held_at_end.append(await lock("a").alocked())

        held_at_end: list[bool] = []
        assert [number async for number in count()] == [1, 2]
        numbers = count()
        async for _ in numbers:
            assert await lock("a").alocked()
            break
        await numbers.aclose()

        assert held_at_end == [True, True]
        assert not await lock("a").alocked()

    async def test_an_asynchronous_generator_hears_what_is_sent_and_thrown(self) -> None:
        @distributed_lock("a")
        async def echo() -> AsyncGenerator[str, str]:
            try:
                heard = yield "ready"
                yield f"heard {heard}"
            except ZeroDivisionError:
                yield "caught"

        voice = echo()
        assert await anext(voice) == "ready"
        assert await voice.asend("a word") == "heard a word"
        assert await voice.athrow(ZeroDivisionError()) == "caught"
        await voice.aclose()


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    markcoroutinefunction(function)
    return function
