"""What other processes do in the tests of locks that a session holds; see tests.fixtures.child."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from django.db import connections, transaction

from django_distlock import Lock, LockError, lock, locks, transaction_lock
from django_distlock.engine.bells import ThreadBell
from django_distlock.engine.registry import registry
from django_distlock.engine.values import Request
from tests.contract import acts
from tests.fixtures.child import end_in_full, hear_word, say

#: As in the contract.
hold = acts.hold
#: How many wait at once, where many do.
WAITERS = 100


def end_inside(name: str, **terms: Any) -> None:
    """Hold the lock until told to leave, and end without releasing it."""
    end_in_full()
    assert lock(name, **terms).acquire()
    say("held")
    hear_word("leave")


def hold_places(name: str, using: str, limit: int) -> None:
    """Hold all places until told to leave."""
    for _ in range(limit):
        assert lock(name, using=using, limit=limit, reentrant=False, timeout=0).acquire()
    say("held")
    hear_word("leave")


def wait_patiently(name: str, using: str, limit: int) -> None:
    """Wait for a place for ever, woken by the server alone, and hold it until told to leave."""
    backend = locks[using]
    backend.waiting = replace(backend.waiting, look_again=3600.0)
    sleep, is_told = backend.sleep, False

    def tell(request: Request, bell: ThreadBell, seconds: float) -> None:
        nonlocal is_told
        if not is_told:
            say("sleeps")
            is_told = True
        sleep(request, bell, seconds)

    backend.sleep = tell  # type: ignore[method-assign]  # of this process alone
    with lock(name, using=using, limit=limit, timeout=None) as lease:
        say("held", place=lease.place)
        hear_word("leave")


def wait(name: str, using: str) -> None:
    """Wait for the lock for ever."""
    say("waits")
    lock(name, using=using, timeout=None).acquire()


def cancel_and_end(name: str, using: str) -> None:
    """Wait for the lock in a task, for ever; cancel it when told, and be done."""
    end_in_full()

    async def main() -> None:
        waiting = asyncio.create_task(lock(name, using=using, timeout=None).aacquire())
        await asyncio.to_thread(hear_word, "cancel")
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(main())


def cancel_waiters(name: str, using: str, way: str) -> None:
    """Have readers wait for the lock, cancel them all, and end as a script, a server or a child ends.

    Or end "in a hurry": nobody cancels them, and there is no time to take them out of the line.
    """
    end_in_full()
    hear = partial(hear_word, "cancel")
    if way == "end in a hurry":
        registry.release_all = lambda *_: None  # type: ignore[method-assign]
        for reader in _readers(name, using):
            threading.Thread(target=reader.acquire, daemon=True).start()
        say("waits")
        hear()
        return
    if way == "child of multiprocessing":
        context = multiprocessing.get_context("fork")
        told = context.Event()
        child = context.Process(target=_cancel_waiters, args=(name, using, told.wait))
        child.start()
        hear()
        told.set()
        child.join()
        return
    _cancel_waiters(name, using, hear)
    if way == "sys.exit":
        sys.exit(0)


def _readers(name: str, using: str) -> list[Lock]:
    return [lock(name, using=using, timeout=None, shared=True) for _ in range(WAITERS)]


def _cancel_waiters(name: str, using: str, hear: Callable[[], object]) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(reader.aacquire()) for reader in _readers(name, using)]
        say("waits")
        await asyncio.to_thread(hear)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(main())


def hold_beside_a_waiter(name: str, using: str, transaction_on: str = "") -> dict[str, Any]:
    """Hold a short lock while another thread waits in vain; tell what became of both."""
    refused = list[str]()

    def wait() -> None:
        try:
            if transaction_on:
                with transaction.atomic(using=transaction_on):
                    transaction_lock(name, using=transaction_on, timeout=3)
            else:
                with lock(name, using=using, timeout=3):
                    pass
        except LockError as error:
            refused.append(type(error).__name__)
        connections.close_all()

    with lock(f"{name}:beside", using=using, ttl=1.5) as lease:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        return {"refused": refused, "held": lease.held}
