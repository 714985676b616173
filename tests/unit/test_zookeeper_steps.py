"""Steps of a conversation with an ensemble, and who is stopped on the way."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Generator
from typing import Any

import pytest

from django_distlock import clock
from django_distlock.backends.zookeeper.steps import run


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
