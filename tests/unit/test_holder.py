"""Who holds a lock, told to people: which task, if it is one."""

from __future__ import annotations

import pytest

from django_distlock.ground.holder import Holder

celery = pytest.importorskip("celery")

app = celery.Celery("holders", set_as_current=False)


def current_task() -> str:
    return Holder.current().task


def test_celery_task_is_told_by_name_and_id() -> None:
    task = app.task(current_task, name="bills.send")

    assert task.apply(task_id="4711").get() == "bills.send[4711]"


def test_long_name_leaves_the_id_whole() -> None:
    task = app.task(current_task, name="bills." + "x" * 200)

    found = task.apply(task_id="4711").get()

    assert found.startswith("bills.xxx")
    assert found.endswith("x[4711]")
    assert len(found) == 110


def test_task_and_id_are_harmless_text() -> None:
    task = app.task(current_task, name="bills.söhne")

    assert task.apply(task_id="a\0b\ud800").get() == "bills.s\\xf6hne[a%00b%ED%A0%80]"


async def test_asyncio_task_is_told_by_name() -> None:
    assert current_task().startswith("Task-")


def test_no_task_is_no_text() -> None:
    assert not current_task()
