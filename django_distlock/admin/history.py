"""The rows of the lock table in the admin: also the locks that nobody holds any more."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.db import InterfaceError, OperationalError, connections, router
from django.forms.utils import to_current_timezone
from django.http import HttpResponseRedirect
from django.urls import reverse
from django.utils import formats, timezone
from django.utils.html import format_html
from django.utils.translation import gettext as _, gettext_lazy

from django_distlock.backends.database import DatabaseBackend, records
from django_distlock.backends.database.records import State
from django_distlock.engine.naming import LONGEST_LISTED, printable
from django_distlock.exceptions import InvalidLockBackend, first_line
from django_distlock.handler import locks
from django_distlock.models import MethodLock

from .live import ReadOnly
from .survey import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

#: Fields that no query may filter by: their values could be guessed letter by letter.
SECRETS = {"owner", "last_owner"}


class StateFilter(admin.SimpleListFilter):
    """Filters by state: held, stale, reserved, or free, by the server's current time."""

    title = gettext_lazy("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return State.choices

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(state=self.value()) if self.value() else queryset


@admin.register(MethodLock)
class MethodLockAdmin(ReadOnly):
    """Shows the rows of the locks in one database, as history; HeldLockAdmin shows who holds what now.

    To show the locks of another database too, register a subclass with another *using*, on
    another admin site or for a proxy model.
    """

    change_form_template = "admin/django_distlock/change_form.html"

    #: The alias in DATABASES; None: the one of the first database backend in DISTLOCK.
    using: str | None = None

    list_display = (
        "name",
        "state",
        "held_by",
        "since",
        "remaining",
        "fencing_token",
        "waiters",
        "alias",
    )
    list_filter = (StateFilter,)
    search_fields = ("description", "method_name")
    ordering = ("method_name",)
    show_full_result_count = False
    fields = readonly_fields = ("full_name", "key", *list_display[1:], "last_change")

    @admin.display(description=gettext_lazy("name"), ordering="description")
    def name(self, lock: MethodLock) -> str:
        return str(lock)

    @admin.display(description=gettext_lazy("name"))
    def full_name(self, lock: MethodLock) -> str:
        return _wrapped(lock.name)

    @admin.display(description=gettext_lazy("key"))
    def key(self, lock: MethodLock) -> str:
        return _wrapped(lock.method_name)

    @admin.display(description=gettext_lazy("state"), ordering="state")
    def state(self, lock: Any) -> str:
        return str(State(lock.state).label)

    @admin.display(description=gettext_lazy("holder"))
    def held_by(self, lock: MethodLock) -> str:
        return str(records.holder_of(lock) or self.get_empty_value_display())

    @admin.display(description=gettext_lazy("since"), ordering="acquired_at")
    def since(self, lock: Any) -> str:
        if lock.owner is None or lock.acquired_at is None:
            return self.get_empty_value_display()
        return _here(lock.acquired_at, lock.server_now)

    @admin.display(description=gettext_lazy("last change"))
    def last_change(self, lock: Any) -> str:
        return _here(lock.updated_at, lock.server_now)

    @admin.display(description=gettext_lazy("remaining"), ordering="available_at")
    def remaining(self, lock: Any) -> str:
        if lock.state == State.FREE:
            return self.get_empty_value_display()
        return Row(records.as_held(lock), ()).remaining

    @admin.display(description=gettext_lazy("waiters"), ordering="waiters")
    def waiters(self, lock: Any) -> Any:
        return lock.waiters

    @admin.display(description=gettext_lazy("alias"))
    def alias(self, lock: MethodLock) -> str:
        """Return the aliases of DISTLOCK that have this lock; if there are none, its kind and prefix."""
        aliases = [backend.alias for backend in self.backends_of(lock)]
        prefix = lock.method_name.rpartition("|")[0]
        return ", ".join(aliases) or printable(prefix) or self.get_empty_value_display()

    def has_module_permission(self, request: HttpRequest) -> bool:
        return False  # the page of the locks has a link

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        field = lookup.partition("__")[0]
        return field not in SECRETS and super().lookup_allowed(lookup, value, request)

    def get_queryset(self, request: HttpRequest) -> QuerySet[MethodLock]:
        return records.described(self.database).order_by(*self.ordering)

    @property
    def database(self) -> str:
        """The database whose locks are shown."""
        first = next((backend.options.using for backend in _database_backends()), None)
        return self.using or first or router.db_for_write(MethodLock)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for names in the form in which their column stores them."""
        if not search_term.isascii():
            search_term = json.dumps(search_term)[1:-1]
        return super().get_search_results(request, queryset, search_term)

    def backends_of(self, lock: MethodLock) -> Iterator[DatabaseBackend]:
        for backend in _database_backends():
            if backend.options.using == self.database and backend.keeps(lock.method_name):
                yield backend

    def changelist_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self._page(super().changelist_view, request, *args, **kwargs)

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self._page(super().changeform_view, request, *args, **kwargs)

    def _page(
        self, view: Callable[..., HttpResponse], request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show a page on a working connection; without one, show an error on the index page."""
        connection = connections[self.database]
        if connection.connection and not (connection.in_atomic_block or connection.is_usable()):
            connection.close()
        try:
            return view(request, *args, **kwargs)
        except (OperationalError, InterfaceError) as error:
            text = _("The database “%(database)s” cannot be read: %(error)s")
            facts = {"database": self.database, "error": printable(first_line(error))}
            self.message_user(request, text % facts, messages.ERROR)
            return HttpResponseRedirect(reverse("admin:index", current_app=self.admin_site.name))

    def history_view(self, request: HttpRequest, object_id: str, *args: Any) -> HttpResponse:
        """Show the page of the lock: it lists the forced releases."""
        lock = self.get_object(request, object_id)
        key = quote(lock.method_name if lock else object_id)
        url = reverse(
            "admin:django_distlock_heldlock_change", args=[key], current_app=self.admin_site.name
        )
        return HttpResponseRedirect(url)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        lock = context["original"]
        aliases = tuple(backend.alias for backend in self.backends_of(lock))
        if aliases and lock.state != State.FREE:
            context["row"] = Row(records.as_held(lock), aliases)
        return super().render_change_form(request, context, *args, **kwargs)


def _database_backends() -> Iterator[DatabaseBackend]:
    for alias in locks:
        # An alias with wrong settings must not hide the locks of the others.
        with suppress(InvalidLockBackend):
            if isinstance(backend := locks[alias], DatabaseBackend):
                yield backend


def _here(instant: datetime, server_now: datetime) -> str:
    """Return a time of the server by the clock and in the time zone of this machine."""
    here = to_current_timezone(timezone.now() - (server_now - instant))
    return formats.date_format(here, "SHORT_DATETIME_FORMAT")


def _wrapped(text: str) -> str:
    # A name may be one long word.
    shown = printable(text, LONGEST_LISTED)
    return format_html('<span style="overflow-wrap: anywhere">{}</span>', shown)
