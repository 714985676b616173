"""What a decorated function does instead while somebody else holds its lock."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import BaseCommand, call_command
from django.template.response import TemplateResponse
from django.test import RequestFactory
from pytest_django.fixtures import Settings

from django_distlock import LockNotAcquired, Policy, distributed_lock, lock, respond, retry, skip
from tests.contract.crew import held_in_thread

pytestmark = pytest.mark.usefixtures("memory")


@pytest.fixture
def busy() -> Iterator[str]:
    """The name of a lock that somebody else holds."""
    with held_in_thread(lock("busy", ttl=20)):
        yield "busy"


def body(*args: Any, **kwargs: Any) -> Any:
    pytest.fail("held by another thread")


def refused(on_busy: Policy | None) -> Any:
    """Return a function that never runs, as its lock is busy."""
    return distributed_lock("busy", timeout=0, on_busy=on_busy)(body)


def test_skip_returns_a_value_instead(busy: str) -> None:
    assert refused(skip())() is None
    assert refused(skip("later"))() == "later"


def test_a_callable_is_given_the_error_and_the_arguments(busy: str) -> None:
    def instead(error: LockNotAcquired, *args: object, **kwargs: object) -> object:
        return error.name, args, kwargs

    assert refused(instead)(1, 2, x=3) == (busy, (1, 2), {"x": 3})


class Report(BaseCommand):
    requires_system_checks = ()
    handle = refused(None)


class OtherReport(Report):
    def handle(self, *args: object, **options: object) -> None:
        with lock("busy", timeout=0):
            body()


@pytest.mark.parametrize("command", [Report, OtherReport])
def test_a_busy_command_ends_with_one_line(busy: str, command: type[BaseCommand]) -> None:
    said = io.StringIO()

    with pytest.raises(SystemExit) as ended:
        command(stderr=said).run_from_argv(["manage.py", "report"])
    with pytest.raises(LockNotAcquired):
        call_command(command())

    assert ended.value.code == 1
    [line] = said.getvalue().splitlines()
    assert line.startswith(f"LockNotAcquired: Lock {busy!r} is held by ")


@pytest.mark.parametrize("name", ["busy", "status", "countdown", "options", "value"])
def test_an_argument_of_the_call_may_have_any_name(busy: str, name: str) -> None:
    pytest.importorskip("celery")
    given = {name: 1}

    assert refused(skip("later"))(**given) == "later"
    assert refused(respond())(RequestFactory().get("/"), **given).status_code == 409
    with pytest.raises(LockNotAcquired):
        refused(retry())(**given)


async def test_the_policy_of_a_generator_is_told_of_the_call(busy: str) -> None:
    told = []

    def note(error: LockNotAcquired, *args: int, **kwargs: int) -> None:
        told.append((error.name, args, kwargs))

    async def anote(error: LockNotAcquired, *args: int, **kwargs: int) -> None:
        note(error, *args, **kwargs)

    @distributed_lock(busy, timeout=0, on_busy=note)
    def count(*args: int, **kwargs: int) -> Iterator[int]:
        yield 1

    @distributed_lock(busy, timeout=0, on_busy=anote)
    async def acount(*args: int, **kwargs: int) -> AsyncGenerator[int]:
        yield 1

    assert list(count(1, b=2)) == []
    assert [number async for number in acount(1, b=2)] == []
    assert told == [(busy, (1,), {"b": 2})] * 2


def test_respond_answers_with_a_status_and_when_to_try_again(busy: str) -> None:
    response = refused(respond())(RequestFactory().get("/"))

    assert response.status_code == 409
    assert response["Retry-After"] == "5"
    assert response["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("accept", ["application/json", "application/problem+json"])
def test_respond_answers_in_json_whom_asks_for_it(busy: str, accept: str) -> None:
    response = refused(respond(423))(RequestFactory().get("/", headers={"accept": accept}))

    assert response.status_code == 423
    assert response["Content-Type"] == "application/problem+json"
    assert json.loads(response.content) == {
        "type": "about:blank",
        "title": "Somebody else is already working on this; try again later.",
        "status": 423,
    }


@pytest.mark.parametrize("accept", ["text/html", "application/json"])
def test_respond_tells_a_client_neither_the_name_nor_the_holder(busy: str, accept: str) -> None:
    with pytest.raises(LockNotAcquired) as caught:
        refused(None)()
    answer = respond()(caught.value, RequestFactory().get("/", headers={"accept": accept}))

    assert caught.value.holder
    for secret in (busy.encode(), caught.value.holder.host.encode(), b"pid"):
        assert secret not in answer.content.replace(b"about:blank", b"")


def test_respond_shows_people_a_page_that_tells_when(
    busy: str, tmp_path: Path, settings: Settings
) -> None:
    (tmp_path / "busy.html").write_text("{{ busy.name }}{{ busy.reserved_until|default:'' }}")
    settings.TEMPLATES = [
        {"BACKEND": "django.template.backends.django.DjangoTemplates", "DIRS": [tmp_path]}
    ]

    view = refused(respond(template="busy.html"))

    page = view(RequestFactory().get("/"))
    asked = view(RequestFactory().get("/", headers={"accept": "application/json"}))

    assert isinstance(page, TemplateResponse)
    assert page.render().content == busy.encode()
    assert (page.status_code, page["Retry-After"]) == (409, "5")
    assert asked["Content-Type"] == "application/problem+json"


def _refusal(remaining: float | None = None) -> LockNotAcquired:
    return LockNotAcquired("busy", 1.0, None, remaining)


@pytest.mark.parametrize(
    ("remaining", "later"), [(0.2, "1"), (1.0, "1"), (1.2, "2"), (9.0, "5"), (None, None)]
)
def test_respond_rounds_the_time_to_wait_up(remaining: float | None, later: str | None) -> None:
    response = respond()(_refusal(remaining), RequestFactory().get("/"))

    assert response.get("Retry-After") == later


class Again(Exception):
    """What Celery raises to retry a task."""


class Task:
    """The task that runs now, as Celery has it."""

    def __init__(self, retries: int = 0) -> None:
        self.request = SimpleNamespace(retries=retries)

    def retry(self, **options: object) -> Exception:
        self.options = options
        return Again()


def _countdown(monkeypatch: pytest.MonkeyPatch, retries: int, busy: LockNotAcquired) -> float:
    pytest.importorskip("celery")
    task = Task(retries)
    monkeypatch.setattr("celery.current_task", task)
    with pytest.raises(Again):
        retry()(busy)
    later = task.options["countdown"]
    assert isinstance(later, float)
    return later


def test_retry_asks_the_task_to_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("celery")
    task, busy = Task(), _refusal(3.0)
    monkeypatch.setattr("celery.current_task", task)

    with pytest.raises(Again):
        retry(5, max_retries=7)(busy)
    assert task.options == {"exc": busy, "countdown": 5, "max_retries": 7}


@pytest.mark.parametrize(
    ("retries", "longest"), [(0, 1), (1, 2), (2, 4), (5, 32), (6, 64), (7, 64), (100_000, 64)]
)
@pytest.mark.parametrize("remaining", [None, 1000.0])
def test_retry_waits_longer_each_time_and_not_all_at_once(
    monkeypatch: pytest.MonkeyPatch, retries: int, longest: float, remaining: float | None
) -> None:
    pauses = {_countdown(monkeypatch, retries, _refusal(remaining)) for _ in range(20)}

    assert len(pauses) > 10
    assert longest / 2 <= min(pauses) <= max(pauses) <= longest


def test_retry_does_not_wait_longer_than_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _countdown(monkeypatch, 6, _refusal(3.0)) == 3.0


@pytest.mark.parametrize("thrown", [(), KeyError, (KeyError, ValueError), (TimeoutError,)])
@pytest.mark.parametrize("on_busy", [None, retry()])
def test_a_busy_task_is_logged_in_one_line(
    busy: str, caplog: pytest.LogCaptureFixture, thrown: Any, on_busy: Policy | None
) -> None:
    app = pytest.importorskip("celery").Celery(set_as_current=False)

    work = app.task(throws=thrown, max_retries=0, shared=False)(refused(on_busy))

    with caplog.at_level("INFO", "celery"):
        results = [work.apply().result for _ in range(2)]

    logged = [record for record in caplog.records if record.name == "celery.app.trace"]
    assert [type(result) for result in results] == [LockNotAcquired, LockNotAcquired]
    assert [record.exc_info for record in logged] == [None, None]
    assert f"raised expected: {results[0]!r}" in logged[0].message
    assert str(work.throws).count("LockNotAcquired") == (thrown != (TimeoutError,))
