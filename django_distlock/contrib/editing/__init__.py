"""Edit locks: a form that is open in a page holds the lock of its object, in the admin and in pages of one's own."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core import signing
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.http import HttpResponse, HttpResponseRedirect, JsonResponse
from django.middleware.csrf import get_token
from django.urls import NoReverseMatch, reverse
from django.utils import formats
from django.utils.crypto import salted_hmac
from django.utils.text import Truncator, capfirst
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_protect
from django.views.decorators.http import require_http_methods

from django_distlock.conf import DEFAULT_ALIAS, checked_ttl
from django_distlock.engine.acquisition import acquire
from django_distlock.engine.lease import Lease
from django_distlock.engine.steps import settled
from django_distlock.engine.values import Held, LockState, Release, Secret
from django_distlock.exceptions import (
    LockBackendError,
    LockLost,
    LockNotAcquired,
    LockOutcomeUnknown,
    NotSupported,
)
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import printable, warn
from django_distlock.ground.objects import object_name
from django_distlock.handler import locks
from django_distlock.models import LONGEST_SHOWN
from django_distlock.operators import Row
from django_distlock.transactions import never_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from datetime import timedelta

    from django.db.models import Model, QuerySet
    from django.forms import BaseModelForm
    from django.http import HttpRequest

    from django_distlock.backends.base import BaseLockBackend
    from django_distlock.engine.values import Request

#: The fields of a form with an edit lock: the signed ticket of its page, and the holding that is to be taken over.
FIELD, TAKE_OVER = "distlock_edit", "distlock_take_over"
#: The permission to take over what somebody else edits.
PERMISSION = "django_distlock.take_over_methodlock"
#: The name of edit_lock_view() in the URLs of a project.
URL_NAME = "distlock_edit_lock"
SALT = "django_distlock.edit"
#: How the purpose of a page begins: any code may name its task as a page does.
EDITED_BY = "edited by "
#: Seconds that a page keeps the lock after its last renewal; and without a script, which renews it.
TTL, TTL_WITHOUT_SCRIPT = 90.0, 1800.0
#: Most seconds between two renewals by the script of a page that is visible.
PAUSE = 5.0
#: How often the lock is asked for while its holders give it back.
TRIES = 3
#: A page has one of two owners: until its script runs, and from then on, when a shorter ttl is enough.
AT_FIRST, LIVE = "at first", "live"


@dataclass(frozen=True, slots=True)
class Ticket:
    """The signed text in a page with a form: which lock it has or wants.

    *key*: the one of the lock on its server, that of the page's tenant. *ttl*: seconds, of a page whose script renews the lock; *first_ttl*: of a page whose script has not run yet.
    *nonce*: new for each page; with SECRET_KEY it makes the owners of the lock. *path*: the address of the
    page. *database*: the alias of DATABASES that has the object. *seen*: by field, a digest of the value that the form was opened with.
    """

    using: str
    name: str
    key: str
    model: str
    pk: str
    database: str
    user: str
    ttl: float
    first_ttl: float
    path: str
    may_take_over: bool
    nonce: str
    seen: dict[str, str] | None = None

    def written(self) -> str:
        return signing.dumps(asdict(self), salt=SALT, compress=True)

    def renamed(self, attempt: str) -> Ticket:
        """Return the ticket that the page gets by this *attempt*: two tabs that have one ticket get two."""
        return replace(self, nonce=owner_of(self.nonce, f"again {attempt}")[:16])

    def mark(self, text: str) -> str:
        """Return a digest of a value of this object, which only the server can make."""
        secret = salted_hmac(f"{SALT}.seen", f"{self.name} {text}", algorithm="sha256")
        return secret.hexdigest()[:12]


def read_ticket(request: HttpRequest) -> Ticket | None:
    """Return the ticket that a page has sent; None if it has none, was changed, or is of another user or release."""
    try:
        ticket = Ticket(**signing.loads(request.POST.get(FIELD, ""), salt=SALT))
    except (signing.BadSignature, UnicodeError, TypeError):
        return None
    return ticket if ticket.user == user_key(request) else None


def owner_of(nonce: str, kind: str) -> Secret:
    """Return the owner of the lock of a page: no page and no listing shows it."""
    return Secret(salted_hmac(f"{SALT}.{kind}", nonce, algorithm="sha256").hexdigest()[:32])


def new_nonce() -> str:
    return secrets.token_hex(8)


def user_key(request: HttpRequest) -> str:
    """Return the key of the user as text; empty if nobody is logged in."""
    pk = getattr(getattr(request, "user", None), "pk", None)
    return "" if pk is None else str(pk)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an object that a form can change: a field, or the rows of an inline. *shown*: its value for people."""

    key: str
    label: str
    text: str
    shown: str


@dataclass(frozen=True, slots=True)
class Editor:
    """A user who edits an object, or other code that holds its lock. *nonce*: of the page; empty if other code holds the lock."""

    held: Held
    name: str
    nonce: str
    is_me: bool

    @property
    def sentence(self) -> str:
        """A sentence for people: by whom it is edited since when."""
        since = Row(self.held, ()).since
        facts = {"who": self.name, "since": clock.time_of_day(since) if since else "-"}
        if self.is_me:
            return _("You have opened this in another window since %(since)s.") % facts
        return _("Being edited by %(who)s since %(since)s.") % facts


class EditLock:
    """The lock of an object that is edited, as one page sees it; edit_lock() makes it.

    *editor*: who else has the lock; None if this page has it. *failed*: the server of the locks did not answer,
    so nobody is kept out. *changes*: what others have changed since the form was opened.
    """

    def __init__(
        self,
        request: HttpRequest,
        ticket: Ticket,
        url: str = "",
        log: Callable[[EditLock, Editor], Any] | None = None,
    ) -> None:
        """Ask nothing yet. *log* returns the log entry of a take-over, which is deleted if there was none."""
        self.request = request
        self.ticket = ticket
        self._url = url
        self._log = log
        self.editor: Editor | None = None
        self.failed = False
        self.changes: list[Part] = []
        #: Whether the page is to be read only: it was opened while somebody else edits the object.
        self.is_read_only = False
        #: Whether it cannot be known what the form was opened with, so that all counts as changed.
        self._is_unknown = False

    # For templates.

    @property
    def text(self) -> str:
        """The ticket of the page that is answered now, signed."""
        return self.ticket.written()

    @property
    def url(self) -> str:
        """The address that the page's script asks."""
        try:
            return self._url or reverse(URL_NAME)
        except NoReverseMatch:
            line = f'path("edit-lock/", edit_lock_view, name="{URL_NAME}")'
            problem = f"The pages of edit_lock() need an address: add {line} to the URLs."
            raise ImproperlyConfigured(problem) from None

    @property
    def can_take_over(self) -> bool:
        """Whether the user may take the lock from its holder."""
        return self.editor is not None and (self.ticket.may_take_over or self.editor.is_me)

    @property
    def pause(self) -> float:
        """Seconds between two renewals."""
        return min(PAUSE, self.ticket.ttl / 3)

    @property
    def message(self) -> str:
        """The text that the page shows when it is opened; mostly empty."""
        if self.failed:
            return _(
                "It cannot be told whether somebody else edits this."
                " If it is changed meanwhile, you are told when you save."
            )
        return self.editor.sentence if self.editor else ""

    # For the view of a form.

    def begin(self) -> None:
        """Take the lock for the page that is answered now, if nobody else has it; NotSupported if no page can hold it."""
        if not self.backend.supports_detach:
            raise NotSupported(self.ticket.using, "edit_lock()", "Its locks end with a process.")
        for ttl in (self.ticket.ttl, self.ticket.first_ttl):
            self.backend.check_ttl(ttl)
        if self.request.method != "POST":
            with self._noting_failure():
                self.editor = self._taken(self._asking(AT_FIRST, self.ticket.first_ttl))
            self.is_read_only = self.editor is not None
            return
        before = read_ticket(self.request)
        if before is not None and before.key == self.ticket.key:
            self.ticket = replace(self.ticket, seen=before.seen)
        else:
            self._is_unknown = FIELD in self.request.POST
        with self._noting_failure():
            if shown := self.request.POST.get(TAKE_OVER):
                self.take_over(shown)
            self.editor = self._taken(self._asking(AT_FIRST), before)

    def watch(self) -> None:
        """Note who edits the object, for a page that cannot change it."""
        self.is_read_only = True
        with self._noting_failure():
            self.editor = self.look()

    def note_seen(self, parts: Iterable[Part]) -> None:
        """Note the values that the form is opened with."""
        seen = {part.key: self.ticket.mark(part.text) for part in parts}
        self.ticket = replace(self.ticket, seen=seen)

    def problems(
        self, names: Collection[str], more: Callable[[Model], list[Part]] | None = None
    ) -> list[str]:
        """Return why the form must not be saved: somebody else has the lock, or has changed what it shows.

        *names*: the fields of the form. *more*: returns the other parts of the object.
        """
        problems = [_("Not saved. %s") % self.editor.sentence] if self.editor else []
        row = self.row()
        if row is None:
            return [_("Not saved. It was deleted meanwhile.")]
        parts = [*parts_of(row, names), *(more(row) if more else ())]
        self.changes = [part for part in parts if self._is_changed(part)]
        if self.changes:
            text = _(
                "Not saved yet. It was changed after you had opened it:"
                " compare what you have typed with the current values, and save again."
            )
            problems.append(text)
        if self.changes or self.ticket.seen is None:
            self.note_seen(parts)  # the page shows them
        return problems

    def accepts(self, form: BaseModelForm[Any]) -> bool:
        """Return whether *form* is valid and may be saved; otherwise its errors say why not.

        Call it instead of ``form.is_valid()``, best in the transaction that saves the form: it locks the row.
        """
        problems = self.problems(form.fields)
        form.full_clean()
        for problem in problems:
            form.add_error(None, problem)
        return form.is_valid()

    def keep(self) -> None:
        """Keep the lock longer for the page that is answered now: it shows the form again, and may run no script."""
        if self.request.method == "POST" and self.editor is None:
            with self._noting_failure():
                request = self._asking(AT_FIRST, self.ticket.first_ttl)
                settled(lambda: self.backend.extend([request]))

    def release(self) -> None:
        """Release the lock, if the page has it: the form was saved, or left. Call it after the commit."""
        for kind in (LIVE, AT_FIRST):
            request = self._asking(kind)
            try:
                if settled(partial(self.backend.release, request)) is Release.RELEASED:
                    return
            except LockBackendError:
                self.backend.abandon_later(request)

    # For the page's script.

    def renew(self) -> bool:
        """Extend the lock of a page that is still open; return whether it has it."""
        live, first = self._asking(LIVE), self._asking(AT_FIRST)
        if settled(lambda: self.backend.extend([live]))[0]:
            return True
        return settled(lambda: self.backend.take_over(live, first.owner))

    def again(self, attempt: str) -> EditLock:
        """Return the lock for the same page, after it was asked for again. *attempt* names this request, for leave()."""
        other = EditLock(self.request, self.ticket.renamed(attempt or new_nonce()))
        other.editor = other._taken(other._asking(LIVE))
        return other

    def leave(self, attempt: str) -> None:
        """Release the lock of a page that is gone, and what its *attempt* gets, whose answer nobody reads."""
        self.release()
        if attempt:
            other = EditLock(self.request, self.ticket.renamed(attempt))
            self.backend.abandon_later(other._asking(LIVE))

    def look(self) -> Editor | None:
        """Return who edits the object, be it this page."""
        if not self.backend.supports_listing:
            return None  # nothing is locked there
        found = settled(lambda: [*self.backend.held(self.ticket.key)])
        held = next((each for each in found if each.state == LockState.HELD), None)
        return None if held is None else self._editor(held)

    def take_over(self, shown: str) -> bool:
        """End the holding with the digest *shown*, if it is still there and the user may; return whether it was ended."""
        self.editor = self.look()
        if self.editor is None or not self.can_take_over:
            return False
        entry, is_ended = self._log(self, self.editor) if self._log else None, False
        try:
            key = self.editor.held.key
            is_ended = self.backend.force_release(key, shown, by=self._username)
        except LockOutcomeUnknown:
            is_ended = True  # perhaps: the entry stays
            raise
        finally:
            if entry and not is_ended:
                entry.delete()
        return is_ended

    def row(self) -> Model | None:
        """Return the object as it is now; in a transaction, with its row locked."""
        model, database = apps.get_model(self.ticket.model), self.ticket.database
        pk = model._meta.pk.to_python(self.ticket.pk)  # noqa: SLF001 - documented
        rows: QuerySet[Any] = model._base_manager.using(database).filter(pk=pk)  # noqa: SLF001 - documented
        if connections[database].in_atomic_block:
            rows = rows.select_for_update()
        row: Model | None = rows.first()
        return row

    def is_as_seen(self) -> bool | None:
        """Return whether the fields of the object are what the form was opened with; None if it was deleted."""
        row = self.row()
        known = self.ticket.seen or {}
        return None if row is None else not any(map(self._is_changed, parts_of(row, known)))

    @property
    def backend(self) -> BaseLockBackend:
        return locks[self.ticket.using]

    @property
    def _username(self) -> str:
        return self.request.user.get_username() if self.ticket.user else "an editor"

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except LockBackendError as error:
            self.failed = True
            warn(
                "The form is shown without its lock: %s",
                error,
                name=self.ticket.name,
                using=self.ticket.using,
            )

    def _is_changed(self, part: Part) -> bool:
        mark = (self.ticket.seen or {}).get(part.key)
        return self._is_unknown or (mark is not None and mark != self.ticket.mark(part.text))

    def _asking(self, kind: str, ttl: float = 0.0) -> Request:
        ticket = self.ticket
        task = f"edit {ticket.nonce} {quote(ticket.user, safe='')}"
        holder = replace(Holder.current(f"{EDITED_BY}{self._username}"), task=task)
        request = self.backend.request(
            ticket.name, ticket.key, ttl=ttl or ticket.ttl, holder=holder
        )
        return replace(request, owner=owner_of(ticket.nonce, kind))

    def _taken(self, request: Request, before: Ticket | None = None) -> Editor | None:
        """Take the lock, and return None; or who else has it. Other pages of the same user, the one *before* first, give it away."""
        if before is not None and self._is_moved(request, before.nonce):
            return None
        busy = LockNotAcquired(request.name)
        for _try in range(TRIES):
            lease = Lease(self.backend, request, renew=False, release_when="at_exit")
            try:
                acquire(lease, 0)
                lease.end_here()
            except LockNotAcquired as refused:
                busy = refused
            except LockLost:
                continue
            else:
                return None
            editor = self.look()
            if editor is not None and not (editor.is_me and editor.nonce):
                return editor
            if editor is not None and self._is_moved(request, editor.nonce):
                return None
        return self._editor(Held(busy.name, request.key, busy.holder, busy.remaining, None, ""))

    def _is_moved(self, request: Request, nonce: str) -> bool:
        formers = [owner_of(nonce, kind) for kind in (LIVE, AT_FIRST)]
        return any(settled(partial(self.backend.take_over, request, each)) for each in formers)

    def _editor(self, held: Held) -> Editor:
        holder = held.holder
        words = holder.task.split(" ") if holder and holder.purpose.startswith(EDITED_BY) else []
        _word, nonce, user = words if len(words) == 3 else ("", "", "")
        pk = unquote(user)
        users = get_user_model()._default_manager.filter(pk=pk) if pk else ()  # noqa: SLF001 - documented
        name = next(map(_name_of, users), "") or str(held.holder or "?")
        return Editor(held, name, nonce, is_me=bool(pk) and pk == self.ticket.user)


def edit_lock(
    request: HttpRequest,
    instance: Model,
    *,
    using: str = DEFAULT_ALIAS,
    ttl: float | timedelta = TTL,
    ttl_without_script: float | timedelta = TTL_WITHOUT_SCRIPT,
    may_take_over: bool | None = None,
) -> EditLock:
    """Take the lock of a saved *instance* for the page of *request*, which has its form; return the EditLock.

    For GET, *is_read_only* of the result is true if somebody else edits the instance. For POST, call its
    accepts(form) instead of ``form.is_valid()``, and its release() after the form was saved.

    *ttl*: seconds that the lock lives after the page has vanished; *ttl_without_script*: after it was opened, if it
    runs no script. *may_take_over*: whether the user may take the
    lock from somebody else; by default, who has the permission ``django_distlock.take_over_methodlock``.
    """
    if may_take_over is None:
        may_take_over = bool(user_key(request)) and request.user.has_perm(PERMISSION)
    ttls = checked_ttl(ttl), checked_ttl(ttl_without_script, "ttl_without_script")
    edit = EditLock(request, new_ticket(request, instance, using, ttls, may_take_over))
    edit.begin()
    if request.method != "POST":
        edit.note_seen(parts_of(instance, None))
    return edit


def new_ticket(
    request: HttpRequest,
    instance: Model,
    using: str,
    ttls: tuple[float, float],
    may_take_over: bool,
) -> Ticket:
    """Return the ticket of a new page. *ttls*: its *ttl* and *first_ttl*."""
    name = f"edit:{object_name(instance)}"
    return Ticket(
        using=using,
        name=name,
        key=locks[using].key_of(name),
        model=instance._meta.label_lower,  # noqa: SLF001 - documented
        pk=key_of(instance),
        # The one that save() would write to.
        database=router.db_for_write(instance._meta.model, instance=instance),  # noqa: SLF001 - documented
        user=user_key(request),
        ttl=ttls[0],
        first_ttl=ttls[1],
        path=request.get_full_path(),
        may_take_over=may_take_over,
        nonce=new_nonce(),
    )


def key_of(instance: Model) -> str:
    """Return the key of *instance* as text, also one of several columns."""
    key: str = instance._meta.pk.value_to_string(instance)  # noqa: SLF001 - documented
    return key


def parts_of(instance: Model, names: Collection[str] | None) -> Iterator[Part]:
    """Return the editable fields of *instance* that are in *names*; None: all of them."""
    opts = instance._meta  # noqa: SLF001 - documented
    for field in [*opts.concrete_fields, *opts.many_to_many]:
        if not field.editable or (names is not None and field.name not in names):
            continue
        if field.many_to_many:
            related = [*field.value_from_object(instance)]
            text, value = (
                repr(sorted(str(each.pk) for each in related)),
                ", ".join(map(str, related)),
            )
        else:
            text, value = str(field.value_to_string(instance)), getattr(instance, field.name)
            if field.choices:
                value = getattr(instance, f"get_{field.name}_display")()
        yield Part(field.name, capfirst(str(field.verbose_name)), text, shown_value(value))


def shown_value(value: object) -> str:
    """Return *value* for people, cut if it is long."""
    text = "" if value is None else str(formats.localize(value))
    return Truncator(text).chars(4 * LONGEST_SHOWN) or "-"


def _name_of(user: Any) -> str:
    full_name = user.get_full_name() if hasattr(user, "get_full_name") else ""
    return printable(full_name or user.get_username())


@never_cache
@csrf_protect
@require_http_methods(["GET", "POST"])
def edit_lock_view(request: HttpRequest) -> HttpResponse:
    """Answer the script of a page with an edit lock; "Take over" of a page that is read only is sent here too."""
    return answer(request, EditLock)


never_atomic(edit_lock_view)


def answer(request: HttpRequest, make: Callable[[HttpRequest, Ticket], EditLock]) -> HttpResponse:
    """Return the answer of edit_lock_view(); *make* makes the lock."""
    if request.method == "GET":
        # That of an open page is not valid any more after another login.
        return JsonResponse({"csrf": get_token(request)})
    ticket, what = read_ticket(request), request.POST.get("what")
    if ticket is None:
        text = _(
            "You are logged out, or logged in as somebody else. What you have typed stays here."
        )
        return JsonResponse({"state": "refused", "message": text})
    edit = make(request, ticket)
    try:
        if what == "take-over":
            edit.take_over(request.POST.get(TAKE_OVER, ""))
            return HttpResponseRedirect(ticket.path)
        return JsonResponse(_told(edit, what))
    except LockBackendError:
        edit.failed = True
        if what == "take-over":
            return HttpResponseRedirect(ticket.path)
        return JsonResponse({"state": "failed", "message": edit.message})


def _told(edit: EditLock, what: str | None) -> dict[str, str]:
    """Return what the script is told: "held", "free", "busy", "changed" or "gone", with a message."""
    attempt = edit.request.POST.get("attempt", "")
    if what == "leave":
        edit.leave(attempt)
        return {"state": "left"}
    if what == "renew" and edit.renew():
        return {"state": "held"}
    if what == "again":
        edit = edit.again(attempt)
        if edit.editor is None:
            return _told_again(edit)
    edit.editor = edit.editor or edit.look()
    if edit.editor is None:
        text = _("Nobody edits this any more: load the page again to edit it.")
        return {"state": "free", "message": text}
    text = edit.message
    if what != "look":
        text += " " + _("What you have typed stays here.")
    shown = edit.editor.held.owner_digest if edit.can_take_over else ""
    return {"state": "busy", "message": text, "take_over": shown}


def _told_again(edit: EditLock) -> dict[str, str]:
    is_as_seen = edit.is_as_seen()
    if is_as_seen is None:
        edit.release()
        return {"state": "gone", "message": _("This was deleted.")}
    told = {"state": "held", "text": edit.text}
    if not is_as_seen:
        text = _("This was changed after you had opened it. When you save, you are shown what.")
        told |= {"state": "changed", "message": text}
    return told


__all__ = ["EditLock", "edit_lock", "edit_lock_view"]
