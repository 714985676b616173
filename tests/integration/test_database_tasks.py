"""Tasks of Django that are under way once: a real worker, whose queue and locks are in the database."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from django.apps import apps
from django.db import connections

from django_distlock import lock, locks
from django_distlock.ground.clock import lease_time
from tests.fixtures.calls import Calls
from tests.fixtures.eventually import eventually, never
from tests.fixtures.launch import launch

if not apps.is_installed("django_tasks_db"):
    pytest.skip("There are no tasks of Django, or there is no queue.", allow_module_level=True)
DBTaskResult: Any = apps.get_model("django_tasks_database", "DBTaskResult")

from tests.integration import database_tasks as tasks  # noqa: E402 - there must be tasks
from tests.integration.database_tasks import AT_MOST, LEASE  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TTL = LEASE
pytestmark = pytest.mark.timeout(120)


class Worker(Protocol):
    """Starts a worker, which the test may kill."""

    def __call__(self) -> subprocess.Popen[str]:
        """Return its process."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    (tmp_path / "go").touch()  # a test that failed must not keep a worker busy
    DBTaskResult.objects.all().delete()


@pytest.fixture
def worker(folder: str) -> Iterator[Worker]:
    command = [sys.executable, "-m", "django", "db_worker", "--backend=database", "--interval=0.1"]
    command += ["--no-startup-delay", "--no-reload", "--settings=testproject.settings"]
    with ExitStack() as stack:

        def start() -> subprocess.Popen[str]:
            process = launch(command, cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start


def is_free(folder: str) -> bool:
    return not lock(f"once:{folder}").locked()


def began(folder: str, times: int = 1) -> list[int]:
    """Return the processes in which bodies began, once so many have."""

    def pids() -> list[int]:
        diary = Path(folder, "began")
        found = [int(pid) for pid in diary.read_text().split()] if diary.exists() else []
        return found if len(found) >= times else []

    return eventually(pids, 30)


def let_go(folder: str) -> None:
    Path(folder, "go").touch()


def ended(result: Any, status: str = "SUCCESSFUL") -> Any:
    """Return *result* once it has ended, as *status*."""

    def is_over() -> bool:
        result.refresh()
        return bool(result.is_finished)

    eventually(is_over, 30)
    assert result.status == status, result.errors
    return result


def test_while_it_waits_or_runs_it_is_not_sent_again(worker: Worker, folder: str) -> None:
    task: Any = tasks.aonce
    first = task.enqueue(folder)
    assert task.enqueue(folder) is None
    worker()
    began(folder)

    never(lambda: task.enqueue(folder) is not None, LEASE + 2)

    [held] = [each for each in locks["default"].held() if each.name == f"once:{folder}"]
    assert held.holder
    assert held.holder.purpose == f"{task.module_path}[{first.id}]"
    let_go(folder)
    assert ended(first).return_value == "done"
    eventually(partial(is_free, folder))
    assert ended(task.enqueue(folder)).return_value == "done"
    assert len(began(folder)) == 2


def test_what_is_sent_while_it_runs_is_run_after_it_once(worker: Worker, folder: str) -> None:
    first = tasks.once_more.enqueue(folder)
    worker()
    worker()
    began(folder)

    second = tasks.once_more.enqueue(folder)

    assert second
    never(lambda: tasks.once_more.enqueue(folder) is not None, LEASE + 2)
    assert len(began(folder)) == 1
    let_go(folder)
    assert ended(first).return_value == ended(second).return_value == "done"
    assert len(began(folder)) == 2


# Those that wait for quiet.


def call_for(seconds: float, folder: str) -> None:
    """Call twenty times a second."""
    calls, ends = Calls(folder), lease_time() + seconds
    try:
        while lease_time() < ends:
            calls.add()
            tasks.asee.enqueue(folder)
            never(bool, 0.05)
    finally:
        connections.close_all()


def test_forty_calls_a_second_lead_to_few_bodies_and_the_last_sees_the_last_call(
    worker: Worker, folder: str
) -> None:
    calls, seconds = Calls(folder), 2 * AT_MOST
    calls.add()
    tasks.asee.enqueue(folder)
    worker()
    worker()
    eventually(calls.are_seen, 30)

    with ThreadPoolExecutor(2) as senders:
        for sender in [senders.submit(call_for, seconds, folder) for _ in range(2)]:
            sender.result()

    eventually(calls.are_seen, AT_MOST + 5)
    assert 1 < len(calls.seen) <= seconds / AT_MOST + 2
    assert calls.number > 10 * len(calls.seen)


def test_a_worker_that_is_killed_while_a_message_waits_does_no_harm(
    worker: Worker, folder: str
) -> None:
    process, calls = worker(), Calls(folder)
    calls.add()
    tasks.asee.enqueue(folder)
    calls.add()
    assert tasks.asee.enqueue(folder) is None

    process.kill()
    worker()

    eventually(calls.are_seen, 30)
    assert len(calls.seen) == 1


def test_a_killed_worker_frees_the_name_within_its_lease(worker: Worker, folder: str) -> None:
    task: Any = tasks.once
    task.enqueue(folder)
    process = worker()
    began(folder)

    process.kill()

    never(partial(is_free, folder), TTL * 2 / 3 - 0.5)  # it renewed at a third of it
    assert task.enqueue(folder) is None
    eventually(partial(is_free, folder), TTL)
    let_go(folder)
    second = task.enqueue(folder)
    worker()
    assert ended(second).return_value == "done"


def test_a_lost_message_frees_the_name_within_its_lease(folder: str) -> None:
    tasks.once.enqueue(folder)
    DBTaskResult.objects.all().delete()

    never(partial(is_free, folder), LEASE - 2)
    eventually(partial(is_free, folder), 5)

    assert tasks.once.enqueue(folder)


def test_a_message_that_waits_for_longer_than_its_lease_gives_way_to_a_later_one(
    worker: Worker, folder: str
) -> None:
    let_go(folder)
    alone = tasks.once.enqueue(folder)
    eventually(partial(is_free, folder), LEASE + 2)
    process = worker()
    assert ended(alone).return_value == "done"
    process.kill()
    lost = tasks.once.enqueue(folder)
    eventually(partial(is_free, folder), LEASE + 2)
    later = tasks.once_within_a_minute.enqueue(folder)

    worker()

    [error] = ended(lost, "FAILED").errors
    assert error.exception_class_path == "django_distlock.exceptions.LockNotAcquired"
    assert f"({tasks.once_within_a_minute.module_path})" in error.traceback
    assert ended(later).return_value == "done"
