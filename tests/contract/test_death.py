"""Holders that are killed, frozen, forked, or gone: their locks come free, and never too early."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress

import pytest
from asgiref.sync import async_to_sync

from django_distlock import Lease, LockNotHeld, lock
from django_distlock.engine.registry import registry
from tests.contract.faults import Faulty
from tests.fixtures.eventually import eventually, never

from .crew import ataken, elsewhere, start, take_and_release, taken
from .profiles import Profile, lacks, needs
from .rivals import Children, Rival, Rivals

#: Seconds in which the registry looks several times for owners that have ended.
LOOKS = 0.3


@needs("cross_process", "leased")
def test_the_lock_of_a_killed_process_comes_free_with_its_ttl_and_never_before(
    child: Children, using: str, name: str, rival: Rivals, profile: Profile
) -> None:
    ttl, other = max(15 * profile.tick, profile.shortest_ttl), rival()
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
    token = holder.expect("held")["token"]

    holder.kill()

    other = rival()
    other.takes(within=15)
    assert token is None or (other.token or 0) > token


@lacks("whole_seconds")
@needs("cross_process")
def test_a_waiter_gets_the_lock_of_a_killed_process(
    child: Children, using: str, name: str, tick: float
) -> None:
    holder = child("hold", name=name, using=using, ttl=15 * tick)
    holder.expect("held")
    waiting = start(lambda: take_and_release(using, name, timeout=200 * tick))
    never(waiting.done, 2 * tick)

    holder.kill()

    assert waiting.result(20)


@lacks("variant")
@needs("cross_process")
def test_a_frozen_holder_learns_first_thing_that_it_has_lost_the_lock_and_frees_nobody(
    child: Children, using: str, name: str, rival: Rivals, profile: Profile
) -> None:
    other, ttl = rival(), max(10 * profile.tick, profile.shortest_ttl)
    holder = child("wake_up_late", name=name, using=using, ttl=ttl)
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


@lacks("variant")
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
@needs("typical")
def test_a_process_that_ends_while_daemon_threads_work_leaves_nothing(
    child: Children, using: str, name: str, rival: Rivals
) -> None:
    names = [f"{name}:{number}" for number in range(8)]

    child("leave_with_daemons", names=names, using=using, ttl=60).result()

    for each in names:
        rival(of=each).takes(within=20)


@needs("typical")
def test_a_try_that_is_under_way_as_the_process_ends_is_waited_for(
    faulty: Faulty, using: str, name: str, rival: Rivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_ended_by", 0)  # and so again after the test
    goes_on = faulty.hang("try_acquire")
    taking = start(lock(name, using=using, timeout=0).acquire)
    eventually(lambda: faulty.calls["try_acquire"])

    def let_go() -> None:
        goes_on.wait(0.3)
        goes_on.set()

    start(let_go)

    registry.end(10)

    assert faulty.answers["try_acquire"] == 1
    with suppress(LockNotHeld):
        assert (lease := taking.result(10))
        assert not lease.held
    rival().takes()


@needs("cross_process")
def test_a_forked_child_inherits_nothing_and_frees_nothing(
    child: Children, using: str, name: str, rival: Rivals
) -> None:
    _forks(child, using, name, rival(), by_c=False)


@needs("cross_process", "typical")
def test_nor_does_one_that_code_in_c_has_forked(
    child: Children, using: str, name: str, rival: Rivals
) -> None:
    _forks(child, using, name, rival(), by_c=True)


def _forks(child: Children, using: str, name: str, other: Rival, *, by_c: bool) -> None:
    parent = child("fork_inside", name=name, using=using, ttl=30, timeout=10, by_c=by_c)

    forked = parent.expect("forked")
    parent.expect("alone")

    assert forked == {
        "event": "forked",
        "held": False,
        "check": "LockNotHeld",
        "extend": "LockNotHeld",
        "release": "LockNotHeld",
        "taken": False,
        "renewed": True,
    }
    assert not other.tries()
    parent.tell("leave")
    assert parent.result() is True
    assert other.tries()


def test_the_lock_of_a_dead_thread_comes_free_soon(using: str, name: str, rival: Rivals) -> None:
    other = rival()
    told: list[str] = []

    def take_and_die() -> None:
        lease = taken(name, using=using, ttl=30)
        lease.on_lost(told.append)

    elsewhere(take_and_die)

    other.takes(within=15)
    [reason] = eventually(lambda: told)
    assert "ended without releasing" in reason


@needs("typical")
def test_the_lock_of_a_finished_task_comes_free_soon(using: str, name: str, rival: Rivals) -> None:
    told, kept = list[str](), list[contextvars.Context]()

    async def take_and_end() -> None:
        lease = await ataken(name, using=using, ttl=30)
        lease.on_lost(told.append)
        kept.append(contextvars.copy_context())

    asyncio.run(take_and_end())

    rival().takes(within=15)
    [reason] = eventually(lambda: told)
    assert "ended without releasing" in reason
    assert kept


@needs("typical")
def test_the_lock_of_a_task_that_was_destroyed_in_its_block_comes_free(
    using: str, name: str, rival: Rivals
) -> None:
    loop = asyncio.new_event_loop()
    tasks: list[asyncio.Task[None]] = []

    async def stay() -> None:
        async with lock(name, using=using, ttl=30):
            loop.stop()
            await asyncio.Event().wait()

    tasks.append(loop.create_task(stay()))
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tasks[0].get_coro().close()  # as the collector does
        tasks.clear()
    rival().takes(within=15)


@needs("typical")
class TestALeaseInSomebodysHands:
    """Its thread or task has ended, and it lives on: who has it uses, extends and releases it."""

    def _lives_on(self, lease: Lease | None, other: Rival) -> None:
        assert lease
        never(lambda: lease.lost, LOOKS)
        lease.check()
        assert not other.tries()

    @pytest.mark.parametrize("way", ["thread", "run", "async_to_sync"])
    def test_of_a_caller(self, using: str, name: str, rival: Rivals, way: str) -> None:
        recipe = lock(name, using=using, ttl=30)
        ways: dict[str, Callable[[], Lease | None]] = {
            "thread": lambda: elsewhere(recipe.acquire),
            "run": lambda: asyncio.run(recipe.aacquire()),
            "async_to_sync": async_to_sync(recipe.aacquire),
        }

        lease = ways[way]()

        self._lives_on(lease, other := rival())

        assert lease
        if lease.backend.supports_extend:
            lease.extend()
        lease.release()
        assert other.tries()

    async def test_of_an_inner_task(self, using: str, name: str, rival: Rivals) -> None:
        first = await asyncio.wait_for(lock(name, using=using, ttl=30).aacquire(), 20)
        second, third = await asyncio.gather(
            *(lock(f"{name}:{number}", using=using, ttl=30).aacquire() for number in (2, 3))
        )

        other = rival()
        await asyncio.to_thread(self._lives_on, first, other)

        for lease in (first, second, third):
            assert lease
            await lease.arelease()
        assert await asyncio.to_thread(other.tries)

    def test_is_given_back_when_nobody_has_it_any_more(
        self, using: str, name: str, rival: Rivals
    ) -> None:
        kept = [elsewhere(lock(name, using=using, ttl=30).acquire)]
        self._lives_on(kept[0], other := rival())

        kept.clear()

        other.takes(within=15)

    def test_a_suspended_block_has_it(self, using: str, name: str, rival: Rivals) -> None:
        def hold() -> Generator[None, None, None]:
            with lock(name, using=using, ttl=30):
                yield

        block = hold()
        elsewhere(lambda: next(block))

        other = rival()
        never(other.tries, LOOKS)
        block.close()
        assert other.tries()


@needs("typical")
class TestThreadsThatThreadingDidNotStart:
    def _run(self, act: Callable[[], object]) -> int:
        """Run *act* in such a thread; return the ident it had."""
        idents: list[int] = []
        over = _thread.allocate_lock()
        over.acquire()

        def run() -> None:
            try:
                act()
            finally:
                idents.append(_thread.get_ident())
                over.release()

        _thread.start_new_thread(run, ())
        assert over.acquire(timeout=40)
        eventually(lambda: idents[0] not in sys._current_frames())
        return idents[0]

    def test_the_lock_of_one_that_has_ended_comes_free(
        self, using: str, name: str, rival: Rivals
    ) -> None:
        self._run(lock(name, using=using, ttl=30).acquire)

        rival().takes(within=15)

    @pytest.mark.usefixtures("using")
    def test_one_with_the_ident_of_a_dead_one_is_another(self, using: str, name: str) -> None:
        recipe, leases = lock(name, using=using, ttl=30), list[Lease]()
        released: list[int] = []
        ident = self._run(lambda: leases.extend(filter(None, [recipe.acquire()])))

        def release() -> None:
            if _thread.get_ident() == ident:
                with pytest.raises(LockNotHeld):
                    recipe.release()
                released.append(ident)

        while not released:
            self._run(release)

        leases[0].release()

    def test_none_is_invented(self, using: str, name: str) -> None:
        def use() -> None:
            with lock(name, using=using):
                pass

        use()  # drivers that start threads of their own have done so
        before = set(threading.enumerate())

        self._run(use)

        invented = [each.name for each in set(threading.enumerate()) - before]
        assert not [each for each in invented if each.startswith("Dummy")]


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
