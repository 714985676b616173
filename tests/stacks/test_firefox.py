"""Edit locks in Firefox, which restores what was typed on F5, too, where Chromium does on Back alone."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from django_distlock.operators import holdings
from testproject.models import Account
from testproject.services import open_account
from tests.fixtures.eventually import eventually
from tests.fixtures.firefox import PATIENCE, Firefox, firefox

pytestmark = pytest.mark.timeout(240)

ADMIN, OWN = "admin:testproject_account_change", "rename"
SAVE = "form:has(#id_name) :is([name=_save], form > button)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    with firefox(tmp_path_factory.mktemp("firefox")) as browser:
        yield browser


@pytest.fixture
def ada(browser: Firefox, live_server: Any, name: str) -> Firefox:
    """The browser of somebody who may do everything."""
    user = Client()
    user.force_login(User.objects.create_superuser(name))
    browser.log_in(live_server.url, user.cookies["sessionid"].value)
    return browser


@pytest.fixture
def account(name: str) -> Account:
    return open_account(name, Decimal("100.00"))


def is_live(account: Account) -> bool:
    """Return whether a script has renewed the lock, whose ttl is longer then."""
    found = holdings("default", f"edit:testproject.account:{account.pk}")
    return bool(found and (found[0].remaining or 0) > 15)


@pytest.mark.parametrize("page", [ADMIN, OWN])
@pytest.mark.parametrize("way", ["back", "reload"])
def test_text_that_the_browser_restores_is_old_text(
    ada: Firefox, account: Account, live_server: Any, page: str, way: str
) -> None:
    ada.open(live_server.url + reverse(page, args=[account.pk]))
    eventually(lambda: is_live(account), PATIENCE, "the script renews the lock")
    ada.type("#id_name", "typed by Ada")

    if way == "back":
        ada.open(live_server.url + reverse("index"))
    Account.objects.filter(pk=account.pk).update(name="saved by Bob")
    ada.back() if way == "back" else ada.reload()
    eventually(lambda: is_live(account), PATIENCE, "the page has the lock")
    is_restored = ada.run("document.querySelector('#id_name').value") == "typed by Ada"
    ada.press(SAVE)

    # Pages of the admin are not to be stored, so there is nothing to restore.
    assert is_restored == (page == OWN)
    account.refresh_from_db()
    assert account.name == "saved by Bob"
    if is_restored:
        assert "saved by Bob" in ada.text(".distlock-edit-changes")
        ada.press(SAVE)
        account.refresh_from_db()
        assert account.name == "typed by Ada"
