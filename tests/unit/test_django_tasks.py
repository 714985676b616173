"""Tasks of Django itself, from 6.0 on or by the package django-tasks, under a lock."""

from __future__ import annotations

import logging
import math
import re
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_distlock import (
    LockBackendError,
    LockNotAcquired,
    NotSupported,
    distributed_lock,
    force_release,
    lock,
    locks,
    skip,
)
from django_distlock.checks import check_settings
from django_distlock.ground.clock import lease_time
from django_distlock.transactions import call_at_rollback
from tests.contract.crew import held_in_thread, start
from tests.fixtures.eventually import eventually, never
from tests.fixtures.interruption import StopAt, TimeLimit, stop_at_call_of

if TYPE_CHECKING:
    from pytest_django import Settings

PACKAGE = "django.tasks" if find_spec("django.tasks") else "django_tasks"
tasks: Any = pytest.importorskip(PACKAGE)
unique_task = import_module("django_distlock.contrib.tasks").unique_task
pytestmark = pytest.mark.usefixtures("memory")

Task: Any = import_module(f"{PACKAGE}.base").Task
task_started: Any = import_module(f"{PACKAGE}.signals").task_started
DummyBackend: Any = import_module(f"{PACKAGE}.backends.dummy").DummyBackend


@tasks.task
@distributed_lock("work:{number}", timeout=0)
def work(number: int) -> bool:
    return lock(f"work:{number}").locked()


@tasks.task
@distributed_lock("work:{number}", timeout=0, on_busy=skip("skipped"))
def skipped(number: int) -> str:
    return "done"


def handed_over(name: str) -> str:
    lease = lock(name).acquire()
    assert lease
    return lease.detach(60)


def test_a_busy_task_fails_or_is_skipped() -> None:
    with held_in_thread(lock("work:7")):
        failed = work.enqueue(7)
        assert skipped.enqueue(7).return_value == "skipped"

    assert failed.status == "FAILED"
    assert failed.errors[0].exception_class_path == "django_distlock.exceptions.LockNotAcquired"


# Tasks that are under way once. Nobody works on the queue of the dummy backend.


class Broken(DummyBackend):  # type: ignore[misc]  # Django 5.2 may have none
    def enqueue(self, *_: Any) -> Any:
        raise OSError("the queue is gone")

    async def aenqueue(self, *_: Any) -> Any:
        self.enqueue()


QUEUES = {
    "default": f"{PACKAGE}.backends.immediate.ImmediateBackend",
    "queue": f"{PACKAGE}.backends.dummy.DummyBackend",
    "broken": f"{__name__}.Broken",
}


@pytest.fixture(autouse=True)
def queues(settings: Settings) -> None:
    settings.TASKS = {alias: {"BACKEND": path, "QUEUES": []} for alias, path in QUEUES.items()}


def queued() -> Any:
    return tasks.task_backends["queue"].results


@unique_task("once:{number}")
def once(number: int, *, again: bool = False) -> Any:
    """Tell whether the lock is held, or what enqueuing it once more returns."""
    return once.enqueue(number) if again else lock(f"once:{number}").locked()


@unique_task("once:{number}")
async def aonce(number: int) -> bool:
    return await lock(f"once:{number}").alocked()


def purpose() -> Any:
    [held] = locks["default"].held()
    return held.holder and held.holder.purpose


@unique_task("once:{number}")
def tells(number: int) -> Any:
    return purpose()


@unique_task("once:{number}")
async def atells(number: int) -> Any:
    return purpose()


@unique_task("any:{what}")
def with_arguments(what: Any) -> bool:
    [held] = locks["default"].held()
    return held.name.startswith("any:")


def parts_held(number: int) -> list[bool]:
    return [lock(f"once:{number}{part}").locked() for part in ("", ":running", ":called")]


#: Seconds: a body begins so long after the last call, and at the latest so long after the first one.
QUIET, AT_MOST = 0.5, 1.5
debounce = partial(unique_task, "once:{number}", debounce=QUIET, at_most=timedelta(seconds=AT_MOST))


@unique_task("once:{number}", again=True)
def once_more(number: int) -> list[bool]:
    return parts_held(number)


@unique_task("once:{number}", again=True)
async def aonce_more(number: int) -> list[bool]:
    return parts_held(number)


@unique_task("once:{number}", until="start")
def free_at_start(number: int) -> list[bool]:
    return parts_held(number)


@unique_task("once:{number}", until="start")
async def afree_at_start(number: int) -> list[bool]:
    return parts_held(number)


@debounce()
def quiet(number: int) -> list[bool]:
    return parts_held(number)


@debounce()
async def aquiet(number: int) -> list[bool]:
    return parts_held(number)


@debounce(takes_context=True)
def calls_itself(context: Any, number: int) -> int:
    again = calls_itself.using(backend="queue")
    return len([each for each in range(3) if again.enqueue(number)])


@unique_task
def by_all_arguments(number: int, month: str = "May") -> bool:
    return lock(f'{__name__}.by_all_arguments(number={number}, month="{month}")').locked()


@unique_task(takes_context=True)
async def aby_all_arguments(context: Any, number: int) -> bool:
    return await lock(f"{__name__}.aby_all_arguments(number={number})").alocked()


def run(message: Any) -> Any:
    """Do what a worker does with a message of the queue."""
    context = [None] * message.task.takes_context
    return message.task.call(*context, *message.args, **message.kwargs)


@pytest.mark.parametrize("task", [once, aonce])
def test_a_unique_task_holds_its_lock_and_gives_it_back(task: Any) -> None:
    assert task.enqueue(7).return_value is True
    assert not lock("once:7").locked()
    assert task.enqueue(7).return_value is True


def test_called_as_a_function_it_is_locked_too() -> None:
    assert once.call(7) is once.func(7) is aonce.call(7) is True
    assert not lock("once:7").locked()

    with held_in_thread(lock("once:7")):
        for call in (once.call, once.func, aonce.call):
            with pytest.raises(LockNotAcquired):
                call(7)


def is_free(name: str) -> bool:
    return not lock(name).locked()


def test_an_exception_at_any_step_of_enqueue_leaves_no_name_taken() -> None:
    task, is_sent, number = once.using(backend="queue"), False, 0
    while not is_sent:
        number += 1
        with suppress(TimeLimit), StopAt(number):
            task.enqueue(number)
        is_sent = bool(tasks.task_backends["queue"].results)
        if not is_sent:
            eventually(partial(is_free, f"once:{number}"), 10, f"step {number}")
    assert number > 50


def test_an_exception_after_the_sending_leaves_the_name_to_the_message() -> None:
    task = once.using(backend="queue")
    with pytest.raises(TimeLimit):
        stop_at_call_of(call_at_rollback)
        task.enqueue(7)
    assert len(queued()) == 1
    assert task.enqueue(7) is None


def test_while_it_waits_it_is_not_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_distlock")
    task = once.using(backend="queue")

    assert task.enqueue(7).status == "READY"
    assert task.enqueue(7) is task.enqueue(number=7) is once.enqueue(7) is None
    assert task.enqueue(8)

    assert [message.args for message in queued()] == [[7], [8]]
    assert f"({__name__}.once): not sent" in caplog.text
    assert run(queued()[0]) is True
    assert task.enqueue(7)


@pytest.mark.parametrize("task", [by_all_arguments, aby_all_arguments])
def test_without_a_name_it_is_unique_by_all_its_arguments(task: Any) -> None:
    assert task.enqueue(7).return_value is True
    waiting = task.using(backend="queue")

    assert waiting.enqueue(7)
    assert waiting.enqueue(7) is waiting.enqueue(number=7) is None
    assert waiting.enqueue(8)


@pytest.mark.parametrize(
    ("task", "held"),
    [
        (once_more, [False, True, False]),
        (aonce_more, [False, True, False]),
        (free_at_start, [False, False, False]),
        (afree_at_start, [False, False, False]),
    ],
)
def test_the_name_may_be_free_while_it_runs(task: Any, held: list[bool]) -> None:
    in_queue = task.using(backend="queue")
    assert task.enqueue(7).return_value == held
    assert in_queue.enqueue(7)
    assert in_queue.enqueue(7) is None
    assert run(queued()[0]) == held
    assert not any(parts_held(7))


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("task", [once_more, aonce_more])
def test_what_is_sent_while_it_runs_waits_for_its_end_also_if_its_name_is_lost_meanwhile(
    task: Any, is_lost: bool
) -> None:
    in_queue = task.using(backend="queue")
    with held_in_thread(lock("once:7:running")):
        assert in_queue.enqueue(7)
        assert in_queue.enqueue(7) is None
        [message] = queued()
        running = start(lambda: run(message))
        never(running.done, 0.2)
        assert force_release("once:7") if is_lost else in_queue.enqueue(7) is None
    assert running.result(20) == [False, True, False]
    assert in_queue.enqueue(7)


# Those that wait for quiet.


def start_next() -> Any:
    """Do what a worker does with the last message, as if it were due; None if it is put off."""
    message = queued()[-1]
    task_started.send(DummyBackend, task_result=message)
    return run(message)


def seconds_until_due() -> float:
    due = queued()[-1].task.run_after - timezone.now()
    return float(due.total_seconds())


@pytest.mark.parametrize("task", [quiet, aquiet])
def test_a_body_begins_when_it_has_been_quiet(task: Any) -> None:
    task, began = task.using(backend="queue"), lease_time()
    assert task.enqueue(7)
    due = seconds_until_due()
    assert QUIET - (lease_time() - began) - 0.1 <= due <= QUIET
    assert not lock("once:7:called").locked()
    assert task.enqueue(7) is task.enqueue(7) is None

    assert start_next() is None

    assert 0 < seconds_until_due() <= QUIET
    assert task.enqueue(7) is None
    eventually(lambda: not lock("once:7:called").locked())
    assert start_next() == [False, True, False]
    assert [message.args for message in queued()] == [[7], [7]]
    assert task.enqueue(7)


@pytest.mark.parametrize("task", [quiet, aquiet])
def test_while_calls_go_on_it_begins_at_the_latest_time(task: Any) -> None:
    task, began = task.using(backend="queue"), lease_time()
    assert task.enqueue(7)
    called = lease_time()
    while True:
        task.enqueue(7)
        if start_next() is not None:
            break
        passed = lease_time() - called
        assert seconds_until_due() <= AT_MOST - passed + 0.1

    assert lease_time() - began >= AT_MOST


def test_a_message_that_is_put_off_keeps_its_arguments_its_queue_and_its_lease() -> None:
    task = calls_itself.using(backend="queue", queue_name="slow", priority=7)
    task.enqueue(7)
    task.enqueue(7)

    assert start_next() is None

    again = queued()[-1]
    assert (again.args, again.task.queue_name, again.task.priority) == ([7], "slow", 7)
    held = {each.name: each.remaining for each in locks["default"].held()}
    assert held["once:7"] == pytest.approx(3600, abs=5)


def test_what_is_called_while_it_runs_leads_to_one_more() -> None:
    calls_itself.using(backend="queue").enqueue(7)
    [message] = queued()

    assert run(message) == 1

    assert len(queued()) == 2
    assert seconds_until_due() == pytest.approx(QUIET, abs=0.2)


def test_called_in_place_or_with_a_lease_it_does_not_wait() -> None:
    assert quiet.call(7) == [False, True, False]
    assert quiet.enqueue(8, distlock=handed_over("once:8")).return_value == [False, True, False]


def test_a_message_that_cannot_be_put_off_frees_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        quiet.using(backend="queue").enqueue(7)
    monkeypatch.setattr(DummyBackend, "enqueue", Broken.enqueue)

    with pytest.raises(OSError, match="the queue is gone"):
        start_next()

    assert not lock("once:7").locked()


@pytest.mark.parametrize(
    ("words", "kind", "problem"),
    [
        ({"debounce": 0}, ValueError, "debounce must be more than 0 seconds"),
        ({"debounce": "30"}, TypeError, "debounce must be a number of seconds or a timedelta"),
        ({"debounce": 30, "at_most": math.inf}, ValueError, "at_most must be more than 0"),
        (
            {"debounce": 30, "at_most": 29},
            ValueError,
            r"at_most must be debounce \(30 seconds\) or",
        ),
        ({"at_most": 300}, ValueError, "give debounce, too"),
        ({"debounce": 30, "until": "start"}, ValueError, 'leave out until="start"'),
    ],
)
def test_times_that_cannot_be_waited_for_are_refused(
    words: dict[str, Any], kind: type[Exception], problem: str
) -> None:
    with pytest.raises(kind, match=problem):
        unique_task("once:{number}", **words)(once.func.__wrapped__)


def test_without_at_most_it_waits_ten_times_as_long() -> None:
    assert unique_task(debounce=30)(by_all_arguments.func.__wrapped__).func.once.at_most == 300


def test_a_time_of_ones_own_is_refused() -> None:
    later = quiet.using(backend="queue", run_after=timezone.now() + timedelta(seconds=1000))
    with pytest.raises(ValueError, match="quiet runs: enqueue it without run_after"):
        later.enqueue(7)

    assert not lock("once:7").locked()


def test_a_queue_that_cannot_wait_is_refused_and_told() -> None:
    problem = r"TASKS\['default'\] does not support run_after, which debounce needs\. Give the task"
    with pytest.raises(NotSupported, match=problem):
        quiet.enqueue(7)
    assert not lock("once:7").locked()

    task = unique_task("once:{number}", debounce=30)(once.func.__wrapped__)

    [told] = [each for each in check_settings() if each.msg.startswith(f"{__name__}.once()")]
    assert told.id == "distlock.E010"
    assert re.search(problem, told.msg)
    del task


@pytest.mark.parametrize("task", [tells, atells])
def test_the_holder_is_the_task_and_when_it_runs_its_id(task: Any) -> None:
    result = task.enqueue(7)
    assert result.return_value == f"{task.module_path}[{result.id}]"
    assert task.call(7) == task.module_path

    task.using(backend="queue").enqueue(7)

    assert purpose() == task.module_path


def test_a_lock_that_no_such_task_holds_is_no_silence() -> None:
    with lock("once:7"), pytest.raises(LockNotAcquired):
        once.enqueue(7)
    for purpose in ("", __name__, f"{__name__}.once_more", f"{__name__}.once_more[1]"):
        with held_in_thread(lock("once:7", purpose=purpose)), pytest.raises(LockNotAcquired):
            once.enqueue(7)


async def test_a_task_that_could_not_be_sent_is_free() -> None:
    broken = once.using(backend="broken")
    with pytest.raises(OSError, match="the queue is gone"):
        broken.enqueue(7)
    with pytest.raises(OSError, match="the queue is gone"):
        await broken.aenqueue(8)
    with pytest.raises(OSError, match="the queue is gone"):
        broken.enqueue(9, distlock=handed_over("once:9"))

    assert locks["default"].held() == []


@pytest.mark.parametrize(
    "what", [(1, 2), {"a": (1, 2)}, b"x"], ids=["tuple", "tuple in a dict", "bytes"]
)
def test_arguments_that_json_changes_keep_their_name(what: Any) -> None:
    in_queue = with_arguments.using(backend="queue")

    assert with_arguments.enqueue(what).return_value is True

    assert in_queue.enqueue(what)
    assert in_queue.enqueue(what) is None
    assert run(queued()[0]) is True
    assert with_arguments.enqueue(what, distlock=handed_over(f"any:{what}")).return_value is True


@pytest.mark.parametrize("task", [once, aonce])
def test_a_task_that_could_not_take_its_lease_over_is_free_when_its_server_is_back(
    task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise LockBackendError("default", "it is down")

    task.using(backend="queue").enqueue(7)
    with monkeypatch.context() as patch, pytest.raises(LockBackendError):
        for verb in ("take_over", "atake_over"):
            patch.setattr(locks["default"], verb, fail)
        run(queued()[0])

    eventually(lambda: not lock("once:7").locked(), 10)


def test_the_lease_lasts_from_when_it_is_to_run() -> None:
    later = timezone.now() + timedelta(seconds=1000)

    once.using(backend="queue").enqueue(7)
    once.using(backend="queue", run_after=later).enqueue(8)

    held = {each.name: each.remaining for each in locks["default"].held()}
    assert held["once:7"] == pytest.approx(3600, abs=5)
    assert held["once:8"] == pytest.approx(4600, abs=5)


@pytest.mark.parametrize("task", [once, aonce])
def test_a_copy_of_a_message_runs_when_the_name_is_free(task: Any) -> None:
    task.using(backend="queue").enqueue(7)
    [message] = queued()

    assert run(message) is run(message) is True
    with held_in_thread(lock("once:7")), pytest.raises(LockNotAcquired, match="'once:7' is held"):
        run(message)


@pytest.mark.parametrize("task", [once, aonce])
def test_a_lease_is_handed_over(task: Any) -> None:
    assert task.enqueue(7, distlock=handed_over("once:7")).return_value is True

    assert not lock("once:7").locked()


@pytest.mark.parametrize(("args", "kind"), [((), TypeError), ((None,), ValueError)])
def test_a_lease_handed_over_with_wrong_arguments_is_freed(
    args: tuple[Any, ...], kind: type[Exception]
) -> None:
    text = handed_over("once:7")

    with pytest.raises(kind):
        once.enqueue(*args, distlock=text)

    assert not lock("once:7").locked()


def test_a_lease_in_place_of_its_text_is_refused_and_stays_held() -> None:
    with lock("once:7") as lease:
        with pytest.raises(TypeError, match=r"the text of Lease\.detach\(\), not Lease"):
            once.enqueue(7, distlock=lease)
        assert lease.held


@pytest.mark.parametrize("task", [once, aonce])
def test_the_lease_of_another_lock_is_refused_and_freed(task: Any) -> None:
    [error] = task.enqueue(7, distlock=handed_over("other")).errors

    assert error.exception_class is ValueError
    assert "needs lock 'once:7', and was handed 'other'" in error.traceback
    assert not lock("other").locked()
    assert not lock("once:7").locked()


def test_what_is_rolled_back_is_free_and_what_is_committed_is_not() -> None:
    task = once.using(backend="queue")
    handed = handed_over("once:6")
    with pytest.raises(OSError), transaction.atomic():  # noqa: PT011 - it is ours
        task.enqueue(7)
        task.enqueue(6, distlock=handed)
        raise OSError
    assert not lock("once:7").locked()
    assert not lock("once:6").locked()
    with transaction.atomic():
        task.enqueue(8)

    never(lambda: not lock("once:8").locked(), 0.5)


def savepoint() -> str:
    sid = connection.savepoint()
    assert sid
    return sid


def test_what_a_savepoint_has_rolled_back_is_free_and_the_rest_is_not() -> None:
    task = once.using(backend="queue")
    with transaction.atomic():
        task.enqueue(5)
        with transaction.atomic():
            outer = savepoint()
            with transaction.atomic():
                task.enqueue(6)
            transaction.savepoint_commit(savepoint())
            inner = savepoint()
            task.enqueue(7)
            transaction.savepoint_rollback(inner)
            assert not lock("once:7").locked()
            assert lock("once:6").locked()
            task.enqueue(8)
            transaction.savepoint_commit(inner)
            transaction.savepoint_rollback(outer)
            assert not lock("once:6").locked()
            assert not lock("once:8").locked()
        task.enqueue(9)

    assert lock("once:5").locked()
    assert lock("once:9").locked()


def test_without_autocommit_too_what_is_rolled_back_is_free_and_what_is_committed_is_not() -> None:
    task = once.using(backend="queue")
    transaction.set_autocommit(False)
    try:
        for number, end in ((7, transaction.rollback), (8, transaction.commit)):
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
            task.enqueue(number)
            end()
    finally:
        transaction.set_autocommit(True)

    assert not lock("once:7").locked()
    assert lock("once:8").locked()


def test_what_unique_task_cannot_use_is_refused() -> None:
    plain = once.func.__wrapped__
    with pytest.raises(TypeError, match="leave @task out"):
        unique_task("x")(tasks.task(plain))
    with pytest.raises(TypeError, match=r"write unique_task\(lambda \.\.\.: "):
        unique_task(plain, queue_name="slow")
    with pytest.raises(ValueError, match="field 'context'"):
        unique_task("{context}", takes_context=True)(calls_itself.func.__wrapped__)
    with pytest.raises(TypeError, match="missing a required argument: 'number'"):
        once.enqueue()
    with pytest.raises(TypeError, match="has no 'ttl'; use lease"):
        unique_task("x", ttl=60)


def test_a_lock_that_ends_with_its_process_is_refused(settings: Settings) -> None:
    settings.DISTLOCK = {"bound": "zookeeper://localhost:1"}
    bound = unique_task("x", using="bound")(once.func.__wrapped__)

    with pytest.raises(NotSupported, match="unique_task"):
        bound.enqueue(7)
