"""Edit locks: who opens a form holds its object, and nothing is overwritten silently."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from decimal import Decimal
from secrets import token_hex
from typing import Any

import pytest
from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, User
from django.db import connections, models
from django.forms import modelform_factory
from django.test import Client, RequestFactory, modify_settings
from django.test.utils import isolate_apps
from django.urls import reverse

from django_distlock import NotSupported, lock, locks
from django_distlock.contrib import editing
from django_distlock.operators import holdings
from testproject.models import Account, Fee
from tests.contract.profiles import PATIENT_REDLOCK
from tests.fixtures import tenancy
from tests.fixtures.tenancy import tenant

from . import edit_site
from .aliases import DOWN, MEMORY
from .edit_site import Fields, fields_of
from .staff import client_of, superuser

REDLOCK = {
    "BACKEND": "django_distlock.backends.redlock.RedlockBackend",
    "OPTIONS": {"servers": [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]},
}
ROW = {"BACKEND": "tests.integration.edit_site.BoundToProcess"}
CACHE = "django_distlock.backends.cache.CacheBackend"
FIVE = ["redis_one", "redis_two", "redis_three", "redis_four", "redis_five"]
SERVERS: dict[str, dict[str, Any]] = {
    "postgres": {"OPTIONS": {"using": "postgres"}},
    "mariadb": {"OPTIONS": {"using": "mariadb"}},
    "redis": {"BACKEND": CACHE, "OPTIONS": {"cache": "redis_cache"}},
    "redis_five": {"BACKEND": REDLOCK["BACKEND"], "OPTIONS": {"servers": FIVE, **PATIENT_REDLOCK}},
}

with isolate_apps("testproject"):

    class Line(models.Model):  # noqa: DJ008 - nobody reads it
        """A key of two columns."""

        pk = models.CompositePrimaryKey("shelf", "number")
        shelf = models.IntegerField()
        number = models.IntegerField()
        name = models.CharField(max_length=100)

        class Meta:
            app_label = "testproject"


EDITOR = ("view_account", "change_account", "delete_account", "view_fee", "add_fee", "change_fee")


@pytest.fixture(autouse=True, params=["database"])
def site(request: pytest.FixtureRequest, settings: Any) -> Iterator[None]:
    kind = request.param
    settings.ROOT_URLCONF = edit_site.addresses()
    if kind == "memory":
        settings.DISTLOCK = {"default": MEMORY}
    elif kind == "database":
        settings.DISTLOCK = {"default": {}}
    else:
        request.getfixturevalue(kind)
        settings.DISTLOCK = {"default": SERVERS[kind]}
    yield
    locks.close()


@pytest.fixture
def ada() -> Client:
    return client_of(*EDITOR)


@pytest.fixture
def bob() -> Client:
    return client_of(*EDITOR)


@pytest.fixture
def chief() -> Client:
    return client_of(*EDITOR, "take_over_methodlock")


def page_of(account: Account) -> str:
    return reverse("admin:testproject_account_change", args=[account.pk])


def name_of(client: Client) -> str:
    return User.objects.get(pk=client.session["_auth_user_id"]).username


def held(account: Account) -> list[Any]:
    return holdings("default", f"edit:testproject.account:{account.pk}")


def ask(client: Client, opened: dict[str, Any], what: str, **more: str) -> Any:
    """Send what the script of a page sends, and return the answer."""
    url = reverse("admin:testproject_account_changelist") + "edit-lock/"
    sent = {"distlock_edit": opened["distlock_edit"], "life": opened.get("life", ""), **more}
    answer = client.post(url, {**sent, "what": what})
    if what == "renew" and answer.json()["state"] == "lost":
        sent["life"] = token_hex()
        answer = client.post(url, {**sent, "what": "take"})
        opened["life"] = token_hex() if answer.json()["state"] == "busy" else sent["life"]
    return answer


def errors(page: Any) -> list[str]:
    assert page.status_code == 200, page
    return [str(error) for error in page.context["adminform"].form.non_field_errors()]


def test_the_first_edits_and_others_read_meanwhile(
    account: Account, ada: Client, bob: Client
) -> None:
    Fee.objects.create(account=account, amount=3)
    first = ada.get(page_of(account))
    second = bob.get(page_of(account))

    assert "_save" in Fields(first.content.decode()).buttons
    assert "Being edited" not in first.content.decode()
    assert {"name", "fees-0-amount"} <= {*fields_of(first)}
    buttons = Fields(second.content.decode()).buttons
    assert not {"_save", "_continue", "what"} & set(buttons)
    assert f"Being edited by {name_of(ada)} since " in second.content.decode()
    assert not {"name", "fees-0-amount"} & {*fields_of(second)}

    assert ada.post(page_of(account), {**fields_of(first), "name": "Lovelace"}).status_code == 302
    account.refresh_from_db()
    assert account.name == "Lovelace"
    assert held(account) == []
    assert "_save" in Fields(bob.get(page_of(account)).content.decode()).buttons


def test_who_edits_is_told_where_times_have_no_zone(
    account: Account, ada: Client, bob: Client, settings: Any
) -> None:
    settings.USE_TZ = False
    ada.get(page_of(account))

    page = bob.get(page_of(account)).content.decode()

    assert f"Being edited by {name_of(ada)} since " in page


def test_a_form_that_is_sent_nevertheless_is_shown_again(
    account: Account, ada: Client, bob: Client
) -> None:
    opened = fields_of(bob.get(page_of(account)))
    ask(bob, opened, "leave")
    ada.get(page_of(account))

    page = bob.post(page_of(account), {**opened, "name": "typed by Bob"})

    [error] = errors(page)
    assert error.startswith(f"Not saved. Being edited by {name_of(ada)} since ")
    assert fields_of(page)["name"] == "typed by Bob"
    account.refresh_from_db()
    assert account.name != "typed by Bob"


def test_what_was_changed_meanwhile_is_shown_and_saved_only_the_second_time(
    account: Account, ada: Client
) -> None:
    opened = fields_of(ada.get(page_of(account)))
    Account.objects.filter(pk=account.pk).update(balance=42)

    page = ada.post(page_of(account), {**opened, "name": "typed"})

    [error] = errors(page)
    assert error.startswith("Not saved yet.")
    assert [(part.key, part.shown) for part in page.context["distlock_edit"].changes] == [
        ("balance", "42.00")
    ]
    assert "42.00" in page.content.decode()
    again = fields_of(page)
    assert (again["name"], again["balance"]) == ("typed", "100.00")
    account.refresh_from_db()
    assert account.name != "typed"
    assert account.balance == Decimal(42)

    assert ada.post(page_of(account), {**again, "balance": "42.00"}).status_code == 302
    account.refresh_from_db()
    assert (account.name, account.balance) == ("typed", Decimal(42))


def test_a_changed_row_of_an_inline_counts(account: Account, ada: Client) -> None:
    fee = Fee.objects.create(account=account, amount=3)
    opened = fields_of(ada.get(page_of(account)))
    Fee.objects.filter(pk=fee.pk).update(amount=4)

    page = ada.post(page_of(account), {**opened, "fees-0-amount": "5"})

    assert [part.label for part in page.context["distlock_edit"].changes] == ["Fees"]
    assert fields_of(page)["fees-0-amount"] == "5"
    fee.refresh_from_db()
    assert fee.amount == 4
    assert ada.post(page_of(account), fields_of(page)).status_code == 302
    fee.refresh_from_db()
    assert fee.amount == 5


def test_who_may_takes_over_with_an_entry_in_the_log(
    account: Account, ada: Client, chief: Client
) -> None:
    opened = fields_of(ada.get(page_of(account)))
    page = chief.get(page_of(account))
    assert "what" in Fields(page.content.decode()).buttons
    shown = fields_of(page)

    answer = ask(chief, shown, "take-over", distlock_take_over=shown["distlock_take_over"])

    # The page of the former editor asks before the browser has loaded the page again.
    assert ask(ada, opened, "renew").json()["state"] == "busy"
    assert answer.url == page_of(account)
    assert "_save" in Fields(chief.get(answer.url).content.decode()).buttons
    entry = LogEntry.objects.get(object_id=str(account.pk))
    assert entry.user.username == name_of(chief)
    assert entry.get_change_message() == f"Took over from {name_of(ada)}, who was editing it."

    told = ask(ada, opened, "renew").json()
    assert told["state"] == "busy"
    assert f"Being edited by {name_of(chief)}" in told["message"]
    assert told["take_over"] == ""
    assert errors(ada.post(page_of(account), {**opened, "name": "lost"}))


def test_nobody_takes_over_without_the_permission(
    account: Account, ada: Client, bob: Client
) -> None:
    ada.get(page_of(account))
    shown = fields_of(bob.get(page_of(account)))
    assert "distlock_take_over" not in shown
    [before] = held(account)

    ask(bob, shown, "take-over", distlock_take_over=before.owner_digest)

    assert [each.owner_digest for each in held(account)] == [before.owner_digest]
    assert not LogEntry.objects.filter(object_id=str(account.pk)).exists()


def test_a_page_holds_its_lock_for_seconds_until_its_script_renews_it(
    account: Account, ada: Client
) -> None:
    opened = fields_of(ada.get(page_of(account)))
    assert held(account)[0].remaining <= 15

    assert ask(ada, opened, "renew").json() == {"state": "held"}
    [live] = held(account)
    assert 80 < live.remaining <= 90
    assert ask(ada, opened, "renew").json() == {"state": "held"}

    assert ask(ada, opened, "leave").json() == {"state": "left"}
    assert held(account) == []


def test_another_window_of_the_same_user_gets_the_lock(account: Account, ada: Client) -> None:
    first = fields_of(ada.get(page_of(account)))
    ask(ada, first, "renew")
    second = ada.get(page_of(account))

    assert "_save" in Fields(second.content.decode()).buttons
    told = ask(ada, first, "renew").json()
    assert told["state"] == "busy"
    assert told["message"].startswith("You have opened this in another window since ")
    assert ask(ada, fields_of(second), "renew").json() == {"state": "held"}

    # As after a reload: the page before says only now that it is left.
    ask(ada, first, "leave")
    assert ask(ada, fields_of(second), "renew").json() == {"state": "held"}

    assert ada.post(page_of(account), {**first, "name": "first"}).status_code == 302
    page = ada.post(page_of(account), {**fields_of(second), "name": "second"})
    assert errors(page)
    account.refresh_from_db()
    assert account.name == "first"


def test_a_form_of_another_user_or_another_key_counts_as_changed(
    account: Account, ada: Client, bob: Client
) -> None:
    opened = fields_of(ada.get(page_of(account)))
    ask(ada, opened, "leave")

    page = bob.post(page_of(account), {**opened, "name": "typed by Ada"})

    assert [error[:14] for error in errors(page)] == ["Not saved yet."]
    assert page.context["distlock_edit"].changes[0].key == "name"
    assert bob.post(page_of(account), fields_of(page)).status_code == 302


def test_the_ticket_of_another_object_counts_as_none(account: Account) -> None:
    boss = superuser()
    group = Group.objects.create(name=uuid.uuid4().hex)
    ticket = fields_of(boss.get(reverse("admin:auth_group_change", args=[group.pk])))
    opened = fields_of(boss.get(page_of(account)))

    sent = {**opened, "name": "typed", "distlock_edit": ticket["distlock_edit"]}
    page = boss.post(page_of(account), sent)

    assert page.context["distlock_edit"].changes[0].key == "name"


def test_the_page_of_one_tenant_has_nothing_to_do_with_the_locks_of_another(
    account: Account, ada: Client, bob: Client, settings: Any
) -> None:
    settings.DISTLOCK = {"default": {**settings.DISTLOCK["default"], "KEY_PREFIX": tenancy.PREFIX}}
    with tenant("north"):
        opened = fields_of(ada.get(page_of(account)))
    with tenant("south"):
        page = bob.get(page_of(account))
        assert "_save" in Fields(page.content.decode()).buttons
        # A page keeps the lock that it has, whatever address its script asks.
        assert ask(ada, opened, "renew").json() == {"state": "held"}
        assert ask(ada, opened, "leave").json() == {"state": "left"}
        [held_by_bob] = held(account)
        assert held_by_bob.holder.purpose == f"edited by {name_of(bob)}"
        refused = ada.post(page_of(account), opened)
        assert any(name_of(bob) in error for error in errors(refused))
    with tenant("north"):
        assert held(account) == []


def test_a_form_without_a_ticket_is_saved_if_nobody_edits(
    account: Account, ada: Client, bob: Client
) -> None:
    opened = fields_of(ada.get(page_of(account)))
    opened.pop("distlock_edit")
    assert errors(bob.post(page_of(account), {**opened, "name": "by a script"}))
    assert ada.post(page_of(account), {**opened, "name": "by a script"}).status_code == 302
    assert held(account) == []


def test_who_may_only_look_is_told_and_locks_nothing(account: Account, ada: Client) -> None:
    viewer = client_of("view_account")
    viewer.get(page_of(account))
    assert held(account) == []

    ada.get(page_of(account))
    page = viewer.get(page_of(account))

    assert f"Being edited by {name_of(ada)}" in page.content.decode()
    assert 'data-reading="yes"' in page.content.decode()
    assert ask(viewer, fields_of(page), "look").json()["state"] == "busy"
    ask(ada, fields_of(ada.get(page_of(account))), "leave")
    told = ask(viewer, fields_of(page), "look").json()
    assert told == {"state": "free", "message": ""}


def test_what_is_edited_is_not_deleted(account: Account, ada: Client, bob: Client) -> None:
    ada.get(page_of(account))
    delete = reverse("admin:testproject_account_delete", args=[account.pk])
    changelist = reverse("admin:testproject_account_changelist")

    page = bob.post(delete, {"post": "yes"})
    assert f"Being edited by {name_of(ada)}" in page.content.decode()
    action = {"action": "delete_selected", "_selected_action": account.pk, "post": "yes"}
    page = bob.post(changelist, action)
    assert f"Being edited by {name_of(ada)}" in page.content.decode()
    assert Account.objects.filter(pk=account.pk).exists()

    assert ada.post(delete, {"post": "yes"}).status_code == 302
    assert not Account.objects.filter(pk=account.pk).exists()


def test_what_is_edited_is_not_changed_in_the_list(
    account: Account, ada: Client, bob: Client
) -> None:
    Account.objects.exclude(pk=account.pk).delete()
    ada.get(page_of(account))
    changelist = reverse("admin:testproject_account_changelist")
    opened = {**fields_of(bob.get(changelist)), "_save": "Save"}

    page = bob.post(changelist, {**opened, "form-0-name": "by Bob"})
    assert f"Being edited by {name_of(ada)}" in page.content.decode()
    account.refresh_from_db()
    assert account.name != "by Bob"

    assert bob.post(changelist, opened).status_code == 302
    assert ada.post(changelist, {**opened, "form-0-name": "by Ada"}).status_code == 302


def test_code_that_holds_the_lock_keeps_editors_out(account: Account, ada: Client) -> None:
    with lock(f"edit:testproject.account:{account.pk}", purpose="the nightly import"):
        page = ada.get(page_of(account))
        assert "(the nightly import) since " in page.content.decode()


def test_without_the_server_of_the_locks_people_work_and_values_are_compared(
    account: Account, ada: Client, settings: Any
) -> None:
    settings.DISTLOCK = {"default": DOWN}
    page = ada.get(page_of(account))
    assert "It cannot be told whether somebody else edits this." in page.content.decode()
    opened = fields_of(page)
    assert ask(ada, opened, "renew").json()["state"] == "failed"

    Account.objects.filter(pk=account.pk).update(balance=1)
    page = ada.post(page_of(account), {**opened, "name": "typed"})
    assert [error[:14] for error in errors(page)] == ["Not saved yet."]
    assert ada.post(page_of(account), fields_of(page)).status_code == 302


def test_no_page_shows_the_owner(account: Account, ada: Client, bob: Client) -> None:
    page = ada.get(page_of(account))
    ticket = page.context["distlock_edit"].ticket
    owner = editing.owner_of(ticket.nonce)

    for shown in (page, bob.get(page_of(account))):
        assert owner not in shown.content.decode()
    assert owner not in str(held(account))
    assert repr(owner) == "<secret>"


def test_a_page_of_ones_own(account: Account, ada: Client, bob: Client) -> None:
    url, view = reverse("rename", args=[account.pk]), reverse("distlock_edit_lock")
    opened, shown = fields_of(ada.get(url)), bob.get(url)
    assert f"Being edited by {name_of(ada)} since " in shown.content.decode()
    sent = {"distlock_edit": opened["distlock_edit"], "what": "renew"}
    assert ada.post(view, sent).json() == {"state": "held"}

    Account.objects.filter(pk=account.pk).update(name="other")
    page = ada.post(url, {**opened, "name": "typed"})
    assert "Not saved yet." in page.content.decode()
    assert "other" in page.content.decode()
    assert ada.post(url, fields_of(page)).status_code == 302
    account.refresh_from_db()
    assert account.name == "typed"
    assert held(account) == []


def test_a_page_of_ones_own_can_be_taken_over(account: Account, ada: Client, chief: Client) -> None:
    url, view = reverse("rename", args=[account.pk]), reverse("distlock_edit_lock")
    ada.get(url)
    shown = fields_of(chief.get(url))

    answer: Any = chief.post(view, {**shown, "what": "take-over"})

    assert answer.url == url
    assert "Being edited" not in chief.get(url).content.decode()
    assert f"by {name_of(chief)}" in held(account)[0].holder.purpose


def test_wrong_settings_are_told_by_the_check(settings: Any) -> None:
    settings.DISTLOCK = {"default": {}, "down": DOWN, "row": ROW}

    def problems(**attributes: Any) -> list[str]:
        made = type("WrongAdmin", (edit_site.AccountAdmin,), attributes)(Account, edit_site.site)
        found = made.check()
        for each in found:
            assert (each.id, each.obj) == ("distlock.E050", type(made))
            assert str(each.hint).endswith("checks.html#distlock-e050")
        return [each.msg for each in found]

    assert problems() == problems(edit_lock_using="down") == []
    [text] = problems(edit_lock_using="row")
    assert text == (
        "WrongAdmin: DISTLOCK['row'] cannot hold locks for pages; "
        "set edit_lock_using to an alias of a database, Redis or Redlock."
    )
    [text] = problems(edit_lock_using="nowhere")
    assert text == "WrongAdmin: DISTLOCK has no alias 'nowhere'."
    [text] = problems(edit_lock_ttl=-1)
    assert text.startswith("WrongAdmin: edit_lock_ttl must be ")
    settings.DISTLOCK = {"default": {}, "redlock": REDLOCK}
    [text] = problems(edit_lock_using="redlock")
    assert "a ttl of 90 seconds is more than 30 seconds" in text
    with modify_settings(INSTALLED_APPS={"remove": "django_distlock"}):
        [text] = problems()
    assert text == "WrongAdmin: 'django_distlock' is not in INSTALLED_APPS."
    settings.DISTLOCK = {"other": {"BACKEND": "nowhere"}}
    assert problems() == problems(edit_lock_using="other") == []


def test_an_alias_that_holds_no_locks_for_pages_is_refused(
    account: Account, ada: Client, settings: Any
) -> None:
    settings.DISTLOCK = {"default": ROW}

    with pytest.raises(NotSupported, match=re.escape("edit_lock()")):
        ada.get(reverse("rename", args=[account.pk]))


@pytest.mark.parametrize(
    "site", ["memory", "postgres", "mariadb", "redis", "redis_five"], indirect=True
)
def test_it_is_the_same_on_every_server(
    site: None, account: Account, ada: Client, bob: Client, chief: Client
) -> None:
    opened = fields_of(ada.get(page_of(account)))
    assert ask(ada, opened, "renew").json() == {"state": "held"}
    assert ask(ada, opened, "renew").json() == {"state": "held"}
    assert 80 < held(account)[0].remaining <= 90
    seen = bob.get(page_of(account)).content.decode()
    assert f"Being edited by {name_of(ada)} since " in seen

    again = fields_of(ada.get(page_of(account)))
    assert ask(ada, opened, "renew").json()["state"] == "busy"
    assert ask(ada, opened, "leave").json() == {"state": "left"}
    assert ask(ada, again, "renew").json() == {"state": "held"}
    for _ in range(2):  # as after a form whose answer is a file: the page stays
        assert ask(ada, again, "leave").json() == {"state": "left"}
        assert ask(ada, again, "renew").json() == {"state": "held"}
        assert ask(ada, again, "renew").json() == {"state": "held"}
        [live] = held(account)
        assert 80 < live.remaining <= 90
    page = ada.post(page_of(account), {**again, "balance": "much"})
    last = fields_of(page)

    shown = fields_of(chief.get(page_of(account)))
    ask(chief, shown, "take-over", distlock_take_over=shown["distlock_take_over"])
    opened = fields_of(chief.get(page_of(account)))
    for _ in range(5):
        assert ask(chief, opened, "renew").json() == {"state": "held"}
        assert ask(ada, last, "renew").json()["state"] == "busy"
    assert chief.post(page_of(account), {**opened, "name": "chief"}).status_code == 302
    assert held(account) == []
    assert ask(ada, last, "renew").json()["state"] == "changed"
    assert ask(ada, last, "leave").json() == {"state": "left"}
    assert ask(ada, last, "begin", life="1").json()["state"] == "changed"
    assert ask(ada, last, "leave", life="1").json() == {"state": "left"}
    assert held(account) == []


def post(url: str = "/", **values: str) -> Any:
    request: Any = RequestFactory().post(url, values)
    request.user = User(pk=1)
    return request


def saves(row: Any, opened: str, name: str) -> bool:
    """Return whether a form of *row*, opened with this ticket, accepts the *name*."""
    request = post(distlock_edit=opened, name=name)
    edit = editing.edit_lock(request, row, may_take_over=False)
    form = modelform_factory(type(row), fields=["name"])(request.POST, instance=row)
    is_accepted = edit.accepts(form)
    edit.release()
    return is_accepted


def opened_by_me(row: Any) -> str:
    request: Any = RequestFactory().get("/")
    request.user = User(pk=1)
    return editing.edit_lock(request, row, may_take_over=False).ticket.written()


@pytest.mark.parametrize("site", ["postgres"], indirect=True)
def test_an_object_is_compared_with_its_row_in_the_database_that_it_is_from(site: None) -> None:
    rows = Account.objects.using("postgres")
    account = rows.create(name="Ada", balance=1, opening_balance=1)
    opened, last = opened_by_me(account), opened_by_me(account)

    assert saves(account, opened, "Lovelace")
    rows.update(name="Byron")
    assert not saves(account, last, "Lovelace")
    rows.all().delete()


def test_an_object_with_a_key_of_two_columns_is_edited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(apps.all_models["testproject"], "line", Line)
    with connections["default"].schema_editor() as editor:
        editor.create_model(Line)
    rows: Any = models.QuerySet(Line)
    line = rows.create(shelf=7, number=2, name="Ada")
    try:
        opened, last = opened_by_me(line), opened_by_me(line)
        assert saves(line, opened, "Lovelace")
        rows.update(name="Byron")
        assert not saves(line, last, "Lovelace")
    finally:
        with connections["default"].schema_editor() as editor:
            editor.delete_model(Line)
