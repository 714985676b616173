"""Readers together, writers alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator

import pytest

from django_distlock import Lease, Lock, LockDeadlock, current_lease, lock, lock_all
from django_distlock.lock_set import LockSet
from tests.fixtures.eventually import eventually

from .crew import can_take, elsewhere, start, together
from .profiles import needs
from .rivals import Rivals

pytestmark = needs("shared")


def test_readers_hold_it_at_once(using: str, name: str) -> None:
    all_inside = threading.Barrier(4)

    def read() -> bool:
        with lock(name, using=using, shared=True) as lease:
            all_inside.wait(10)
            return lease.shared

    assert together(read, read, read, read) == [True] * 4


def test_a_writer_excludes_readers_and_writers(using: str, name: str, rival: Rivals) -> None:
    writer, reader = rival(), rival(shared=True)

    with lock(name, using=using):
        assert not writer.tries()
        assert not reader.tries()


def test_it_is_free_for_a_writer_once_the_last_reader_has_left(
    using: str, name: str, rival: Rivals
) -> None:
    writer, first, second = rival(), rival(shared=True), rival(shared=True)
    first.takes()
    second.takes()

    first.leaves()
    assert not writer.tries()
    second.leaves()
    assert writer.tries()


@needs("spares_writers")
def test_a_waiting_writer_is_not_starved_by_readers(using: str, name: str, rival: Rivals) -> None:
    reader = rival(shared=True)
    reader.takes()
    written = threading.Event()

    def write() -> None:
        with lock(name, using=using, timeout=20):
            written.set()

    writing = start(write)
    # From when on the writer waits, new readers stand behind it.
    eventually(lambda: not _reads(using, name))
    reader.leaves()

    writing.result(10)
    assert written.is_set()
    assert eventually(lambda: _reads(using, name))


def _reads(using: str, name: str) -> bool:
    return elsewhere(lambda: can_take(using, name, shared=True))


def test_a_reader_that_would_write_is_told_of_the_deadlock(using: str, name: str) -> None:
    with lock(name, using=using, shared=True) as lease:
        with pytest.raises(LockDeadlock), lock(name, using=using):
            pytest.fail("waits for itself")
        lease.check()


def test_a_writer_may_read_and_a_reader_may_read_again(using: str, name: str) -> None:
    with lock(name, using=using) as outer, lock(name, using=using, shared=True) as inner:
        assert inner is outer
    with (
        lock(name, using=using, shared=True) as outer,
        lock(name, using=using, shared=True) as inner,
    ):
        assert inner is outer


def test_a_retried_shared_acquire_counts_once(rival: Rivals) -> None:
    writer, reader = rival(), rival(shared=True)
    reader.takes()
    reader.takes()

    reader.leaves()

    assert writer.tries()


@pytest.mark.parametrize("closer_reads", [False, True])
@pytest.mark.parametrize("of", [lock, lock_all])
@needs("typical")
def test_a_generator_closed_by_another_thread_releases_its_own_lease_only(
    using: str, name: str, of: Callable[..., Lock | LockSet], closer_reads: bool
) -> None:
    recipe = of(name, using=using, shared=True)

    def read() -> Generator[Lease]:
        with recipe as leases:
            yield leases if isinstance(leases, Lease) else leases[0]

    generator, other = read(), read()
    lease, innocent = elsewhere(lambda: next(generator)), elsewhere(lambda: next(other))

    if closer_reads:
        with recipe:
            generator.close()
            assert not lease.held
            assert innocent.held
            assert current_lease(name)
    else:
        generator.close()
    assert not lease.held
    assert innocent.held
    other.close()
    assert not innocent.held
    assert not lock(name, using=using).locked()


@needs("typical")
async def test_an_asynchronous_generator_closed_by_another_task_releases_its_own_lease_only(
    using: str, name: str
) -> None:
    recipe = lock(name, using=using, shared=True)

    async def read() -> AsyncGenerator[Lease]:
        async with recipe as lease:
            yield lease

    generator, other = read(), read()
    lease = await asyncio.create_task(anext(generator))
    innocent = await asyncio.create_task(anext(other))

    await generator.aclose()

    assert not lease.held
    assert innocent.held
    await other.aclose()
    assert not innocent.held
