"""Locks in the admin: the held ones of every alias with their holders, and the free ones of databases."""

from __future__ import annotations

from collections import defaultdict
from math import inf
from typing import TYPE_CHECKING, Any

import django
from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import unquote
from django.contrib.auth.decorators import permission_required
from django.contrib.contenttypes.models import ContentType
from django.core.paginator import Paginator
from django.db import (
    DatabaseError,
    router,
    transaction,
)
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.text import Truncator
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from .engine.values import LockState
from .exceptions import LockError, LockOutcomeUnknown, first_line
from .ground.naming import printable
from .handler import locks
from .models import LONGEST_SHOWN, HeldLock
from .operators import Row, forget_late, free_locks, look_up, look_up_names, read_value, survey
from .transactions import never_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from django.db.models import Model
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    _Admin = admin.ModelAdmin[Any]
else:
    _Admin = object

VIEW = "django_distlock.view_methodlock"
FORCE_RELEASE = "django_distlock.force_release_methodlock"
#: Locks on one confirmation page: more than this would be confirmed without reading.
MOST_AT_ONCE = 100
#: Locks on one page of the list.
PAGE = 100
#: The header by which the script that refreshes the list asks for the table alone.
FRAGMENT = "X-Distlock-Fragment"
#: Whether Django's own pages have their breadcrumbs in a list.
HAS_LISTED_BREADCRUMBS = django.VERSION >= (6, 1)
#: The columns of the list: their headings, and what they are sorted by.
COLUMNS: dict[str, tuple[Any, Callable[[Row], Any]]] = {
    "name": (gettext_lazy("name"), lambda row: row.held.name.casefold()),
    "state": (gettext_lazy("state"), lambda row: row.state),
    "holder": (gettext_lazy("holder"), lambda row: str(row.held.holder or "")),
    "since": (gettext_lazy("since"), lambda row: -(row.held.age or 0.0)),
    "remaining": (gettext_lazy("remaining"), lambda row: _known(row.held.remaining, inf)),
    "waiters": (gettext_lazy("waiters"), lambda row: _known(row.held.waiters, -1)),
    "alias": (gettext_lazy("alias"), lambda row: row.aliases),
}
#: The choices of the filter by state, and what each of them shows.
STATES: dict[str, tuple[Any, set[str]]] = {
    "": (gettext_lazy("held and stale"), {LockState.HELD, LockState.STALE}),
    **{state: (state.label, {state}) for state in LockState},
    "all": (gettext_lazy("all"), {*LockState}),
}
#: The text of Django's admin if nothing is selected, word for word, so that its translations apply.
NOTHING_SELECTED = (
    "Items must be selected in order to perform actions on them. No items have been changed."
)


@admin.register(HeldLock)
class HeldLockAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # Django takes no argument at run time
    """Shows the locks of every alias that can list them, and their holders; users with the permission can free them."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(VIEW)

    def get_urls(self) -> list[URLPattern]:
        def page(view: Callable[..., HttpResponse], *permissions: str) -> Any:
            return self.admin_site.admin_view(
                permission_required(permissions, raise_exception=True)(view)
            )

        force_release = never_atomic(page(self.force_release_view, VIEW, FORCE_RELEASE))
        name = "django_distlock_heldlock_"
        return [
            path("", page(self.changelist_view, VIEW), name=f"{name}changelist"),
            path("force-release/", force_release, name=f"{name}force_release"),
            path("<path:object_id>/change/", page(self.change_view, VIEW), name=f"{name}change"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the locks of all aliases; for the page's script, only the part that it refreshes."""
        wanted = {name: request.GET.get(name, "") for name in ("q", "state", "alias", "host")}
        aliases = list(locks)
        chosen = [wanted["alias"]] if wanted["alias"] in aliases else aliases
        rows, problems = survey(chosen)
        states = STATES.get(wanted["state"], STATES[""])[1]
        if LockState.FREE in states:
            free, unread = free_locks(chosen, wanted["q"])
            rows, problems = rows + free, unread | problems
        host, text = wanted["host"], wanted["q"].casefold()
        found = [
            row
            for row in rows
            if row.held.state in states
            and (not host or row.host == host)
            and (not text or text in row.held.name.casefold() or text in row.held.key.casefold())
        ]
        order = request.GET.get("o", "name")
        column = order.removeprefix("-")
        directions = {column: "ascending" if order == column else "descending"}
        if column in COLUMNS:
            found.sort(key=COLUMNS[column][1], reverse=order.startswith("-"))
        page = Paginator(found, PAGE).get_page(request.GET.get("p"))
        hosts = sorted({host, *(row.host for row in rows)} - {""})
        context = {
            "title": str(self.opts.verbose_name_plural).capitalize(),
            "columns": [
                (name, heading, f"-{name}" if order == name else name, directions.get(name, "none"))
                for name, (heading, _key) in COLUMNS.items()
            ],
            "filters": [
                (name, label, wanted[name], choices)
                for name, label, choices in (
                    ("state", _("state"), [(key, text) for key, (text, _states) in STATES.items()]),
                    ("alias", _("alias"), [("", _("all")), *zip(aliases, aliases, strict=True)]),
                    ("host", _("host"), [("", _("all")), *zip(hosts, hosts, strict=True)]),
                )
            ],
            "page": page,
            "pages": page.paginator.get_elided_page_range(page.number),
            "problems": problems,
            "wanted": wanted,
            "order": order,
            **(extra_context or {}),
        }
        if FRAGMENT not in request.headers:
            return self._page(request, "locks", context)
        response = self._page(request, "locks_table", context)
        response[FRAGMENT] = "yes"
        return response

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show the lock with this key, and the log of its forced releases."""
        key = unquote(object_id)
        rows, problems = look_up({alias: [key] for alias in locks})
        kind = ContentType.objects.get_for_model(HeldLock, for_concrete_model=False)
        forced = LogEntry.objects.filter(content_type=kind, object_id=key)
        context = {
            "title": Truncator(rows[0].held.name if rows else printable(key)).chars(LONGEST_SHOWN),
            "key": printable(key),
            "rows": rows,
            "problems": problems,
            "forced": forced.select_related("user").order_by("-action_time")[:PAGE],
            **(extra_context or {}),
        }
        return self._page(request, "lock", context)

    def force_release_view(self, request: HttpRequest) -> HttpResponse:
        """Show the confirmation page for the selected locks, or free the confirmed locks."""
        confirmed = request.POST.getlist("lock")
        values = confirmed or request.GET.getlist("lock") + request.POST.getlist("selected")
        keys = defaultdict[str, set[str]](set)
        for alias, _digest, key in map(read_value, values[: MOST_AT_ONCE + 1]):
            keys[alias].add(key)
        rows, problems = look_up({alias: keys[alias] for alias in locks if alias in keys})
        known = {row.value: row for row in rows}
        for alias, problem in problems.items():
            self.message_user(request, f"{alias}: {problem}", messages.ERROR)
        if confirmed:
            asked = [value for value in confirmed if read_value(value)[0] not in problems]
            freed = sum(self._force(request, value, known.get(value)) for value in asked)
            if freed:
                text = ngettext(
                    "%(count)d lock was released.", "%(count)d locks were released.", freed
                )
                self.message_user(request, text % {"count": freed}, messages.SUCCESS)
        elif not values:
            self.message_user(request, _(NOTHING_SELECTED), messages.WARNING)
        elif not (selected := [known[value] for value in dict.fromkeys(values) if value in known]):
            self.message_user(request, _("Nobody holds what was selected."), messages.WARNING)
        elif len(selected) > MOST_AT_ONCE:
            refusal = _("Select at most %d held locks.") % MOST_AT_ONCE
            self.message_user(request, refusal, messages.ERROR)
        else:
            context = {"title": _("Force release"), "rows": selected, "next": self._next(request)}
            return self._page(request, "force_release", context)
        return HttpResponseRedirect(self._next(request))

    def _next(self, request: HttpRequest) -> str:
        """Return the page to go to after the release: the object's page that had the button, or the list."""
        asked = request.POST.get("next") or request.GET.get("next")
        host, is_secure = {request.get_host()}, request.is_secure()
        if asked and url_has_allowed_host_and_scheme(asked, host, require_https=is_secure):
            return asked
        url = "admin:django_distlock_heldlock_changelist"
        return reverse(url, current_app=self.admin_site.name)

    def _force(self, request: HttpRequest, value: str, row: Row | None) -> bool:
        """Free the lock if it still has the holder that the page showed; else show a message."""
        problem = _("the holder that was shown does not hold it any more.")
        try:
            if row is not None and self._free(request, row):
                return True
        except (LockError, DatabaseError) as error:
            problem = first_line(error)
        name = row.held.name if row else printable(read_value(value)[2])
        facts = {"name": Truncator(name).chars(LONGEST_SHOWN), "problem": problem}
        text = _("“%(name)s” was not released: %(problem)s") % facts
        self.message_user(request, text, messages.WARNING)
        return False

    def _free(self, request: HttpRequest, row: Row) -> bool:
        """Log who frees the lock, then free it, so that each release has an entry."""
        entry = self._log(request, row)
        alias, held, is_freed = row.aliases[0], row.held, False
        try:
            by = request.user.get_username()
            is_freed = locks[alias].force_release(held.key, held.owner_digest, by=by)
        except LockOutcomeUnknown:
            # The lock may be free: the entry stays.
            is_freed = True
            raise
        finally:
            forget_late(row.aliases)
            if not is_freed:
                entry.delete()
        return is_freed

    def _log(self, request: HttpRequest, row: Row) -> LogEntry:
        """Log the forced release; in ASCII if the log's table cannot store other characters."""
        held = row.held
        if held.reserved:
            text = _(
                "Ended the reservation by min_hold on alias “%(alias)s”, fencing token %(token)s."
            )
        else:
            text = _(
                "Forced the release on alias “%(alias)s”: held by %(holder)s, fencing token %(token)s."
            )
        facts = {"alias": row.aliases[0], "holder": held.holder or "-", "token": held.token or "-"}
        texts = held.key, held.name, text % facts
        try:
            with transaction.atomic(using=router.db_for_write(LogEntry)):
                return self._entry(request, *texts)
        except DatabaseError:
            ascii_only = (each.encode("ascii", "backslashreplace").decode() for each in texts)
            return self._entry(request, *ascii_only)

    def _entry(self, request: HttpRequest, key: str, name: str, text: str) -> LogEntry:
        return self.log_change(request, HeldLock(pk=key, method_name=name), text)

    def _page(self, request: HttpRequest, name: str, context: dict[str, Any]) -> TemplateResponse:
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "request": request,
            "may_force": request.user.has_perm(FORCE_RELEASE),
            "has_listed_breadcrumbs": HAS_LISTED_BREADCRUMBS,
            **context,
        }
        return TemplateResponse(request, f"admin/django_distlock/{name}.html", context)


class ObjectLocksMixin(_Admin):
    """Mixin, before ModelAdmin in the bases: the page of an object shows who holds its locks.

    Users need the permission ``django_distlock.view_methodlock`` to see the locks, and
    ``django_distlock.force_release_methodlock`` for the button that frees one.
    """

    #: The aliases of DISTLOCK to ask; None: all.
    object_locks_using: str | Iterable[str] | None = None

    def get_object_locks(self, request: HttpRequest, obj: Model) -> Iterable[str | Model]:
        """Return the names of the locks to show with *obj*; by default, the name of ``lock(obj)``."""
        return [obj]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        response: Any = super().render_change_form(request, context, *args, **kwargs)
        obj = context.get("original")
        if obj is not None and request.user.has_perm(VIEW):
            using = self.object_locks_using
            aliases = locks if using is None else [using] if isinstance(using, str) else using
            rows, problems = look_up_names(self.get_object_locks(request, obj), aliases)
            response.context_data |= {
                "distlock_rows": rows,
                "distlock_problems": problems,
                "distlock_may_force": request.user.has_perm(FORCE_RELEASE),
                # Our template extends the one that Django chose, which may be the project's.
                "distlock_page": response.resolve_template(response.template_name),
            }
            response.template_name = "admin/django_distlock/object_locks.html"
        return response


def _known(number: float | None, instead: float) -> float:
    return instead if number is None else number
