"""ObjectLocksMixin: who holds the locks of an object, on its page in the admin, and the button to free them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.urls import path, reverse
from django.utils.html import escape

from django_distlock import lock, locks
from django_distlock.admin import HeldLockAdmin, ObjectLocksMixin
from django_distlock.contrib.editing.admin import EditLockMixin
from django_distlock.models import HeldLock
from testproject.models import Account
from testproject.settings import DISTLOCK
from testproject.urls import urlpatterns
from tests.contract.crew import taken

from .aliases import DOWN, MEMORY
from .staff import FORCE, LIST, client_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from django.db.models import Model
    from django.http import HttpRequest
    from django.test import Client
    from pytest_django import Settings

    from tests.fixtures.redis import Redis

SEES = "view_account", "change_account", "view_methodlock"
FREES = *SEES, "force_release_methodlock"


class AccountAdmin(ObjectLocksMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    def get_object_locks(self, request: HttpRequest, obj: Model) -> Iterable[str | Model]:
        return [obj, f"fee:{obj.pk}"]


class EditedFirst(EditLockMixin, ObjectLocksMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    object_locks_using = "default"


class EditedLast(ObjectLocksMixin, EditLockMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    object_locks_using = ("default",)


def serve(settings: Settings, kind: Any, *, with_locks: bool = True) -> None:
    site = admin.AdminSite()
    site.register(Account, kind)
    if with_locks:
        site.register(HeldLock, HeldLockAdmin)
    settings.ROOT_URLCONF = (path("admin/", site.urls), *urlpatterns)


@pytest.fixture(autouse=True)
def aliases(settings: Settings) -> Iterator[None]:
    settings.DISTLOCK = {"default": {}, "memory": MEMORY}
    serve(settings, AccountAdmin)
    yield
    locks.close()


def page_of(account: Account) -> str:
    return reverse("admin:testproject_account_change", args=[account.pk])


def shown(client: Client, account: Account) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names and aliases of the locks on the page of the account."""
    rows = client.get(page_of(account)).context["distlock_rows"]
    return [(row.held.name, row.aliases) for row in rows]


def test_it_shows_who_holds_the_locks_of_the_object_on_each_alias(
    account: Account, redis: Redis, settings: Settings
) -> None:
    settings.DISTLOCK = {"default": {}, "memory": MEMORY, "redis": DISTLOCK["redis"]}
    client = client_of(*SEES)
    name = f"testproject.account:{account.pk}"
    assert shown(client, account) == []
    assert "Nobody holds a lock." in client.get(page_of(account)).text

    with (
        lock(account, purpose="the yearly report") as lease,
        lock(account, using="redis"),
        lock(f"fee:{account.pk}", using="memory"),
        lock("another"),
    ):
        page = client.get(page_of(account)).text
        assert shown(client, account) == [
            (name, ("default",)),
            (f"fee:{account.pk}", ("memory",)),
            (name, ("redis",)),
        ]
    assert "Locks of this object" in page
    assert escape(lease.holder) in page
    assert 'action="/' not in page.partition("distlock-object")[2].partition("</table>")[0]


def test_the_page_of_a_new_object_has_none(account: Account) -> None:
    page = client_of(*SEES, "add_account").get(reverse("admin:testproject_account_add"))

    assert page.status_code == 200
    assert "distlock-object" not in page.text


def test_who_may_not_see_locks_sees_none(account: Account) -> None:
    with lock(account):
        page = client_of("view_account", "change_account").get(page_of(account)).text

    assert "distlock" not in page


@pytest.mark.parametrize("with_locks", [True, False])
@pytest.mark.parametrize("permissions", [SEES, FREES])
def test_the_button_needs_a_permission_of_its_own_and_a_site_with_the_locks(
    account: Account, settings: Settings, permissions: tuple[str, ...], with_locks: bool
) -> None:
    serve(settings, AccountAdmin, with_locks=with_locks)

    with lock(account):
        page = client_of(*permissions).get(page_of(account)).text

    assert "Locks of this object" in page
    assert ("force-release/?lock=" in page) is (permissions == FREES and with_locks)


def test_the_button_frees_it_after_a_confirmation_and_comes_back(account: Account) -> None:
    client, address = client_of(*FREES), page_of(account)
    lease = taken(account)
    page = client.get(address).text
    link = page.partition('distlock-danger" href="')[2].partition('"')[0].replace("&amp;", "&")

    question = client.get(link)
    confirmed = {"lock": question.context["rows"][0].value, "next": question.context["next"]}
    assert f'value="{address}"' in question.text
    assert lease.held
    answer = client.post(FORCE, confirmed)

    assert (answer.status_code, answer.headers["Location"]) == (302, address)
    assert lease.lost
    assert shown(client, account) == []
    entry = LogEntry.objects.get(object_id=lease.request.key)
    assert entry.get_change_message().startswith("Forced the release on alias “default”")
    assert entry.user_id == int(client.session["_auth_user_id"])


@pytest.mark.parametrize("elsewhere", ["https://evil.example/", "//evil.example", "javascript:x"])
def test_it_goes_to_no_other_site(account: Account, elsewhere: str) -> None:
    client = client_of(*FREES)
    with lock(account):
        words = {"lock": client.get(page_of(account)).context["distlock_rows"][0].value}

        question = client.get(FORCE, {**words, "next": elsewhere})

        assert question.context["next"] == LIST
        assert elsewhere not in question.text
    answer = client.post(FORCE, {**words, "next": elsewhere})
    assert answer.headers["Location"] == LIST


def test_what_is_down_or_wrong_is_told_and_does_not_hide_the_others(
    account: Account, settings: Settings
) -> None:
    settings.DISTLOCK = {"default": {}, "down": DOWN, "wrong": {"BACKEND": "redis"}}

    with lock(account):
        page = client_of(*SEES).get(page_of(account))

    assert [row.aliases for row in page.context["distlock_rows"]] == [("default",)]
    assert [*page.context["distlock_problems"]] == ["wrong", "down"]
    assert "<strong>down</strong>" in page.text


@pytest.mark.parametrize("kind", [EditedFirst, EditedLast])
def test_it_goes_together_with_edit_locks(
    account: Account, settings: Settings, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DISTLOCK = {"default": {}, "down": DOWN}
    serve(settings, kind)

    with lock(account):
        page = client_of(*FREES).get(page_of(account))

    assert 'name="distlock_edit"' in page.text
    assert "distlock-object" in page.text
    assert page.context["distlock_problems"] == {}
    assert not caplog.records
