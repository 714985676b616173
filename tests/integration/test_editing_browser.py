"""Edit locks in browsers: two users who open one object, under a strict Content-Security-Policy."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from django.contrib.auth.models import Permission, User
from django.urls import reverse
from selenium.webdriver.common.by import By

from django_distlock import force_release, locks
from django_distlock.operators import holdings
from testproject.models import Account, Fee
from tests.fixtures.browser import OpenBrowser, served
from tests.fixtures.eventually import eventually
from tests.fixtures.proxy import Proxy

from .browsing import Operator

Start = Callable[..., "Editor"]
NO_SCRIPTS = {"profile.managed_default_content_settings.javascript": 2}
SAVE = "[name=_save]"
#: Seconds until a page has asked the server again, on a machine with much to do.
PATIENCE = 30
#: Seconds after which Chromium ends a page whose tab is closed, though its script was not told yet.
CUT_OFF = 0.5
#: Lets the script of a page ask more often.
HURRY = "document.querySelector('.distlock-edit').dataset.pause = 0.5;"

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]


class Editor(Operator):
    """Somebody at a browser who edits accounts."""

    user: User

    def edit(self, account: Account) -> None:
        self.open(reverse("admin:testproject_account_change", args=[account.pk]))

    def edit_live(self, account: Account) -> None:
        """Open the object, and wait until the script of the page has renewed the lock."""
        self.edit(account)
        eventually(lambda: is_live(account), PATIENCE, "the script renews the lock")

    def says(self) -> str:
        """Return what the page says of who edits the object."""
        found = self.browser.find_elements(By.CSS_SELECTOR, ".distlock-edit-message")
        return str(found[0].text) if found else ""

    def is_told(self, text: str) -> None:
        """Wait until the page says *text* of who edits the object."""
        try:
            eventually(lambda: text in self.says(), PATIENCE)
        except AssertionError:
            pytest.fail(f"the page of {self.user} says {self.says()!r}, not {text!r}")

    def type_name(self, text: str) -> None:
        field = self.find("#id_name")
        field.clear()
        field.send_keys(text)

    def close_tab(self) -> float:
        """Close the tab, go on in another one, and return how many seconds the closing took."""
        first = self.browser.current_window_handle
        self.browser.switch_to.new_window("tab")
        other = self.browser.current_window_handle
        self.browser.switch_to.window(first)
        began = time.monotonic()
        self.browser.close()
        took = time.monotonic() - began
        self.browser.switch_to.window(other)
        return took

    def has(self, selector: str) -> bool:
        return bool(self.browser.find_elements(By.CSS_SELECTOR, selector))

    def complaints(self) -> list[str]:
        """Return what the browser complains about, such as a script that the policy forbids."""
        lines = [str(line["message"]) for line in cast("Any", self.browser).get_log("browser")]
        return [line for line in lines if "favicon" not in line]


@pytest.fixture(scope="module")
def edit_site(databases: None) -> Iterator[str]:
    with served("tests.integration.edit_settings") as address:
        yield address


@pytest.fixture
def editor(edit_site: str, open_browser: OpenBrowser) -> Start:
    """Starts browsers, each with somebody who may do everything."""

    def start(name: str, **preferences: Any) -> Editor:
        someone = Editor(open_browser(preferences), edit_site)
        username = f"{name}-{uuid.uuid4().hex[:8]}"
        someone.user = User.objects.create_superuser(username, first_name=name)
        someone.log_in(someone.user)
        return someone

    return start


@pytest.fixture(autouse=True)
def urls(settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.integration.edit_site"


@pytest.fixture
def account(account: Account) -> Account:
    Fee.objects.create(account=account, amount=3)
    return account


def edit_name(account: Account) -> str:
    return f"edit:testproject.account:{account.pk}"


def held(account: Account) -> list[Any]:
    return holdings("default", edit_name(account))


#: Lets no answer to a page come in time that asks for its lock again, and has it ask.
TOO_LATE = """const real = window.fetch;
window.fetch = (url, options) => {
    const answer = real(url, options);
    return options.body && options.body.get("what") === "take" ? new Promise(() => {}) : answer;
};
document.dispatchEvent(new Event("visibilitychange"));"""

#: Sends the form, whose answer goes elsewhere, so that the page stays; has the page ask again, and returns what it asked.
SENT = """const form = document.querySelector("#id_name").form, asked = [], real = window.fetch;
window.fetch = (url, options) => { asked.push(url); return real(url, options); };
document.body.append(Object.assign(document.createElement("iframe"), { name: "elsewhere" }));
form.target = "elsewhere";
form.requestSubmit();
document.dispatchEvent(new Event("visibilitychange"));
return asked;"""

#: Sends the form by a button of its own, whose answer goes elsewhere, so that the page stays.
PREVIEW = """const form = document.querySelector("#id_name").form, button = document.createElement("button");
document.body.append(Object.assign(document.createElement("iframe"), { name: "elsewhere" }));
form.append(Object.assign(button, { formAction: "/", formTarget: "elsewhere" }));
button.click();"""

#: Puts the form of another page into this one and runs its scripts, as htmx does; then takes it out.
COMES = """fetch(arguments[0]).then((response) => response.text()).then((html) => {
    const page = document.createRange().createContextualFragment(html);
    page.querySelector("form").append(Object.assign(document.createElement("input"), { name: "elements" }));
    document.body.replaceChildren(page);
});"""
GOES = """document.body.replaceChildren();
document.dispatchEvent(new Event("visibilitychange"));"""


def is_live(account: Account) -> bool:
    """Return whether a script has renewed the lock, which the page had taken for 15 seconds.

    What is left of a new lock may be listed as some milliseconds more than that.
    """
    return bool((found := held(account)) and found[0].remaining > 60)


def test_the_first_is_told_in_the_page_and_loses_nothing(editor: Start, account: Account) -> None:
    ada, bob = editor("Ada"), editor("Bob")
    ada.edit_live(account)
    assert ada.says() == ""
    ada.type_name("typed by Ada")

    bob.edit(account)
    assert bob.says().startswith("Being edited by Ada since ")
    assert not bob.has(SAVE)
    assert not bob.has("#id_name")
    bob.press("[value=take-over]")
    assert bob.has(SAVE)
    assert bob.says() == ""

    ada.is_told("Being edited by Bob")
    assert ada.says().endswith("What you have typed stays here.")
    assert ada.find("#id_name").get_attribute("value") == "typed by Ada"
    ada.press(SAVE)
    assert "Not saved. Being edited by Bob since " in ada.find(".errornote ~ .errorlist").text
    assert ada.find("#id_name").get_attribute("value") == "typed by Ada"

    bob.type_name("saved by Bob")
    bob.press(SAVE)
    account.refresh_from_db()
    assert account.name == "saved by Bob"
    ada.is_told("changed after you had opened")
    ada.press(SAVE)
    assert "saved by Bob" in ada.find(".distlock-edit-changes").text
    assert ada.find("#id_name").get_attribute("value") == "typed by Ada"
    ada.press(SAVE)
    account.refresh_from_db()
    assert account.name == "typed by Ada"
    assert held(account) == []
    assert ada.complaints() == bob.complaints() == []


def test_a_tab_that_is_closed_or_left_gives_the_lock_back(editor: Start, account: Account) -> None:
    ada = editor("Ada")
    for _ in range(10):
        ada.edit_live(account)
        if ada.close_tab() < CUT_OFF:
            break
        force_release(edit_name(account))
    else:
        pytest.fail("the browser cut the page off ten times")
    eventually(lambda: not held(account), PATIENCE, "the closed tab gives it back")

    ada.edit_live(account)
    ada.open("/")
    eventually(lambda: not held(account), PATIENCE, "the page that is left gives it back")
    ada.browser.back()
    eventually(lambda: is_live(account), PATIENCE, "the page that comes back takes it again")
    assert ada.has(SAVE)


def test_a_page_that_goes_while_it_asks_again_keeps_no_lock(
    editor: Start, account: Account
) -> None:
    ada = editor("Ada")
    ada.edit_live(account)
    [first] = held(account)

    # As the view does that saves the form: the page stays for a moment.
    assert locks["default"].force_release(first.key, first.owner_digest)
    ada.browser.execute_script(TOO_LATE)
    eventually(lambda: held(account), PATIENCE, "the page asks again")
    ada.open("/")

    eventually(lambda: not held(account), PATIENCE, "the page that is left gives it back")


def test_a_page_does_not_take_back_the_lock_that_its_sent_form_gives_back(
    editor: Start, account: Account
) -> None:
    ada = editor("Ada")
    ada.edit_live(account)
    ada.type_name("typed by Ada")

    assert ada.browser.execute_script(SENT) == []

    eventually(lambda: not held(account), PATIENCE, "the view that saves gives it back")
    account.refresh_from_db()
    assert account.name == "typed by Ada"


def test_a_form_is_saved_right_after_another_button_has_sent_it_elsewhere(
    editor: Start, account: Account
) -> None:
    ada = editor("Ada")
    ada.edit_live(account)
    ada.type_name("typed by Ada")
    ada.browser.execute_script(PREVIEW)

    ada.press(SAVE)

    account.refresh_from_db()
    assert account.name == "typed by Ada"


@pytest.mark.parametrize("way", ["history.back()", "location.reload()"])
def test_text_that_the_browser_restores_is_old_text(
    editor: Start, account: Account, way: str
) -> None:
    ada = editor("Ada")
    ada.edit_live(account)
    ada.type_name("typed by Ada")
    if way == "history.back()":
        ada.open("/")
    Account.objects.filter(pk=account.pk).update(name="saved by Bob")
    ada.browser.execute_script(way)
    eventually(lambda: is_live(account), PATIENCE, "the page has the lock")
    typed = ada.find("#id_name").get_attribute("value")

    ada.press(SAVE)

    if typed == "typed by Ada":
        assert "saved by Bob" in ada.find(".distlock-edit-changes").text
    account.refresh_from_db()
    assert account.name == "saved by Bob"


def test_who_may_only_look_is_not_told_to_edit(editor: Start, account: Account) -> None:
    ada, reader = editor("Ada"), editor("Reader")
    User.objects.filter(pk=reader.user.pk).update(is_superuser=False)
    reader.user.user_permissions.add(Permission.objects.get(codename="view_account"))
    ada.edit(account)
    reader.edit(account)
    assert "Being edited by Ada" in reader.says()

    ada.open("/")

    eventually(lambda: "Ada" not in reader.says(), PATIENCE, "the reader is told")
    assert reader.says() == ""


def test_the_button_of_a_reader_takes_over_from_who_edits_by_now(
    editor: Start, account: Account
) -> None:
    ada, bob, chief = editor("Ada"), editor("Bob"), editor("Chief")
    ada.edit(account)
    chief.edit(account)
    ada.open("/")
    eventually(lambda: "Nobody edits" in chief.says(), PATIENCE, "the reader is told")
    assert not chief.find("[value=take-over]").is_displayed()
    bob.edit(account)
    eventually(lambda: "Being edited by Bob" in chief.says(), PATIENCE, "the reader is told")

    chief.press("[value=take-over]")

    assert chief.has(SAVE)
    assert chief.says() == ""


def test_a_form_may_come_and_go_without_its_page(editor: Start, account: Account) -> None:
    ada = editor("Ada")
    ada.open(reverse("index"))
    for _ in range(2):
        ada.browser.execute_script(COMES, reverse("rename", args=[account.pk]))
        eventually(lambda: is_live(account), PATIENCE, "its script has begun")

        ada.browser.execute_script(GOES)
        eventually(lambda: not held(account), PATIENCE, "the lock is given back")


def test_what_was_typed_survives_another_login(editor: Start, account: Account) -> None:
    ada = editor("Ada")
    ada.edit(account)
    ada.type_name("typed by Ada")
    form = ada.browser.current_window_handle
    ada.browser.delete_all_cookies()
    eventually(lambda: "You are logged out" in ada.says(), PATIENCE, "the page says so")

    ada.browser.switch_to.new_window("tab")
    ada.user.set_password("secret")
    ada.user.save()
    ada.open(f"{reverse('admin:login')}?next=/")
    ada.find("#id_username").send_keys(ada.user.username)
    ada.find("#id_password").send_keys("secret")
    ada.press("[type=submit]")
    ada.browser.switch_to.window(form)
    eventually(lambda: ada.says() == "", PATIENCE, "the page has the lock again")
    ada.press(SAVE)

    account.refresh_from_db()
    assert account.name == "typed by Ada"


def test_a_site_that_does_not_answer_is_told(
    editor: Start, edit_site: str, account: Account
) -> None:
    ada = editor("Ada")
    with Proxy(int(edit_site.rpartition(":")[2])) as proxy:
        ada.site = f"http://{proxy.host}:{proxy.port}"
        ada.edit_live(account)
        ada.browser.execute_script(HURRY)

        proxy.black_hole()
        eventually(lambda: "The site does not answer" in ada.says(), PATIENCE, "the page says so")

        proxy.pass_through()
        eventually(lambda: ada.says() == "", PATIENCE, "the page has the lock again")


def test_it_works_without_scripts(editor: Start, account: Account) -> None:
    ada, bob = editor("Ada", **NO_SCRIPTS), editor("Bob", **NO_SCRIPTS)
    ada.edit(account)
    assert held(account)
    bob.edit(account)
    assert "Being edited by Ada" in bob.says()
    bob.click("[value=take-over]")
    eventually(lambda: bob.has(SAVE), PATIENCE, "the form comes")

    ada.type_name("typed by Ada")
    ada.click(SAVE)
    eventually(lambda: ada.has(".errornote"), PATIENCE, "the form comes again")
    assert "Being edited by Bob" in ada.says()
    assert ada.find("#id_name").get_attribute("value") == "typed by Ada"
    ada.click(".distlock-edit-take-over input")
    ada.click(SAVE)
    eventually(lambda: not ada.has("#id_name"), PATIENCE, "it is saved")
    account.refresh_from_db()
    assert account.name == "typed by Ada"
