"""Tasks in a real worker, whose process the agent watches as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from django_distlock import lock
from tests.fixtures.eventually import eventually

from . import tasks

if TYPE_CHECKING:
    from tests.fixtures.celery_worker import CeleryWorker, StartWorkers

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("celery_connections")]


@pytest.fixture(scope="module")
def worker(start_workers: StartWorkers) -> CeleryWorker:
    return start_workers(include=tasks.__name__)[0]


def test_a_task_runs_under_its_lock(worker: CeleryWorker, name: str) -> None:
    sent = tasks.locked_task.apply_async([name], queue=worker.queue)

    assert sent.get(timeout=30) is True


def test_a_unique_task_is_sent_once(worker: CeleryWorker, name: str) -> None:
    with worker.paused():
        first = tasks.once.apply_async([name], queue=worker.queue)
        second = tasks.once.apply_async([name], queue=worker.queue)

        assert second.id == first.id
    assert first.get(timeout=30) == name
    eventually(lambda: lock(f"once:{name}", using="redis", timeout=0).acquire(), 20)
