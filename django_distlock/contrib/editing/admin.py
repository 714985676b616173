"""EditLockMixin: a user who opens an object in the admin holds its lock; others may read it meanwhile."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.contrib import admin
from django.contrib.admin.options import TO_FIELD_VAR
from django.contrib.admin.utils import unquote
from django.core.checks import CheckMessage, Error
from django.urls import path, reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from django_distlock.conf import DEFAULT_ALIAS, checked_ttl
from django_distlock.exceptions import DOCS, InvalidLockBackend, LockBackendError
from django_distlock.handler import locks
from django_distlock.transactions import never_atomic

from . import (
    PERMISSION,
    TTL,
    TTL_WITHOUT_SCRIPT,
    EditLock,
    Part,
    answer,
    key_of,
    new_ticket,
    parts_of,
    shown_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import timedelta

    from django.contrib.admin.models import LogEntry
    from django.db.models import Model
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    from . import Editor, Ticket

    _Admin = admin.ModelAdmin[Any]
else:
    _Admin = object

#: The attribute of a request that has the edit lock of its change form.
_EDIT = "_distlock_edit"


class EditLockMixin(_Admin):
    """Mixin, before ModelAdmin in the bases: one user at a time edits an object, and others see who does.

    A form whose object was changed meanwhile is not saved, but shown again with what was typed.
    """

    #: The alias of DISTLOCK.
    edit_lock_using: str = DEFAULT_ALIAS
    #: Seconds that an object stays locked after the browser of its editor has vanished.
    edit_lock_ttl: float | timedelta = TTL
    #: Seconds that it stays locked after it was opened by a browser that runs no script.
    edit_lock_ttl_without_script: float | timedelta = TTL_WITHOUT_SCRIPT

    def has_take_over_permission(self, request: HttpRequest, obj: Model) -> bool:
        """Return whether the user may take over what somebody else edits."""
        return self.has_change_permission(request, obj) and request.user.has_perm(PERMISSION)

    # The page of an object.

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: Any = None,
    ) -> Any:
        # Before the transaction that Django begins: no lock is asked for in one.
        edit = None if object_id is None else self._begun(request, object_id)
        setattr(request, _EDIT, edit)
        response = super().changeform_view(request, object_id, form_url, extra_context)
        is_form = "adminform" in (getattr(response, "context_data", None) or ())
        if edit is not None and request.method == "POST" and not is_form:
            edit.release()
        return response

    def _begun(self, request: HttpRequest, object_id: str) -> EditLock | None:
        to_field = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        if to_field and not self.to_field_allowed(request, to_field):
            return None  # Django refuses it
        obj = self.get_object(request, unquote(object_id), to_field)
        if obj is None or not self.has_view_or_change_permission(request, obj):
            return None
        edit = self._edit_lock(request, self._ticket(request, obj))
        if self.has_change_permission(request, obj) and request.method in {"GET", "POST"}:
            edit.begin()
        else:
            edit.watch()
        return edit

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        edit: EditLock | None = getattr(request, _EDIT, None)
        if edit is None or not change or request.method != "POST":
            return form

        def inlines(row: Model) -> list[Part]:
            kinds: Iterable[Any] = self.get_formsets_with_inlines(request, row)
            querysets = [(kind, inline.get_queryset(request)) for kind, inline in kinds]
            return [*_parts_of(kind(instance=row, queryset=rows) for kind, rows in querysets)]

        return _checked(form, lambda form: edit.problems(form.fields, inlines))

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        response: Any = super().render_change_form(request, context, *args, **kwargs)
        edit: EditLock | None = getattr(request, _EDIT, None)
        if edit is not None:
            if request.method != "POST":
                formsets = [each.formset for each in context["inline_admin_formsets"]]
                fields = parts_of(context["original"], context["adminform"].form.fields)
                edit.note_seen([*fields, *_parts_of(formsets)])
            # Around the page that would be shown, whose template may be the project's.
            parent = response.resolve_template(response.template_name)
            response.context_data |= {"distlock_edit": edit, "distlock_parent": parent}
            response.template_name = "admin/django_distlock/edit_form.html"
            if edit.is_read_only:
                response.context_data["save_as"] = False  # there is nothing in the page to be sent
        return response

    # What somebody else edits is read only.

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and not _keeps_out(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and not _keeps_out(request, obj)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> tuple[Any, Any, Any, Any]:
        found, count, missing, protected = super().get_deleted_objects(objs, request)
        edited = [f"{obj}: {text}" for obj in objs for text in self._edited_by(request, obj)]
        return found, count, missing, [*protected, *edited]

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> Any:
        form = super().get_changelist_form(request, **kwargs)
        return _checked(
            form, lambda form: self._edited_by(request, form.instance) if form.has_changed() else ()
        )

    def _edited_by(self, request: HttpRequest, obj: Model) -> list[str]:
        """Return who else edits *obj* since when, for people; nothing if nobody does, or that cannot be told."""
        try:
            editor = self._edit_lock(request, self._ticket(request, obj)).look()
        except LockBackendError:
            return []
        return [] if editor is None or editor.is_me else [editor.sentence]

    # The address that pages ask, and the checks.

    def get_urls(self) -> list[URLPattern]:
        urls = super().get_urls()
        for url in urls:
            if url.name == f"{self._url_name}_change":
                never_atomic(url.callback)
        view = never_atomic(self.admin_site.admin_view(self.edit_lock_view))
        return [path("edit-lock/", view, name=f"{self._url_name}_edit_lock"), *urls]

    def edit_lock_view(self, request: HttpRequest) -> HttpResponse:
        """Answer the script of a change form."""
        return answer(request, self._edit_lock)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        return [*super().check(**kwargs), *self._check_edit_lock()]

    def _check_edit_lock(self) -> Iterator[Error]:
        using, problems = self.edit_lock_using, []
        # distlock.E001 tells what is wrong with an alias, and distlock.W001 that there is no default one.
        with suppress(InvalidLockBackend):
            if using not in {*locks, DEFAULT_ALIAS}:
                problems.append(f"DISTLOCK has no alias {using!r}.")
            elif not locks[using].supports_detach:
                instead = "set edit_lock_using to an alias of a database, Redis or Redlock"
                problems.append(f"DISTLOCK[{using!r}] cannot hold locks for pages; {instead}.")
            try:
                for ttl in self._ttls():
                    locks[using].check_ttl(ttl)
            except (TypeError, ValueError) as error:
                problems.append(str(error))
        if not apps.is_installed("django_distlock"):
            problems.append("'django_distlock' is not in INSTALLED_APPS.")
        hint = f"Correct it. See {DOCS}reference/checks.html#distlock-e050"
        for problem in problems:
            text = f"{type(self).__name__}: {problem}"
            yield Error(text, hint=hint, obj=type(self), id="distlock.E050")

    @property
    def _url_name(self) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}"

    def _ticket(self, request: HttpRequest, obj: Model) -> Ticket:
        may_take_over = self.has_take_over_permission(request, obj)
        return new_ticket(request, obj, self.edit_lock_using, self._ttls(), may_take_over)

    def _ttls(self) -> tuple[float, float]:
        ttl = checked_ttl(self.edit_lock_ttl, "edit_lock_ttl")
        longest = self.edit_lock_ttl_without_script
        return ttl, checked_ttl(longest, "edit_lock_ttl_without_script")

    def _edit_lock(self, request: HttpRequest, ticket: Ticket) -> EditLock:
        site = self.admin_site.name
        url = reverse(f"admin:{self._url_name}_edit_lock", current_app=site)
        return EditLock(request, ticket, url, self._log_take_over)

    def _log_take_over(self, edit: EditLock, editor: Editor) -> LogEntry | None:
        row = edit.row()
        text = _("Took over from %s, who was editing it.") % editor.name
        return None if row is None else self.log_change(edit.request, row, text)


def _checked(form: Any, problems: Callable[[Any], Iterable[str]]) -> Any:
    """Return a subclass of *form* that has these *problems* too."""

    def clean(self: Any) -> Any:
        # First: its own clean() may raise an error.
        for problem in problems(self):
            self.add_error(None, problem)
        return form.clean(self)

    return type(form.__name__, (form,), {"clean": clean})


def _parts_of(formsets: Iterable[Any]) -> Iterator[Part]:
    for number, formset in enumerate(formsets):
        rows = [*formset.get_queryset()]
        names = formset.form.base_fields
        texts = sorted(
            repr([str(row.pk), *(part.text for part in parts_of(row, names))]) for row in rows
        )
        label = capfirst(str(formset.model._meta.verbose_name_plural))  # noqa: SLF001 - documented
        yield Part(f"inline {number}", label, repr(texts), shown_value(", ".join(map(str, rows))))


def _keeps_out(request: HttpRequest, obj: Any) -> bool:
    """Return whether *obj* is the object of the page, and somebody else edits it."""
    edit: EditLock | None = getattr(request, _EDIT, None)
    if obj is None or edit is None or not edit.is_read_only or edit.editor is None:
        return False
    ticket = edit.ticket
    return (obj._meta.label_lower, key_of(obj)) == (ticket.model, ticket.pk)  # noqa: SLF001 - documented


__all__ = ["EditLockMixin"]
