"""Edit locks: what a form saves is what its user has typed, and nothing else."""

from __future__ import annotations

import logging
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django import forms
from django.contrib.auth.models import Group, Permission, User
from django.db import connections, transaction
from django.forms import BaseInlineFormSet, ModelForm, modelform_factory
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_distlock import lock, locks
from django_distlock.contrib import editing
from testproject.models import Account, Fee
from testproject.services import open_account

from . import edit_site
from .edit_site import fields_of
from .staff import client_of
from .test_editing import (
    EDITOR,
    account,
    ada,
    ask,
    bob,
    chief,
    held,
    name_of,
    opened_by_me,
    page_of,
    post,
    site,
)

__all__ = ["account", "ada", "bob", "chief", "site"]

LIST = "admin:testproject_account_changelist"


@pytest.fixture
def boss() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser(uuid.uuid4().hex))
    return client


def take_away(client: Client, *codenames: str) -> None:
    user = User.objects.get(username=name_of(client))
    user.user_permissions.remove(*Permission.objects.filter(codename__in=codenames))


def test_an_admin_with_a_get_form_of_its_own_is_edited(boss: Client) -> None:
    user = User.objects.create_user(uuid.uuid4().hex)
    url = reverse("admin:auth_user_change", args=[user.pk])
    opened = fields_of(boss.get(url))

    assert boss.post(url, {**opened, "first_name": "Grace"}).status_code == 302

    user.refresh_from_db()
    assert user.first_name == "Grace"


def test_a_page_of_ones_own_keeps_what_its_form_does_not_have(account: Account) -> None:
    request = post(distlock_edit=opened_by_me(account), name="Lovelace")
    edit = editing.edit_lock(request, account)
    form = modelform_factory(Account, fields=["name"])(request.POST, instance=account)
    Account.objects.filter(pk=account.pk).update(balance=1)

    with transaction.atomic():
        assert edit.accepts(form)
        form.save()

    account.refresh_from_db()
    assert (account.name, account.balance) == ("Lovelace", Decimal(1))


@pytest.mark.parametrize("site", ["postgres"], indirect=True)
def test_the_admin_saves_what_it_reads_after_it_has_locked_the_row(
    site: None, account: Account, settings: Any, boss: Client
) -> None:
    rows = Account.objects.using("postgres").filter(pk=account.pk)
    Account.objects.using("postgres").create(
        pk=account.pk, name=account.name, balance=100, opening_balance=100
    )
    opened = fields_of(boss.get(page_of(account)))
    # What is read elsewhere comes from a replica.
    settings.DATABASE_ROUTERS = ["tests.integration.edit_site.ToPostgres"]

    with CaptureQueriesContext(connections["postgres"]) as sent:
        assert boss.post(page_of(account), {**opened, "name": "Lovelace"}).status_code == 302

    texts = [query["sql"] for query in sent if 'FROM "testproject_account"' in query["sql"]]
    assert [text.endswith("FOR UPDATE") for text in texts][:2] == [True, False]
    assert rows.get().name == "Lovelace"
    rows.delete()


def test_the_second_click_of_one_user_is_no_conflict(account: Account, ada: Client) -> None:
    sent = {**fields_of(ada.get(page_of(account))), "name": "Lovelace"}
    assert ada.post(page_of(account), sent).status_code == 302

    assert ada.post(page_of(account), sent).status_code == 302
    assert held(account) == []


def test_what_is_sent_twice_adds_no_row_of_an_inline_twice(account: Account, ada: Client) -> None:
    opened = fields_of(ada.get(page_of(account)))
    sent = {**opened, "fees-TOTAL_FORMS": "1", "fees-0-amount": "3", "fees-0-account": account.pk}
    assert ada.post(page_of(account), sent).status_code == 302

    page = ada.post(page_of(account), sent)

    assert [part.label for part in page.context["distlock_edit"].changes] == ["Fees"]
    assert account.fees.count() == 1


def test_the_list_saves_what_was_typed_and_only_over_what_it_had_shown(
    account: Account, ada: Client
) -> None:
    Account.objects.exclude(pk=account.pk).delete()
    other = open_account("Bob", Decimal(1))
    changelist = reverse(LIST)
    opened = {**fields_of(ada.get(changelist)), "_save": "Save"}
    typed = next(key for key, value in opened.items() if value == account.name)
    typed = typed.removeprefix("initial-")
    Account.objects.filter(pk=account.pk).update(name="by the import", balance=7)
    Account.objects.filter(pk=other.pk).update(name="newest")

    page = ada.post(changelist, {**opened, typed: "typed"})

    assert "It was changed after you had opened the list" in page.content.decode()
    account.refresh_from_db()
    assert (account.name, account.balance) == ("by the import", Decimal(7))
    opened = {**fields_of(ada.get(changelist)), "_save": "Save"}
    Account.objects.filter(pk=account.pk).update(balance=8)
    assert ada.post(changelist, {**opened, typed: "typed"}).status_code == 302
    account.refresh_from_db()
    other.refresh_from_db()
    assert (account.name, account.balance, other.name) == ("typed", Decimal(8), "newest")
    assert ada.post(changelist, {**opened, typed: "typed"}).status_code == 302


def test_fields_of_the_form_alone_are_compared_too(
    account: Account, ada: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithFees(ModelForm):  # type: ignore[type-arg]
        count = forms.CharField()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fields["count"].initial = self.instance.fees.count()

    monkeypatch.setattr(edit_site.AccountAdmin, "form", WithFees)
    monkeypatch.setattr(edit_site.AccountAdmin, "inlines", ())
    opened = fields_of(ada.get(page_of(account)))
    Fee.objects.create(account=account, amount=3)

    page = ada.post(page_of(account), opened)

    [change] = page.context["distlock_edit"].changes
    assert (change.label, change.shown) == ("Count", "1")


def test_formsets_with_arguments_of_their_own_are_compared(
    account: Account, ada: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signed(BaseInlineFormSet):  # type: ignore[type-arg]
        def __init__(self, *args: Any, signer: str, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    def terms(self: Any, *args: Any) -> Any:
        return {**super(edit_site.AccountAdmin, self).get_formset_kwargs(*args), "signer": "Ada"}

    monkeypatch.setattr(edit_site.FeeInline, "formset", Signed)
    monkeypatch.setattr(edit_site.AccountAdmin, "get_formset_kwargs", terms, raising=False)
    opened = fields_of(ada.get(page_of(account)))

    assert ada.post(page_of(account), {**opened, "name": "typed"}).status_code == 302


def test_inlines_of_inlines_are_told_by_the_check() -> None:
    nested = type("Nested", (edit_site.FeeInline,), {"inlines": (edit_site.FeeInline,)})
    made = type("NestedAdmin", (edit_site.AccountAdmin,), {"inlines": (nested,)})

    [found] = made(Account, edit_site.site).check()

    assert (found.id, found.obj) == ("distlock.W050", made)
    assert found.msg == "NestedAdmin: the inlines of Nested are not compared."


def test_a_template_without_the_place_for_it_is_told(  # noqa: PLR0917
    account: Account,
    ada: Client,
    settings: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "bare.html").write_text("{{ adminform.form }}")
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    monkeypatch.setattr(edit_site.AccountAdmin, "change_form_template", "bare.html")

    with caplog.at_level(logging.WARNING, "django_distlock"):
        ada.get(page_of(account))

    assert "bare.html has no block form_top" in caplog.text


def test_rights_are_asked_again_when_a_page_renews_its_lock(account: Account, ada: Client) -> None:
    opened = fields_of(ada.get(page_of(account)))
    assert ask(ada, opened, "renew").json() == {"state": "held"}
    take_away(ada, "change_account")

    told = ask(ada, opened, "renew").json()

    assert told["state"] == "refused"
    assert told["message"].startswith("You may not change this any more.")
    assert held(account) == []
    assert ask(ada, opened, "begin").json()["state"] == "refused"
    assert held(account) == []


def test_rights_are_asked_again_when_a_lock_is_taken_over(
    account: Account, ada: Client, chief: Client
) -> None:
    ada.get(page_of(account))
    shown = fields_of(chief.get(page_of(account)))
    take_away(chief, "take_over_methodlock")

    ask(chief, shown, "take-over", distlock_take_over=shown["distlock_take_over"])

    assert f"{name_of(ada)}" in held(account)[0].holder.purpose


def test_rights_to_take_over_in_a_page_of_ones_own_are_asked_again(
    account: Account, ada: Client, chief: Client
) -> None:
    url = reverse("rename", args=[account.pk])
    ada.get(url)
    shown = fields_of(chief.get(url))
    take_away(chief, "take_over_methodlock")

    chief.post(reverse("distlock_edit_lock"), {**shown, "what": "take-over"})

    assert f"{name_of(ada)}" in held(account)[0].holder.purpose


def test_a_ticket_ends_with_its_session(account: Account, ada: Client, settings: Any) -> None:
    opened = fields_of(ada.get(page_of(account)))
    settings.SESSION_COOKIE_AGE = -1
    request = post(distlock_edit=opened["distlock_edit"])
    request.user = User.objects.get(username=name_of(ada))

    assert editing.read_ticket(request) is None


def test_a_page_asks_no_query_for_each_row_of_a_relation(boss: Client) -> None:
    group = Group.objects.create(name=uuid.uuid4().hex)
    url = reverse("admin:auth_group_change", args=[group.pk])
    boss.get(url)
    counts = []
    for some in (1, 40):
        group.permissions.set(Permission.objects.all()[:some])
        with CaptureQueriesContext(connections["default"]) as sent:
            boss.get(url)
        counts.append(len(sent))

    assert counts[1] - counts[0] < 5


def test_a_deletion_and_a_list_ask_once_who_edits(
    account: Account, ada: Client, bob: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    Account.objects.exclude(pk=account.pk).delete()
    rows = [account, *(open_account(f"Bob {number}", Decimal(1)) for number in range(3))]
    ada.get(page_of(account))
    asked = []
    real = type(locks["default"]).held

    def spy(self: Any, key: Any = None) -> Any:
        asked.append(key)
        return real(self, key)

    monkeypatch.setattr(type(locks["default"]), "held", spy)
    keys = [row.pk for row in rows]
    action = {"action": "delete_selected", "_selected_action": keys, "post": "yes"}
    page = bob.post(reverse(LIST), action)
    assert page.content.decode().count(f"Being edited by {name_of(ada)}") == 1
    assert len(asked) == 1

    opened = {**fields_of(bob.get(reverse(LIST))), "_save": "Save"}
    typed = {key: f"typed {key}" for key in opened if key.startswith("form-") and "name" in key}
    asked.clear()
    page = bob.post(reverse(LIST), {**opened, **typed})
    assert page.content.decode().count(f"Being edited by {name_of(ada)}") == 1
    assert len(asked) == 1


def test_what_is_edited_is_not_deleted_with_something_else(account: Account, ada: Client) -> None:
    fee = Fee.objects.create(account=account, amount=3)
    boss, other = (client_of(*EDITOR, "delete_fee") for _ in range(2))
    boss.get(reverse("admin:testproject_fee_change", args=[fee.pk]))

    page = other.post(
        reverse("admin:testproject_account_delete", args=[account.pk]), {"post": "yes"}
    )

    assert f"Being edited by {name_of(boss)}" in page.content.decode()
    assert Fee.objects.filter(pk=fee.pk).exists()


def test_users_who_are_not_logged_in_are_told_apart_by_their_browsers(account: Account) -> None:
    url = reverse("rename", args=[account.pk])
    first, second = Client(), Client()
    first.get(url)

    assert "Save" in first.get(url).content.decode()
    page = second.get(url).content.decode()
    assert "Being edited by somebody since" in page
    assert "Save" not in page


def test_users_who_are_not_logged_in_see_no_host_and_process(account: Account) -> None:
    with lock(f"edit:testproject.account:{account.pk}", purpose="the nightly import"):
        page = Client().get(reverse("rename", args=[account.pk])).content.decode()

    assert "Being edited by the nightly import since" in page
