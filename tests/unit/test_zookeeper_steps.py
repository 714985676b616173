"""Steps of a conversation with an ensemble, and who is stopped on the way."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
from kazoo.handlers.threading import SequentialThreadingHandler

from django_distlock.backends.zookeeper.steps import _Work, run
from django_distlock.engine import clock


def talk(asked: list[str]) -> Generator[list[Any], list[Any], str]:
    asked.append("first")
    yield []
    asked.append("last")
    return "done"


@pytest.mark.parametrize("has_begun", [False, True])
def test_whoever_is_stopped_before_the_wait_leaves_no_request_under_way(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    asked, works, begin = list[str](), list[Callable[[], None]](), _thread.start_new_thread

    def stopped(work: Callable[[], None], arguments: tuple[()]) -> None:
        works.append(work)
        if has_begun:
            begin(work, arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(_thread, "start_new_thread", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(talk(asked), clock.wait_time() + 10)

    seen = list(asked)
    works[0]()  # a thread that begins late
    assert asked == seen
    assert has_begun or not asked


def test_whoever_is_stopped_waits_for_no_reply() -> None:
    unanswered, asked = SequentialThreadingHandler().async_result(), threading.Event()

    def ask() -> Generator[list[Any], list[Any], None]:
        asked.set()
        yield [unanswered]

    work = _Work(ask(), clock.wait_time() + 1000)
    threading.Thread(target=work.run, daemon=True).start()
    assert asked.wait(10)

    work.give_up()  # and returns

    assert not unanswered.ready()
