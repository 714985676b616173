"""EditLockMixin: a user who opens an object in the admin holds its lock; others may read it meanwhile."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.options import TO_FIELD_VAR
from django.contrib.admin.utils import NestedObjects, unquote
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004 - as Django's
from django.db import router, transaction
from django.urls import path, reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from django_distlock.conf import DEFAULT_ALIAS, checked_ttl
from django_distlock.engine.steps import settled
from django_distlock.exceptions import DOCS, InvalidLockBackend, LockBackendError
from django_distlock.ground.naming import warn
from django_distlock.ground.objects import object_name
from django_distlock.handler import locks
from django_distlock.transactions import never_atomic

from . import PERMISSION, TTL, EditLock, Part, answer, editors, key_of, new_ticket, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import timedelta

    from django.contrib.admin.models import LogEntry
    from django.db.models import Model, QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    from . import Editor, Ticket

    _Admin = admin.ModelAdmin[Any]
else:
    _Admin = object

#: The attribute of a request that has the edit lock of its change form.
_EDIT = "_distlock_edit"
#: What a formset gets of a form that is sent.
_SENT = {"data", "files", "save_as_new", "prefix"}


class EditLockMixin(_Admin):
    """Mixin, before ModelAdmin in the bases: one user at a time edits an object, and others see who does.

    A form whose object was changed meanwhile is not saved, but shown again with what was typed.
    """

    #: The alias of DISTLOCK.
    edit_lock_using: str = DEFAULT_ALIAS
    #: Seconds that an object stays locked after the browser of its editor has vanished.
    edit_lock_ttl: float | timedelta = TTL

    def has_take_over_permission(self, request: HttpRequest, obj: Model) -> bool:
        """Return whether the user may take over what somebody else edits."""
        return self.has_change_permission(request, obj) and request.user.has_perm(PERMISSION)

    # The page of an object.

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> Any:
        # Before the transaction that Django begins, or django-reversion: no lock is asked for in one.
        edit = self._begun(request, object_id, EditLock.begin)
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
            # A page to revert to an older version, in a transaction: it locks nothing, and has a template of its own.
            setattr(request, _EDIT, None)
            edit = self._begun(request, object_id, EditLock.watch)
            if edit is not None and edit.editor is not None and not edit.editor.is_me:
                setattr(request, _EDIT, edit)
                edit.is_shown = True
                self.message_user(request, edit.editor.sentence, messages.WARNING)
        return super().changeform_view(request, object_id, *args, **kwargs)

    def _begun(
        self, request: HttpRequest, object_id: str, begin: Callable[[EditLock], None]
    ) -> EditLock | None:
        to_field = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        if to_field and not self.to_field_allowed(request, to_field):
            return None  # Django refuses it
        obj = self.get_object(request, unquote(object_id), to_field)
        if obj is None or not self.has_view_or_change_permission(request, obj):
            return None
        edit = self._edit_lock(request, self._ticket(request, obj))
        if self.has_change_permission(request, obj) and request.method in {"GET", "POST"}:
            begin(edit)
        else:
            edit.watch()
        return edit

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        edit: EditLock | None = getattr(request, _EDIT, None)
        if edit is not None and request.method == "POST":
            edit.row()  # locks it: a column that the form does not have is saved as it is read below
        return super().get_object(request, object_id, from_field)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = super().get_queryset(request)
        edit: EditLock | None = getattr(request, _EDIT, None)
        if edit is None or request.method != "POST":
            return rows
        return rows.using(edit.ticket.database)  # a replica may have older values

    def get_form(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        form = super().get_form(request, *args, **kwargs)
        edit: EditLock | None = getattr(request, _EDIT, None)
        if edit is None or request.method != "POST" or "_saveasnew" in request.POST:
            return form

        def problems(form: Any) -> Iterable[str]:
            inlines = self.get_formsets_with_inlines(request, form.instance)
            return edit.problems(form, _parts_of(map(partial(_unbound, form), inlines)))

        def _unbound(form: Any, kind_and_inline: Any) -> Any:
            kind, inline = kind_and_inline
            terms = self.get_formset_kwargs(request, form.instance, inline, "")
            return kind(**{key: terms[key] for key in terms.keys() - _SENT})

        return _checked(form, problems)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        response: Any = super().render_change_form(request, context, *args, **kwargs)
        edit: EditLock | None = getattr(request, _EDIT, None)
        if edit is not None:
            if request.method != "POST":
                formsets = [each.formset for each in context["inline_admin_formsets"]]
                parts = [*parts_of(context["adminform"].form), *_parts_of(formsets)]
                edit.note_seen({part.key: part.text for part in parts})
            # Around the page that would be shown, whose template may be the project's.
            parent = response.resolve_template(response.template_name)
            response.context_data |= {"distlock_edit": edit, "distlock_parent": parent}
            response.template_name = "admin/django_distlock/edit_form.html"
            if edit.is_read_only:
                response.context_data["save_as"] = False  # there is nothing in the page to be sent
            response.add_post_render_callback(partial(_warn_unless_shown, edit, parent))
        return response

    # What somebody else edits is read only.

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and not _keeps_out(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and not _keeps_out(request, obj)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> tuple[Any, Any, Any, Any]:
        found, count, missing, protected = super().get_deleted_objects(objs, request)
        edited: dict[str, str] = {}
        if others := self._others(request):
            collector = NestedObjects(using=router.db_for_write(self.model))
            collector.collect(objs)  # also what is deleted with them
            for row in chain(*collector.data.values()):
                if editor := others.get(self._key_of(row)):
                    edited[editor.held.key] = f"{row}: {editor.sentence}"
        return found, count, missing, [*protected, *edited.values()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        is_saved = request.method == "POST" and "_save" in request.POST
        # Rows stay locked from when they are compared until they are saved.
        with transaction.atomic(router.db_for_write(self.model)) if is_saved else nullcontext():
            return super().changelist_view(request, extra_context)

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> Any:
        others = cache(partial(self._others, request))  # asked once for the whole list

        def problems(form: Any) -> Iterator[str]:
            if not form.has_changed():
                return
            if editor := others().get(self._key_of(form.instance)):
                yield editor.sentence
            edit = self._edit_lock(request, self._ticket(request, form.instance))
            if not edit.read_again(form):
                yield _("Not saved. It was deleted meanwhile.")
            elif any(_is_stale(form, name) for name in form.fields):
                yield _("Not saved. It was changed after you had opened the list: load it again.")

        form = _checked(super().get_changelist_form(request, **kwargs), problems)
        return type(form.__name__, (_ShowingInitial, form), {})

    def _others(self, request: HttpRequest) -> dict[str, Editor]:
        """Return who else edits, by the key of the lock; nothing if that cannot be told."""
        backend = locks[self.edit_lock_using]
        if not backend.supports_listing:
            return {}
        try:
            found = settled(lambda: [*backend.held()])
        except LockBackendError:
            return {}
        edited = [held for held in found if held.name.startswith("edit:")]
        return {each.held.key: each for each in editors(request, edited) if not each.is_me}

    def _key_of(self, obj: Model) -> str:
        return locks[self.edit_lock_using].key_of(f"edit:{object_name(obj)}")

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
        return answer(request, self._asked)

    def _asked(self, request: HttpRequest, ticket: Ticket) -> EditLock:
        """Return the lock of a page that asks, with the rights that its user has by now."""
        obj = self.get_object(request, ticket.pk)
        if obj is not None:
            may_take_over = self.has_take_over_permission(request, obj)
            ticket = replace(ticket, may_take_over=may_take_over)
        edit = self._edit_lock(request, ticket)
        if obj is None:
            edit.is_refused = edit.row() is not None  # it is not for this user any more
        elif request.POST.get("what") == "look":
            edit.is_refused = not self.has_view_or_change_permission(request, obj)
        else:
            edit.is_refused = not self.has_change_permission(request, obj)
        return edit

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        return [*super().check(**kwargs), *self._check_edit_lock()]

    def _check_edit_lock(self) -> Iterator[CheckMessage]:
        using, problems = self.edit_lock_using, []
        # distlock.E001 tells what is wrong with an alias, and distlock.W001 that there is no default one.
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

    def _ticket(self, request: HttpRequest, obj: Model) -> Ticket:
        may_take_over = self.has_take_over_permission(request, obj)
        return new_ticket(request, obj, self.edit_lock_using, self._ttl(), may_take_over)

    def _ttl(self) -> float:
        return checked_ttl(self.edit_lock_ttl, "edit_lock_ttl")

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


class _ShowingInitial:
    """A form that sends what it has shown, too, and in which browsers restore nothing over newer values."""

    fields: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.show_hidden_initial = True
            field.widget.attrs["autocomplete"] = "off"


def _is_stale(form: Any, name: str) -> bool:
    """Return whether the list showed another value of this field than it has now, and not what is sent now."""
    field, now = form.fields[name], form.get_initial_for_field(form.fields[name], name)
    if not field.show_hidden_initial:
        return False  # the key, which the formset has added
    widget, key = field.hidden_widget(), form.add_initial_prefix(name)
    shown = widget.value_from_datadict(form.data, form.files, key)
    return bool(field.has_changed(now, shown) and field.has_changed(now, form[name].data))


def _parts_of(formsets: Iterable[Any]) -> Iterator[Part]:
    for number, formset in enumerate(formsets):
        rows = [(form.instance, *parts_of(form)) for form in formset.initial_forms]
        texts = sorted(repr([str(row.pk), *(part.text for part in parts)]) for row, *parts in rows)
        label = capfirst(str(formset.model._meta.verbose_name_plural))  # noqa: SLF001 - documented
        shown = partial(map, itemgetter(0), rows)
        yield Part(f"inline {number}", label, repr(texts), shown)


def _warn_unless_shown(edit: EditLock, template: Any, _response: Any) -> None:
    if not edit.is_shown:
        warn(
            "A form is saved without being compared: %s has no block form_top",
            template.template.name,
            name=edit.ticket.name,
            using=edit.ticket.using,
        )


def _keeps_out(request: HttpRequest, obj: Any) -> bool:
    """Return whether *obj* is the object of the page, and somebody else edits it."""
    edit: EditLock | None = getattr(request, _EDIT, None)
    if obj is None or edit is None or not edit.is_read_only or edit.editor is None:
        return False
    ticket = edit.ticket
    return (obj._meta.label_lower, key_of(obj)) == (ticket.model, ticket.pk)  # noqa: SLF001 - documented


__all__ = ["EditLockMixin"]
