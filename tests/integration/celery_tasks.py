"""Tasks that write down in Redis when their bodies begin and end, and wait until the test lets them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any

import redis
from celery import shared_task

from django_distlock import Lease, LockNotAcquired, distributed_lock, lock, retry, skip
from testproject import celery  # noqa: F401 - it takes the tasks

DB = 7
#: Longer than a worker takes to miss a child that was killed, and to start another.
TTL = 9
LONGEST = 60
#: The ttl of tasks that are ended.
SHORT = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """What a body did: when by the clock that all processes share, and in which of them."""

    event: str
    pid: int
    at: float


class Diary:
    """One page for each test, written by the bodies in the order in which the server got it."""

    def __init__(self, page: str) -> None:
        self.page = page
        self._client = redis.Redis(
            port=int(os.environ["DISTLOCK_REDIS_PORT"]), db=DB, decode_responses=True
        )

    def write(self, event: str) -> None:
        entry = {"event": event, "pid": os.getpid(), "at": time.clock_gettime(time.CLOCK_BOOTTIME)}
        self._client.rpush(self.page, json.dumps(entry))

    def read(self) -> list[Entry]:
        return [Entry(**json.loads(text)) for text in self._all()]

    def let_go(self, bodies: int = 1) -> None:
        """Let so many bodies end."""
        self._client.rpush(f"{self.page}:go", *("go" for _ in range(bodies)))

    def wait(self) -> None:
        assert self._client.blpop([f"{self.page}:go"], timeout=LONGEST), "nobody let it go"

    def close(self) -> None:
        self._client.close()

    def _all(self) -> list[str]:
        found: Any = self._client.lrange(self.page, 0, -1)
        return list(found)


_kept: list[Lease | None] = []


def body(page: str) -> str:
    diary = Diary(page)
    diary.write("began")
    diary.wait()
    diary.write("ended")
    diary.close()
    return "done"


#: What a task needs that is not to be lost with its worker.
NOT_LOST = {"acks_late": True, "reject_on_worker_lost": True}


@shared_task(**NOT_LOST)
@distributed_lock("page:{page}", using="redis", ttl=TTL, timeout=LONGEST)
def waiting(page: str) -> str:
    return body(page)


@shared_task(**NOT_LOST)
@distributed_lock("page:{page}", using="redis", ttl=30, timeout=0, on_busy=skip("skipped"))
def skipping(page: str) -> str:
    return body(page)


@shared_task
@distributed_lock(
    "page:{page}", using="redis", timeout=0, on_busy=retry(countdown=0.5, max_retries=2)
)
def giving_up(page: str) -> str:
    return body(page)


def locked(**terms: Any) -> Any:
    return distributed_lock("page:{page}", using="redis", timeout=0, **terms)


def instead(busy: LockNotAcquired, *args: Any) -> str:
    return f"instead of {args[-1]}"


@shared_task
@locked(on_busy=instead)
def calls(page: str) -> str:
    return body(page)


@shared_task(bind=True)
@locked(on_busy=instead)
def calls_bound(self: Any, page: str) -> str:
    return body(page)


@shared_task(max_retries=None)
@locked(on_busy=retry(countdown=0.1))
def retries(page: str) -> str:
    return body(page)


@shared_task(bind=True, max_retries=None)
@locked(on_busy=retry(countdown=0.1))
def retries_bound(self: Any, page: str) -> str:
    return body(page)


@shared_task(time_limit=1)
@locked(ttl=SHORT)
def hung(page: str) -> str:
    return body(page)


@shared_task(soft_time_limit=1)
@locked(ttl=SHORT)
def told_to_end(page: str) -> str:
    return body(page)


@shared_task
@locked(ttl=SHORT)
def long(page: str) -> str:
    return body(page)


@shared_task
def keeping(page: str) -> bool:
    _kept.append(lock(f"page:{page}", using="redis", ttl=LONGEST).acquire())
    return _kept[-1] is not None
