"""Requests to an ensemble, and who is stopped before the replies come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss, NodeExistsError, NoNodeError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import Exists, GetData
from kazoo.protocol.states import KeeperState

from django_distlock.backends.zookeeper.ensemble import EnsembleSession, Exchange, _Client, _Handler
from django_distlock.backends.zookeeper.options import ZooKeeperOptions
from django_distlock.backends.zookeeper.tokens import Tokens
from django_distlock.engine.bells import ThreadBell
from django_distlock.ground import clock


def session() -> EnsembleSession:
    return EnsembleSession(
        ZooKeeperOptions(), began=lambda: None, suspended=lambda: None, lost=lambda _: None
    )


@pytest.mark.parametrize("has_begun", [False, True])
def test_whoever_is_stopped_before_the_wait_leaves_no_request_under_way(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    asked, jobs = list[str](), list[Callable[[], None]]()

    def ask() -> Any:
        asked.append("asked")
        return SequentialThreadingHandler().async_result()

    def stopped(self: EnsembleSession, job: Callable[[], None]) -> None:
        jobs.append(job)
        if has_begun:
            threading.Thread(target=job, daemon=True).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(EnsembleSession, "hand_over", stopped)
    with pytest.raises(KeyboardInterrupt):
        session().ask([ask], clock.wait_time() + 10)

    seen = list(asked)
    jobs[0]()  # a thread that begins late
    assert asked == seen
    assert has_begun or not asked


def test_whoever_is_stopped_waits_for_no_reply() -> None:
    unanswered, asked = SequentialThreadingHandler().async_result(), threading.Event()

    def ask() -> Any:
        asked.set()
        return unanswered

    exchange = Exchange([ask], ThreadBell().ring)
    threading.Thread(target=exchange.begin, daemon=True).start()
    assert asked.wait(10)

    exchange.give_up()  # and returns

    assert not unanswered.ready()


def test_the_second_of_two_first_holders_takes_the_offset_of_the_first_and_asks_once() -> None:
    known = session()
    known.id = 7
    tokens = Tokens("/distlock", known, lambda *_: pytest.fail("the root is there"))

    def offset() -> Any:
        return tokens.present(KazooClient())

    asking = offset()
    assert len(next(asking)) == 2
    written = SimpleNamespace(mtime=1, mzxid=5)
    assert len(asking.send([written, NoNodeError()])) == 1  # it writes its own
    assert len(asking.send([NodeExistsError()])) == 1  # and looks again
    with pytest.raises(StopIteration) as ended:
        asking.send([(b"40", None)])
    with pytest.raises(StopIteration) as again:
        next(offset())

    assert ended.value.value == again.value.value == (7, 0, 40)


def test_an_error_that_ends_the_thread_of_kazoo_is_a_lost_connection() -> None:
    result, bell = _Handler().async_result(), ThreadBell()
    exchange = Exchange([lambda: result], bell.ring)
    exchange.begin()

    result.set_exception(problem := RuntimeError("xids do not match, expected 11 received 12"))

    assert bell.wait(0)
    [outcome] = exchange.outcomes()
    assert isinstance(outcome, ConnectionLoss)
    assert outcome.__cause__ is problem


def test_looks_at_nodes_are_sent_first_in_each_session() -> None:
    client = _Client()
    requests = [GetData("/a", None), GetData("/b", None), Exists("/held", None)]

    for _ in range(2):
        for request in requests:
            client._queue.append((request, client.handler.async_result()))
        # The very first may be on its way.
        assert [request.path for request, _ in client._queue] == ["/a", "/held", "/b"]
        client._session_callback(KeeperState.EXPIRED_SESSION)
        client._session_callback(KeeperState.CONNECTING)
