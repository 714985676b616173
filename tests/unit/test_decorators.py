"""@distributed_lock on everything that can be called, and what it does instead when it is busy."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
)
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest

from django_distlock import Policy, distributed_lock, lock, respond, retry, skip
from django_distlock.lock import Lock
from tests.contract.crew import elsewhere
from tests.fixtures.eventually import eventually
from tests.fixtures.interruption import TimeLimit, stop_at_call_of

pytestmark = pytest.mark.usefixtures("memory")


def _is_held(name: str) -> bool:
    return lock(name).locked()


def wrapped_by_others(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a plain function that calls *function*, as many decorators of other packages make one."""

    @functools.wraps(function)
    def wrapper() -> Any:
        return function()

    return wrapper


async def coroutine() -> None: ...


def begun() -> asyncio.Future[None]:
    return asyncio.ensure_future(coroutine())


def generator() -> Iterator[None]:
    yield


async def async_generator() -> AsyncIterator[None]:
    yield


#: By kind: a function whose result has not run yet, and what the error calls that result.
UNFINISHED: dict[str, tuple[Callable[[], Any], str]] = {
    "coroutine": (coroutine, "something to await"),
    "task": (begun, "something to await"),
    "generator": (generator, "a generator"),
    "async generator": (async_generator, "a generator"),
    "context manager": (contextmanager(generator), "a context manager"),
    "async context manager": (asynccontextmanager(async_generator), "a context manager"),
}


class TestNames:
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

    def test_a_name_may_be_a_function_of_the_arguments(self) -> None:
        def of_month(account_id: int, month: str = "May") -> str:
            return f"fee:{account_id}:{month}"

        def charge(account_id: int, month: str = "May") -> bool:
            return _is_held(f"fee:{account_id}:{month}")

        by_lambda: Any = distributed_lock(
            lambda account_id, month="May": of_month(account_id, month)
        )
        for decorate in (
            by_lambda,
            distributed_lock(of_month, timeout=0),
            distributed_lock(name=of_month),
        ):
            decorated = decorate(charge)

            assert decorated(7)
            assert decorated(account_id=8, month="June")
            assert not _is_held("fee:7:May")

    async def test_a_function_names_what_methods_and_coroutines_lock(self) -> None:
        class Shop:
            pk = 7

            @distributed_lock(lambda shop: f"shop:{shop.pk}", on_busy=skip())
            def open(self) -> bool:
                return _is_held("shop:7")

            @distributed_lock(name=lambda shop, part: f"{shop.pk}:{part}")
            async def part(self, part: str) -> bool:
                return await lock(f"7:{part}").alocked()

            @distributed_lock(lambda shop: f"parts:{shop.pk}", timeout=0)
            def parts(self) -> Iterator[bool]:
                yield _is_held("parts:7")

        assert Shop().open()
        assert await Shop().part("a")
        assert list(Shop().parts()) == [True]

    def test_a_function_that_names_no_lock_is_told_so(self) -> None:
        @distributed_lock(name=lambda account_id: account_id)
        def charge(account_id: Any) -> None: ...

        with pytest.raises(TypeError, match="must be text, not int"):
            charge(7)
        with pytest.raises(ValueError, match="must not be empty"):
            charge("")

    def test_a_name_is_given_once(self) -> None:
        with pytest.raises(TypeError, match="one name"):
            distributed_lock("a", name="b")  # type: ignore[call-overload]  # under test


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
        assert Account.class_method()
        assert account.static_method()
        assert account.a_property

    def test_it_may_stand_above_staticmethod_and_classmethod(self) -> None:
        class Account:
            kind = "Account"

            @distributed_lock("above {number}")
            @staticmethod
            def static_below(number: int) -> bool:
                return _is_held(f"above {number}")

            @distributed_lock
            @staticmethod
            def bare_static() -> bool:
                return _is_held(f"{__name__}.{Account.bare_static.__qualname__}")

            @distributed_lock("above {cls.kind}", timeout=0)
            @classmethod
            def class_below(cls) -> bool:
                return _is_held("above Account")

            @distributed_lock
            @classmethod
            def bare_class(cls) -> bool:
                return _is_held(f"{__name__}.{Account.bare_class.__qualname__}")

        for owner in (Account, Account()):
            assert owner.static_below(3)
            assert owner.bare_static()
            assert owner.class_below()
            assert owner.bare_class()

    async def test_a_function_that_is_marked_as_one_is_a_coroutine_function(self) -> None:
        async def coroutine(number: int) -> int:
            await asyncio.sleep(0)
            assert await lock(f"a:{number}").alocked()
            return number

        @_marked
        def marked(number: int) -> Awaitable[int]:
            return coroutine(number)

        for function in (coroutine, marked):
            work = distributed_lock("a:{number}")(function)

            assert iscoroutinefunction(work)
            assert await work(1) == 1
            assert not await lock("a:1").alocked()

    @pytest.mark.parametrize("kind", UNFINISHED)
    async def test_what_would_run_without_it_is_refused(self, kind: str) -> None:
        function, what = UNFINISHED[kind]
        work = distributed_lock("a")(wrapped_by_others(function))

        with pytest.raises(TypeError, match=rf"\(\) returned {what}, which would run without the"):
            work()
        assert not await lock("a").alocked()

    def test_a_generator_holds_it_from_its_first_value_to_its_last(self) -> None:
        @distributed_lock("a")
        def count(first: int, *, then: str) -> Generator[int, str, str]:
            heard = yield first
            assert _is_held("a")
            return f"{heard} {then}"

        numbers = count(1, then="and more")
        assert not _is_held("a")
        assert next(numbers) == 1
        assert _is_held("a")
        with pytest.raises(StopIteration) as stopped:
            numbers.send("word")
        assert stopped.value.value == "word and more"
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
        @distributed_lock("{greeting}:{error}")
        async def echo(greeting: str, *, error: type[Exception]) -> AsyncGenerator[str, str]:
            try:
                heard = yield greeting
                yield f"heard {heard}"
            except error:
                yield "caught"

        voice = echo("ready", error=ZeroDivisionError)
        assert await anext(voice) == "ready"
        assert await voice.asend("a word") == "heard a word"
        assert await voice.athrow(ZeroDivisionError()) == "caught"
        await voice.aclose()


class TestLockAsADecorator:
    """@lock("x") is @distributed_lock("x")."""

    def test_it_holds_the_lock_while_a_function_runs(self) -> None:
        @lock("fee:{account_id}", timeout=0)
        def charge(account_id: int) -> bool:
            assert elsewhere(lambda: lock(f"fee:{account_id}").acquire(timeout=0)) is None
            return _is_held(f"fee:{account_id}")

        assert charge(7)
        assert not _is_held("fee:7")

    def test_one_lock_may_decorate_and_be_entered(self) -> None:
        report = lock("report")

        @report
        def work() -> bool:
            return _is_held("report")

        with report:
            assert work()
            assert _is_held("report")
        assert not _is_held("report")


@distributed_lock
def at_the_top(number: int) -> int:
    return number


class TestWhatIsKept:
    def test_it_is_pickled_by_its_name(self) -> None:
        assert pickle.loads(pickle.dumps(at_the_top)) is at_the_top

    def test_it_leads_to_the_function_and_has_its_attributes(self) -> None:
        def work(number: int, *, by: int = 1) -> int:
            return number + by

        work.colour = "red"  # type: ignore[attr-defined]  # as decorators leave them
        for wrapped in (distributed_lock(work), distributed_lock("a")(work), lock("a")(work)):
            assert wrapped.__name__ == "work"
            assert wrapped.__wrapped__ is work  # type: ignore[attr-defined]  # of functools.wraps()
            assert wrapped.colour == "red"  # type: ignore[attr-defined]  # as above
            assert inspect.signature(wrapped) == inspect.signature(work)


class Charger:
    def __call__(self, number: int) -> bool:
        return _is_held(f"a:{number}")


class TestMisuse:
    """What cannot work is refused where it is written, with what to write instead."""

    def test_a_class_is_no_function(self) -> None:
        class Report: ...

        for decorate in (distributed_lock, distributed_lock("a"), distributed_lock(), lock("a")):
            with pytest.raises(TypeError, match=r"Report is a class; .*@method_decorator"):
                decorate(Report)

    def test_a_celery_task_is_decorated_inside(self) -> None:
        app = pytest.importorskip("celery").Celery(set_as_current=False)

        @app.task(shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
        def task() -> None: ...

        for decorate in (distributed_lock, distributed_lock("a", on_busy=respond()), lock("a")):
            with pytest.raises(TypeError, match="is a Celery task; put it below @shared_task"):
                decorate(task)

    def test_a_callable_without_a_name_is_given_one(self) -> None:
        with pytest.raises(TypeError, match=r"give one: distributed_lock\('name'\)"):
            distributed_lock(Charger())

        assert distributed_lock("a:{number}")(Charger())(7)
        assert distributed_lock("a:{number}")(functools.partial(Charger(), number=7))()

    @pytest.mark.parametrize(
        ("on_busy", "said"),
        [
            (skip, "on_busy=skip lacks its parentheses; write on_busy=skip()."),
            ("skip", "on_busy must be skip(), respond(), retry() or a function, not 'skip'."),
        ],
    )
    def test_on_busy_is_a_policy(self, on_busy: Policy, said: str) -> None:
        with pytest.raises(TypeError) as caught:

            @distributed_lock("a", on_busy=on_busy)
            def work() -> None: ...

        assert str(caught.value) == said

    def test_an_async_policy_is_for_async_functions(self) -> None:
        async def later(*_: object) -> None: ...

        locked = distributed_lock("a", on_busy=later)

        async def work() -> None: ...
        async def generate() -> AsyncIterator[None]:
            yield

        def dispatch(view: object, request: HttpRequest) -> None: ...

        for right in (work, generate, dispatch):
            locked(right)
        for wrong in (lambda: None, lambda: (yield)):
            with pytest.raises(TypeError, match=r"on_busy is async, and .*<lambda>\(\) is not"):
                locked(wrong)

    @pytest.mark.parametrize(
        ("make", "error", "said"),
        [
            (lambda: respond("409"), TypeError, "must be a number, not '409'"),  # type: ignore[arg-type]
            (lambda: respond(200), ValueError, "must be an error, 400 to 599, not 200"),
            (lambda: retry(countdown=-1), ValueError, "countdown must be 0 or more seconds"),
            (lambda: retry("5"), TypeError, "countdown must be a number of seconds"),  # type: ignore[arg-type]
        ],
    )
    def test_a_policy_checks_its_arguments(
        self, make: Any, error: type[Exception], said: str
    ) -> None:
        with pytest.raises(error, match=said):
            make()

    def test_respond_needs_a_request(self) -> None:
        def task(shop_id: int) -> None: ...
        def bound_task(self: Any, shop_id: int, request: Any) -> None: ...
        def nightly() -> None: ...

        for function in (task, bound_task, nightly):
            with pytest.raises(
                TypeError, match=r"takes none; use skip\(\), or retry\(\) in a Celery"
            ):
                distributed_lock("a", on_busy=respond())(function)

    def test_retry_needs_a_task(self) -> None:
        def view(request) -> None: ...  # type: ignore[no-untyped-def]  # as most views are
        def typed(this: Any, incoming: HttpRequest) -> None: ...
        async def coroutine() -> None: ...
        def generator() -> Iterator[int]:
            yield 1

        for function in (view, typed):
            with pytest.raises(TypeError, match=r"takes a request; use respond\(\)"):
                distributed_lock("a", on_busy=retry())(function)
        for other in (coroutine, generator):
            with pytest.raises(TypeError, match=r"is async or a generator; use skip\(\)"):
                distributed_lock("a", on_busy=retry())(other)


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    markcoroutinefunction(function)
    return function


@distributed_lock("plain")
def plain() -> None:
    stop_at_call_of(Lock.__exit__)


@distributed_lock("steps")
def steps() -> Iterator[int]:
    yield 1
    stop_at_call_of(Lock.__exit__)


@pytest.mark.parametrize(("call", "name"), [(plain, "plain"), (lambda: [*steps()], "steps")])
def test_an_exception_between_the_body_and_the_release_frees_the_lock(
    call: Callable[[], object], name: str
) -> None:
    with pytest.raises(TimeLimit) as kept:
        call()
    eventually(lambda: not _is_held(name), 10)
    del kept  # whose traceback refers to the lock
