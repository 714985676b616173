"""The admin of the locks in a browser, served by a process of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import cast

import pytest
from django.contrib.auth.models import User
from django.urls import reverse
from selenium.webdriver.common.by import By
from selenium.webdriver.support import expected_conditions as there

from django_distlock import LockNotHeld, lock
from django_distlock.engine.values import LockState
from django_distlock.ground.naming import server_key, stored
from django_distlock.models import MethodLock
from tests.fixtures.browser import OpenBrowser
from tests.fixtures.eventually import eventually

from .browsing import LIST, Operator
from .lock_rows import put, put_waiter

HISTORY = reverse("admin:django_distlock_methodlock_changelist")
FORCE = reverse("admin:django_distlock_heldlock_force_release")
#: The next request has no answer, as on a connection that a firewall has forgotten.
NEVER_ANSWERED = """const send = window.fetch;
    window.fetch = (address, options) => {
        window.fetch = send;
        window.isSent = true;
        return new Promise((_, fail) => options.signal?.addEventListener("abort", fail));
    };"""
IS_SENT = "return window.isSent === true;"
HOSTILE = "<script>alert(1)</script>"
Start = Callable[[], "Operator"]

pytestmark = pytest.mark.server


@pytest.fixture
def operator(site: str, open_browser: OpenBrowser) -> Start:
    """Starts browsers, each with an operator who may do everything."""

    def start() -> Operator:
        username = f"operator-{uuid.uuid4().hex[:8]}"
        someone = Operator(open_browser(), site)
        someone.log_in(User.objects.create_superuser(username))
        return someone

    return start


@pytest.fixture
def name() -> str:
    return f"browser:{uuid.uuid4().hex[:12]}"


def row_of(name: str) -> MethodLock:
    return MethodLock.objects.get(method_name=server_key(name))


def test_list_shows_the_states_and_runs_no_script_of_a_name(operator: Start, name: str) -> None:
    for state in LockState:
        put("default", f"{name}:{state}", state)
    put_waiter("default", put("default", f"{HOSTILE}{name}", LockState.HELD))

    someone = operator()
    someone.open(f"{LIST}?q={name}&state=all")
    assert {row[0]: row[1] for row in someone.rows()} == {
        f"{name}:held": "held",
        f"{name}:stale": "stale",
        f"{name}:reserved": "reserved",
        f"{HOSTILE}{name}": "held",
    }
    assert not someone.browser.find_elements(By.CSS_SELECTOR, "#result_list script")

    someone.open(f"{HISTORY}?q={name}")

    assert {row[0]: (row[1], row[6]) for row in someone.rows()} == {
        f"{name}:held": ("held", "0"),
        f"{name}:stale": ("stale", "0"),
        f"{name}:reserved": ("reserved", "0"),
        f"{name}:free": ("free", "0"),
        f"{HOSTILE}{name}": ("held", "1"),
    }
    assert there.alert_is_present()(someone.browser) is False
    assert not someone.browser.find_elements(By.CSS_SELECTOR, "#result_list script")

    someone.follow("stale")
    assert [row[0] for row in someone.rows()] == [f"{name}:stale"]


def test_lock_is_taken_from_its_holder_after_a_confirmation(operator: Start, name: str) -> None:
    someone = operator()
    with pytest.raises(LockNotHeld), lock(name, ttl=3, purpose="the monthly report") as lease:
        someone.open(f"{LIST}?q={name}")
        someone.click("#pick")
        someone.press("#distlock-force input[type=submit]")

        assert someone.find("#content h1").text == "Force release"
        [asked] = someone.rows()
        assert asked[0] == name
        assert "the monthly report" in asked[2]
        assert row_of(name).owner is not None

        someone.press("#content form input[type=submit]")
        assert someone.message() == "1 lock was released."
        assert row_of(name).owner is None
        eventually(lambda: lease.lost, 5, "the holder is told at its next renewal")


def test_a_page_of_the_lock_says_all_there_is_to_know(operator: Start, name: str) -> None:
    row = put("default", name + "x" * 300, LockState.HELD)
    someone = operator()

    someone.open(f"{HISTORY}{row.pk}/change/")

    page = cast("str", someone.find("#content").text)
    for fact in (
        row.description,
        row.method_name,
        "held",
        "web-1 pid 4711",
        str(row.fencing_token),
    ):
        assert fact in page
    assert not someone.browser.find_elements(By.CSS_SELECTOR, "#content form input[type=text]")
    wide = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert someone.browser.execute_script(wide) is False


def test_the_list_refreshes_itself_and_keeps_what_is_selected(operator: Start, name: str) -> None:
    rows = [put("default", f"{name}:{number}", LockState.HELD) for number in range(1, 31)]
    someone = operator()
    someone.open(f"{LIST}?q={name}")
    # In one script: the list may be refreshed between two.
    someone.browser.execute_script(
        "const box = document.querySelector(arguments[0]);"
        "box.focus(); box.click(); box.dataset.seen = 'yes'; box.scrollIntoView()",
        "#result_list tbody tr:last-child input",
    )
    before = someone.look()

    # In one statement, for the same reason.
    MethodLock.objects.filter(pk=rows[0].pk).update(
        method_name=server_key(f"{name}:0"), description=stored(f"{name}:0")
    )

    eventually(lambda: f"{name}:0" in someone.look()["names"], 10, "the list is refreshed")
    after = someone.look()
    assert f"{name}:1" not in after["names"]
    assert after["is_new"]
    assert after["has_focus"]
    assert after["selected"] == before["selected"] == f"{name}:9"
    assert after["scrolled"] == before["scrolled"] > 0

    # The number of locks is as before: a screen reader is not told of it again.
    assert after["status"] == ""
    put("default", f"{name}:31", LockState.HELD)
    eventually(lambda: someone.look()["status"] == "31 locks", 10, "it is told of another number")

    someone.press("#distlock-force input[type=submit]")
    assert [row[0] for row in someone.rows()] == [f"{name}:9"]


def test_a_request_that_is_never_answered_does_not_end_the_refreshing(
    operator: Start, name: str
) -> None:
    put("default", f"{name}:1", LockState.HELD)
    someone = operator()
    someone.open(f"{LIST}?q={name}")
    someone.browser.execute_script(NEVER_ANSWERED)
    eventually(lambda: someone.look()["names"] and someone.browser.execute_script(IS_SENT), 10)

    put("default", f"{name}:2", LockState.HELD)

    eventually(lambda: len(someone.look()["names"]) == 2, 30, "the list is refreshed")


def test_it_says_so_when_the_operator_is_logged_out(operator: Start, name: str) -> None:
    someone = operator()
    someone.open(f"{LIST}?q={name}")

    someone.browser.delete_all_cookies()

    text = "The page is not refreshed any more: load it again."
    eventually(lambda: someone.look()["status"] == text, 10, "the page says so")
