"""EditLockMixin: a user who opens an object in the admin holds its lock; others may read it meanwhile."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial, update_wrapper
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.options import TO_FIELD_VAR
from django.contrib.admin.utils import NestedObjects, unquote
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004 - as Django's
from django.core.exceptions import ImproperlyConfigured
from django.db import router, transaction
from django.forms import FileField, MultiValueField, MultiWidget
from django.urls import path, reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from django_distlock.conf import DEFAULT_ALIAS, checked_ttl
from django_distlock.exceptions import DOCS, InvalidLockBackend, LockBackendError, NotSupported
from django_distlock.ground.naming import warn
from django_distlock.handler import locks
from django_distlock.operators import holdings
from django_distlock.transactions import never_atomic

from . import PERMISSION, TTL, EditLock, Part, answer, editors, lock_name, new_ticket, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import timedelta

    from django.db.models import Model, QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    from . import Editor, Ticket

    _Admin = admin.ModelAdmin[Any]
else:
    _Admin = object

#: The attribute of a request that has the edit lock of its change form.
_EDIT = "_distlock_edit"


class EditLockMixin(_Admin):
    """Mixin, before ModelAdmin in the bases: one user at a time edits an object; others read it and see the editor.

    A form whose object was changed meanwhile is not saved, but shown again with the input.
    """

    #: The alias of DISTLOCK.
    edit_lock_using: str = DEFAULT_ALIAS
    #: Seconds that an object stays locked after the browser of its editor has vanished.
    edit_lock_ttl: float | timedelta = TTL

    def has_take_over_permission(self, request: HttpRequest, obj: Model) -> bool:
        """Return whether the user may take *obj* over from another editor."""
        return self.has_change_permission(request, obj) and request.user.has_perm(PERMISSION)

    # The page of an object.

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> Any:
        # Acquire the lock before Django or django-reversion begins a transaction, not inside it.
        edit = self._begun(request, object_id)
        setattr(request, _EDIT, edit)
        response = super().change_view(request, object_id, *args, **kwargs)
        is_form = "adminform" in (getattr(response, "context_data", None) or ())
        if edit is not None and request.method == "POST" and not is_form:
            edit.release()
        return response

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if object_id is not None and not hasattr(request, _EDIT):
            # A page to revert to an older version: it runs in a transaction, has its own template and takes no lock.
            setattr(request, _EDIT, None)
            edit = self._begun(request, object_id, is_editor=False)
            if edit is not None and edit.editor is not None and not edit.editor.is_me:
                setattr(request, _EDIT, edit)
                edit.is_shown = True
                self.message_user(request, edit.editor.sentence, messages.WARNING)
        return super().changeform_view(request, object_id, *args, **kwargs)

    def _begun(self, request: HttpRequest, object_id: str, *, is_editor: bool = True) -> Any:
        to_field = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        if to_field and not self.to_field_allowed(request, to_field):
            return None  # Django refuses it
        obj = self.get_object(request, unquote(object_id), to_field)
        if obj is None:
            return None
        edit = self._edit_lock(request, obj)
        is_editor = is_editor and self.has_change_permission(request, obj)
        edit.begin(is_editor=is_editor and request.method in {"GET", "POST"})
        return edit

    def get_object(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if edit := _saved(request):
            edit.row()  # lock the row, so that columns that the form does not have are saved as they are read below
        return super().get_object(request, *args, **kwargs)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = super().get_queryset(request)
        # A replica may have older values.
        return rows.using(edit.ticket.database) if (edit := _saved(request)) else rows

    def get_form(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        form, edit = super().get_form(request, *args, **kwargs), _saved(request)
        if edit is None or "_saveasnew" in request.POST:
            return form

        def inlines(row: Model) -> Iterator[Any]:
            for kind, inline in self.get_formsets_with_inlines(request, row):
                terms = self.get_formset_kwargs(request, row, inline, "")
                yield kind(**{**terms, "data": None, "files": None})

        return _checked(form, lambda form: edit.problems(form, _parts_of(inlines(form.instance))))

    def save_form(self, request: HttpRequest, form: Any, change: bool) -> Any:
        edit = _saved(request)
        if change and edit is not None and not edit.is_compared:
            msg = f"{type(self).__name__}.get_form() must return the form of super().get_form(), which edit locks compare."
            raise ImproperlyConfigured(msg)
        return super().save_form(request, form, change)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        response: Any = super().render_change_form(request, context, *args, **kwargs)
        if edit := getattr(request, _EDIT, None):
            if request.method != "POST":
                formsets = [each.formset for each in context["inline_admin_formsets"]]
                parts = [*parts_of(context["adminform"].form), *_parts_of(formsets)]
                edit.note_seen({part.key: part.text for part in parts})
            # Our template extends the one that Django chose, which may be the project's.
            parent = response.resolve_template(response.template_name)
            response.context_data |= {"distlock_edit": edit, "distlock_parent": parent}
            response.template_name = "admin/django_distlock/edit_form.html"
            if edit.is_read_only:
                response.context_data["save_as"] = False  # the page has no fields to send
            response.add_post_render_callback(partial(_warn_unless_shown, edit, parent))
        return response

    # An object that somebody else edits is read only.

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and not _keeps_out(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and not _keeps_out(request, obj)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> tuple[Any, Any, Any, Any]:
        found, count, missing, protected = super().get_deleted_objects(objs, request)
        edited = dict[str, str]()
        if others := self._others(request):
            key_of = locks[self.edit_lock_using].key_of
            collector = NestedObjects(using=router.db_for_write(self.model))
            collector.collect(objs)  # with all rows that the deletion cascades to
            for row in chain(*collector.data.values()):
                if editor := others.get(key_of(lock_name(row))):
                    edited[editor.held.key] = f"{row}: {editor.sentence}"
        return found, count, missing, [*protected, *edited.values()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        is_saved = request.method == "POST" and "_save" in request.POST
        # Rows stay locked from the comparison until they are saved.
        with transaction.atomic(router.db_for_write(self.model)) if is_saved else nullcontext():
            return super().changelist_view(request, extra_context)

    def get_changelist_formset(self, request: HttpRequest, **kwargs: Any) -> Any:
        others = cache(partial(self._others, request))  # asked once for the whole list

        def problems(form: Any) -> Iterator[str]:
            # Django itself reports a row that was deleted: the form has a new instance then.
            if not form.has_changed() or form.instance._state.adding:  # noqa: SLF001 - documented
                return
            edit = self._edit_lock(request, form.instance)
            if editor := others().get(edit.ticket.key):
                yield editor.sentence
            if not edit.read_again(form):
                yield _("Not saved. It was deleted meanwhile.")
            elif any(_is_stale(form, name) for name in form.base_fields):
                yield _("Not saved. It was changed after you had opened the list: load it again.")

        formset = super().get_changelist_formset(request, **kwargs)
        formset.form = _checked(formset.form, problems)
        formset.form.base_fields = deepcopy(formset.form.base_fields)
        for field in formset.form.base_fields.values():
            if _is_text(field):
                # The list also sends the values that it showed; browsers must not restore old text over newer values.
                field.show_hidden_initial = True
                field.widget.attrs["autocomplete"] = "off"
        return formset

    def _others(self, request: HttpRequest) -> dict[str, Editor]:
        """Return the other editors by the keys of their locks; none if the locks cannot be listed."""
        with suppress(LockBackendError, NotSupported):
            found = holdings(self.edit_lock_using)
            edited = editors(request, (held for held in found if held.name.startswith("edit:")))
            return {each.held.key: each for each in edited if not each.is_me}
        return {}

    # The address that pages ask, and the checks.

    def get_urls(self) -> list[URLPattern]:
        urls = super().get_urls()
        for url in urls:
            if getattr(url, "name", None) == f"{self._url_name}_change":
                never_atomic(url.callback)
        view = never_atomic(self.admin_site.admin_view(self.edit_lock_view))
        return [path("edit-lock/", view, name=f"{self._url_name}_edit_lock"), *urls]

    def edit_lock_view(self, request: HttpRequest) -> HttpResponse:
        """Answer the script of a change form."""
        return answer(request, self._asked)

    def _asked(self, request: HttpRequest, ticket: Ticket) -> EditLock:
        """Return the lock for a request of a page's script."""
        obj = self.get_object(request, ticket.pk)
        is_look = request.POST.get("what") == "look"
        may = self.has_view_or_change_permission if is_look else self.has_change_permission
        edit = self._edit_lock(request, obj, ticket)
        edit.is_read_only = not self.has_change_permission(request, obj)
        if obj is None:  # but a row: get_object() hides the object from this user
            edit.is_refused = edit.row() is not None
        else:  # the ticket may be of the admin of another model, which has other rights
            edit.is_refused = lock_name(obj) != ticket.name or not may(request, obj)
        return edit

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        return [*super().check(**kwargs), *self._check_edit_lock()]

    def _check_edit_lock(self) -> Iterator[CheckMessage]:
        using, problems = self.edit_lock_using, []
        # distlock.E001 reports wrong settings of an alias, and distlock.W001 a missing default alias.
        with suppress(InvalidLockBackend):
            if using not in {*locks, DEFAULT_ALIAS}:
                problems.append(f"DISTLOCK has no alias {using!r}.")
            elif not locks[using].supports_detach:
                instead = "set edit_lock_using to an alias of a database, Redis or Redlock"
                problems.append(f"DISTLOCK[{using!r}] cannot hold locks for pages; {instead}.")
            try:
                locks[using].check_ttl(self._ttl())
            except (TypeError, ValueError) as error:
                problems.append(str(error))
        if not apps.is_installed("django_distlock"):
            problems.append("'django_distlock' is not in INSTALLED_APPS.")
        hint = f"Correct it. See {DOCS}reference/checks.html#distlock-e050"
        for problem in problems:
            text = f"{type(self).__name__}: {problem}"
            yield Error(text, hint=hint, obj=type(self), id="distlock.E050")
        for inline in self.inlines:
            if getattr(inline, "inlines", ()):
                text = f"{type(self).__name__}: the inlines of {inline.__name__} are not compared."
                hint = f"Others may overwrite them. See {DOCS}reference/checks.html#distlock-w050"
                yield Warning(text, hint=hint, obj=type(self), id="distlock.W050")

    @property
    def _url_name(self) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}"

    def _ttl(self) -> float:
        return checked_ttl(self.edit_lock_ttl, "edit_lock_ttl")

    def _edit_lock(self, request: HttpRequest, obj: Any, ticket: Any = None) -> EditLock:
        """Return the lock of *obj*, or of a page with a *ticket*, with the user's present permissions."""
        if ticket is None:
            ticket = new_ticket(request, obj, self.edit_lock_using, self._ttl())
        if obj is not None:
            may_take_over = self.has_take_over_permission(request, obj)
            ticket = replace(ticket, may_take_over=may_take_over)
        site = self.admin_site.name
        url = reverse(f"admin:{self._url_name}_edit_lock", current_app=site)
        return EditLock(request, ticket, url, self._log_take_over)

    def _log_take_over(self, edit: EditLock, editor: Editor) -> None:
        if (row := edit.row()) is not None:
            text = _("Took over from %s, who was editing it.") % editor.name
            self.log_change(edit.request, row, text)


def _checked(form: Any, problems: Callable[[Any], Iterable[str]]) -> Any:
    """Return a subclass of *form*, or a function if it is no class; clean() of what it makes also adds these *problems*."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if form.__new__ is object.__new__:
            return _with_problems(object.__new__(cls), problems)
        # It may make a form of another class, such as one that is given the request.
        return _with_problems(form.__new__(cls, *args, **kwargs), problems)

    def make(*args: Any, **kwargs: Any) -> Any:
        return _with_problems(form(*args, **kwargs), problems)

    if not isinstance(form, type):
        return update_wrapper(make, form)
    made = type(form.__name__, (form,), {"__new__": new})
    # The metaclass has made new ones, without what a get_form() has changed in them.
    for name in {"base_fields", "declared_fields", "_meta"} & {*dir(form)}:
        setattr(made, name, getattr(form, name))
    return made


def _with_problems(form: Any, problems: Callable[[Any], Iterable[str]]) -> Any:
    own = form.clean

    def clean() -> Any:
        # First, because the form's own clean() may raise an error.
        for problem in problems(form):
            form.add_error(None, problem)
        return own()

    form.clean = clean
    return form


def _is_text(field: Any) -> bool:
    """Return True if a list can send what it showed of *field* as text.

    It cannot send a file, which a row keeps unless a new one is sent, nor the values of several inputs whose hidden
    widget has one.
    """
    if isinstance(field, MultiValueField):
        return isinstance(field.hidden_widget(), MultiWidget)
    return not isinstance(field, FileField)


def _is_stale(form: Any, name: str) -> bool:
    """Return True if the field now has neither the value that the list showed nor the sent value."""
    field, now = form.fields[name], form.get_initial_for_field(form.fields[name], name)
    if not field.show_hidden_initial:
        return False
    widget, key = field.hidden_widget(), form.add_initial_prefix(name)
    shown = widget.value_from_datadict(form.data, form.files, key)
    now, shown, sent = map(_as_sent, (now, shown, form[name].data))
    return bool(field.has_changed(now, shown) and field.has_changed(now, sent))


def _as_sent(value: Any) -> Any:
    """Return a text without the changes that browsers and fields make: in line breaks, and in the spaces around it."""
    return value.replace("\r\n", "\n").strip() if isinstance(value, str) else value


def _parts_of(formsets: Iterable[Any]) -> Iterator[Part]:
    for number, formset in enumerate(formsets):
        rows = [(form.instance, *parts_of(form)) for form in formset.initial_forms]
        texts = sorted(repr([str(row.pk), *(part.text for part in parts)]) for row, *parts in rows)
        label = capfirst(str(formset.model._meta.verbose_name_plural))  # noqa: SLF001 - documented
        yield Part(f"inline {number}", label, repr(texts), map(itemgetter(0), rows))


def _warn_unless_shown(edit: EditLock, template: Any, _response: Any) -> None:
    if not edit.is_shown:
        warn(
            "A form is saved without being compared: %s has no block form_top",
            template.template.name,
            name=edit.ticket.name,
            using=edit.ticket.using,
        )


def _saved(request: HttpRequest) -> EditLock | None:
    """Return the edit lock if *request* sends a change form; otherwise None."""
    return getattr(request, _EDIT, None) if request.method == "POST" else None


def _keeps_out(request: HttpRequest, obj: Any) -> bool:
    """Return True if *obj* is the object of the page, and somebody else edits it."""
    edit: Any = getattr(request, _EDIT, None)
    is_kept = obj is not None and edit is not None and edit.is_read_only and edit.editor
    return bool(is_kept and edit.ticket.name == lock_name(obj))


__all__ = ["EditLockMixin"]
