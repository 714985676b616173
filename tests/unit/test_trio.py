"""Locks that are taken in tasks of trio, which all share one thread."""

from __future__ import annotations

import subprocess
import sys

#: In another process: what trio does as it is imported makes Hypothesis warn in this one.
NURSERY = """
import django
from django.conf import settings

settings.configure(
    DISTLOCK={"default": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}},
    INSTALLED_APPS=["django_distlock"],
)
django.setup()

import trio
from django_distlock import LockDeadlock, LockNotAcquired, lock

async def child(timeout):
    try:
        with lock("fee", timeout=timeout):
            print("held")
    except (LockNotAcquired, LockDeadlock) as error:
        print(type(error).__name__)

def work():
    with lock("fee", timeout=0), lock("fee", timeout=0):
        print("entered again")

async def main():
    with lock("fee"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child, None)
    await trio.to_thread.run_sync(work)

trio.run(main)
"""


#: What async code is told that asyncio does not run.
WITHOUT_ASYNCIO = f"""
{NURSERY.partition("async def child")[0]}
from django_distlock import NotSupported, alead, lock_all, try_lock
from django_distlock.contrib.cache import aget_or_compute

async def work(lease=None):
    pass

async def block(manager):
    async with manager:
        pass

async def main():
    terms = {{"cancel_when_lost": True}}
    for asked in (
        block(lock("fee", **terms)),
        block(lock_all(lock("fee", **terms), lock("rent", **terms))),
        block(try_lock("fee", **terms)),
        alead("fee", work),
        aget_or_compute("fee", work, timeout=60, stale=60),
    ):
        try:
            await asked
        except NotSupported as error:
            print("trio.to_thread" in str(error))

trio.run(main)
"""


def test_async_code_is_told_that_it_needs_asyncio() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_ASYNCIO],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stdout.splitlines() == ["True"] * 5, run.stderr


def test_tasks_of_a_nursery_do_not_enter_the_lock_of_the_task_around_it() -> None:
    run = subprocess.run(
        [sys.executable, "-c", NURSERY], capture_output=True, text=True, timeout=60, check=False
    )

    told = ["LockNotAcquired", "LockDeadlock", "entered again"]
    assert run.stdout.splitlines() == told, run.stderr
