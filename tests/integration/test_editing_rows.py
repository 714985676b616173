"""Edit locks: what a form saves is what its user has typed, and nothing else."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.exceptions import ImproperlyConfigured
from django.core.files.base import ContentFile
from django.db import connections, models, transaction
from django.forms import (
    CharField,
    ModelForm,
    MultiValueField,
    MultiWidget,
    PasswordInput,
    TextInput,
    modelform_factory,
)
from django.test import Client
from django.test.utils import CaptureQueriesContext, isolate_apps
from django.urls import include, path, reverse

from django_distlock.contrib import editing
from django_distlock.contrib.editing.admin import EditLockMixin
from testproject.models import Account, Fee
from testproject.services import open_account

from .edit_site import AccountAdmin, fields_of
from .staff import client_of, superuser
from .test_editing import (
    EDITOR,
    ada,
    ask,
    bob,
    chief,
    held,
    name_of,
    opened_by_me,
    page_of,
    post,
    saves,
    site,
)

__all__ = ["ada", "bob", "chief", "site"]

LIST = "admin:testproject_account_changelist"

with isolate_apps("testproject"):

    class Scan(models.Model):  # noqa: DJ008 - nobody reads it
        """A row with a file."""

        name = models.CharField(max_length=100)
        file = models.FileField(blank=True)
        marks = models.JSONField(default=dict, blank=True)
        note = models.TextField(blank=True)
        author = models.ForeignKey(
            User, models.SET_NULL, null=True, blank=True, db_constraint=False, related_name="+"
        )

        class Meta:
            app_label = "testproject"
            ordering = ("author__username", "pk")


class ScanAdmin(EditLockMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("pk", "name", "file")
    list_editable = ("name", "file")
    ordering = ("pk",)


class Halves(MultiWidget):
    """Two inputs, for a dict of two values."""

    def __init__(self, attrs: Any = None) -> None:
        super().__init__([TextInput(), TextInput()], attrs)

    def decompress(self, value: Any) -> list[Any]:
        return [value["amount"], value["currency"]] if value else []


class TwoInputs(MultiValueField):
    """A field of two inputs, which Django cannot hide, like that of an amount with its currency."""

    widget = Halves

    def __init__(self, *, initial: Any = None, **_: Any) -> None:
        super().__init__((CharField(), CharField()), initial=initial)

    def compress(self, data_list: Any) -> Any:
        return dict(zip(("amount", "currency"), data_list, strict=True))


class PriceAdmin(ScanAdmin):
    list_display = ("pk", "name", "marks")
    list_editable = ("name", "marks")
    formfield_overrides = {models.JSONField: {"form_class": TwoInputs}}  # noqa: RUF012 - as Django does


class WithTools(admin.ModelAdmin):  # type: ignore[type-arg]
    """Includes the URLs of another module."""

    def get_urls(self) -> Any:
        return [path("tools/", include(([], "tools"))), *super().get_urls()]


class RequestForm(ModelForm):  # type: ignore[type-arg]
    """A form that is given the request."""

    def __init__(self, *args: Any, request: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request = request


class InAnotherClass(admin.ModelAdmin):  # type: ignore[type-arg]
    """Gives its form the request by a class that makes forms of another class."""

    form = RequestForm

    def get_form(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        form: Any = super().get_form(request, *args, **kwargs)

        class WithRequest(form):  # type: ignore[misc]
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                return form(*args, request=request, **kwargs)

        return WithRequest


class ByPartial(admin.ModelAdmin):  # type: ignore[type-arg]
    """Gives its form the request by a callable that is no class."""

    form = RequestForm

    def get_form(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        form: Any = super().get_form(request, *args, **kwargs)
        made = partial(form, request=request)
        vars(made)["base_fields"] = form.base_fields  # for the admin's fieldsets
        return made


class Narrowed(admin.ModelAdmin):  # type: ignore[type-arg]
    """Changes the fields of its form for each request."""

    def get_form(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        form: Any = super().get_form(request, *args, **kwargs)
        form.base_fields["name"].disabled = True
        return form


class WithoutSuper(EditLockMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    """Has one form, which is not made for each request."""

    def get_form(self, *_: Any, **__: Any) -> Any:
        return modelform_factory(Account, fields=("name", "balance"))


@pytest.fixture
def register(settings: Any) -> Callable[..., None]:
    """Registers a model, by default accounts, with an admin."""

    def register(kind: type, model: type[models.Model] = Account) -> None:
        site = admin.AdminSite()
        site.register(model, kind)
        settings.ROOT_URLCONF = (path("admin/", site.urls),)

    return register


@pytest.fixture
def scans(
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
    register: Callable[..., None],
    tmp_path: Path,
) -> Iterator[Any]:
    """The rows of Scan, in a table of their own, which the admin serves."""
    monkeypatch.setitem(apps.all_models["testproject"], "scan", Scan)
    register(ScanAdmin, Scan)
    settings.MEDIA_ROOT = tmp_path
    with connections["default"].schema_editor() as editor:
        editor.create_model(Scan)
    yield models.QuerySet(Scan)
    LogEntry.objects.filter(content_type__model="scan").delete()
    with connections["default"].schema_editor() as editor:
        editor.delete_model(Scan)


@pytest.fixture
def boss() -> Client:
    return superuser()


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


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [InAnotherClass, ByPartial, Narrowed])
def test_the_form_of_another_get_form_is_compared_and_kept_as_it_is(
    kind: Any, is_first: bool, account: Account, boss: Client, register: Callable[..., None]
) -> None:
    bases = (kind, EditLockMixin) if is_first else (EditLockMixin, kind)
    register(type("Admin", (*bases, admin.ModelAdmin), {}))
    opened = fields_of(boss.get(page_of(account)))
    Account.objects.filter(pk=account.pk).update(balance=50)

    page = boss.post(page_of(account), {**opened, "name": "Lovelace", "balance": "70"})

    assert [part.label for part in page.context["distlock_edit"].changes] == ["Balance"]
    assert boss.post(page_of(account), fields_of(page)).status_code == 302
    account.refresh_from_db()
    assert account.balance == 70
    assert (account.name == "Lovelace") == (kind is not Narrowed)


def test_a_form_that_is_not_compared_is_not_saved(
    account: Account, boss: Client, register: Callable[..., None]
) -> None:
    register(WithoutSuper)
    opened = fields_of(boss.get(page_of(account)))

    with pytest.raises(ImproperlyConfigured, match=r"WithoutSuper\.get_form\(\) must return"):
        boss.post(page_of(account), {**opened, "balance": "70"})

    account.refresh_from_db()
    assert account.balance == 100


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


@pytest.mark.parametrize("site", ["postgres"], indirect=True)
def test_a_model_that_is_ordered_by_a_relation_is_saved(
    site: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(apps.all_models["testproject"], "scan", Scan)
    with connections["postgres"].schema_editor() as editor:
        editor.create_model(Scan)
    row: Any = models.QuerySet(Scan).using("postgres").create(name="a")
    try:
        with transaction.atomic("postgres"):
            assert saves(row, opened_by_me(row), "b")
    finally:
        with connections["postgres"].schema_editor() as editor:
            editor.delete_model(Scan)


def test_a_relation_that_points_nowhere_is_shown_as_it_is(scans: Any, boss: Client) -> None:
    row = scans.create(name="a")
    url = reverse("admin:testproject_scan_change", args=[row.pk])
    opened = fields_of(boss.get(url))
    scans.update(author=999_999)

    page = boss.post(url, {**opened, "name": "typed"})

    [change] = page.context["distlock_edit"].changes
    assert (change.label, change.shown) == ("Author", "999999")
    assert boss.post(url, fields_of(page)).status_code == 302


@pytest.mark.parametrize("field", ["name", "marks_0"])
def test_a_list_with_a_field_of_two_inputs_is_saved(
    scans: Any, boss: Client, register: Callable[..., None], field: str
) -> None:
    register(PriceAdmin, Scan)
    scans.create(name="a", marks={"amount": "3", "currency": "EUR"})
    url = reverse("admin:testproject_scan_changelist")
    listed = fields_of(boss.get(url))

    sent = {**listed, "action": "", f"form-0-{field}": "4", "_save": ""}
    page = boss.post(url, sent)
    assert page.status_code == 302, page.context["cl"].formset.errors

    row = scans.get()
    assert "4" in (row.name, row.marks["amount"])
    assert row.marks["currency"] == "EUR"


@pytest.mark.parametrize(
    "widget",
    [
        PasswordInput(),
        TextInput({"type": "password"}),
        MultiWidget({"": PasswordInput()}),
    ],
)
def test_what_a_password_field_hides_is_not_shown_beside_the_form(
    widget: Any, account: Account, boss: Client, register: Callable[..., None]
) -> None:
    widget.decompress = lambda value: [value]
    form = modelform_factory(Account, fields=("name",), widgets={"name": widget})
    register(type("Admin", (EditLockMixin, admin.ModelAdmin), {"form": form}))
    opened = fields_of(boss.get(page_of(account)))

    # A page whose values are not known, so that all of them count as changed.
    page = boss.post(page_of(account), {**opened, "distlock_edit": "", "name": "guessed"})

    [change] = page.context["distlock_edit"].changes
    assert change.shown == editing.MASKED


def test_an_admin_that_includes_other_urls_is_served(
    account: Account, boss: Client, register: Callable[..., None]
) -> None:
    register(type("Admin", (EditLockMixin, WithTools), {}))

    assert boss.get(page_of(account)).status_code == 200


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


def test_a_list_is_shown_again_if_one_of_its_rows_was_deleted(
    account: Account, ada: Client
) -> None:
    Account.objects.exclude(pk=account.pk).delete()
    open_account("Bob", Decimal(1))
    opened = {**fields_of(ada.get(reverse(LIST))), "_save": "Save"}
    Account.objects.exclude(pk=account.pk).delete()
    first, last = sorted(key for key in opened if re.fullmatch(r"form-\d-name", key))

    page = ada.post(reverse(LIST), {**opened, first: "typed", last: "typed"})

    assert [[*each] for each in page.context["cl"].formset.errors].count(["id"]) == 1
    assert 'value="typed"' in page.content.decode()


def test_the_list_saves_over_text_that_a_browser_does_not_send_as_it_is(
    account: Account, ada: Client
) -> None:
    Account.objects.exclude(pk=account.pk).delete()
    for stored in (" Ada ", "Ada\nLovelace"):
        Account.objects.filter(pk=account.pk).update(name=stored)
        opened = {**fields_of(ada.get(reverse(LIST))), "_save": "Save"}
        opened["initial-form-0-name"] = stored.replace("\n", "\r\n")

        assert ada.post(reverse(LIST), {**opened, "form-0-name": "typed"}).status_code == 302

        account.refresh_from_db()
        assert account.name == "typed"


def test_the_list_saves_a_file_and_no_row_that_was_left_as_it_is(scans: Any, boss: Client) -> None:
    rows = [scans.create(name=name, file=file) for name, file in [("a", "a.txt"), ("b", "")]]
    edited = scans.create(name="c", file="c.txt")
    superuser().get(reverse("admin:testproject_scan_change", args=[edited.pk]))
    changelist = reverse("admin:testproject_scan_changelist")
    opened = {**fields_of(boss.get(changelist)), "_save": "Save"}
    files = {f"form-{row}-file": ContentFile(b"new", f"new-{row}.txt") for row in (0, 1)}

    assert boss.post(changelist, {**opened, **files, "form-0-name": "typed"}).status_code == 302

    found = [*scans.order_by("pk").values_list("name", "file")]
    assert found == [("typed", "new-0.txt"), ("b", "new-1.txt"), ("c", "c.txt")]
    logged = LogEntry.objects.filter(content_type__model="scan").order_by("object_id")
    assert [entry.object_id for entry in logged] == [str(row.pk) for row in rows]


def test_a_field_whose_default_is_a_function_is_compared(scans: Any, boss: Client) -> None:
    row = scans.create(name="a", marks={"by": "Ada"})
    url = reverse("admin:testproject_scan_change", args=[row.pk])
    opened = fields_of(boss.get(url))
    scans.update(marks={"by": "the import"})

    page = boss.post(url, {**opened, "name": "typed"})

    assert scans.get().marks == {"by": "the import"}
    assert [part.label for part in page.context["distlock_edit"].changes] == ["Marks"]
    assert boss.post(url, fields_of(page)).status_code == 302
    assert scans.get().marks == {"by": "Ada"}


def test_a_field_that_the_page_did_not_have_is_not_emptied(
    scans: Any, boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fixed(_self: Any, _request: Any, row: Any) -> list[str]:
        return ["marks", *row.marks]

    monkeypatch.setattr(ScanAdmin, "get_readonly_fields", fixed)
    row = scans.create(name="a", marks=["note"], note="by Ada")
    url = reverse("admin:testproject_scan_change", args=[row.pk])
    opened = fields_of(boss.get(url))
    scans.update(marks=[])

    page = boss.post(url, {**opened, "name": "typed"})

    assert scans.get().note == "by Ada"
    assert [part.label for part in page.context["distlock_edit"].changes] == ["Note"]
    assert boss.post(url, {**fields_of(page), "note": "typed"}).status_code == 302
    assert scans.get().note == "typed"


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


@pytest.mark.parametrize("change", ["the permission is taken away", "the object is hidden"])
def test_rights_are_asked_again_when_a_lock_is_taken_over(
    account: Account, ada: Client, chief: Client, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    ada.get(page_of(account))
    shown = fields_of(chief.get(page_of(account)))
    if change == "the object is hidden":
        monkeypatch.setattr(AccountAdmin, "get_queryset", lambda *_: Account.objects.none())
    else:
        take_away(chief, "take_over_methodlock")

    ask(chief, shown, "take-over", distlock_take_over=shown["distlock_take_over"])

    assert name_of(ada) in held(account)[0].holder.purpose


def test_a_ticket_lives_on_with_a_session_that_each_request_extends(
    account: Account, ada: Client, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SESSION_SAVE_EVERY_REQUEST = True
    opened = fields_of(ada.get(page_of(account)))
    later = time.time() + settings.SESSION_COOKIE_AGE + 1
    monkeypatch.setattr("django.core.signing.time", SimpleNamespace(time=lambda: later))

    assert ask(ada, opened, "renew").json() == {"state": "held"}
    assert ada.post(page_of(account), {**opened, "name": "Lovelace"}).status_code == 302


def test_a_page_does_nothing_at_the_address_of_another_model(account: Account, ada: Client) -> None:
    Fee.objects.update_or_create(pk=account.pk, defaults={"account": account, "amount": 3})
    other = client_of("view_account", "change_fee", "take_over_methodlock")
    ada.get(page_of(account))
    shown = fields_of(other.get(page_of(account)))
    asked = {**shown, "distlock_take_over": held(account)[0].owner_digest}
    address = reverse("admin:testproject_fee_edit_lock")

    other.post(address, {**asked, "what": "take-over"})
    assert name_of(ada) in held(account)[0].holder.purpose

    ask(ada, fields_of(ada.get(page_of(account))), "leave")
    assert other.post(address, {**asked, "what": "begin"}).json()["state"] == "refused"
    assert held(account) == []


def test_a_ticket_ends_with_its_session(account: Account, ada: Client, settings: Any) -> None:
    opened = fields_of(ada.get(page_of(account)))
    settings.SESSION_COOKIE_AGE = -1
    request = post(distlock_edit=opened["distlock_edit"])
    request.user = User.objects.get(username=name_of(ada))

    assert editing.read_ticket(request) is None


def test_what_is_edited_is_not_deleted_with_something_else(account: Account, ada: Client) -> None:
    fee = Fee.objects.create(account=account, amount=3)
    bob, other = (client_of(*EDITOR, "delete_fee") for _ in range(2))
    bob.get(reverse("admin:testproject_fee_change", args=[fee.pk]))

    page = other.post(
        reverse("admin:testproject_account_delete", args=[account.pk]), {"post": "yes"}
    )

    assert f"Being edited by {name_of(bob)}" in page.content.decode()
    assert Fee.objects.filter(pk=fee.pk).exists()


def test_editors_are_called_by_their_names_in_any_script(account: Account, bob: Client) -> None:
    for name, told in (
        ("Jürgen Müller", "Jürgen Müller"),
        ("山田 太郎", "山田 太郎"),
        ("Ю. Константинопольский", "Ю. Константинопол..."),
        ("Ana\u202e", "Ana\\u202e"),
    ):
        editor = client_of(*EDITOR)
        User.objects.filter(username=name_of(editor)).update(first_name=name)
        editor.get(page_of(account))

        shown = bob.get(page_of(account)).content.decode()

        assert f"Being edited by {told} since " in shown
        ask(editor, fields_of(editor.get(page_of(account))), "leave")
