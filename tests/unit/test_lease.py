"""A lease by the clock: when it is held, in jeopardy, lost, and over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from django_distlock import Lease, LockBackendError, LockLost, LockNotHeld, NotSupported, lock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.engine.local_queue import LocalQueue
from django_distlock.engine.registry import registry
from django_distlock.engine.values import Release, Request, State
from django_distlock.ground import clock
from django_distlock.ground.clock import drift
from tests.fixtures.clocks import PutForward
from tests.fixtures.eventually import eventually
from tests.fixtures.interruption import TimeLimit


@pytest.mark.parametrize("text", [None, b"text", 5])
async def test_attach_takes_a_text(text: Any) -> None:
    with pytest.raises(TypeError, match="takes the text that detach"):
        Lease.attach(text)
    with pytest.raises(TypeError, match="takes the text that detach"):
        await Lease.aattach(text)


def _taken(name: str = "a", **terms: object) -> Lease:
    lease = lock(name, **{"ttl": 100, "renew": False, **terms}).acquire()  # type: ignore[arg-type]
    assert lease
    return lease


def test_it_is_lost_when_the_deadline_passes_not_before_and_for_good(
    memory: LocMemBackend, put_forward: PutForward
) -> None:
    lease = _taken(ttl=100)

    put_forward(90)
    lease.check()
    assert lease.held
    assert 0 < lease.remaining < 9

    put_forward(99)
    assert lease.lost
    assert not lease.held
    assert lease.remaining == 0
    put_forward(0)
    assert lease.lost
    assert lease.state is State.LOST
    with pytest.raises(LockLost, match="deadline passed"):
        lease.check()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_release_by_a_callback_of_the_loss_hides_no_loss_from_the_exit(
    memory: LocMemBackend, put_forward: PutForward, *, is_elsewhere: bool
) -> None:
    def release(reason: str) -> None:
        with suppress(LockNotHeld):
            lease.release()

    lease = _taken(ttl=100)
    lease.on_lost(release)
    put_forward(101)
    if is_elsewhere:  # as the thread that renews it does
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: lease.lost).result()

    with pytest.raises(LockLost, match="deadline passed"):
        lease.release()
    with pytest.raises(LockNotHeld):
        lease.release()


def test_one_that_the_exit_gives_back_during_its_release_was_not_lost(
    memory: LocMemBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, release = _taken(), memory.release

    def exit_meanwhile(request: Request) -> Release:
        monkeypatch.undo()
        registry.release_all()
        return release(request)

    monkeypatch.setattr(memory, "release", exit_meanwhile)

    lease.release()

    assert lease.state is State.RELEASED


def test_it_is_in_no_jeopardy_because_its_max_hold_ends(
    memory: LocMemBackend, put_forward: PutForward
) -> None:
    lease, calm = _taken(ttl=100, max_hold=150, renew=True), _taken("b", ttl=100, renew=False)
    lease.due = math.inf

    put_forward(80)
    assert lease.in_jeopardy
    assert not calm.in_jeopardy
    lease.extend()
    for seconds in (80, 110, 140):
        put_forward(seconds)
        assert not lease.in_jeopardy
    put_forward(150)
    assert lease.lost


def test_released_is_final_and_tells_nobody(memory: LocMemBackend, put_forward: PutForward) -> None:
    told: list[str] = []
    lease = _taken()
    lease.on_lost(told.append)
    lease.release()

    put_forward(1_000)
    lease.end(State.LOST, "too late")

    assert lease.state is State.RELEASED
    assert not told
    with pytest.raises(LockNotHeld) as caught:
        lease.check()
    assert not isinstance(caught.value, LockLost)


class StoppedLine(LocalQueue):
    """An exception from outside comes when the first one leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[str] = []

    def leave(self, key: str, place: Any) -> None:
        self.left.append(key)
        super().leave(key, place)
        if len(self.left) == 1:
            raise TimeLimit


def test_an_exception_from_outside_at_the_end_keeps_nothing_from_those_who_wait_for_it(
    memory: LocMemBackend,
) -> None:
    line = memory.queue = StoppedLine()
    lease = _taken()
    lease.in_line_as = lease.ref

    with pytest.raises(TimeLimit):
        lease.release()

    eventually(lambda: line.left == ["a", "a"], 5)
    with lock("a", timeout=0):
        pass


@pytest.mark.timeout(10)  # seconds, for a finalizer that would wait for its own thread
def test_a_finalizer_may_release_whatever_its_thread_holds(
    memory: LocMemBackend, put_forward: PutForward
) -> None:
    lease = _taken()
    put_forward(100)

    with lease._mutex, registry._mutex, memory.queue._mutex:
        lease.give_back_later()

    eventually(lambda: lease.lost, 5)


def test_extend_counts_from_before_the_request(
    memory: LocMemBackend, put_forward: PutForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = _taken(ttl=100)
    extend = memory.extend

    def extend_slowly(requests: Sequence[Request]) -> Sequence[bool]:
        put_forward(60)
        return extend(requests)

    monkeypatch.setattr(memory, "extend", extend_slowly)
    put_forward(50)

    began = clock.lease_time()
    lease.extend()

    assert began <= lease.deadline - 100 + drift(100) < began + 10
    assert lease.ttl == 100
    lease.release()


def test_a_ttl_that_the_server_did_not_take_is_not_kept(
    memory: LocMemBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(requests: Sequence[Request]) -> Sequence[bool]:
        raise LockBackendError("default", "it is down")

    lease = _taken(ttl=10)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "extend", refuse)
        with pytest.raises(LockBackendError):
            lease.extend(600)
        with pytest.raises(LockBackendError):
            lease.detach(600)

    assert lease.ttl == 10
    lease.extend()
    assert lease.remaining <= 10
    lease.release()


def test_max_hold_cuts_extensions_short(memory: LocMemBackend, put_forward: PutForward) -> None:
    lease = _taken(ttl=100, max_hold=150)
    put_forward(90)

    lease.extend(1_000)

    assert lease.remaining <= 60
    put_forward(151)
    with pytest.raises(LockLost):
        lease.extend()


@pytest.mark.parametrize("error", [LockNotHeld, LockLost])
async def test_once_released_or_expired_it_cannot_be_entered(
    memory: LocMemBackend, put_forward: PutForward, error: type[Exception]
) -> None:
    lease = _taken(ttl=100)
    if error is LockNotHeld:
        lease.release()
    else:
        put_forward(100)

    with pytest.raises(error), lease:
        pytest.fail("the body ran")
    with pytest.raises(error):
        async with lease:
            pytest.fail("the body ran")


def test_guard_needs_a_backend_in_that_database(
    memory: LocMemBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocMemBackend, "guard", BaseLockBackend.guard)  # what most backends have

    with _taken() as lease, pytest.raises(NotSupported, match="guard"):
        lease.guard()


@pytest.mark.parametrize("operation", ["guard", "claim", "save", "update"])
def test_what_it_protects_is_not_touched_once_it_is_lost(
    memory: LocMemBackend, put_forward: PutForward, operation: str
) -> None:
    lease = _taken(ttl=100)
    put_forward(100)

    with pytest.raises(LockLost):
        getattr(lease, operation)(*([] if operation == "guard" else [None]))
