"""The pages of the locks, and edit locks, in the admins and themes of packages."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse
from selenium.webdriver.common.by import By

from django_distlock import lock
from django_distlock.contrib.editing.admin import EditLockMixin
from django_distlock.operators import holdings, survey
from tests.fixtures.browser import OpenBrowser
from tests.integration.edit_site import fields_of

from .models import Plain

FORCE = "admin:django_distlock_heldlock_force_release"
LOCKS = "admin:django_distlock_heldlock_changelist"
EDITED = [
    model
    for model, options in admin.site._registry.items()
    if model._meta.app_label == "stacks" and isinstance(options, EditLockMixin)
]


@pytest.fixture
def client(name: str) -> Client:
    """The browser of somebody who may do everything."""
    visitor = Client(raise_request_exception=True)
    visitor.force_login(User.objects.create_superuser(f"admin-{name}", password="-"))
    return visitor


def test_a_held_lock_is_listed_and_freed(client: Client, name: str) -> None:
    lease = lock(name).acquire()
    assert lease

    page = client.get(reverse(LOCKS))
    assert name in page.content.decode()
    (row,) = [row for row in survey(["default"])[0] if row.held.name == name]
    asked = client.get(reverse(FORCE), {"lock": row.value})
    assert name in asked.content.decode()
    client.post(reverse(FORCE), {"lock": row.value}, follow=True)

    assert lock(name, reentrant=False, timeout=0).acquire()


def test_a_free_lock_is_shown(client: Client, name: str) -> None:
    with lock(name):
        pass

    assert name in client.get(reverse(LOCKS), {"state": "free", "q": name}).content.decode()


@pytest.mark.parametrize("model", EDITED, ids=lambda model: model.__name__)
def test_an_object_is_edited_by_one_user_at_a_time(client: Client, name: str, model: Any) -> None:
    row = model.objects.create(name=name)
    page = reverse(f"admin:{model._meta.label_lower.replace('.', '_')}_change", args=[row.pk])
    second = Client()
    second.force_login(User.objects.create_superuser(f"second-{name}", password="-"))

    opened = client.get(page)
    refused = second.get(page)
    assert re.search(rf"admin-{name}", refused.content.decode())
    saved = client.post(page, {**fields_of(opened), "name": f"{name} saved"}, follow=True)

    assert saved.status_code == 200
    row.refresh_from_db()
    assert row.name == f"{name} saved"


#: How light a colour is, as in WCAG.
LIGHT = """const light = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
const style = getComputedStyle(arguments[0]);
return [style.color, style.backgroundColor].map(light).sort();"""


def test_who_edits_and_the_button_to_take_over_are_readable(
    client: Client, name: str, live_server: Any, open_browser: OpenBrowser
) -> None:
    model: Any = Plain
    row = model.objects.create(name=name)
    page = reverse("admin:stacks_plain_change", args=[row.pk])
    second = Client()
    second.force_login(User.objects.create_superuser(f"second-{name}", password="-"))
    browser = open_browser()
    browser.get(f"{live_server.url}/admin/jsi18n/")
    session = second.cookies["sessionid"].value
    browser.add_cookie({"name": "sessionid", "value": session})

    client.get(page)

    browser.get(f"{live_server.url}{page}")

    for selector in (".distlock-edit-message", "[value=take-over]"):
        shown = browser.find_element(By.CSS_SELECTOR, selector)
        dark, light = browser.execute_script(LIGHT, shown)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
        assert shown.rect["x"] >= 0
        assert shown.rect["width"] > 7 * len(shown.text)
        assert shown.value_of_css_property("text-indent") == "0px"


@pytest.mark.skipif(not apps.is_installed("reversion"), reason="django-reversion's pages")
def test_a_row_is_not_reverted_while_somebody_edits_it(client: Client, name: str) -> None:
    from reversion.models import Version

    from .models import Place

    row = Place.objects.create(name=name)
    page = reverse("admin:stacks_place_change", args=[row.pk])
    sent = {**fields_of(client.get(page)), "name": f"{name} first"}
    assert client.post(page, sent).status_code == 302
    sent = {**fields_of(client.get(page)), "name": f"{name} second"}
    assert client.post(page, sent).status_code == 302
    version = Version.objects.get_for_object(row).last()
    assert version
    revert = reverse("admin:stacks_place_revision", args=[row.pk, version.pk])
    second = Client()
    second.force_login(User.objects.create_superuser(f"second-{name}", password="-"))
    second.get(page)

    read = client.get(revert)
    assert f"second-{name}" in read.content.decode()
    assert client.post(revert, sent).status_code == 403
    row.refresh_from_db()
    assert row.name == f"{name} second"

    opened = fields_of(second.get(revert))
    assert second.post(revert, opened).status_code == 302
    row.refresh_from_db()
    assert row.name == f"{name} first"


@pytest.mark.skipif(not apps.is_installed("reversion"), reason="django-reversion's middleware")
@pytest.mark.skipif(connection.vendor == "sqlite", reason="the locks are in the same file")
def test_an_object_is_edited_in_the_transaction_of_a_revision(
    client: Client, name: str, settings: Any
) -> None:
    from reversion.models import Version

    from .models import Place

    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "reversion.middleware.RevisionMiddleware"]
    row = Place.objects.create(name=name)
    page = reverse("admin:stacks_place_change", args=[row.pk])
    opened = fields_of(client.get(page))
    Place.objects.filter(pk=row.pk).update(amount=7)

    page_again = client.post(page, {**opened, "name": f"{name} first"})
    assert "It was changed after you had opened it" in page_again.content.decode()
    assert client.post(page, fields_of(page_again)).status_code == 302
    row.refresh_from_db()
    assert row.name == f"{name} first"
    assert Version.objects.get_for_object(row).count() == 1
    assert holdings("default", f"edit:stacks.place:{row.pk}") == []


@pytest.mark.skipif(not apps.is_installed("parler"), reason="django-parler's translations")
def test_a_translation_that_was_changed_meanwhile_is_told(client: Client, name: str) -> None:
    from .models import Translated

    def change(language: str) -> None:
        other = Translated.objects.get(pk=row.pk)
        other.set_current_language(language)
        other.title = f"{language} by others"
        other.save()

    def titles() -> list[tuple[str, str]]:
        rows = Translated.translations.field.model.objects.filter(master=row.pk)
        return sorted(rows.values_list("language_code", "title"))

    row = Translated.objects.language("en").create(name=name, title="first")
    page = reverse("admin:stacks_translated_change", args=[row.pk])
    for language in ("en", "de"):  # the first is changed, the second added
        where = f"{page}?language={language}"
        opened = {**fields_of(client.get(where)), "title": f"{language} typed"}
        change(language)
        shown = client.post(where, opened)
        assert [part.shown for part in shown.context["distlock_edit"].changes] == [
            f"{language} by others"
        ]
        assert dict(titles())[language] == f"{language} by others"
        assert client.post(where, fields_of(shown)).status_code == 302
        assert dict(titles())[language] == f"{language} typed"

    opened = {**fields_of(client.get(f"{page}?language=de")), "title": "de again"}
    change("en")
    assert client.post(f"{page}?language=de", opened).status_code == 302
    assert titles() == [("de", "de again"), ("en", "en by others")]
