"""A form that is charged once, however often it is sent: by HTTP, and by people at a browser."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest
from django.db import connections
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from testproject import views
from testproject.models import Account, Fee
from testproject.services import open_account
from tests.fixtures.browser import OpenBrowser
from tests.fixtures.eventually import eventually

Send = Callable[..., Any]


@pytest.fixture
def account(databases: None) -> Account:
    return open_account("Ada", Decimal("1000.00"))


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


# At a browser, served by threads of another process.


@pytest.fixture
def browser(open_browser: OpenBrowser) -> WebDriver:
    return open_browser()


@pytest.fixture
def form(browser: WebDriver, site: str, account: Account) -> str:
    """The address of the form, which the browser shows."""
    address = site + reverse("charge-form", args=[account.pk])
    browser.get(address)
    return address


def press(browser: WebDriver) -> None:
    browser.find_element(By.CSS_SELECTOR, "button").click()


def shows(browser: WebDriver, text: str) -> None:
    script = "return document.body ? document.body.innerText : ''"
    eventually(lambda: text in browser.execute_script(script), 15, text)


@pytest.mark.server
def test_double_click_charges_once(browser: WebDriver, form: str, account: Account) -> None:
    browser.execute_script(
        "const button = document.querySelector('button'); button.click(); setTimeout(() => button.click(), 300)"
    )

    shows(browser, "It is being worked on.")
    eventually(lambda: fees(account) == 1, 10)
    browser.refresh()
    shows(browser, "It was done.")
    assert fees(account) == 1
