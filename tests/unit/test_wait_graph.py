"""Who waits for whom in one process: what a caller holds itself, in a transaction or as a lease."""

from __future__ import annotations

import pytest

from django_distlock import LockDeadlock
from django_distlock.engine.deadlocks import HeldBy, LockId, Waiter, WaitGraph, wait_graph
from django_distlock.engine.waiting import Wait
from django_distlock.ground.caller import Caller


@pytest.mark.parametrize("held_in", [None, "one connection", "another"])
@pytest.mark.parametrize("wanted_in", [None, "one connection"])
def test_what_ones_own_transaction_holds_is_waited_for_in_vain(
    held_in: str | None, wanted_in: str | None
) -> None:
    graph, me, lock = WaitGraph(), Caller(), LockId("server", "a")
    held = HeldBy(me, shared=False, transaction=held_in)
    graph.other_holders.append(lambda: iter([(lock, held)]))
    come = {"shared": False, "wait": Wait(60), "came": wait_graph.arrive()}
    waiter = Waiter("a", lock, me, **come, transaction=wanted_in)  # type: ignore[arg-type]  # of several types

    if held_in == wanted_in:
        graph.begin(waiter)
    else:
        with pytest.raises(LockDeadlock, match="would wait for itself"):
            graph.begin(waiter)
