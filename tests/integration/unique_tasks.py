"""Unique tasks, and tasks that go on with the lease of a view: as celery_tasks.py, they write a diary."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Task, shared_task, signature

from django_distlock.contrib.celery import attached, unique_task

from .celery_tasks import Diary, body

#: How long a message keeps the name, and how long a task does that died.
LEASE = 4
unique = partial(unique_task, "once:{page}", using="redis", lease=LEASE)


class Again(Exception):
    """What a task is retried for."""


@unique()
def once(page: str) -> str:
    return body(page)


@unique(lease=60)
def once_within_a_minute(page: str) -> str:
    return body(page)


@unique(again=True)
def once_more(page: str) -> str:
    return body(page)


@unique(until="start")
def free_at_start(page: str) -> str:
    return body(page)


@unique(lease=60)
def brief(page: str) -> None: ...


@unique(lease=60, again=True)
def brief_again(page: str) -> None: ...


@unique(autoretry_for=(Again,), default_retry_delay=1)
def retried_by_itself(page: str) -> str:
    diary = Diary(page)
    diary.write("tried")
    tries = len(diary.read())
    diary.close()
    if tries < 2:
        raise Again
    return body(page)


@unique(acks_late=True, reject_on_worker_lost=True)
def not_lost(page: str) -> str:
    return body(page)


@unique()
def step(page: str, *_: Any) -> str:
    return body(page)


@unique_task(using="redis", lease=LEASE)
def by_all_arguments(page: str, day: str = "today") -> str:
    return body(page)


class SentSlowly(Task):  # type: ignore[misc]  # Celery has no types
    """A task that is sent when the test allows it."""

    def apply_async(self, args: Any = None, *more: Any, **options: Any) -> Any:
        diary = Diary(args[0])
        diary.write("sends")
        diary.wait()
        diary.close()
        return super().apply_async(args, *more, **options)


@shared_task(base=SentSlowly)
def sent_slowly(page: str) -> None: ...


@shared_task
def after(part: str) -> str:
    return f"after {part}"


@shared_task(bind=True)
def replaced(self: Any, step: Any) -> None:
    raise self.replace(signature(step))


@shared_task(bind=True)
def goes_on(self: Any, page: str) -> str:
    with attached(self):
        return body(page)


class EndsSlowly(Task):  # type: ignore[misc]  # as above
    """A task that goes on, until the test allows it to end, after its result is stored."""

    def on_success(self, _: Any, __: str, args: Any, ___: Any) -> None:
        diary = Diary(args[0])
        diary.write("succeeded")
        diary.wait()
        diary.close()


@unique(base=EndsSlowly, lease=60)
def ends_slowly(page: str) -> str:
    return "done"


@unique_task("once:{page}:{what}", using="redis", lease=LEASE)
def with_arguments(page: str, what: Any) -> str:
    return body(page)


@unique_task("once:{page}:{what}", using="redis", lease=LEASE, bind=True)
def with_arguments_retried(self: Any, page: str, what: Any) -> str:
    if self.request.retries == 0:
        raise self.retry(countdown=LEASE + 2)
    return body(page)
