"""Edit locks: a form that is open in a page holds the lock of its object, in the admin and in pages of one's own."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, starmap
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from django.apps import apps
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core import signing
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.models import Model, QuerySet
from django.forms import model_to_dict
from django.http import HttpResponse, HttpResponseRedirect, JsonResponse
from django.middleware.csrf import get_token
from django.urls import NoReverseMatch, reverse
from django.utils import formats
from django.utils.crypto import salted_hmac
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_protect
from django.views.decorators.http import require_http_methods

from django_distlock.conf import DEFAULT_ALIAS, checked_ttl
from django_distlock.engine.acquisition import acquire
from django_distlock.engine.lease import Lease
from django_distlock.engine.steps import settled
from django_distlock.engine.values import Held, LockState, Secret
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
    from collections.abc import Callable, Iterable, Iterator
    from datetime import timedelta

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
#: Seconds that a page keeps the lock after its last renewal; and until its script has renewed it first.
TTL, FIRST_TTL = 90.0, 15.0
#: Most seconds between two renewals by the script of a page that is visible.
PAUSE = 5.0
#: How often the lock is asked for while its holders give it back.
TRIES = 3
#: How many rows of a relation are named for people.
FEW = 20
#: How the key of a user begins who is not logged in.
ANONYMOUS = "anonymous "


@dataclass(frozen=True, slots=True)
class Ticket:
    """The signed text in a page with a form: which lock it has or wants.

    *key*: the one of the lock on its server, that of the page's tenant. *ttl*: seconds, of a page whose script renews
    the lock. *nonce*: new for each page; with SECRET_KEY it makes the owner of the lock. *path*: the address of the
    page. *database*: the alias of DATABASES that has the object. *may_take_over*: None is decided by the permission,
    at each request. *seen*: by field, a digest of the value that the form was opened with.
    """

    using: str
    name: str
    key: str
    model: str
    pk: str
    database: str
    user: str
    ttl: float
    path: str
    may_take_over: bool | None
    nonce: str
    seen: dict[str, str] | None = None

    def written(self) -> str:
        return signing.dumps(asdict(self), salt=SALT, compress=True)

    def renamed(self, attempt: str) -> Ticket:
        """Return the ticket that the page gets by this *attempt*: two tabs that have one ticket get two."""
        return replace(self, nonce=owner_of(f"{self.nonce} {attempt}")[:16])

    def mark(self, text: str) -> str:
        """Return a digest of a value of this object, which only the server can make."""
        secret = salted_hmac(f"{SALT}.seen", f"{self.name} {text}", algorithm="sha256")
        return secret.hexdigest()[:12]


def read_ticket(request: HttpRequest) -> Ticket | None:
    """Return the ticket that a page has sent; None if it has none, or one that is not valid.

    It ends with the page's session, and is valid for one user and one release.
    """
    text, age = request.POST.get(FIELD, ""), settings.SESSION_COOKIE_AGE
    try:
        ticket = Ticket(**signing.loads(text, salt=SALT, max_age=age))
    except (signing.BadSignature, UnicodeError, TypeError):
        return None
    return ticket if ticket.user == user_key(request) else None


def owner_of(nonce: str) -> Secret:
    """Return the owner of the lock of a page: no page and no listing shows it."""
    return Secret(salted_hmac(SALT, nonce, algorithm="sha256").hexdigest()[:32])


def new_nonce() -> str:
    return secrets.token_hex(8)


def user_key(request: HttpRequest) -> str:
    """Return the key of the user as text; for a user who is not logged in, one of the browser."""
    pk = getattr(getattr(request, "user", None), "pk", None)
    if pk is not None:
        return str(pk)
    get_token(request)  # every browser with a form has its secret
    secret = request.META["CSRF_COOKIE"]
    return ANONYMOUS + salted_hmac(f"{SALT}.browser", secret, algorithm="sha256").hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an object that a form can change: a field, or the rows of an inline.

    *text*: what is compared of it. *values*: returns what is shown of it, which no query is made for otherwise.
    """

    key: str
    label: str
    text: str
    values: Callable[[], Iterable[Any]]
    shown: str = ""

    def with_shown(self) -> Part:
        """Return it with its value for people, cut if it is long."""
        values = [*islice(self.values(), FEW + 1)]
        texts = [str(formats.localize(value)) for value in values[:FEW] if value is not None]
        text = ", ".join(texts + ["..."] * (len(values) > FEW))
        return replace(self, shown=Truncator(text).chars(4 * LONGEST_SHOWN) or "-")


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
        #: Whether the user may not do what the page asks for, by now.
        self.is_refused = False
        #: Whether the page has the tag.
        self.is_shown = False

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
        if self.editor is None or self.editor.is_me:
            return self.editor is not None
        if self.ticket.may_take_over is not None:
            return self.ticket.may_take_over
        user: Any = getattr(self.request, "user", None)
        return user is not None and bool(user.has_perm(PERMISSION))

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
        self.backend.check_ttl(self.ticket.ttl)
        if self.request.method != "POST":
            with self._noting_failure():
                self.editor = self._taken(self._asking(FIRST_TTL))
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
            self.editor = self._taken(self._asking(FIRST_TTL), before)

    def watch(self) -> None:
        """Note who edits the object, for a page that cannot change it."""
        self.is_read_only = True
        with self._noting_failure():
            self.editor = self.look()

    def note_seen(self, texts: dict[str, str]) -> None:
        """Note the values that the form is opened with, by field."""
        seen = {key: self.ticket.mark(text) for key, text in texts.items()}
        self.ticket = replace(self.ticket, seen=seen)

    def problems(self, form: BaseModelForm[Any], more: Iterable[Part] = ()) -> list[str]:
        """Return why the form must not be saved: somebody else has the lock, or has changed what it shows.

        The *form* has its object as it is now, with nothing of what was typed. *more*: other parts of the object.
        """
        problems = [_("Not saved. %s") % self.editor.sentence] if self.editor else []
        fields, more = [*parts_of(form)], [*more]
        # What somebody else has changed to the same value, such as the first click of two, is in nobody's way.
        typed = [part for part in fields if part.key in form.changed_data]
        changed = [part for part in [*typed, *more] if self._is_changed(part.key, part.text)]
        self.changes = [part.with_shown() for part in changed]
        if self.changes:
            text = _(
                "Not saved yet. It was changed after you had opened it:"
                " compare what you have typed with the current values, and save again."
            )
            problems.append(text)
        # A page that is shown again has the same text, compared with what is shown beside it.
        if self.changes or self.ticket.seen is None:
            self.note_seen({part.key: part.text for part in [*fields, *more]})
        return problems

    def accepts(self, form: BaseModelForm[Any]) -> bool:
        """Return whether *form* is valid and may be saved; otherwise its errors say why not.

        Call it instead of ``form.is_valid()``, in the transaction that saves the form: it locks the row, and reads the
        form's instance again, so that a column that the form does not have is saved as it is.
        """
        if self.read_again(form):
            problems = self.problems(form)
        else:
            problems = [_("Not saved. It was deleted meanwhile.")]
        form.full_clean()
        for problem in problems:
            form.add_error(None, problem)
        return form.is_valid()

    def read_again(self, form: BaseModelForm[Any]) -> bool:
        """Lock the row of the form's instance, and read that again; return False if the row was deleted."""
        if self.row() is None:
            return False
        form.instance.refresh_from_db(using=self.ticket.database)
        form.initial = {**form.initial, **model_to_dict(form.instance, form.fields)}
        return True

    def release(self) -> None:
        """Release the lock, if the page has it: the form was saved, or left. Call it after the commit."""
        request = self._asking()
        try:
            settled(partial(self.backend.release, request))
        except LockBackendError:
            self.backend.abandon_later(request)

    # For the page's script.

    def renew(self) -> bool:
        """Extend the lock of a page that is still open; return whether it has it."""
        return settled(lambda: self.backend.extend([self._asking()]))[0]

    def again(self, attempt: str) -> EditLock:
        """Return the lock for the same page, after it was asked for again. *attempt* names this request, for leave()."""
        other = EditLock(self.request, self.ticket.renamed(attempt or new_nonce()))
        other.editor = other._taken(other._asking())
        return other

    def leave(self, attempt: str) -> None:
        """Release the lock of a page that is gone, and what its *attempt* gets, whose answer nobody reads."""
        self.release()
        if attempt:
            other = EditLock(self.request, self.ticket.renamed(attempt))
            self.backend.abandon_later(other._asking())

    def look(self) -> Editor | None:
        """Return who edits the object, be it this page."""
        if not self.backend.supports_listing:
            return None  # nothing is locked there
        found = settled(lambda: [*self.backend.held(self.ticket.key)])
        return next(iter(editors(self.request, found)), None)

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
        # No manager's: one may join tables that cannot be locked, or hide rows.
        rows: QuerySet[Any] = QuerySet(model).using(database).filter(pk=pk)
        if connections[database].in_atomic_block:
            rows = rows.select_for_update()
        row: Model | None = rows.first()
        return row

    def is_as_seen(self) -> bool | None:
        """Return whether the fields of the object are what the form was opened with; None if it was deleted."""
        row = self.row()
        if row is None:
            return None
        return not any(starmap(self._is_changed, texts_of(row).items()))

    @property
    def backend(self) -> BaseLockBackend:
        return locks[self.ticket.using]

    @property
    def _username(self) -> str:
        user = getattr(self.request, "user", None)
        return user.get_username() if user is not None and user.pk is not None else "an editor"

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

    def _is_changed(self, key: str, text: str) -> bool:
        mark = (self.ticket.seen or {}).get(key)
        return self._is_unknown or (mark is not None and mark != self.ticket.mark(text))

    def _asking(self, ttl: float | None = None) -> Request:
        ticket = self.ticket
        task = f"edit {ticket.nonce} {quote(ticket.user, safe='')}"
        holder = replace(Holder.current(f"{EDITED_BY}{self._username}"), task=task)
        ttl = ticket.ttl if ttl is None else min(ttl, ticket.ttl)
        request = self.backend.request(ticket.name, ticket.key, ttl=ttl, holder=holder)
        return replace(request, owner=owner_of(ticket.nonce))

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
        held = Held(busy.name, request.key, busy.holder, busy.remaining, None, "")
        return editors(self.request, [held])[0]

    def _is_moved(self, request: Request, nonce: str) -> bool:
        return settled(partial(self.backend.take_over, request, owner_of(nonce)))


def editors(request: HttpRequest, found: Iterable[Held]) -> list[Editor]:
    """Return who edits, of the holdings that were *found*."""
    me, pages = user_key(request), []
    for held in found:
        if held.state == LockState.HELD:
            holder, words = held.holder, []
            if holder and holder.purpose.startswith(EDITED_BY):
                words = holder.task.split(" ")
            pages.append((held, words[1], unquote(words[2])) if len(words) == 3 else (held, "", ""))
    keys = {pk for _held, _nonce, pk in pages if pk and not pk.startswith(ANONYMOUS)}
    users = get_user_model()._default_manager.filter(pk__in=keys) if keys else ()  # noqa: SLF001 - documented
    names = {str(user.pk): _name_of(user) for user in users}

    def name(held: Held, nonce: str, pk: str) -> str:
        if nonce or held.holder is None:
            return names.get(pk) or _("somebody")
        # Its host and process are not for everybody.
        is_known = not me.startswith(ANONYMOUS)
        return str(held.holder) if is_known else held.holder.purpose or _("somebody")

    return [Editor(page[0], name(*page), page[1], is_me=page[2] == me) for page in pages]


def edit_lock(
    request: HttpRequest,
    instance: Model,
    *,
    using: str = DEFAULT_ALIAS,
    ttl: float | timedelta = TTL,
    may_take_over: bool | None = None,
) -> EditLock:
    """Take the lock of a saved *instance* for the page of *request*, which has its form; return the EditLock.

    For GET, *is_read_only* of the result is true if somebody else edits the instance. For POST, call its
    accepts(form) instead of ``form.is_valid()``, and its release() after the form was saved.

    *ttl*: seconds that the lock lives after the page has vanished. *may_take_over*: whether the user may take the
    lock from somebody else; by default, who has the permission ``django_distlock.take_over_methodlock``.
    """
    edit = EditLock(request, new_ticket(request, instance, using, checked_ttl(ttl), may_take_over))
    edit.begin()
    if request.method != "POST":
        edit.note_seen(texts_of(instance))
    return edit


def new_ticket(
    request: HttpRequest,
    instance: Model,
    using: str,
    ttl: float,
    may_take_over: bool | None,
) -> Ticket:
    """Return the ticket of a new page."""
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
        ttl=ttl,
        path=request.get_full_path(),
        may_take_over=may_take_over,
        nonce=new_nonce(),
    )


def key_of(instance: Model) -> str:
    """Return the key of *instance* as text, also one of several columns."""
    key: str = instance._meta.pk.value_to_string(instance)  # noqa: SLF001 - documented
    return key


def texts_of(instance: Model) -> dict[str, str]:
    """Return what is compared of the editable fields of *instance*."""
    return {name: compared(value) for name, value in model_to_dict(instance).items()}


def parts_of(form: BaseModelForm[Any]) -> Iterator[Part]:
    """Return the fields of *form* as its object has them, also those that are no fields of the model."""
    values = {name: form.initial.get(name, field.initial) for name, field in form.fields.items()}
    values |= model_to_dict(form.instance, form.fields)
    for name, value in values.items():
        if not callable(value):  # such as the current time
            shown = partial(_values_of, form.instance, name, value)
            yield Part(name, str(form[name].label), compared(value), shown)


def compared(value: Any) -> str:
    """Return the text by which *value* is compared."""
    if isinstance(value, (list, QuerySet)):
        rows = [*value]
        if isinstance(value, QuerySet) or all(isinstance(row, Model) for row in rows):
            return repr(sorted(map(compared, rows)))
    if isinstance(value, Model):
        value = value.pk
    return "" if value is None else str(value)


def _values_of(instance: Model, name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, QuerySet)):
        return value
    shown = getattr(instance, f"get_{name}_display", None)
    return [shown() if shown else getattr(instance, name, value)]


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
    if edit.is_refused:
        edit.release()
        text = _("You may not change this any more. What you have typed stays here.")
        return {"state": "refused", "message": text}
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
