"""The admin's forced release: it asks for confirmation, and frees only the leases that it showed."""

from __future__ import annotations

from copy import copy
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import django
from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.core.exceptions import PermissionDenied
from django.db import (
    DatabaseError,
    InterfaceError,
    OperationalError,
    connections,
    router,
    transaction,
)
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from .backends.base import tell_forced
from .backends.database import DatabaseBackend, records
from .engine.naming import printable
from .exceptions import first_line
from .models import LONGEST_SHOWN, MethodLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    from .engine.values import Held

_Page = TypeVar("_Page")
#: Locks on one confirmation page: more than this would be confirmed without reading.
MOST_AT_ONCE = 100
#: Digits that always fit into 64 bits.
LONGEST_KEY = 18


def on_a_live_connection(view: Callable[..., _Page]) -> Callable[..., _Page]:
    """Show a page on a working connection; without one, show an error on the index page."""

    @wraps(view)
    def page(self: ForcedRelease, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        connection = connections[self.database]
        if connection.connection and not (connection.in_atomic_block or connection.is_usable()):
            connection.close()
        try:
            return view(self, request, *args, **kwargs)
        except (OperationalError, InterfaceError) as error:
            text = _("The database “%(database)s” cannot be read: %(error)s")
            facts = {"database": self.database, "error": printable(first_line(error))}
            self.message_user(request, text % facts, messages.ERROR)
            return HttpResponseRedirect(reverse("admin:index", current_app=self.admin_site.name))

    return page


class ForcedRelease(admin.ModelAdmin):  # type: ignore[type-arg]  # Django takes no argument at run time
    """An admin of lock rows with an action and a button that free held locks."""

    actions = ("force_release",)
    change_form_template = "admin/django_distlock/change_form.html"

    @property
    def database(self) -> str:
        """The database whose locks are shown."""
        raise NotImplementedError

    def backends_of(self, lock: MethodLock) -> Iterator[DatabaseBackend]:
        """Yield the backends to which this lock belongs."""
        raise NotImplementedError

    def columns(self, lock: MethodLock) -> dict[str, Any]:
        """Return the columns of a lock on the confirmation page."""
        raise NotImplementedError

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        """Return whether this user may free locks of others."""
        return request.user.has_perm("django_distlock.force_release_methodlock")

    @admin.action(
        permissions=["force_release"],
        description=gettext_lazy("Force release of selected %(verbose_name_plural)s"),
    )
    def force_release(
        self, request: HttpRequest, queryset: QuerySet[MethodLock]
    ) -> HttpResponse | None:
        """Show the confirmation page."""
        return self._confirmation(request, queryset)

    @on_a_live_connection
    def changelist_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return super().changelist_view(request, *args, **kwargs)

    @on_a_live_connection
    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return super().changeform_view(request, *args, **kwargs)

    @on_a_live_connection
    def force_release_view(self, request: HttpRequest) -> HttpResponse:
        """Show the confirmation page (GET), or free the confirmed locks (POST)."""
        if not (self.has_force_release_permission(request) and self.has_view_permission(request)):
            raise PermissionDenied
        page = None
        if request.method == "POST":
            self._force_all(request, request.POST.getlist("lock"))
        else:
            keys = filter(_is_key, request.GET.getlist("lock"))
            page = self._confirmation(request, self.get_queryset(request).filter(pk__in=keys))
        return page or HttpResponseRedirect(self._url("changelist"))

    def get_urls(self) -> list[URLPattern]:
        """Add the confirmation page."""
        view = self.admin_site.admin_view(self.force_release_view)
        for database in connections:
            # A transaction of ATOMIC_REQUESTS has read the session; then SQLite may not let it write.
            transaction.non_atomic_requests(database)(view)
        name = self._url_name("force_release")
        return [path("force-release/", view, name=name), *super().get_urls()]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Add the button."""
        lock = context["original"]
        if lock.state != records.State.FREE and self.has_force_release_permission(request):
            context["force_release_url"] = f"{self._url('force_release')}?lock={lock.pk}"
        return super().render_change_form(request, context, *args, **kwargs)

    def log_change(self, request: HttpRequest, obj: MethodLock, message: Any) -> LogEntry:
        """Log the change; with the name in ASCII if the table of log entries cannot store it unchanged."""
        try:
            with transaction.atomic(using=router.db_for_write(LogEntry)):
                return super().log_change(request, obj, message)
        except DatabaseError:
            plain = copy(obj)
            plain.description = obj.name.encode("ascii", "backslashreplace").decode()[
                :LONGEST_SHOWN
            ]
            return super().log_change(request, plain, message)

    def _confirmation(
        self, request: HttpRequest, queryset: QuerySet[Any]
    ) -> TemplateResponse | None:
        """Return the confirmation page, or None after a message that says why there is none."""
        held = list(queryset.exclude(state=records.State.FREE)[: MOST_AT_ONCE + 1])
        if not held:
            self.message_user(request, _("Nobody holds what was selected."), messages.WARNING)
            return None
        if len(held) > MOST_AT_ONCE:
            refusal = _("Select at most %d held locks.") % MOST_AT_ONCE
            self.message_user(request, refusal, messages.ERROR)
            return None
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": _("Force release"),
            "opts": self.opts,
            "rows": [self.columns(lock) for lock in held],
            # A digest of each owner: the owner itself is secret.
            "values": [f"{lock.pk}:{records.as_held(lock).owner_digest}" for lock in held],
            "action_url": self._url("force_release"),
            "changelist_url": self._url("changelist"),
            "has_listed_breadcrumbs": django.VERSION >= (6, 1),
        }
        return TemplateResponse(request, "admin/django_distlock/force_release.html", context)

    def _force_all(self, request: HttpRequest, confirmed: list[str]) -> None:
        freed = sum(self._force(request, *value.partition(":")[::2]) for value in confirmed)
        if freed:
            text = ngettext("%(count)d lock was released.", "%(count)d locks were released.", freed)
            self.message_user(request, text % {"count": freed}, messages.SUCCESS)

    def _force(self, request: HttpRequest, key: str, owner_digest: str) -> bool:
        """Free the lock if it still has the holder that was shown; else show a message."""
        lock = self.get_queryset(request).filter(pk=key).first() if _is_key(key) else None
        if lock and records.is_shown(lock, owner_digest) and self._free(request, lock):
            return True
        refusal = _("“%s” was not released: the holder that was shown does not hold it any more.")
        self.message_user(request, refusal % (lock or printable(key)), messages.WARNING)
        return False

    def _free(self, request: HttpRequest, lock: MethodLock) -> bool:
        """Free the lock and log who did it, both or neither."""
        facts = {"holder": records.holder_of(lock) or "-", "token": lock.fencing_token}
        with transaction.atomic(using=self.database):
            with connections[self.database].cursor() as cursor:
                is_freed = records.free(cursor, lock)
            if not is_freed:
                return False
            if records.is_reserved(lock):
                text = _(
                    "Ended the reservation by min_hold or lock_delay, fencing token %(token)d."
                )
            else:
                text = _("Forced the release: held by %(holder)s, fencing token %(token)d.")
            self.log_change(request, lock, text % facts)
            tell = partial(self._tell, lock, records.as_held(lock), request.user.get_username())
            transaction.on_commit(tell, using=self.database)
        return True

    def _tell(self, lock: MethodLock, ended: Held, username: str) -> None:
        backends = list(self.backends_of(lock))
        kind = type(backends[0]) if backends else DatabaseBackend
        tell_forced(ended, kind, [backend.alias for backend in backends], by=username)

    def _url(self, name: str) -> str:
        return reverse(f"admin:{self._url_name(name)}", current_app=self.admin_site.name)

    def _url_name(self, name: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{name}"


def _is_key(text: str) -> bool:
    return text.isdecimal() and len(text) <= LONGEST_KEY
