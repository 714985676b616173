"""Requests to an ensemble, and who is stopped before the replies come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss
from kazoo.handlers.threading import SequentialThreadingHandler

from django_distlock.backends.zookeeper.ensemble import EnsembleSession, Exchange, _Handler
from django_distlock.backends.zookeeper.options import ZooKeeperOptions
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


def test_an_error_that_ends_the_thread_of_kazoo_is_a_lost_connection() -> None:
    result, bell = _Handler().async_result(), ThreadBell()
    exchange = Exchange([lambda: result], bell.ring)
    exchange.begin()

    result.set_exception(problem := RuntimeError("xids do not match, expected 11 received 12"))

    assert bell.wait(0)
    [outcome] = exchange.outcomes()
    assert isinstance(outcome, ConnectionLoss)
    assert outcome.__cause__ is problem
