"""What happens to locks is told by signals and logs, and who listens can break nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.dispatch import Signal

from django_distlock import (
    Lease,
    LockBackendError,
    LockLost,
    LockNotAcquired,
    distributed_lock,
    lock,
    locks,
)
from django_distlock.backends.base import BaseLockBackend
from django_distlock.ground import clock
from django_distlock.signals import (
    backend_failed,
    lock_acquired,
    lock_busy,
    lock_detached,
    lock_extended,
    lock_forced,
    lock_lost,
    lock_released,
)
from tests.fixtures.clocks import PutForward
from tests.fixtures.eventually import aeventually, eventually, never

from .crew import ataken, start, taken, waiting_for
from .faults import Faulty
from .profiles import Profile, needs
from .rivals import Rival, Rivals

pytestmark = needs("typical")

SIGNALS = {
    "acquired": lock_acquired,
    "busy": lock_busy,
    "released": lock_released,
    "lost": lock_lost,
    "extended": lock_extended,
    "detached": lock_detached,
    "forced": lock_forced,
}
Connect = Callable[[Signal, Callable[..., Any]], None]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connects receivers that are disconnected after the test."""
    connected: list[tuple[Signal, Callable[..., Any]]] = []

    def connect(signal: Signal, receiver: Callable[..., Any]) -> None:
        signal.connect(receiver)
        connected.append((signal, receiver))

    yield connect
    for signal, receiver in connected:
        signal.disconnect(receiver)


@pytest.fixture
def told(connect: Connect, name: str) -> list[tuple[str, dict[str, Any]]]:
    """What was told of the lock of the test, in order: the name of the signal and its facts."""
    heard: list[tuple[str, dict[str, Any]]] = []

    def listen_to(word: str, signal: Signal) -> None:
        def receive(sender: object, *, signal: Signal, **facts: Any) -> None:
            # What became of the locks of other tests may be told late.
            if facts["name"] == name:
                heard.append((word, {**facts, "sender": sender}))

        connect(signal, receive)

    for word, signal in SIGNALS.items():
        listen_to(word, signal)
    return heard


Told = list[tuple[str, dict[str, Any]]]


def test_a_holding_is_told_from_its_begin_to_its_end(
    using: str, name: str, told: Told, backend: BaseLockBackend
) -> None:
    with lock(name, using=using, renew=False) as lease, lock(name, using=using):
        lease.extend()

    facts = {"sender": type(backend), "name": name, "using": using, "template": "", "lease": lease}
    acquired, extended, released = (facts for _, facts in told)
    assert [word for word, _ in told] == ["acquired", "extended", "released"]
    assert 0 <= acquired.pop("waited") < 20
    assert acquired.pop("requests") >= 1
    assert acquired.pop("waited_for") is None
    assert 0 <= released.pop("took") < 20
    assert 0 < released.pop("held") < 20
    assert acquired == extended == released == facts


def test_a_receiver_enters_the_lock_that_it_is_told_of(
    connect: Connect, using: str, name: str
) -> None:
    entered = list[object]()

    def receive(sender: object, *, lease: Lease, **_: Any) -> None:
        if lease.name == name:
            with lock(name, using=using, timeout=0) as inner:
                entered.append(inner)

    connect(lock_acquired, receive)

    with lock(name, using=using) as outer:
        assert entered == [outer]


def test_who_gave_up_is_told_of_the_holder(
    name: str, told: Told, rival: Rivals, backend: BaseLockBackend, profile: Profile
) -> None:
    using, holder = backend.alias, rival()
    holder.takes()

    assert lock(name, using=using, timeout=0).acquire() is None
    with pytest.raises(LockNotAcquired), lock(name, using=using, timeout=0):
        pass

    [(word, facts), (again, _)] = told
    assert word == again == "busy"
    assert facts.keys() == {
        "sender",
        "name",
        "using",
        "template",
        "waited",
        "requests",
        "holder",
        "remaining",
        "reserved_until",
    }
    assert facts["reserved_until"] is None
    assert (facts["sender"], facts["name"], facts["using"]) == (type(backend), name, using)
    assert facts["holder"] == (holder.request.holder if profile.names_holder else None)
    assert (facts["remaining"] is not None) is profile.tells_end
    # A server's clock may be coarse, and its arithmetic too.
    assert 0 < (facts["remaining"] or 1) < holder.request.ttl + 0.01


@needs("min_hold")
def test_who_is_refused_by_min_hold_is_told_until_when(using: str, name: str, told: Told) -> None:
    with lock(name, using=using, min_hold=100):
        pass
    told.clear()

    assert lock(name, using=using, timeout=0).acquire() is None

    [(word, facts)] = told
    assert (word, facts["holder"]) == ("busy", None)
    assert 90 < (facts["reserved_until"] - datetime.now(UTC)).total_seconds() < 100.1


@needs("leased")
def test_a_loss_is_told_once_with_its_reason(
    using: str, name: str, told: Told, tick: float
) -> None:
    lease = taken(name, using=using, ttl=2 * tick, renew=False)
    eventually(lambda: len(told) > 1)
    with pytest.raises(LockLost):
        lease.release()

    [_, (word, facts)] = told
    assert word == "lost"
    assert facts["lease"] is lease
    assert facts["reason"] == lease.reason
    assert facts["held"] > 0


@needs("listing")
def test_a_forced_release_is_told_with_whose_it_was_and_logged(
    using: str,
    told: Told,
    backend: BaseLockBackend,
    holder: Rival,
    caplog: pytest.LogCaptureFixture,
) -> None:
    [record] = [held for held in backend.held() if held.key == holder.request.key]

    assert backend.force_release(record.key, record.owner_digest)

    [(word, facts)] = told
    assert word == "forced"
    name = holder.request.name
    assert (facts["sender"], facts["name"], facts["using"]) == (type(backend), name, using)
    assert facts["holder"] == holder.request.holder
    assert [r.levelname for r in caplog.records if name in r.getMessage()] == ["WARNING"]


@needs("detach")
def test_a_lease_that_is_handed_on_is_told_with_how_long_it_was_held(
    using: str, name: str, told: Told
) -> None:
    lease = taken(name, using=using, renew=False)
    text = lease.detach()

    assert [word for word, _ in told] == ["acquired", "extended", "detached"]
    assert told[-1][1]["lease"] is lease
    assert 0 < told[-1][1]["held"] < 20
    Lease.attach(text).release()


def test_a_waiter_is_told_how_long_it_waited_and_for_whom(
    using: str, name: str, told: Told, holder: Rival, profile: Profile
) -> None:
    def leave() -> float:
        eventually(lambda: waiting_for(locks[using], name))
        since = time.monotonic()
        never(lambda: told, 3 * profile.tick)
        waited = time.monotonic() - since
        holder.leaves()
        return waited

    leaving = start(leave)
    with lock(name, using=using, timeout=30):
        pass

    [facts] = [facts for word, facts in told if word == "acquired"]
    assert leaving.result(20) < facts["waited"] < 30
    assert facts["requests"] > 1
    assert facts["waited_for"] == (holder.request.holder if profile.names_holder else None)


def test_the_name_of_a_decorated_function_is_told_with_what_it_is_made_of(
    using: str, name: str, told: Told
) -> None:
    template = f"{name[:-1]}{{last}}"

    @distributed_lock(template, using=using)
    def work(last: str) -> None: ...

    work(name[-1])

    assert [facts["template"] for _, facts in told] == [template] * 2


def test_an_error_of_the_server_is_told_and_logged_with_fields_and_not_as_busy(
    name: str, connect: Connect, told: Told, faulty: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[dict[str, Any]] = []
    connect(backend_failed, lambda **facts: heard.append(facts))

    faulty.fail("try_acquire")
    with pytest.raises(LockBackendError) as failed:
        lock(name, using=faulty.alias, timeout=0).acquire()

    [facts] = heard
    assert facts["error"] is failed.value
    assert 0 <= facts["waited"] < 30
    assert facts["requests"] >= 1
    assert (facts["name"], facts["using"]) == (name, faulty.alias)
    assert not told
    [record] = [record for record in caplog.records if name in record.getMessage()]
    assert record.levelname == "ERROR"
    assert (record.distlock_name, record.distlock_using) == (name, faulty.alias)  # type: ignore[attr-defined]


def test_outcomes_are_logged_once_with_fields_that_json_can_have(
    using: str, name: str, rival: Rivals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "django_distlock")
    with lock(name, using=using):
        pass
    rival().takes()
    with pytest.raises(LockNotAcquired), lock(name, using=using, timeout=0):
        pass

    # What became of the locks of other tests may be logged late.
    named = [record for record in caplog.records if name in record.getMessage()]
    records = [record for record in named if hasattr(record, "distlock_name")]
    assert [record.levelname for record in records] == ["DEBUG", "INFO"]
    for record in records:
        fields = {key: each for key, each in vars(record).items() if key.startswith("distlock_")}
        assert json.loads(json.dumps(fields)) == fields
        assert (fields["distlock_name"], fields["distlock_using"]) == (name, using)


def _fail(**facts: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("word", ["acquired", "busy", "extended", "released"])
def test_a_receiver_that_fails_breaks_nothing(
    using: str, name: str, connect: Connect, rival: Rivals, word: str
) -> None:
    holder = rival()
    connect(SIGNALS[word], _fail)

    with lock(name, using=using) as lease:
        lease.extend()
        lease.check()
    assert not lease.held
    holder.takes()
    assert lock(name, using=using, timeout=0).acquire() is None
    holder.leaves()
    with lock(name, using=using, timeout=20) as lease:
        assert lease.held


@needs("leased")
def test_no_body_begins_on_a_lease_that_outlived_a_slow_receiver_no_more(
    using: str, name: str, connect: Connect, put_forward: PutForward
) -> None:
    ends = iter(range(150, 1500, 150))
    connect(lock_acquired, lambda **facts: put_forward(next(ends)))
    mine = lock(name, using=using, ttl=100, renew=False)

    with pytest.raises(LockLost), mine:
        pytest.fail("the lease has ended")
    with pytest.raises(LockLost):
        mine(lambda: pytest.fail("the lease has ended"))()
    with pytest.raises(LockLost):
        mine.acquire()

    eventually(lambda: not mine.locked())


@needs("leased")
async def test_an_asynchronous_receiver_hides_no_loss(
    using: str, name: str, connect: Connect, tick: float
) -> None:
    heard = asyncio.Event()

    async def receive(**facts: Any) -> None:
        heard.set()

    connect(lock_lost, receive)
    lease = await ataken(name, using=using, ttl=2 * tick, renew=False)
    while lease.deadline > clock.lease_time():
        pass  # the thread that looks after leases must not be the first to see it

    with pytest.raises(LockLost):
        lease.check()


async def test_a_task_cancelled_while_receivers_are_told_leaves_nothing(
    using: str, name: str, connect: Connect, rival: Rivals
) -> None:
    over, other = threading.Event(), rival()

    async def receive(**facts: Any) -> None:
        await aeventually(over.is_set, 30)  # in the event loop of another thread

    connect(lock_acquired, receive)
    lease: Lease | None = None

    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                lease = await lock(name, using=using, timeout=5).aacquire()
    finally:
        over.set()

    if lease:
        await lease.arelease()
    await asyncio.to_thread(other.takes, 15)  # long before the ttl


async def test_a_slow_receiver_does_not_make_a_task_wait_for_a_view_that_waits_for_it(
    using: str, name: str, connect: Connect
) -> None:
    """Django runs synchronous views in one thread, in which receivers of tasks must not stand in line."""
    connect(lock_acquired, lambda **facts: None)
    view_waits = threading.Event()

    def view() -> bool:
        view_waits.set()
        with lock(name, using=using, timeout=20) as lease:
            return lease.held

    async def work() -> None:
        async with lock(name, using=using, timeout=5):
            running.append(asyncio.create_task(sync_to_async(view)()))
            await aeventually(view_waits.is_set)
            # The view waits for us in that thread.
            async with lock(f"{name}:other", using=using, timeout=5):
                pass

    running: list[asyncio.Task[bool]] = []
    await asyncio.wait_for(work(), 10)

    assert await running[0]
