"""Celery tasks under a lock: real workers, whose broker, results and locks are on a real Redis."""

from __future__ import annotations

import os
from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import LockNotAcquired, lock
from testproject import tasks
from testproject.services import audit, open_account
from tests.fixtures.eventually import eventually
from tests.integration import celery_tasks
from tests.integration.celery_tasks import SHORT, TTL, Diary, Entry

if TYPE_CHECKING:
    from tests.fixtures.celery_worker import CeleryWorker, StartWorkers

COPIES = 40
WORK = 0.01
#: The lease begins a little before the body does.
NEARLY_TTL = TTL - 0.5
OWN_TASKS = celery_tasks.__name__
#: For workers that bring back what nobody has acknowledged within a second.
FORGIVING: dict[str, Any] = {
    "visibility_timeout": 1,
    "unacked_restore_interval": 0.2,
    "unacked_restore_throttle": 1,
    # A worker killed while it brings back would keep others from that for five minutes.
    "unacked_mutex_expire": 1,
}
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("celery_connections")]


@pytest.fixture
def account() -> int:
    return open_account("charged by Celery", Decimal("100000.00")).pk


def send_copies(task: Any, worker: CeleryWorker, account: int) -> list[Any]:
    return [task.apply_async((account, WORK), queue=worker.queue) for _ in range(COPIES)]


def send_to(worker: CeleryWorker, name: str, diary: Diary) -> Any:
    return getattr(celery_tasks, name).apply_async((diary.page,), queue=worker.queue)


def ends(results: list[Any]) -> Counter[object]:
    return Counter(result.get(timeout=60) for result in results)


def began(diary: Diary, number: int) -> list[Entry]:
    """Return the beginnings of bodies, once they are as many."""

    def found() -> list[Entry]:
        beginnings = [entry for entry in diary.read() if entry.event == "began"]
        return beginnings if len(beginnings) >= number else []

    return eventually(found, 40, f"{number} bodies began")


def test_without_a_lock_updates_get_lost(worker: CeleryWorker, account: int) -> None:
    results = send_copies(tasks.charge, worker, account)

    assert ends(results) == {tasks.CHARGED: COPIES}
    assert audit(account).made == COPIES
    assert audit(account).lost > 0


def test_tasks_that_retry_have_all_run_in_the_end(worker: CeleryWorker, account: int) -> None:
    logged = len(worker.log)
    results = send_copies(tasks.charge_or_retry, worker, account)

    assert ends(results) == {tasks.CHARGED: COPIES}
    assert (audit(account).made, audit(account).lost) == (COPIES, 0)
    assert "Retry in 0.05s: LockNotAcquired" in worker.log[logged:]


def test_task_that_runs_out_of_retries_fails_and_says_why(
    worker: CeleryWorker, diary: Diary
) -> None:
    logged = len(worker.log)
    with lock(f"page:{diary.page}", using="redis") as lease:
        result = send_to(worker, "giving_up", diary)

        with pytest.raises(LockNotAcquired) as caught:
            result.get(timeout=30)

    assert caught.value.name == f"page:{diary.page}"
    assert caught.value.holder == lease.holder
    assert caught.value.holder.pid == os.getpid()
    assert diary.read() == []
    said = eventually(lambda: [x for x in worker.log[logged:].splitlines() if "raised" in x])
    assert f"giving_up[{result.id}] raised expected: {caught.value!r}" in said[0]
    assert "Traceback" not in worker.log[logged:]


@pytest.mark.parametrize("bound", ["", "_bound"])
@pytest.mark.parametrize("kind", ["calls", "retries"])
def test_each_policy_works_with_and_without_bind(
    worker: CeleryWorker, diary: Diary, kind: str, bound: str
) -> None:
    diary.let_go()
    with lock(f"page:{diary.page}", using="redis"):
        result = send_to(worker, kind + bound, diary)
        if kind == "retries":
            eventually(lambda: result.state == "RETRY", 20)
        else:
            assert result.get(timeout=30) == f"instead of {diary.page}"
        assert diary.read() == []

    if kind == "retries":
        assert result.get(timeout=30) == "done"


@pytest.mark.parametrize("end", ["hung", "told_to_end", "revoked"])
def test_a_task_that_is_ended_leaves_nothing_beyond_its_ttl(
    worker: CeleryWorker, diary: Diary, end: str
) -> None:
    result = send_to(worker, "long" if end == "revoked" else end, diary)
    began(diary, 1)

    if end == "revoked":
        result.revoke(terminate=True)

    eventually(lambda: not lock(f"page:{diary.page}", using="redis").locked(), SHORT + 4)
    assert [entry.event for entry in diary.read()] == ["began"]


def test_worker_that_is_stopped_gives_back_what_its_processes_hold(
    start_workers: StartWorkers, diary: Diary
) -> None:
    [worker] = start_workers(children=1, include=OWN_TASKS)
    assert send_to(worker, "keeping", diary).get(timeout=30)

    worker.stop()

    # Long before its ttl.
    with lock(f"page:{diary.page}", using="redis", timeout=20):
        pass


def test_task_of_a_killed_worker_runs_elsewhere_once_its_lease_is_over(
    start_workers: StartWorkers, diary: Diary
) -> None:
    pair = start_workers(2, children=1, include=OWN_TASKS, **FORGIVING)
    result = send_to(pair[0], "waiting", diary)
    [first] = began(diary, 1)

    next(worker for worker in pair if first.pid in worker.pids).kill()

    _, second = began(diary, 2)
    assert second.at - first.at > NEARLY_TTL
    diary.let_go()
    assert result.get(timeout=30) == "done"


def test_copy_of_a_task_that_takes_too_long_for_the_broker_does_not_run_beside_it(
    start_workers: StartWorkers, diary: Diary
) -> None:
    [worker] = start_workers(include=OWN_TASKS, **FORGIVING)
    result = send_to(worker, "skipping", diary)
    began(diary, 1)

    # Both have one id, and one result: the first that is there stays.
    assert result.get(timeout=30) == "skipped"

    assert [entry.event for entry in diary.read()] == ["began"]
    diary.let_go()
    eventually(lambda: [entry.event for entry in diary.read()] == ["began", "ended"])
