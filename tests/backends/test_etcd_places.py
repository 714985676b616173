"""The line for places with a limit: its first waiter stands in the lines of the places, and asks nothing for one."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import Lease, lock
from django_distlock.backends.etcd.gateway import Reply
from django_distlock.backends.queue.places import turn_of
from django_distlock.engine.values import Grant, Request
from django_distlock.exceptions import LockOutcomeUnknown
from django_distlock.ground.holder import Holder
from tests.fixtures.eventually import eventually, never
from tests.fixtures.interruption import StopAt, TimeLimit

from .etcd_tools import aliases, backend, encoded, entries, expire, keys, noted
from .queue_tools import Counter, rival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_django.fixtures import Settings

    from tests.fixtures.etcd import Cluster
    from tests.fixtures.processes import Child

    Lines = Callable[[], list[str]]
    Unsure = Callable[[bool], AbstractContextManager[list[Any]]]

pytestmark = pytest.mark.usefixtures("etcd_aliases")
LIMIT = 3


@pytest.fixture
def lines(etcd: Cluster, namespace: str) -> Lines:
    """Returns the lines of all holders and waiters: those of places by number, and "", which is for any of them."""

    def seen() -> list[str]:
        folders = [path.rpartition("/")[0] for path in keys(etcd.running[0], f"{namespace}/x")]
        return sorted(folder.rpartition("~")[2] for folder in folders)

    return seen


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The transactions of all sessions, as they are sent."""
    return noted(monkeypatch, "/v3/kv/txn")


@pytest.fixture
def taken() -> list[Lease]:
    """The leases on all places."""
    return _taken(LIMIT)


@pytest.fixture
def waiter() -> Request:
    """A waiter for any place; see _stands()."""
    return _waiter(LIMIT)


def _taken(limit: int) -> list[Lease]:
    found = [_one(limit).acquire() for _ in range(limit)]
    return [lease for lease in found if lease is not None]


def _one(limit: int = LIMIT, using: str = "elsewhere", timeout: float | None = 0.0) -> Any:
    return lock("x", using=using, limit=limit, timeout=timeout, reentrant=False)


def _waiter(limit: int) -> Request:
    return rival("x", holder=Holder.current("rival")).with_limit(limit)


def _stands(waiter: Request) -> Counter:
    """Have it stand in line until it waits for its bell."""
    bell = Counter()

    def is_watched() -> bool:
        turn = backend()._recipe.get(turn_of(waiter).owner)
        return turn is not None and turn.is_watched

    eventually(lambda: _tries(waiter) is None and is_watched() and backend()._is_told(waiter, bell))
    return bell


def _tries(waiter: Request) -> int | None:
    """Have it try; return the number of the place that it gets."""
    answer = backend().try_acquire(waiter, queued=True, left=None)
    return answer.place if isinstance(answer, Grant) else None


def test_the_first_in_line_is_told_its_place_and_asks_once_whether_that_is_so(
    sent: list[Any], taken: list[Lease], waiter: Request
) -> None:
    bell = _stands(waiter)
    freed = taken.pop()
    freed.release()
    eventually(lambda: bell.rung)
    asked = len(sent)

    place = _tries(waiter)

    assert place == freed.place
    assert len(sent) == asked + 1
    assert backend().extend([waiter.at(place or 0)]) == [True]


def test_who_has_a_place_leaves_the_lines_of_the_others(
    lines: Lines, taken: list[Lease], waiter: Request
) -> None:
    bell = _stands(waiter)
    assert lines() == sorted(["", *"012" * 2])
    taken[0].release()
    eventually(lambda: bell.rung)
    assert _tries(waiter) is not None

    backend().forget_bell(waiter)

    eventually(lambda: lines() == ["0", "1", "2"])
    taken[1].release()
    taken[2].release()
    assert all(_one().acquire() for _ in range(2))
    assert _one().acquire() is None


def test_who_gives_up_leaves_all_lines(lines: Lines, taken: list[Lease], waiter: Request) -> None:
    _stands(waiter)

    backend().abandon_later(waiter)

    eventually(lambda: lines() == ["0", "1", "2"])
    assert not entries()
    # Once the answer to the deletion has come.
    eventually(lambda: {folder[-1] for folder, _ in backend()._recipe._slots} <= {"0", "1", "2"})
    for lease in taken:
        lease.release()


def test_who_gives_up_when_a_place_has_come_free_leaves_it_to_others(
    taken: list[Lease], waiter: Request
) -> None:
    bell = _stands(waiter)
    taken[0].release()
    eventually(lambda: bell.rung)

    backend().abandon_later(waiter)

    with _one(timeout=20) as lease:
        assert lease.place == taken[0].place


def test_nobody_who_comes_later_takes_the_place_of_the_first_in_line(
    taken: list[Lease], waiter: Request
) -> None:
    bell = _stands(waiter)

    taken[0].release()

    assert _one().acquire() is None
    eventually(lambda: bell.rung)
    assert _tries(waiter) == taken[0].place


def test_the_second_in_line_is_served_after_the_first(taken: list[Lease]) -> None:
    first, second = _waiter(LIMIT), _waiter(LIMIT)
    bells = [_stands(first), _stands(second)]
    for lease, waiter, bell in zip(taken, (first, second), bells, strict=False):
        lease.release()
        eventually(lambda: bell.rung)  # noqa: B023
        eventually(lambda: _tries(waiter) is not None)  # noqa: B023
        backend().forget_bell(waiter)


def test_a_place_at_which_it_does_not_stand_is_taken_as_well(
    monkeypatch: pytest.MonkeyPatch, taken: list[Lease], waiter: Request
) -> None:
    monkeypatch.setattr("django_distlock.backends.etcd.recipe.CLAIMS", 1)
    bell = _stands(waiter)
    [turn] = entries()
    [claim] = turn.claims
    other = next(lease for lease in taken if lease.place != claim.request.place)

    other.release()

    eventually(lambda: bell.rung)
    assert _tries(waiter) == other.place


def test_a_limit_of_a_thousand(etcd: Cluster, namespace: str) -> None:
    waiter, value = _waiter(1000), json.dumps({"owner": "somebody"})
    folder = backend()._recipe.folder(waiter.key)
    for place in range(1000):
        key = encoded(f"{folder}{place}/w-1-0")
        etcd.running[0].asks("/v3/kv/put", key=key, value=encoded(f"{value} {place}"))
    bell = _stands(waiter)

    etcd.running[0].asks("/v3/kv/deleterange", key=encoded(f"{folder}77/w-1-0"))

    eventually(lambda: bell.rung)
    assert _tries(waiter) == 77


def test_a_single_try_is_not_refused_by_who_is_leaving_the_other_lines(
    monkeypatch: pytest.MonkeyPatch, sent: list[Any], taken: list[Lease], waiter: Request
) -> None:
    bell, looked, bury = _stands(waiter), threading.Event(), backend()._recipe._bury
    monkeypatch.setattr(backend()._recipe, "_bury", lambda *size: looked.wait(20) and bury(*size))
    for lease in taken[:2]:
        lease.release()
    eventually(lambda: bell.rung)
    place = _tries(waiter)
    backend().forget_bell(waiter)
    sent.clear()

    with ThreadPoolExecutor() as pool:
        trying = pool.submit(_one().acquire)
        eventually(lambda: len(sent) > 2)  # it has tried, and looked twice
        looked.set()
        lease = trying.result(20)

    assert lease
    assert {lease.place, place} == {each.place for each in taken[:2]}


def test_a_waiter_whose_session_was_revoked_stands_in_all_lines_again(
    etcd: Cluster, lines: Lines, sent: list[Any], taken: list[Lease]
) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(_one(using="locks", timeout=20).acquire)
        eventually(lambda: entries() and entries()[0].is_watched)
        [turn] = entries()
        before = turn.lease_id
        sent.clear()
        expire(etcd)
        eventually(lambda: turn.lease_id != before and turn.is_watched)
        assert lines() == sorted(["", *"012" * 2])
        # It does not ask again and again by a session that is over.
        assert len(sent) < 10

        taken[1].release()

        lease = waiting.result(20)
        assert lease
        assert lease.place == taken[1].place
        lease.release()


def test_a_first_waiter_whose_session_was_revoked_waits_behind_the_next_one(
    etcd: Cluster, taken: list[Lease]
) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(_one(using="locks", timeout=20).acquire)
        eventually(lambda: entries() and entries()[0].is_watched)
        second = pool.submit(_one(timeout=20).acquire)
        eventually(lambda: [entry for entry in entries("elsewhere") if entry.is_in_line])
        expire(etcd)

        # It asks nothing until it is the first again, and its keys in the other lines are forgotten.
        eventually(lambda: entries()[0].is_watched and not entries()[0].claims)
        eventually(lambda: len(backend()._recipe._slots) == 1)
        for freed, waiting in zip(taken, (second, first), strict=False):
            freed.release()
            lease = waiting.result(20)
            assert lease
            assert lease.place == freed.place


@pytest.mark.parametrize("which", ["its turn", "a place"])
def test_a_waiter_whose_key_was_deleted_is_served_all_the_same(
    etcd: Cluster, namespace: str, taken: list[Lease], which: str
) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(_one(using="locks", timeout=20).acquire)
        eventually(lambda: entries() and entries()[0].is_watched)
        [turn] = entries()
        [*claims] = turn.claims
        doomed = turn if which == "its turn" else claims[0]
        place = claims[0].request.place
        etcd.running[0].asks("/v3/kv/deleterange", key=encoded(doomed.key))
        eventually(lambda: turn.is_watched)

        next(lease for lease in taken if lease.place == place).release()

        lease = waiting.result(20)
        assert lease
        assert lease.place == place
        lease.release()


def test_a_waiter_whose_event_loop_is_gone_keeps_no_place(lines: Lines, taken: list[Lease]) -> None:
    loop = asyncio.new_event_loop()
    waiting_for_ever = _one(using="locks", timeout=None).aacquire()
    ghost = loop.create_task(waiting_for_ever)
    while not any(entry.bell and entry.is_watched for entry in entries()):
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()

    for lease in taken:
        lease.release()

    try:
        eventually(lambda: lines() == [])
    finally:
        # Who looks after the garbage would be told of a task that is not done.
        ghost._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own switch
        waiting_for_ever.close()


def test_a_waiter_whose_event_loop_ends_while_a_thread_asks_for_it_makes_no_key(
    etcd: Cluster, lines: Lines, taken: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.new_event_loop()
    waiting_for_ever = _one(using="locks", timeout=None).aacquire()
    ghost = loop.create_task(waiting_for_ever)
    while not any(entry.bell and entry.is_watched for entry in entries()):
        loop.run_until_complete(asyncio.sleep(0.01))
    [turn] = entries()
    join, asks, goes_on = backend()._recipe._join, threading.Event(), threading.Event()
    has_asked = threading.Event()

    def join_late(*terms: Any) -> Reply:
        asks.set()
        goes_on.wait(20)
        try:
            return join(*terms)
        finally:
            has_asked.set()

    monkeypatch.setattr(backend()._recipe, "_join", join_late)
    etcd.running[0].asks("/v3/kv/deleterange", key=encoded(turn.key))  # so that it looks again
    while not asks.is_set():
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    try:
        for lease in taken:
            lease.release()
        eventually(lambda: not entries() and lines() == [])

        goes_on.set()

        assert has_asked.wait(20)
        assert lines() == []
    finally:
        # Who looks after the garbage would be told of a task that is not done.
        ghost._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own switch
        waiting_for_ever.close()


def test_a_waiter_asks_with_pauses_while_etcd_refuses_to_write(
    etcd: Cluster, sent: list[Any], taken: list[Lease]
) -> None:
    member = etcd.running[0]
    alarm = {"memberID": member.status["header"]["member_id"], "alarm": "NOSPACE"}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(_one(using="locks", timeout=20).acquire)
        eventually(lambda: entries() and entries()[0].is_watched)
        member.asks("/v3/maintenance/alarm", action="ACTIVATE", **alarm)
        try:
            sent.clear()
            backend()._recipe.watcher._wake_all()  # so that it looks again
            eventually(lambda: sent)
            never(lambda: len(sent) > 2, 0.5)
        finally:
            member.asks("/v3/maintenance/alarm", action="DEACTIVATE", **alarm)
        taken[0].release()
        assert waiting.result(20)


def test_the_first_waiter_of_a_process_stands_in_the_lines_of_the_places_at_once(
    lines: Lines, taken: list[Lease]
) -> None:
    with ThreadPoolExecutor() as pool:
        # Less than the second after which it would look again.
        waiting = pool.submit(_one(using="locks", timeout=0.8).acquire)
        eventually(lambda: lines() == sorted(["", *"012" * 2]) or waiting.done())

        taken[0].release()

        lease = waiting.result(20)
        assert lease
        assert lease.place == taken[0].place


@pytest.mark.parametrize("answers", [True, False])
def test_a_request_that_arrives_after_the_waiter_gave_up_makes_no_key(
    unsure: Unsure, etcd: Cluster, lines: Lines, taken: list[Lease], *, answers: bool
) -> None:
    waiter = _waiter(LIMIT)
    _tries(waiter)  # it stands in line; the next time it looks who has the places
    with unsure(answers) as late:
        _tries(waiter)
    backend().abandon_later(waiter)
    eventually(lambda: lines() == ["0", "1", "2"])

    for path, body in late:
        etcd.running[0].asks(path, **body)

    assert late
    assert lines() == ["0", "1", "2"]
    assert not any(lease.lost for lease in taken)


@pytest.fixture
def unsure(sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> Unsure:
    """In the block, requests are sent twice, and perhaps answered; gives them."""

    @contextmanager
    def block(answers: bool) -> Iterator[list[Any]]:
        ask, late = backend()._recipe._ask, []

        def ask_twice(*acts: Any, **more: Any) -> Reply:
            before = len(sent)
            reply = ask(*acts, **more)._replace(is_sure=False)
            late.extend(sent[before:])
            if not answers:
                raise LockOutcomeUnknown("locks", "no answer")
            return reply

        with monkeypatch.context() as patch:
            patch.setattr(backend()._recipe, "_ask", ask_twice)
            yield late

    return block


@pytest.mark.parametrize("freed", [False, True])
def test_an_exception_at_any_step_leaves_no_key(
    lines: Lines,
    taken: list[Lease],
    monkeypatch: pytest.MonkeyPatch,
    *,
    freed: bool,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", id)  # one may hit a generator that is closed
    number, is_over = 0, False
    while not is_over:
        number += 1
        waiter = _waiter(LIMIT)
        if freed:
            bell = _stands(waiter)
            taken.pop(0).release()
            eventually(lambda: bell.rung)  # noqa: B023
        else:
            _tries(waiter)  # it stands in line; the next time it looks who has the places
        with suppress(TimeLimit), StopAt(number) as stop:
            _tries(waiter)
        is_over = stop.calls < number

        backend().abandon(waiter)
        backend().abandon(waiter.at(0))

        if freed:
            taken.append(_one(timeout=20).acquire())
        eventually(lambda: lines() == ["0", "1", "2"])
    assert number > 20


def test_the_places_that_a_dead_first_waiter_stood_at_come_free(
    spawn: Callable[..., Child],
    settings: Settings,
    etcd: Cluster,
    namespace: str,
    lines: Lines,
) -> None:
    settings.DISTLOCK = aliases(etcd, namespace, session_timeout=4.0)
    taken = _taken(LIMIT)
    terms = {"using": "locks", "name": "x", "limit": LIMIT, "timeout": None}
    waiting = spawn("tests.contract.acts:hold", aliases=settings.DISTLOCK, **terms)
    eventually(lambda: lines() == sorted(["", *"012" * 2]), 20)
    waiting.stop()
    taken[0].release()
    never(lambda: _one().acquire(), 0.3)

    waiting.kill()

    with _one(timeout=20) as lease:
        assert lease.place == taken[0].place
