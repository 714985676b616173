"""Who waits for whom in one process, and who stands before whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from django_distlock import LockDeadlock
from django_distlock.engine.deadlocks import HeldBy, LockId, Waiter, WaitGraph, wait_graph
from django_distlock.engine.waiting import Wait
from django_distlock.ground.caller import Caller

A, B = LockId("server", "a"), LockId("server", "b")
_T = TypeVar("_T")


def elsewhere(make: Callable[[], _T]) -> _T:
    """Return what *make* returns in another thread."""
    made: list[_T] = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    return made[0]


class World:
    """A wait graph with holders that are told, not registered."""

    def __init__(self) -> None:
        self.graph = WaitGraph()
        self.holding: list[tuple[LockId, HeldBy]] = []
        self.graph.other_holders.append(lambda: iter(self.holding))
        self.me, self.other = Caller(), elsewhere(Caller)

    def waiter(self, lock: LockId, caller: Caller, **wishes: Any) -> Waiter:
        wishes = {"shared": False, "wait": Wait(60), "came": wait_graph.arrive(), **wishes}
        return Waiter(lock.key, lock, caller, **wishes)

    def hold(self, lock: LockId, caller: Caller, *, shared: bool = False) -> None:
        self.holding.append((lock, HeldBy(caller, shared)))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    assert not world.graph._waiting


def test_who_closes_a_circle_is_told_and_waits_no_more(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.hold(A, world.me)
    world.hold(B, world.other)
    first, second = world.waiter(A, world.other), world.waiter(B, world.me)
    world.graph.begin(first)

    with pytest.raises(LockDeadlock, match=r"'b' would never end: others wait") as raised:
        world.graph.begin(second)

    assert raised.value.name == "b"
    assert [*world.graph._waiting.values()] == [first]
    [record] = caplog.records
    assert record.getMessage() == "Lock b: deadlock"
    assert vars(record)["distlock_name"] == "b"
    world.graph.end(second)
    assert [*world.graph._waiting.values()] == [first]
    world.graph.end(first)


@pytest.mark.parametrize("held_in", [None, "one connection", "another"])
@pytest.mark.parametrize("wanted_in", [None, "one connection"])
def test_what_ones_own_transaction_holds_is_waited_for_in_vain(
    world: World, held_in: str | None, wanted_in: str | None
) -> None:
    world.holding.append((A, HeldBy(world.me, shared=False, transaction=held_in)))
    waiter = world.waiter(A, world.me, transaction=wanted_in)

    if held_in != wanted_in:
        with pytest.raises(LockDeadlock, match="would wait for itself"):
            world.graph.begin(waiter)
    else:
        world.graph.begin(waiter)
    world.graph.end(waiter)


def test_a_reader_waits_for_a_writer_that_the_server_lets_no_later_reader_pass(
    world: World,
) -> None:
    early = world.waiter(A, world.me, shared=True)
    writer = world.waiter(A, world.other)
    elsewhere_waiter = world.waiter(B, world.other)
    late = world.waiter(A, world.me, shared=True)
    writer.stand_before_readers()
    after = world.waiter(A, world.me, shared=True)
    first_number = writer.ahead_since
    writer.stand_before_readers()
    assert writer.ahead_since == first_number
    early.stand_before_readers()
    assert early.ahead_since is None
    world.hold(A, world.me, shared=True)
    world.graph.begin(writer)

    for reader in (early, late):
        world.graph.begin(reader)
        world.graph.end(reader)

    assert elsewhere_waiter.ahead_since is None
    with pytest.raises(LockDeadlock):
        world.graph.begin(after)
    world.graph.end(writer)
