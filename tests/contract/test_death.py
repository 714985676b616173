"""Holders that are killed, frozen, forked, or gone: their locks come free, and never too early."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Callable

from django_distlock import Lease, lock
from tests.fixtures.eventually import eventually, never
from tests.fixtures.processes import Child

from .crew import elsewhere, start
from .profiles import lacks, needs
from .rivals import Rival

Children = Callable[..., Child]
Rivals = Callable[..., Rival]


@lacks("whole_seconds")
@needs("cross_process", "leased")
def test_the_lock_of_a_killed_process_comes_free_with_its_ttl_and_never_before(
    child: Children, using: str, name: str, rival: Rivals, tick: float
) -> None:
    ttl, other = 15 * tick, rival()
    holder = child("hold", name=name, using=using, ttl=ttl)
    began = holder.expect("held")["began"]

    holder.kill()
    other.takes(within=ttl + 10)

    freed = time.monotonic()
    assert began + ttl - 0.001 <= freed


@needs("cross_process", "session_bound")
def test_the_lock_of_a_killed_process_comes_free_with_its_session(
    child: Children, using: str, name: str, rival: Rivals
) -> None:
    holder = child("hold", name=name, using=using)
    holder.expect("held")

    holder.kill()

    rival().takes(within=15)


@lacks("whole_seconds")
@needs("cross_process")
def test_a_waiter_gets_the_lock_of_a_killed_process(
    child: Children, using: str, name: str, tick: float
) -> None:
    holder = child("hold", name=name, using=using, ttl=30 * tick)
    holder.expect("held")
    waiting = start(lambda: _take(using, name, timeout=200 * tick))
    never(waiting.done, 2 * tick)

    holder.kill()

    assert waiting.result(20)


def _take(using: str, name: str, timeout: float) -> bool:
    with lock(name, using=using, timeout=timeout) as lease:
        return lease.held


@lacks("whole_seconds")
@needs("cross_process", "leased")
def test_a_frozen_holder_learns_first_thing_that_it_has_lost_the_lock_and_frees_nobody(
    child: Children, using: str, name: str, rival: Rivals, tick: float
) -> None:
    other = rival()
    holder = child("wake_up_late", name=name, using=using, ttl=10 * tick)
    holder.expect("held")
    holder.stop()
    other.takes(within=10)
    # It finds this word, not the time, when it goes on.
    holder.tell("go on")

    holder.cont()

    said = holder.result()
    assert said["check"] == "LockLost"
    assert said["release"] in {"LockNotOwned", "LockLost"}
    assert other.holds


@needs("cross_process", "leased")
def test_a_holder_frozen_for_less_than_its_ttl_keeps_the_lock(
    child: Children, using: str, name: str, rival: Rivals, tick: float
) -> None:
    other = rival()
    holder = child("wake_up_late", name=name, using=using, ttl=60 * tick)
    holder.expect("held")
    holder.stop()
    never(other.tries, 5 * tick)
    holder.tell("go on")

    holder.cont()

    assert holder.result() == {"check": "done", "release": "done"}
    assert other.tries()


@needs("cross_process")
def test_a_process_that_ends_gives_back_what_it_holds(
    child: Children, using: str, name: str, rival: Rivals
) -> None:
    ended = child("leave_without_a_word", name=name, using=using, ttl=60)

    token = ended.result()

    other = rival()
    other.takes(within=20)
    assert token is None or (other.token or 0) > token


@needs("cross_process")
def test_a_child_of_multiprocessing_that_ends_gives_back_what_it_holds(
    child: Children, using: str, name: str, rival: Rivals
) -> None:
    ended = child("leave_as_a_child", name=name, using=using, ttl=60)

    assert ended.result() == 0

    rival().takes(within=20)


@needs("cross_process")
def test_a_process_that_cancels_its_acquires_and_ends_leaves_nothing(
    child: Children, using: str, name: str, rival: Rivals
) -> None:
    names = [f"{name}:{number}" for number in range(20)]

    child("cancel_and_end", names=names, using=using, ttl=60).result()

    # Long before the ttl; a server that was too busy to hear the goodbye ends the session by itself.
    for each in names:
        rival(of=each).takes(within=20)


@needs("cross_process")
def test_a_forked_child_inherits_nothing_and_frees_nothing(
    child: Children, using: str, name: str, rival: Rivals
) -> None:
    other = rival()
    parent = child("fork_inside", name=name, using=using, ttl=30, timeout=10)

    forked = parent.expect("forked")
    parent.expect("alone")

    assert forked == {
        "event": "forked",
        "held": False,
        "check": "LockNotHeld",
        "extend": "LockNotHeld",
        "release": "LockNotHeld",
        "taken": False,
    }
    assert not other.tries()
    parent.tell("leave")
    assert parent.result() is True
    assert other.tries()


def test_the_lock_of_a_dead_thread_comes_free_soon(using: str, name: str, rival: Rivals) -> None:
    other = rival()
    told: list[str] = []

    def take_and_die() -> None:
        lease = lock(name, using=using, ttl=30).acquire()
        assert lease
        lease.on_lost(told.append)

    elsewhere(take_and_die)

    other.takes(within=15)
    [reason] = eventually(lambda: told)
    assert "ended without releasing" in reason


def test_the_lock_of_a_finished_task_comes_free_soon(using: str, name: str, rival: Rivals) -> None:
    kept: list[Lease | None] = []

    async def take_and_end() -> None:
        kept.append(await lock(name, using=using, ttl=30).aacquire())

    asyncio.run(take_and_end())

    assert kept[0]
    rival().takes(within=15)
    assert kept[0].lost


@lacks("cross_process")
def test_a_fork_of_this_process_leaves_its_leases_alone(using: str, name: str) -> None:

    with lock(name, using=using) as lease:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads: that is what is tried here.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os._exit(0 if not lease.held else 1)
        _, status = os.waitpid(pid, 0)

        assert status == 0
        lease.check()
