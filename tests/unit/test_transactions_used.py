"""Which connections a thread and a task have used, as Django itself tells, but quicker; and views without transactions."""

from __future__ import annotations

import asyncio

import pytest
from django.core.handlers.base import BaseHandler
from django.db import connection, connections
from django.http import HttpRequest, HttpResponse

from django_distlock import transactions


def test_they_are_what_django_says_in_a_thread_and_in_an_event_loop() -> None:
    found = []

    def compare() -> None:
        found.append(transactions._used_here() == connections.all(initialized_only=True))

    async def in_a_task() -> None:
        assert connections["default"].alias == "default"  # one of the task's own
        compare()

    assert connection.alias == "default"
    compare()
    asyncio.run(in_a_task())
    compare()

    assert found == [True, True, True]
    assert connections["default"] in transactions._used_here()


def test_a_view_that_is_never_atomic_is_so_on_every_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connections.settings, "other", {"ATOMIC_REQUESTS": True})

    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    assert BaseHandler().make_view_atomic(view) is not view
    assert BaseHandler().make_view_atomic(transactions.never_atomic(view)) is view


def test_an_alias_that_was_added_by_hand_need_not_be_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connections.settings, "other", {"ENGINE": "django.db.backends.sqlite3"})

    assert transactions.open_here() == ()
