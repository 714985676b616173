"""Requests to an ensemble, and who is stopped before the replies come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.handlers.threading import SequentialThreadingHandler

from django_distlock.backends.zookeeper.options import ZooKeeperOptions
from django_distlock.backends.zookeeper.session import Exchange, Session
from django_distlock.engine import clock
from django_distlock.engine.bells import ThreadBell


def session() -> Session:
    return Session(
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

    def stopped(self: Session, job: Callable[[], None]) -> None:
        jobs.append(job)
        if has_begun:
            threading.Thread(target=job, daemon=True).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "hand_over", stopped)
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
