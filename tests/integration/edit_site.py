"""A site where one user at a time edits an object: an admin with inlines and list_editable, and a page of its own."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

from django.contrib import admin
from django.contrib.auth import admin as auth
from django.contrib.auth.models import Group, User
from django.db import transaction
from django.forms import modelform_factory
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.template import engines
from django.urls import path
from django.views.i18n import JavaScriptCatalog

from django_distlock.backends.locmem import LocMemBackend
from django_distlock.contrib.editing import edit_lock, edit_lock_view
from django_distlock.contrib.editing.admin import EditLockMixin
from testproject.models import Account, Fee


class BoundToProcess(LocMemBackend):
    """A backend whose locks end with a process."""

    supports_detach = False


class ToPostgres:
    """A router that writes accounts to PostgreSQL."""

    def db_for_write(self, model: Any, **_hints: Any) -> str | None:
        return "postgres" if model is Account else None


class FeeInline(admin.TabularInline):  # type: ignore[type-arg]
    model = Fee
    extra = 0


class AccountAdmin(EditLockMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    inlines = (FeeInline,)
    list_display = ("pk", "name")
    list_editable = ("name",)
    save_as = True


class GroupAdmin(EditLockMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ("name", "permissions")


class FeeAdmin(EditLockMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass


class UserAdmin(EditLockMixin, auth.UserAdmin):  # type: ignore[type-arg]
    pass


site = admin.AdminSite()
site.register(Account, AccountAdmin)
site.register(Group, GroupAdmin)
site.register(Fee, FeeAdmin)
site.register(User, UserAdmin)

PAGE = """{% load distlock %}<form method="post">{% csrf_token %}{% edit_lock edit %}{{ form }}
{% if not edit.is_read_only %}<button>Save</button>{% endif %}</form>"""


def rename(request: HttpRequest, pk: int) -> HttpResponse:
    account = get_object_or_404(Account, pk=pk)
    edit = edit_lock(request, account)
    form = modelform_factory(Account, fields=["name"])(request.POST or None, instance=account)
    if request.method == "POST":
        with transaction.atomic():
            is_saved = edit.accepts(form)
            if is_saved:
                form.save()
        if is_saved:
            edit.release()
            return redirect("index")
    page = engines["django"].from_string(PAGE).render({"form": form, "edit": edit}, request)
    return HttpResponse(page)


def strict(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    """Middleware: no page may run a script or use a style that is not a file of this site."""

    def answer(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response["Content-Security-Policy"] = "default-src 'self'; form-action 'self'"
        return response

    return answer


def index(request: HttpRequest) -> HttpResponse:
    return HttpResponse("saved")


def addresses() -> tuple[Any, ...]:
    """Return the addresses of the site, made now."""
    return (
        path("", index, name="index"),
        path("admin/", site.urls),
        path("jsi18n/", JavaScriptCatalog.as_view(), name="jsi18n"),
        path("rename/<int:pk>/", rename, name="rename"),
        path("edit-lock/", edit_lock_view, name="distlock_edit_lock"),
    )


urlpatterns = addresses()


class Fields(HTMLParser):
    """Reads what a browser would send of the forms of a page, submit buttons left out."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}
        self.buttons: list[str] = []
        self._select = self._text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        name, kind = known.get("name") or "", known.get("type")
        if tag == "select":
            self._select = name
        elif tag == "textarea":
            self._text = name
            self.values[name] = ""
        elif tag == "option" and "selected" in known:
            self.values.setdefault(self._select, []).append(known["value"])
        elif tag == "button" or kind == "submit":
            self.buttons.append(name)
        elif tag == "input" and name and (kind not in {"checkbox", "radio"} or "checked" in known):
            self.values[name] = known.get("value") or ""

    def handle_data(self, data: str) -> None:
        if self._text:
            self.values[self._text] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea":
            self._text = ""


def fields_of(page: Any) -> dict[str, Any]:
    """Return what a browser would send of the form in a response, as it was opened."""
    values = Fields(page.content.decode()).values
    return {name: value for name, value in values.items() if "__prefix__" not in name}
