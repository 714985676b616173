"""The admin of the locks in a browser, served by a process of its own."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import cast
from urllib.parse import quote

import pytest
from django.contrib.admin.utils import quote as admin_quote
from django.contrib.auth.models import User
from django.urls import reverse
from selenium.webdriver.common.by import By

from django_distlock import LockNotHeld, lock
from django_distlock.engine.values import LockState, digest
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import server_key, stored
from django_distlock.models import MethodLock
from tests.fixtures.browser import OpenBrowser, served
from tests.fixtures.eventually import eventually

from .browsing import Operator
from .lock_rows import put, put_waiter, reread
from .staff import FORCE, LIST

PICTURE = Path(__file__).parents[2] / "docs" / "_static" / "locks.webp"
#: Whether what takes a lock away has the colour in which Django deletes.
IS_RED = """const probe = document.body.appendChild(document.createElement("i"));
    probe.style.background = "var(--delete-button-bg)";
    const red = getComputedStyle(probe).backgroundColor;
    probe.remove();
    return getComputedStyle(document.querySelector(".distlock-danger")).backgroundColor === red;"""
#: The next request has no answer, as on a connection that a firewall has forgotten.
NEVER_ANSWERED = """const send = window.fetch;
    window.fetch = (address, options) => {
        window.fetch = send;
        window.isSent = true;
        return new Promise((_, fail) => options.signal?.addEventListener("abort", fail));
    };"""
IS_SENT = "return window.isSent === true;"
STOPPED = "The page is not refreshed any more: load it again."
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


def row_of(name: str) -> MethodLock:
    return MethodLock.objects.get(method_name=server_key(name))


def test_lock_is_taken_from_its_holder_after_a_confirmation(operator: Start, name: str) -> None:
    someone = operator()
    with pytest.raises(LockNotHeld), lock(name, ttl=3, purpose="the monthly report") as lease:
        someone.open(f"{LIST}?q={name}")
        assert someone.browser.execute_script(IS_RED)
        someone.click("#pick")
        someone.press("#distlock-force input[type=submit]")

        assert someone.find("#content h1").text == "Force release"
        assert someone.browser.execute_script(IS_RED)
        [asked] = someone.rows()
        assert asked[0] == name
        assert "the monthly report" in asked[2]
        assert row_of(name).owner is not None

        someone.press("#content form input[type=submit]")
        assert someone.message() == "1 lock was released."
        assert row_of(name).owner is None
        eventually(lambda: lease.lost, 5, "the holder is told at its next renewal")


def test_a_page_of_the_lock_says_all_there_is_to_know_and_who_changes_his_mind_releases_nothing(
    operator: Start, name: str
) -> None:
    row = put("default", name + "x" * 300, LockState.HELD)
    someone = operator()

    someone.open(f"{LIST}{quote(row.method_name)}/change/")

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
    assert someone.browser.execute_script(IS_RED)

    someone.follow("Force release")
    someone.follow("No, take me back")
    assert someone.browser.current_url.endswith(LIST)
    assert reread(row) == row


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


def test_refreshing_can_be_paused_and_stays_so(operator: Start, name: str) -> None:
    put("default", f"{name}:1", LockState.HELD)
    someone = operator()
    someone.open(f"{LIST}?q={name}")
    someone.click("#distlock-pause")
    someone.follow("NAME")

    put("default", f"{name}:2", LockState.HELD)

    assert someone.find("#distlock-pause").get_attribute("aria-pressed") == "true"
    someone.look()
    time.sleep(1)
    assert len(someone.look()["names"]) == 1
    someone.click("#distlock-pause")
    eventually(lambda: len(someone.look()["names"]) == 2, 10, "the list is refreshed")


def test_it_says_so_when_the_operator_is_logged_out(operator: Start, name: str) -> None:
    someone = operator()
    someone.open(f"{LIST}?q={name}")

    someone.browser.delete_all_cookies()

    eventually(lambda: someone.look()["status"] == STOPPED, 10, "the page says so")


@pytest.mark.usefixtures("databases")
def test_it_says_so_where_users_log_in_on_another_host(open_browser: OpenBrowser) -> None:
    with served("tests.integration.sso_settings") as site:
        someone = Operator(open_browser(), site)
        someone.log_in(User.objects.create_superuser(f"operator-{uuid.uuid4().hex[:8]}"))
        someone.open(LIST)

        someone.browser.delete_all_cookies()

        eventually(lambda: someone.look()["status"] == STOPPED, 10, "the page says so")


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_nothing_is_cut_off(
    operator: Start, name: str, width: int, theme: str, tmp_path: Path
) -> None:
    for state in LockState:
        put("default", f"{name}:{state}", state)
    row = put("default", name + "x" * 200, LockState.HELD)
    someone = operator()
    someone.resize(width, 900)
    someone.choose(theme)
    page = reverse("admin:django_distlock_heldlock_change", args=[admin_quote(row.method_name)])
    value = quote(f"default:{digest(str(row.owner))}:{row.method_name}")

    for path, row_name in (
        (f"{LIST}?q={name}&state=all", f"{name}:held"),
        (page, row.description),
        (f"{FORCE}?lock={value}", row.description[:40]),
    ):
        someone.open(path)

        assert row_name in someone.find("#content").text
        assert someone.find("html").get_attribute("data-theme") == theme
        assert someone.cut_off() == []
        someone.browser.save_screenshot(str(tmp_path / f"{len(path)}.png"))


def test_the_picture_of_the_readme_is_of_this_page(operator: Start) -> None:
    """With DISTLOCK_PICTURE=1 in the environment it is taken again."""
    MethodLock.objects.all().delete()
    other = Holder("worker-2", 512, "", "reports.tasks.yearly[5d1c]").to_json()
    for invoice in (4711, 4712):
        put_waiter("default", put("default", f"invoice:{invoice}", LockState.HELD))
    put("default", "report:yearly", LockState.HELD, holder=other)
    put("default", "import:shop-7", LockState.STALE)
    put("default", "feed:hourly", LockState.RESERVED)
    someone = operator()
    User.objects.filter(username__startswith="operator-").update(first_name="Ada")
    someone.resize(1280, 560)
    someone.open(f"{LIST}?state=all&alias=default")

    taken = someone.picture()

    assert len(taken) < 60_000
    if os.environ.get("DISTLOCK_PICTURE"):
        PICTURE.write_bytes(taken)
    assert 1_000 < PICTURE.stat().st_size < 60_000
