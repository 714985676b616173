"""A form that is charged once, however often it is sent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from testproject import views
from testproject.models import Account, Fee

Send = Callable[..., Any]


@pytest.fixture
def send(client: Client, account: Account, monkeypatch: pytest.MonkeyPatch) -> Send:
    """Sends the form, with the token "t" and the fields that are given."""
    monkeypatch.setattr(views, "PATIENCE", 0.3)
    url = reverse("charge-form", args=[account.pk])
    return lambda headers=None, **fields: client.post(
        url, {"token": "t", **fields}, headers=headers
    )


def fees(account: Account) -> int:
    return Fee.objects.filter(account=account).count()


def test_second_sending_is_refused_for_a_minute(send: Send, account: Account) -> None:
    first, second, other = send(), send(), send(token="other")

    assert (first.status_code, second.status_code, other.status_code) == (302, 409, 302)
    assert 55 < int(second["Retry-After"]) <= 60
    assert "It was done." in second.content.decode()
    assert fees(account) == 2


def test_one_of_two_at_the_same_time_is_charged(send: Send, account: Account) -> None:
    def send_in_thread(_: int) -> HttpResponse:
        try:
            answer: HttpResponse = send()
            return answer
        finally:
            connections.close_all()

    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(send_in_thread, range(4)))

    assert sorted(answer.status_code for answer in answers) == [302, 409, 409, 409]
    told = [answer.text for answer in answers if answer.status_code == 409]
    assert [text for text in told if "It is being worked on." not in text] == []
    assert fees(account) == 1


def test_retry_after_a_failure_is_let_through_at_once(
    send: Send, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert send(fail="on").status_code == 503
    with monkeypatch.context() as broken:
        broken.setattr(views, "charge_fee", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            send()
    assert fees(account) == 0

    assert send().status_code == 302
    assert send().status_code == 409
    assert fees(account) == 1
