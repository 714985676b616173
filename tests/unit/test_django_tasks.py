"""Tasks of Django itself, from 6.0 on, under a lock."""

from __future__ import annotations

import pytest

from django_distlock import Lease, LockLost, distributed_lock, lock, skip
from tests.contract.crew import held_in_thread

tasks = pytest.importorskip("django.tasks")


@tasks.task
@distributed_lock("work:{number}", timeout=0)
def work(number: int) -> bool:
    return lock(f"work:{number}").locked()


@tasks.task
@distributed_lock("work:{number}", timeout=0, on_busy=skip("skipped"))
def skipped(number: int) -> str:
    return "done"


@tasks.task
def goes_on(lease: str) -> bool:
    with Lease.attach(lease) as attached:
        return attached.held


def test_a_task_holds_its_lock_and_gives_it_back() -> None:
    assert work.enqueue(7).return_value is True

    assert not lock("work:7").locked()


def test_a_busy_task_fails_or_is_skipped() -> None:
    with held_in_thread(lock("work:7")):
        failed = work.enqueue(7)
        assert skipped.enqueue(7).return_value == "skipped"

    assert failed.status == "FAILED"
    assert failed.errors[0].exception_class_path == "django_distlock.exceptions.LockNotAcquired"


def test_a_task_goes_on_with_the_lease_of_its_sender_once() -> None:
    lease = lock("report").acquire()
    assert lease
    text = lease.detach(ttl=60)

    assert goes_on.enqueue(text).return_value is True

    assert goes_on.enqueue(text).errors[0].exception_class is LockLost
    assert not lock("report").locked()
