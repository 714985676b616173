"""How long a caller waits: as long as it said, never shorter, and little longer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager

import freezegun
import pytest
import time_machine

from django_distlock import Lock, LockBackendError, LockNotAcquired, lock, try_lock
from django_distlock.engine.background import TRIES
from tests.fixtures.clocks import PutForward
from tests.fixtures.eventually import aeventually, eventually, never

from .crew import held_in_thread, start, take_and_release, taken
from .faults import Faulty, total
from .profiles import Profile, lacks, needs
from .rivals import Rival, Rivals

#: Seconds that a timeout may be late on a machine that is busy with other things.
LATE = 5.0


@pytest.fixture(params=["by this process", "by another"])
def held(request: pytest.FixtureRequest, using: str, name: str, rival: Rivals) -> Iterator[str]:
    """Where the lock of the test is held."""
    if request.param == "by another":
        rival().takes()
        yield request.param
    else:
        with held_in_thread(lock(name, using=using)):
            yield request.param


@pytest.mark.usefixtures("held")
class TestWhileSomebodyElseHoldsIt:
    def test_a_timeout_of_zero_gives_up_at_once(self, using: str, name: str) -> None:
        began = time.monotonic()

        assert lock(name, using=using, timeout=0).acquire() is None
        assert lock(name, using=using).acquire(blocking=False) is None
        assert lock(name, using=using).acquire(timeout=0) is None
        assert time.monotonic() - began < LATE

    @needs("typical")
    def test_the_block_of_try_lock_runs_without_a_lease(self, using: str, name: str) -> None:
        with try_lock(name, using=using) as lease:
            assert lease is None

    @needs("typical")
    async def test_so_does_that_of_a_task(self, using: str, name: str) -> None:
        async with try_lock(name, using=using) as lease:
            assert lease is None

    def test_a_timeout_is_kept_and_never_early(self, using: str, name: str, tick: float) -> None:
        began = time.monotonic()

        assert lock(name, using=using).acquire(timeout=4 * tick) is None
        assert 4 * tick <= time.monotonic() - began < 4 * tick + LATE

    async def test_a_timeout_of_a_task_is_kept_and_never_early(
        self, using: str, name: str, tick: float
    ) -> None:
        began = time.monotonic()

        assert await lock(name, using=using).aacquire(timeout=4 * tick) is None
        assert 4 * tick <= time.monotonic() - began < 4 * tick + LATE

    def test_with_raises_who_has_it_and_for_how_long(
        self, using: str, name: str, tick: float, held: str, profile: Profile
    ) -> None:
        with pytest.raises(LockNotAcquired) as caught, lock(name, using=using, timeout=tick):
            pytest.fail("the lock is held by somebody else")

        assert caught.value.name == name
        assert tick <= caught.value.waited < tick + LATE
        is_known = held == "by this process"
        assert (caught.value.holder is not None) is (is_known or profile.names_holder)
        assert (caught.value.remaining is not None) is (is_known or profile.tells_end)
        assert caught.value.remaining is None or 0 < caught.value.remaining <= 30


def _stopped(how: str) -> AbstractContextManager[object]:
    """Stop the clock by one of the libraries that tests do it with."""
    if how == "freezegun":
        return freezegun.freeze_time("2030-01-01")
    return time_machine.travel("2030-01-01", tick=False)


@needs("typical")
class TestWhileTheTestsStopTheClock:
    """What waits goes on by clocks that freezegun and time-machine do not replace."""

    @pytest.fixture(autouse=True, params=["freezegun", "time-machine"])
    def holder(self, request: pytest.FixtureRequest, using: str, rival: Rivals) -> Iterator[Rival]:
        holder = rival(ttl=60)
        holder.takes()
        with _stopped(request.param):
            stopped = time.time()
            yield holder
            assert time.time() == stopped

    def test_a_timeout_is_kept(self, using: str, name: str, tick: float) -> None:
        waiting = start(lambda: lock(name, using=using).acquire(timeout=4 * tick))

        assert waiting.result(4 * tick + 15) is None

    def test_a_lock_is_handed_on_when_it_comes_free_to_who_waits_without_a_timeout(
        self, using: str, name: str, tick: float, holder: Rival
    ) -> None:
        waiting = start(lambda: take_and_release(using, name, None))

        never(waiting.done, 2 * tick)
        holder.leaves()

        assert waiting.result(20)

    @needs("leased")
    def test_a_lease_is_renewed_and_ends_in_its_time(
        self, using: str, name: str, tick: float
    ) -> None:
        lasting = taken(f"{name}:2", using=using, ttl=12 * tick)
        ending = taken(f"{name}:3", using=using, ttl=12 * tick, renew=False)

        eventually(lambda: ending.lost)

        lasting.check()
        lasting.release()


@needs("typical")
class TestWhileOtherTasksKeepAllThreadsBusy:
    """Where a backend has no asyncio of its own, a few threads take the locks of all tasks."""

    @pytest.fixture
    async def hung(self, faulty: Faulty, using: str, name: str) -> AsyncIterator[threading.Event]:
        """Every thread hangs in the try of another lock, until the event is set."""
        if faulty.has_own("atry_acquire"):
            pytest.skip("it has an asyncio of its own")
        over, before = faulty.hang("try_acquire"), faulty.calls["try_acquire"]
        others = [lock(f"{name}:{number}", using=using, timeout=60) for number in range(TRIES)]
        tasks = [asyncio.create_task(_atake_and_release(other)) for other in others]
        await aeventually(lambda: faulty.calls["try_acquire"] - before == TRIES)
        yield over
        over.set()
        await asyncio.gather(*tasks)

    @pytest.mark.usefixtures("hung")
    async def test_a_timeout_is_kept(self, using: str, name: str, tick: float) -> None:
        began = time.monotonic()

        with pytest.raises(LockBackendError, match="the request was not sent in time"):
            await lock(name, using=using).aacquire(timeout=4 * tick)

        assert 4 * tick <= time.monotonic() - began < 4 * tick + LATE

    async def test_a_lease_begins_when_it_is_asked_for(
        self, using: str, name: str, faulty: Faulty, hung: threading.Event, put_forward: PutForward
    ) -> None:
        taken = asyncio.create_task(
            lock(name, using=using, ttl=30, renew=False).aacquire(timeout=60)
        )
        await aeventually(lambda: len(faulty._threads._tries) == TRIES + 1)
        put_forward(20)

        hung.set()
        lease = await taken

        assert lease
        # Some servers keep no lease for so long.
        assert lease.remaining > min(20, lease.request.ttl / 2)
        await lease.arelease()


@needs("cross_process")
@needs("typical")
@pytest.mark.usefixtures("holder")
def test_without_a_timeout_the_setting_of_the_alias_holds(name: str, tick: float) -> None:
    began = time.monotonic()

    assert lock(name, using="brief").acquire() is None
    assert 3 * tick <= time.monotonic() - began < 3 * tick + LATE


async def _atake_and_release(recipe: Lock) -> float:
    async with recipe:
        return time.monotonic()


@pytest.mark.usefixtures("holder")
def test_a_single_try_is_one_request(faulty: Faulty, using: str, name: str) -> None:
    before = faulty.calls["try_acquire"]

    lock(name, using=using, timeout=0).acquire()

    assert faulty.calls["try_acquire"] - before == 1


@lacks("fair")  # there each asks the server
def test_a_lock_that_this_process_holds_is_refused_without_a_request(
    faulty: Faulty, using: str, name: str
) -> None:
    with held_in_thread(lock(name, using=using, renew=False)):
        before = total(faulty.calls)

        assert lock(name, using=using, timeout=0).acquire() is None
        assert total(faulty.calls) == before
