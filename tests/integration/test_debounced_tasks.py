"""Tasks that wait for quiet: real workers, whose broker, results and locks are on a real Redis."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, group
from celery.app.trace import trace_task
from celery.states import IGNORED
from kombu.exceptions import OperationalError

from django_distlock import LockBackendError, lock, locks
from django_distlock.contrib.celery import LOOK_AGAIN
from django_distlock.ground.clock import lease_time
from testproject.celery import app
from tests.fixtures.calls import Calls
from tests.fixtures.celery_worker import close_results
from tests.fixtures.eventually import eventually, never
from tests.integration import debounced_tasks as tasks, unique_tasks
from tests.integration.celery_tasks import Diary
from tests.integration.debounced_tasks import AT_MOST, QUIET
from tests.integration.test_celery import FORGIVING, began

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.celery_worker import CeleryWorker, StartWorkers

TASKS = f"{tasks.__name__},{unique_tasks.__name__}"
A_SECOND = 40
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("celery_connections"),
    pytest.mark.filterwarnings("ignore:Call to deprecated setex"),  # by Celery
]


def is_free(diary: Diary) -> bool:
    return not lock(f"once:{diary.page}", using="redis").locked()


def send_to(worker: CeleryWorker | str, diary: Diary, **options: Any) -> Any:
    queue = worker if isinstance(worker, str) else worker.queue
    return tasks.quiet.apply_async((diary.page,), queue=queue, **options)


def call(task: Any, worker: CeleryWorker, folder: Path) -> None:
    Calls(str(folder)).add()
    task.apply_async((str(folder),), queue=worker.queue)


def call_for(seconds: float, pause: Any, *call_of: Any) -> None:
    """Call again and again, with connections that end with the thread."""
    ends = lease_time() + seconds
    try:
        while lease_time() < ends:
            call(*call_of)
            never(bool, pause())
    finally:
        close_results(app)


def call_in_two_threads(*of: Any) -> None:
    with ThreadPoolExecutor(2) as senders:
        for sender in [senders.submit(call_for, *of) for _ in range(2)]:
            sender.result()


def test_forty_calls_a_second_lead_to_few_bodies_and_the_last_sees_the_last_call(
    worker: CeleryWorker, tmp_path: Path
) -> None:
    calls, seconds = Calls(str(tmp_path)), 2 * AT_MOST

    call_in_two_threads(seconds, lambda: 2 / A_SECOND, tasks.see, worker, tmp_path)

    eventually(calls.are_seen, AT_MOST + 5)
    assert 1 < len(calls.seen) <= seconds / AT_MOST + 1
    assert calls.number > 10 * len(calls.seen)


def test_calls_at_any_moment_are_seen(worker: CeleryWorker, tmp_path: Path) -> None:
    calls, random_pause = Calls(str(tmp_path)), lambda: random.uniform(0, 0.15)
    for _ in range(10):
        call_in_two_threads(1, random_pause, tasks.see_soon, worker, tmp_path)

        eventually(calls.are_seen, 5)


def test_each_call_gets_the_result_of_the_body_that_sees_it(
    worker: CeleryWorker, diary: Diary
) -> None:
    first = send_to(worker, diary)

    again = [send_to(worker, diary)]
    never(diary.read, QUIET / 2)
    last = lease_time()
    again.append(send_to(worker, diary))

    assert {each.id for each in again} == {first.id}
    assert began(diary, 1)[0].at >= last + QUIET
    diary.let_go()
    assert first.get(timeout=30) == "done"


def test_what_is_called_while_a_long_body_runs_is_run_after_it_once(
    worker: CeleryWorker, diary: Diary
) -> None:
    first = send_to(worker, diary)
    began(diary, 1)

    second, third = send_to(worker, diary), send_to(worker, diary)

    assert first.id != second.id == third.id
    never(lambda: len(diary.read()) > 1, 3 * QUIET)
    diary.let_go()
    assert first.get(timeout=30) == "done"
    began(diary, 2)
    diary.let_go()
    assert second.get(timeout=30) == "done"
    eventually(lambda: is_free(diary))


def test_steps_of_a_workflow_run_and_wait_too(worker: CeleryWorker, diary: Diary) -> None:
    diary.let_go(3)
    sent = lease_time()
    step = tasks.quiet.si(diary.page).set(queue=worker.queue)

    both = group(step, step).apply_async()
    end = chain(step, unique_tasks.after.s().set(queue=worker.queue)).apply_async()

    assert began(diary, 1)[0].at >= sent + QUIET
    assert both.get(timeout=40) == ["done", "done"]
    assert end.get(timeout=40) == "after done"


def test_a_killed_worker_leaves_its_message_to_another(
    start_workers: StartWorkers, diary: Diary
) -> None:
    [worker] = start_workers(include=TASKS, **FORGIVING)
    first = send_to(worker, diary)
    eventually(lambda: f"[{first.id}] received" in worker.log, 20)

    worker.kill()

    assert send_to(worker, diary).id == first.id
    worker.launch()
    began(diary, 1)
    assert is_free(diary)
    diary.let_go(2)
    assert first.get(timeout=30) == "done"
    worker.stop()


# What needs no worker.


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was sent, instead of sending it."""
    sent: list[dict[str, Any]] = []

    def note(*_: Any, task_id: str, **options: Any) -> Any:
        sent.append({"id": task_id, **options})
        return app.AsyncResult(task_id)

    monkeypatch.setattr(app, "send_task", note)
    return sent


def run(message: dict[str, Any], diary: Diary) -> tuple[Any, Any]:
    """Run *message* in this process, as a worker does; return the state that it ends in, and what it returns."""
    request = {"id": message["id"], "headers": message["headers"], "delivery_info": {}}
    traced = trace_task(tasks.quiet, message["id"], [diary.page], {}, request, app=app)
    return traced.info and traced.info.state, traced.retval


def test_the_name_is_kept_for_as_long_as_it_waits(diary: Diary, sent: list[Any]) -> None:
    send_to("nobody-works-here", diary)

    assert sent[0]["countdown"] == QUIET
    [held] = [each for each in locks["redis"].held() if each.name == f"once:{diary.page}"]
    assert held.remaining == pytest.approx(60 + QUIET, abs=1)


@pytest.mark.parametrize("words", [{"countdown": 5}, {"eta": "2030-01-01T00:00:00"}])
def test_a_time_of_ones_own_is_refused(diary: Diary, words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="send it without countdown and eta"):
        send_to("nobody-works-here", diary, **words)

    assert is_free(diary)


def test_a_message_that_cannot_be_put_off_runs(
    diary: Diary, sent: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OperationalError("the broker is gone")

    for _ in range(2):
        send_to("nobody-works-here", diary)
    monkeypatch.setattr(app, "send_task", fail)
    diary.let_go()

    assert run(sent[0], diary) == (None, "done")
    assert "quiet is not put off, and runs now: the broker is gone" in caplog.text
    assert is_free(diary)


def test_a_body_does_not_begin_before_the_name_is_free(
    diary: Diary, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = locks["redis"].release

    def fail(request: Any) -> Any:
        if request.name == f"once:{diary.page}":
            raise LockBackendError("redis", "it is down")
        return release(request)

    first = send_to("nobody-works-here", diary)
    with monkeypatch.context() as patch:
        patch.setattr(locks["redis"], "release", fail)
        assert run(sent[0], diary)[0] == IGNORED

    eventually(lambda: is_free(diary))
    assert (sent[1]["id"], sent[1]["countdown"]) == (first.id, LOOK_AGAIN)
    diary.let_go()
    assert run(sent[1], diary) == (None, "done")


@pytest.mark.usefixtures("eager")
def test_in_eager_mode_it_runs_at_once(diary: Diary) -> None:
    tasks.quiet.once.note_call(f"once:{diary.page}")
    diary.let_go(2)

    assert tasks.quiet.delay(diary.page).get() == "done"
    assert tasks.quiet.delay(diary.page).get() == "done"
    assert is_free(diary)
