"""Tasks that are under way once: real workers, whose broker, results and locks are on a real Redis."""

from __future__ import annotations

import enum
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, group, shared_task
from celery.app.trace import trace_task
from celery.exceptions import TaskRevokedError, WorkerLostError
from celery.states import IGNORED, RETRY
from celery.utils import uuid
from django.db import transaction
from kombu.exceptions import OperationalError

from django_distlock import LockBackendError, LockLost, LockNotAcquired, lock, locks
from django_distlock.contrib.celery import handover, unique_task
from django_distlock.signals import lock_acquired, lock_busy
from testproject.celery import app
from tests.contract.crew import listening, taken
from tests.fixtures.celery_worker import close_results
from tests.fixtures.eventually import eventually, never
from tests.fixtures.interruption import StopAt, TimeLimit
from tests.fixtures.launch import send
from tests.integration import unique_tasks, worker_tasks
from tests.integration.celery_tasks import Diary
from tests.integration.test_celery import FORGIVING, began
from tests.integration.unique_tasks import LEASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery.result import AsyncResult

    from tests.fixtures.celery_worker import CeleryWorker, StartWorkers

TASKS = unique_tasks.__name__
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("celery_connections"),
    pytest.mark.filterwarnings("ignore:Call to deprecated setex"),  # by Celery
]


def send_to(worker: CeleryWorker | str, name: str, diary: Diary, **options: Any) -> AsyncResult:
    queue = worker if isinstance(worker, str) else worker.queue
    task = getattr(unique_tasks, name)
    return task.apply_async((diary.page,), queue=queue, **options)


def send_in_thread(*args: Any) -> str:
    """Send as send_to() does, with connections that end with the thread; return the id."""
    try:
        return str(send_to(*args).id)
    finally:
        close_results(app)


def arrive(task_id: str, diary: Diary, name: str = "once", **headers: str) -> Any:
    """Run a message in this process, as a worker does; return the state that it ends in."""
    request = {
        "id": task_id,
        "headers": headers,
        "delivery_info": {"exchange": "", "routing_key": "nobody-works-here"},
    }
    task = getattr(unique_tasks, name)
    traced = trace_task(task, task_id, [diary.page], {}, request, app=app)
    return traced.info and traced.info.state


def is_down(*_: Any, **__: Any) -> None:
    raise LockBackendError("redis", "it is down")


def is_free(diary: Diary) -> bool:
    return not lock(f"once:{diary.page}", using="redis").locked()


def events(diary: Diary) -> list[str]:
    return [entry.event for entry in diary.read()]


def test_sent_again_while_it_runs_it_is_the_one_that_runs(
    worker: CeleryWorker, diary: Diary
) -> None:
    first = send_to(worker, "once", diary)
    began(diary, 1)
    never(lambda: is_free(diary), LEASE + 2)  # its lease is renewed

    again = [send_to(worker, "once", diary) for _ in range(3)]

    assert [each.id for each in again] == [first.id] * 3
    diary.let_go()
    assert again[0].get(timeout=30) == "done"
    eventually(lambda: is_free(diary))
    assert events(diary) == ["began", "ended"]


def test_sent_again_while_it_waits_in_the_queue_it_is_the_one_in_the_queue(diary: Diary) -> None:
    first = send_to("nobody-works-here", "once", diary)

    assert send_to("nobody-works-here", "once", diary).id == first.id
    assert unique_tasks.once.delay(diary.page).id == first.id
    assert unique_tasks.once.s(diary.page).apply_async().id == first.id


@pytest.mark.parametrize("pool", ["solo", "threads", "gevent"])
def test_locks_and_unique_tasks_work_in_every_pool(
    start_workers: StartWorkers, diary: Diary, pool: str
) -> None:
    include, environment = f"{TASKS},{worker_tasks.__name__}", {"PYTHONWARNINGS": "ignore"}
    [worker] = start_workers(children=4, include=include, pool=pool, environment=environment)
    first = send_to(worker, "retried_by_itself", diary)
    began(diary, 1)

    assert send_to(worker, "retried_by_itself", diary).id == first.id

    diary.let_go()
    assert first.get(timeout=30) == "done"
    eventually(lambda: is_free(diary))

    # Each holds it for longer than the ttl.
    terms = {"name": diary.page, "seconds": 2, "ttl": 1, "timeout": 30, "using": "redis"}
    holds = [worker_tasks.hold.apply_async((), terms, queue=worker.queue) for _ in range(2)]
    early, late = sorted(hold.get(timeout=40) for hold in holds)
    assert early[1] <= late[0]
    worker.stop()
    assert not lock(diary.page, using="redis").locked()


def test_the_holder_is_the_task_before_it_runs_too(worker: CeleryWorker, diary: Diary) -> None:
    result = send_to("nobody-works-here", "once", diary)
    with pytest.raises(LockNotAcquired) as caught:
        lock(f"once:{diary.page}", using="redis", timeout=0).__enter__()

    assert caught.value.holder is not None
    assert caught.value.holder.task == f"{TASKS}.once[{result.id}]"
    assert caught.value.holder.purpose == "in the queue"


def test_a_lock_that_no_such_task_holds_is_no_silence(diary: Diary) -> None:
    with lock(f"once:{diary.page}", using="redis"), pytest.raises(LockNotAcquired) as caught:
        send_to("nobody-works-here", "once", diary)

    assert caught.value.holder is not None
    assert caught.value.holder.pid == os.getpid()


def test_a_lease_handed_over_with_wrong_arguments_is_freed(diary: Diary) -> None:
    headers = handover(taken(f"once:{diary.page}", using="redis"), 60)

    with pytest.raises(ValueError, match="None"):
        unique_tasks.once.apply_async((None,), headers=headers)

    assert is_free(diary)


@pytest.mark.parametrize("is_handed", [False, True])
@pytest.mark.parametrize("down", [[], ["abandon", "take_over"]], ids=["", "its server is down too"])
def test_a_task_that_could_not_be_sent_is_free(
    monkeypatch: pytest.MonkeyPatch, diary: Diary, down: list[str], is_handed: bool
) -> None:
    options: dict[str, Any] = {}
    if is_handed:
        options["headers"] = handover(taken(f"once:{diary.page}", using="redis"), 60)
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> None:
            for verb in down:
                patch.setattr(locks["redis"], verb, is_down)
            raise OperationalError("the broker is gone")

        patch.setattr(app, "send_task", fail)
        with pytest.raises(OperationalError):
            send_to("nobody-works-here", "once_within_a_minute", diary, **options)
        assert down or is_free(diary)

    eventually(lambda: is_free(diary), 10)


def test_sent_when_its_result_is_stored_it_is_sent(worker: CeleryWorker, diary: Diary) -> None:
    first = send_to(worker, "ends_slowly", diary)
    assert first.get(timeout=30) == "done"
    eventually(lambda: events(diary) == ["succeeded"], 20)
    assert not is_free(diary)

    with ThreadPoolExecutor(1) as sender:
        second = sender.submit(send_in_thread, worker, "ends_slowly", diary)
        never(second.done, 0.2)
        diary.let_go(2)

    assert second.result() != first.id
    assert app.AsyncResult(second.result()).get(timeout=30) == "done"


def test_without_a_name_it_is_unique_by_all_its_arguments(
    worker: CeleryWorker, diary: Diary
) -> None:
    first = send_to(worker, "by_all_arguments", diary)
    began(diary, 1)

    task, queue = unique_tasks.by_all_arguments, "nobody-works-here"
    again = task.apply_async((), {"day": "today", "page": diary.page}, queue=queue)
    other = task.apply_async((diary.page, "tomorrow"), queue=queue)

    assert again.id == first.id != other.id
    name = f'{unique_tasks.__name__}.by_all_arguments(page="{diary.page}", day="today")'
    assert lock(name, using="redis").locked()
    diary.let_go()
    assert first.get(timeout=30) == "done"
    eventually(lambda: not lock(name, using="redis").locked())


def test_without_brackets_it_is_a_task_too() -> None:
    @unique_task
    def task(shop_id: int) -> bool:
        return lock(f"{__name__}.{task.__qualname__}(shop_id={shop_id})").locked()

    assert task(7)
    with pytest.raises(TypeError, match=r"object has no text .*; give it a name"):
        task(object())


# What JSON does to arguments.


class Colour(str, enum.Enum):  # noqa: UP042 - its text is another one
    RED = "r"


@pytest.mark.parametrize("what", [(1, 2), {1: "a"}, Colour.RED], ids=["tuple", "key", "enum"])
def test_a_chain_and_a_group_go_on_over_a_task_that_is_under_way_and_its_arguments_keep_their_name(
    worker: CeleryWorker, diary: Diary, what: Any
) -> None:
    step = unique_tasks.with_arguments.si(diary.page, what).set(queue=worker.queue)
    first = step.apply_async()
    began(diary, 1)
    assert step.apply_async().id == first.id

    end = chain(step, unique_tasks.after.s().set(queue=worker.queue)).apply_async()
    alone = group(step).apply_async()

    never(lambda: len(events(diary)) > 1, 6)  # they are sent again within 5 seconds
    diary.let_go(3)
    assert [first.get(timeout=30), end.get(timeout=30)] == ["done", "after done"]
    assert alone.get(timeout=30) == ["done"]
    assert events(diary) == ["began", "ended"] * 3


# What never runs.


def test_a_lost_message_frees_the_name_within_its_lease(diary: Diary) -> None:
    first = send_to("purged", "once", diary)
    with app.connection_for_write() as connection:
        assert connection.default_channel.queue_purge("purged") == 1

    never(lambda: is_free(diary), LEASE - 2)
    eventually(lambda: is_free(diary), 5)

    assert send_to("purged", "once", diary).id != first.id


@pytest.mark.parametrize("word", ["countdown", "eta"])
def test_a_countdown_that_is_longer_than_the_lease_keeps_the_name(
    worker: CeleryWorker, diary: Diary, word: str
) -> None:
    diary.let_go()
    seconds = LEASE + 3
    later = seconds if word == "countdown" else datetime.now(UTC) + timedelta(seconds=seconds)
    first = send_to(worker, "once", diary, **{word: later})

    never(lambda: is_free(diary), LEASE + 2)

    assert send_to(worker, "once", diary).id == first.id
    assert first.get(timeout=30) == "done"


@pytest.mark.parametrize("terminate", [False, True])
def test_a_revoked_task_frees_the_name_when_a_worker_sees_it(
    worker: CeleryWorker, diary: Diary, terminate: bool
) -> None:
    result = send_to(worker, "once", diary, countdown=3, expires=60)
    result.revoke(terminate=terminate)

    eventually(lambda: is_free(diary), LEASE + 1)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=10)
    assert events(diary) == []


def test_a_message_that_waits_for_longer_than_its_lease_gives_way_to_a_later_one_in_words(
    worker: CeleryWorker, diary: Diary
) -> None:
    diary.let_go()
    with worker.paused():
        alone = send_to(worker, "once", diary)
        eventually(lambda: is_free(diary), LEASE + 2)
    assert alone.get(timeout=40) == "done"
    eventually(lambda: is_free(diary))  # a task releases its lock after it has stored its result
    with worker.paused():
        lost = send_to(worker, "once", diary)
        eventually(lambda: is_free(diary), LEASE + 2)
        later = send_to(worker, "once_within_a_minute", diary)
        assert later.id != lost.id

    with pytest.raises(LockNotAcquired) as caught:
        lost.get(timeout=40)
    assert later.id in str(caught.value)
    diary.let_go()  # not before, as the other child of the worker may take the later message first
    assert later.get(timeout=20) == "done"
    assert events(diary) == ["began", "ended"] * 2


# What is sent while it runs.


def is_running(diary: Diary) -> bool:
    return lock(f"once:{diary.page}:running", using="redis").locked()


def test_what_is_sent_while_it_runs_is_run_once_more_after_it(
    worker: CeleryWorker, diary: Diary
) -> None:
    first = send_to(worker, "once_more", diary)
    began(diary, 1)

    second, *others = [send_to(worker, "once_more", diary) for _ in range(5)]

    assert second.id != first.id
    assert {each.id for each in others} == {second.id}
    never(lambda: len(events(diary)) > 1, LEASE + 2)  # and its turn is not lost meanwhile
    assert send_to(worker, "once_more", diary).id == second.id
    diary.let_go()
    assert first.get(timeout=30) == "done"
    began(diary, 2)
    assert events(diary) == ["began", "ended", "began"]
    third = send_to(worker, "once_more", diary)
    assert third.id not in {first.id, second.id}
    diary.let_go(2)
    assert [second.get(timeout=30), third.get(timeout=30)] == ["done", "done"]
    assert events(diary) == ["began", "ended"] * 3
    eventually(lambda: is_free(diary) and not is_running(diary))


def test_of_those_no_two_run_at_once_and_no_change_is_missed(
    worker: CeleryWorker, diary: Diary
) -> None:
    diary.let_go(100)
    last = None
    for _ in range(30):
        last = send_to(worker, "once_more", diary)

    assert last is not None
    assert last.get(timeout=60) == "done"
    found = events(diary)
    assert found == ["began", "ended"] * (len(found) // 2)
    eventually(lambda: is_free(diary) and not is_running(diary))


def test_a_name_that_is_free_at_the_start_lets_several_run(
    worker: CeleryWorker, diary: Diary
) -> None:
    with worker.paused():  # else it may have started the first one by now
        first = send_to(worker, "free_at_start", diary)
        assert send_to("nobody-works-here", "free_at_start", diary).id == first.id
    began(diary, 1)
    assert is_free(diary)

    second = send_to(worker, "free_at_start", diary)

    assert second.id != first.id
    began(diary, 2)
    diary.let_go(2)
    assert [first.get(timeout=30), second.get(timeout=30)] == ["done", "done"]


# What dies.


def test_a_retry_keeps_the_name_and_finds_itself_not_busy(
    worker: CeleryWorker, diary: Diary
) -> None:
    """Even if JSON has changed the arguments that the name is made of."""
    name = f"once:{diary.page}:(1, 2)"

    def sent() -> AsyncResult:
        task = unique_tasks.with_arguments_retried
        return task.apply_async((diary.page, (1, 2)), queue=worker.queue)

    def is_free() -> bool:
        return not lock(name, using="redis").locked()

    first = sent()
    eventually(lambda: first.state == RETRY, 20)
    never(is_free, LEASE + 1)
    assert sent().id == first.id

    began(diary, 1)
    assert sent().id == first.id
    diary.let_go()
    assert first.get(timeout=30) == "done"
    eventually(is_free)


@pytest.mark.parametrize(
    ("end", "error"), [("killed", WorkerLostError), ("revoked", TaskRevokedError)]
)
def test_a_killed_child_frees_the_name_within_its_lease(
    worker: CeleryWorker, diary: Diary, end: str, error: type[Exception]
) -> None:
    result = send_to(worker, "once", diary)
    [first] = began(diary, 1)

    if end == "killed":
        send(first.pid, signal.SIGKILL)
    else:
        result.revoke(terminate=True, signal="SIGKILL")

    with pytest.raises(error):
        result.get(timeout=30)
    eventually(lambda: is_free(diary), LEASE + 1)


def test_a_killed_task_that_is_not_lost_runs_again_under_the_same_name(
    worker: CeleryWorker, diary: Diary
) -> None:
    result = send_to(worker, "not_lost", diary)
    [first] = began(diary, 1)

    send(first.pid, signal.SIGKILL)

    _, second = began(diary, 2)
    assert second.pid != first.pid
    assert send_to(worker, "not_lost", diary).id == result.id
    diary.let_go()
    assert result.get(timeout=30) == "done"


def test_a_second_copy_by_the_broker_waits_and_does_not_run(
    start_workers: StartWorkers, diary: Diary
) -> None:
    [worker] = start_workers(include=TASKS, **FORGIVING)
    result = send_to(worker, "not_lost", diary)
    began(diary, 1)
    copies = f"Task {TASKS}.not_lost[{result.id}] received"
    eventually(lambda: worker.log.count(copies) > 3, 20)

    diary.let_go()

    assert result.get(timeout=30) == "done"
    eventually(lambda: "its copy is left out" in worker.log, 30)
    never(lambda: events(diary) != ["began", "ended"], 6)
    worker.stop()


def test_the_name_is_kept_until_the_result_is_stored(worker: CeleryWorker, diary: Diary) -> None:
    slow = unique_tasks.sent_slowly.si(diary.page).set(queue=worker.queue)
    result = send_to(worker, "once", diary, link=slow)
    began(diary, 1)

    # Celery sends what is linked after the body, and before it stores the result.
    diary.let_go()
    eventually(lambda: events(diary) == ["began", "ended", "sends"], 20)

    assert not result.successful()
    assert not is_free(diary)
    diary.let_go()
    assert result.get(timeout=30) == "done"
    eventually(lambda: is_free(diary))


def test_a_copy_that_gets_the_lock_after_the_first_has_succeeded_does_not_run_and_makes_way(
    diary: Diary,
) -> None:
    result, has_asked = app.AsyncResult(uuid()), threading.Event()

    def send_it(name: str, **_: Any) -> None:
        if name == f"once:{diary.page}" and not sent:
            # As if the first copy had stored its result and given the lock back just before.
            app.backend.mark_as_done(result.id, "done")
            sent.append(sender.submit(send_in_thread, "nobody-works-here", "once", diary))
            assert has_asked.wait(10)

    def note(**_: Any) -> None:
        has_asked.set()

    sent: list[Any] = []
    diary.let_go()
    with (
        listening(lock_acquired, send_it),
        listening(lock_busy, note),
        ThreadPoolExecutor(1) as sender,
    ):
        assert arrive(result.id, diary) == IGNORED

    assert events(diary) == []
    assert result.get() == "done"
    assert sent[0].result() != result.id
    assert not is_free(diary)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT], ids=["warm", "cold"])
def test_a_worker_that_is_shut_down_leaves_nothing(
    start_workers: StartWorkers, diary: Diary, number: signal.Signals
) -> None:
    [worker] = start_workers(children=1, include=TASKS)
    send_to(worker, "once", diary)
    began(diary, 1)
    assert worker.process is not None

    worker.process.send_signal(number)
    diary.let_go()
    worker.process.wait(20)

    eventually(lambda: is_free(diary), LEASE + 1)
    assert not diary.read() or number != signal.SIGTERM or events(diary) == ["began", "ended"]


@pytest.mark.parametrize("name", ["brief", "brief_again"])
def test_a_soft_time_limit_at_any_step_frees_the_name_at_once(
    diary: Diary, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", id)  # finalizers drop what they raise
    # Its records, which pytest keeps, have the frames.
    monkeypatch.setattr(logging.getLogger("celery.utils.dispatch.signal"), "disabled", True)

    def calls_until(number: int) -> int:
        page = f"{diary.page}:{number}"
        lease = taken(f"once:{page}", using="redis")
        request = {"id": uuid(), "headers": handover(lease, ttl=60)}
        with suppress(TimeLimit), StopAt(number) as step:
            trace_task(getattr(unique_tasks, name), request["id"], [page], {}, request, app=app)
        return step.calls

    steps = range(calls_until(0))
    for number in steps[1:]:
        calls_until(number)

    of_pages = [f"once:{diary.page}:{number}" for number in steps]
    locks_ = [lock(each + end, using="redis") for each in of_pages for end in ("", ":running")]
    eventually(lambda: not any(each.locked() for each in locks_), 6)


# Steps of a workflow, which others wait for.


def test_the_last_of_a_chain_and_each_of_a_group_have_their_results(
    worker: CeleryWorker, diary: Diary
) -> None:
    diary.let_go(3)
    step = unique_tasks.step.si(diary.page).set(queue=worker.queue)

    both = group(step, step).apply_async()
    last = chain(unique_tasks.after.si("it").set(queue=worker.queue), step).apply_async()

    assert both.get(timeout=40) == ["done", "done"]
    assert last.get(timeout=40) == "done"
    assert events(diary) == ["began", "ended"] * 3


def test_what_replaces_a_task_runs_after_the_one_that_is_under_way(
    worker: CeleryWorker, diary: Diary
) -> None:
    step = unique_tasks.step.si(diary.page).set(queue=worker.queue)
    first = step.apply_async()
    began(diary, 1)

    result = unique_tasks.replaced.si(step).set(queue=worker.queue).apply_async()

    never(lambda: len(events(diary)) > 1, 6)  # it is sent again within 5 seconds
    diary.let_go(2)
    assert [first.get(timeout=30), result.get(timeout=30)] == ["done", "done"]
    assert events(diary) == ["began", "ended"] * 2


# How it is called.


@pytest.mark.parametrize("task_id", ["x" * 109, "\u00e9" * 19])
def test_an_id_that_no_holder_can_tell_is_refused(diary: Diary, task_id: str) -> None:
    with pytest.raises(ValueError, match="too long for unique_task"):
        send_to("nobody-works-here", "once", diary, task_id=task_id)

    assert is_free(diary)


@pytest.mark.django_db(transaction=True)
def test_on_commit_it_is_locked_at_the_commit(worker: CeleryWorker, diary: Diary) -> None:
    with transaction.atomic():
        unique_tasks.once.apply_async_on_commit((diary.page,), queue=worker.queue)
        unique_tasks.once.apply_async_on_commit((diary.page,), queue=worker.queue)
        assert is_free(diary)

    began(diary, 1)
    assert not is_free(diary)
    diary.let_go(2)
    eventually(lambda: is_free(diary), 20)
    assert events(diary) == ["began", "ended"]


@pytest.mark.usefixtures("eager")
def test_in_eager_mode_it_leaves_the_lock_of_its_body_as_often_as_it_entered_it(
    diary: Diary,
) -> None:
    with lock(f"once:{diary.page}:running", using="redis") as lease:
        assert unique_tasks.brief_again.delay(diary.page).successful()

        assert lease.held


@pytest.mark.usefixtures("eager")
def test_in_eager_mode_it_runs_at_once(diary: Diary) -> None:
    diary.let_go(2)

    assert unique_tasks.once.delay(diary.page).get() == "done"
    assert is_free(diary)


# What a view hands over to its task.


def test_a_task_goes_on_with_the_lease_of_a_view(worker: CeleryWorker, diary: Diary) -> None:
    lease = taken(f"once:{diary.page}", using="redis")

    result = send_to(worker, "goes_on", diary, headers=handover(lease, ttl=60))

    began(diary, 1)
    assert not is_free(diary)
    diary.let_go()
    assert result.get(timeout=30) == "done"
    assert is_free(diary)


def test_a_unique_task_refuses_the_lease_of_another_lock(
    worker: CeleryWorker, diary: Diary
) -> None:
    lease = taken(f"other:{diary.page}", using="redis")

    result = send_to(worker, "once", diary, headers=handover(lease, ttl=60))

    with pytest.raises(ValueError, match="needs lock 'once:"):
        result.get(timeout=30)
    assert events(diary) == []
    eventually(lambda: not lock(f"other:{diary.page}", using="redis").locked(), 1)


def test_a_lease_that_came_too_late_is_lost(worker: CeleryWorker, diary: Diary) -> None:
    headers = handover(taken(f"once:{diary.page}", using="redis", ttl=1, renew=False))
    eventually(lambda: is_free(diary), 5)

    with pytest.raises(LockLost):
        send_to(worker, "goes_on", diary, headers=headers).get(timeout=30)

    assert events(diary) == []


# What is refused when decorating.


def test_a_task_is_refused() -> None:
    @shared_task(name="tests.refused")
    def task() -> None: ...

    with pytest.raises(TypeError, match="leave @shared_task out"):
        unique_task("x")(task)


def imported(shop_id: int) -> str:
    return f"import:{shop_id}"


unchecked: Any = unique_task  # by mypy, which sees some of these mistakes


@pytest.mark.parametrize(
    ("decorate", "error", "problem"),
    [
        (lambda: unchecked("import:{shop}")(imported), ValueError, "field 'shop'"),
        (lambda: unchecked("{self}", bind=True)(lambda self: 0), ValueError, "field 'self'"),
        (lambda: unchecked("x", lease=0), ValueError, "lease"),
        (lambda: unchecked("x", until="now")(imported), ValueError, "until must be"),
        (lambda: unchecked("x", until="start", again=True)(imported), ValueError, "True waits"),
        (lambda: unchecked("x", again="yes")(imported), TypeError, "again"),
        (lambda: unchecked(42), TypeError, "must be text"),
        (lambda: unchecked(imported, lease=60), TypeError, r"write @unique_task\(\.\.\.\) above"),
        (lambda: unchecked(name="{shop_id}"), TypeError, "write the lock's name first, without"),
        (lambda: unchecked("x", ttl=60), TypeError, "has no 'ttl'; use lease"),
        (lambda: unchecked("x", limit=3), TypeError, "'limit'; .* @distributed_lock below"),
    ],
)
def test_wrong_words_are_refused(
    decorate: Callable[[], object], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        decorate()
