"""What is said of a process in which nothing runs beside its requests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from django_distlock import handler


@pytest.fixture(autouse=True)
def said_nothing_yet() -> Iterator[None]:
    handler._warn_of_no_threads.cache_clear()
    yield
    handler._warn_of_no_threads.cache_clear()


@pytest.mark.parametrize(("has_threads", "warnings"), [(False, 1), (True, 0)])
def test_uwsgi_without_threads_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    has_threads: bool,
    warnings: int,
) -> None:
    monkeypatch.setitem(sys.modules, "uwsgi", SimpleNamespace(has_threads=has_threads))

    handler.check_threads()
    handler.check_threads()

    found = [each.getMessage() for each in caplog.records if "--enable-threads" in each.message]
    assert len(found) == warnings
