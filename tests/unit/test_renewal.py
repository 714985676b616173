"""The schedule of renewals: what is due when, and that it costs no more than it must."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from django_distlock import Lease, LockBackendError, lock, locks
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.conf import BackendSettings
from django_distlock.engine.registry import registry
from django_distlock.engine.values import Busy, Grant, Request
from django_distlock.exceptions import Contended
from django_distlock.ground import clock
from tests.fixtures.clocks import PutForward
from tests.fixtures.eventually import eventually


class Watched(LocMemBackend):
    """Notes when it is asked to extend what, and what it took."""

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.batches: list[tuple[float, list[str]]] = []

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        self.batches.append((clock.lease_time(), [request.name for request in requests]))
        return super().extend(requests)


class Late(Watched):
    """Grants as a server does whose answer took 50 seconds."""

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        answer = super().try_acquire(request, queued=queued, left=left)
        return (
            replace(answer, start=clock.lease_time() - 50) if isinstance(answer, Grant) else answer
        )


@pytest.fixture
def watched(memory: LocMemBackend) -> Watched:
    backend = Watched(BackendSettings("default"))
    locks.replace("default", backend)
    return backend


@pytest.mark.slow
def test_a_lease_is_renewed_at_a_third_of_its_ttl(watched: Watched) -> None:
    began = clock.lease_time()

    with lock("a", ttl=2.7) as lease:
        assert lease.due <= clock.lease_time() + 0.9
        eventually(lambda: len(watched.batches) >= 2)

    for number, (when, names) in enumerate(watched.batches[:2], 1):
        assert names == ["a"]
        # It may go a little early, along with others.
        assert when - began > number * 0.6


def test_a_lease_whose_grant_came_late_is_renewed_before_its_end(memory: LocMemBackend) -> None:
    backend = Late(BackendSettings("default"))
    locks.replace("default", backend)

    with lock("a", ttl=60) as lease:
        eventually(lambda: backend.batches)
        lease.check()


def test_a_lease_whose_renewal_was_answered_late_is_renewed_at_once(watched: Watched) -> None:
    with lock("a", ttl=600) as lease:
        began = clock.lease_time()

        registry._put_back([lease], began)
        assert began + 200 <= lease.due <= began + 201

        registry._put_back([lease], began - 500)
        assert lease.due <= clock.lease_time()


def test_a_lease_that_no_server_is_known_to_keep_endangers_no_other(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def server_of(request: Request) -> str:
        if request.name == "b":
            raise LockBackendError("default", "no node covers its slot")
        return "a server"

    monkeypatch.setattr(watched, "server_of", server_of)

    with lock("a", ttl=3) as lease, lock("b", ttl=3):
        eventually(lambda: {("a",), ("b",)} <= {tuple(names) for _, names in watched.batches})
        assert not lease.in_jeopardy


@pytest.mark.slow
def test_a_failed_renewal_is_tried_again_soon(watched: Watched) -> None:
    def refuse(requests: Sequence[Request]) -> Sequence[bool]:
        failed.append(clock.lease_time())
        raise OSError("no answer")

    failed: list[float] = []
    lease = lock("a", ttl=2.7).acquire()
    assert lease
    watched.extend = refuse  # type: ignore[method-assign]

    eventually(lambda: lease.lost)

    # Once at a third, then nine times in a ttl: about five more times. A third each would be two.
    assert len(failed) >= 3


@pytest.mark.parametrize(
    ("is_seen", "asked", "ttl"),
    [(True, 0, 60), (False, 9, 10)],
    ids=["the loss was seen", "that is over, too"],
)
def test_an_extension_that_is_told_late_prolongs_nothing_that_is_over(
    watched: Watched, put_forward: PutForward, is_seen: bool, asked: float, ttl: float
) -> None:
    lease = lock("a", ttl=10, renew=False).acquire()
    assert lease
    start = clock.lease_time()
    put_forward(30)
    assert not is_seen or lease.lost

    lease.confirm(start + asked, ttl)

    assert lease.lost
    assert lease.remaining == 0


def test_a_lease_is_not_due_while_it_is_being_granted(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: list[object] = []
    grant = Lease.grant

    def look_at_that_moment(*args: Any) -> bool:
        is_held = grant(*args)
        due.extend(registry._take_due().values())
        return is_held

    monkeypatch.setattr(Lease, "grant", look_at_that_moment)

    with lock("a", ttl=60):
        pass

    assert not due


class Moving(Watched):
    """Cannot extend the lock "moving": another server is about to get its keys."""

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        kept = super().extend(requests)
        if "moving" in self.batches[-1][1]:
            raise Contended("default", "its slot is being moved")
        return kept


def test_a_lock_that_cannot_be_renewed_keeps_no_other_from_being_renewed(
    memory: LocMemBackend, put_forward: PutForward
) -> None:
    backend = Moving(BackendSettings("default"))
    locks.replace("default", backend)
    with ExitStack() as stack:
        names = ["a", "moving", "b"]
        a, moving, b = (stack.enter_context(lock(name, ttl=60)) for name in names)
        before = a.deadline, b.deadline

        put_forward(30)
        eventually(lambda: a.deadline > before[0] and b.deadline > before[1])

        assert moving.in_jeopardy
        assert backend.batches[0][1] == names
