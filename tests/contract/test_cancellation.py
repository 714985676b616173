"""Whatever interrupts an acquire or a release, nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable

import pytest

from django_distlock import Lease, Lock, LockError, lock, lock_all
from django_distlock.backends.base import BaseLockBackend
from django_distlock.engine.registry import registry
from django_distlock.engine.values import State
from django_distlock.lock_set import LockSet
from tests.fixtures.eventually import aeventually

from .crew import SOON, taken, waiting_for
from .faults import Faulty, total
from .profiles import needs
from .rivals import Rival, Rivals


async def _ends(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def _becomes_free(other: Rival) -> None:
    await asyncio.to_thread(other.takes, SOON)


async def _goes_on(faulty: Faulty, verb: str, *twins: str) -> None:
    """Return once the requests that hung have arrived; those of a backend's own twin end with the task."""
    if not any(map(faulty.has_own, twins)):
        await aeventually(lambda: faulty.answers[verb] == faulty.calls[verb])


async def _hold(using: str, name: str) -> None:
    async with lock(name, using=using, timeout=30):
        await asyncio.Event().wait()


async def test_a_task_cancelled_at_any_moment_of_its_acquire_leaves_nothing(
    using: str, name: str, rival: Rivals
) -> None:
    names = [f"{name}:{number}" for number in range(40)]
    tasks = [asyncio.create_task(_hold(using, each)) for each in names]
    random.shuffle(tasks)

    for task in tasks:
        await asyncio.sleep(random.uniform(0, 0.002))
        task.cancel()
    await asyncio.wait(tasks)

    for each in names:
        await _becomes_free(rival(of=each))


async def test_a_task_cancelled_while_it_waits_leaves_nothing(
    backend: BaseLockBackend, using: str, name: str, rival: Rivals, holder: Rival
) -> None:
    other = rival()
    tasks = [asyncio.create_task(_hold(using, name)) for _ in range(5)]
    await aeventually(lambda: waiting_for(backend, name) == 5)

    for task in tasks:
        await _ends(task)

    await asyncio.to_thread(holder.leaves)
    await _becomes_free(other)


@pytest.mark.parametrize("hangs", ["hang", "hang_replies"])
async def test_a_task_cancelled_while_its_request_is_under_way_leaves_nothing(
    faulty: Faulty, using: str, name: str, rival: Rivals, hangs: str
) -> None:
    other = rival()
    hung = getattr(faulty, hangs)("try_acquire")
    task = asyncio.create_task(_hold(using, name))
    await aeventually(lambda: faulty.calls["try_acquire"])

    await _ends(task)
    faulty.heal()

    hung.set()
    await _goes_on(faulty, "try_acquire", "atry_acquire")
    await _becomes_free(other)


async def test_a_task_cancelled_while_it_takes_its_place_in_the_queue_leaves_nothing(
    faulty: Faulty, using: str, name: str, rival: Rivals, holder: Rival
) -> None:
    other = rival()
    hung = faulty.hang("enqueue")
    task = asyncio.create_task(_hold(using, name))
    # A backend without a queue has tried twice by then.
    await aeventually(
        lambda: faulty.calls["enqueue"] or faulty.calls["wait_for"] or total(faulty.calls) > 5
    )

    await _ends(task)
    hung.set()
    await _goes_on(faulty, "enqueue", "aenqueue", "asleep")

    await asyncio.to_thread(holder.leaves)
    await _becomes_free(other)


async def test_a_task_cancelled_while_it_releases_has_released(
    faulty: Faulty, using: str, name: str, rival: Rivals
) -> None:
    other, taken = rival(), list[Lease]()

    async def hold() -> None:
        async with lock(name, using=using) as lease:
            taken.append(lease)

    hung = faulty.hang("release")
    task = asyncio.create_task(hold())
    await aeventually(lambda: faulty.calls["release"])

    await _ends(task)
    await asyncio.to_thread(registry._look)
    hung.set()

    await aeventually(lambda: taken[0].state is State.RELEASED)
    await _becomes_free(other)


@needs("typical")
@pytest.mark.parametrize("of", [lock, lock_all])
async def test_a_release_cancelled_before_it_begins_can_be_called_again(
    using: str, name: str, rival: Rivals, of: Callable[..., Lock | LockSet]
) -> None:
    recipe = of(name, using=using)
    await recipe.aacquire()

    await _ends(asyncio.create_task(recipe.arelease()))

    assert not await asyncio.to_thread(rival().tries)
    await recipe.arelease()
    await _becomes_free(rival())


@needs("typical")
async def test_a_release_that_fails_after_its_task_was_cancelled_is_a_warning(
    faulty: Faulty, using: str, name: str, rival: Rivals, caplog: pytest.LogCaptureFixture
) -> None:
    errors = list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    other, hung = rival(), faulty.hang("release")
    lease = await lock(name, using=using).aacquire(timeout=0)
    assert lease is not None
    task = asyncio.create_task(lease.arelease())
    await aeventually(lambda: faulty.calls["release"])
    await _ends(task)

    faulty.lose_replies("release", times=2)
    hung.set()

    await aeventually(lambda: "the test loses this reply" in caplog.text)
    gc.collect()
    assert f"Leaving lock {name}" in caplog.text
    assert not errors  # as a task whose exception nobody has retrieved
    await _becomes_free(other)


@needs("typical")
def test_a_loop_that_ends_in_the_middle_of_everything_leaves_nothing(
    using: str, name: str, rival: Rivals
) -> None:
    names = [f"{name}:{number}" for number in range(10)]
    tasks = []

    async def main() -> None:
        for each in names:
            tasks.append(asyncio.create_task(_hold(using, each)))
            await asyncio.sleep(0.001)

    asyncio.run(main())

    for each in names:
        rival(of=each).takes(within=SOON)


def test_a_release_that_fails_is_tried_until_it_works(
    faulty: Faulty, using: str, name: str, rival: Rivals
) -> None:
    other = rival()
    faulty.fail("release", times=3)
    lease = taken(name, using=using)

    with pytest.raises(LockError):
        lease.release()

    assert not lease.held
    other.takes(within=5)
    faulty.heal()  # who gives it back in another way has left some faults
