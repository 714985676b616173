"""Edit locks: a form that is open in a page holds the lock of its object, in the admin and in your own pages."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from math import inf
from secrets import token_hex
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from django.apps import apps
from django.conf import settings
from django.core import signing
from django.core.exceptions import ImproperlyConfigured, ObjectDoesNotExist
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
from django_distlock.engine.values import Held, LockState, Secret, State
from django_distlock.exceptions import LockBackendError, LockLost, LockNotAcquired, NotSupported
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder, unescaped
from django_distlock.ground.naming import warn
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
#: The purpose of each page's holding begins with this. The task alone proves nothing: any code may name a task so.
EDITED_BY = "edited by "
#: Seconds that a page keeps the lock after the last renewal; and before the first renewal by the page's script.
TTL, FIRST_TTL = 90.0, 15.0
#: Most seconds between two renewals by the script of a page that is visible.
PAUSE = 5.0
#: How often the lock is tried while its holders release it.
TRIES = 3
#: How many rows of a relation are named for people.
FEW = 20
#: What people see in the place of a password.
MASKED = "********"
#: What the key of a user who is not logged in begins with.
ANONYMOUS = "anonymous "


@dataclass(frozen=True, slots=True)
class Ticket:
    """The signed text in a page with a form: names the lock that the page has or wants.

    *key*: that of the lock on its server, which differs between tenants. *ttl*: seconds that the lock lives after a
    renewal by the page's script. *nonce*: new for each page; with SECRET_KEY it makes the owner of the lock. *path*: the
    address of the page. *database*: the alias of DATABASES that has the object. *may_take_over*: None: the permission
    decides at each request. *seen*: by field, a digest of the value that the form was opened with.
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
    may_take_over: bool | None = None
    nonce: str = field(default_factory=partial(token_hex, 8))
    seen: dict[str, str] | None = None

    def written(self) -> str:
        return signing.dumps(asdict(self), salt=SALT, compress=True)

    def mark(self, text: str) -> str:
        """Return a digest of a value of this object, which only the server can make."""
        secret = salted_hmac(f"{SALT}.seen", f"{self.name} {text}", algorithm="sha256")
        return secret.hexdigest()[:12]


def read_ticket(request: HttpRequest) -> Ticket | None:
    """Return the ticket that a page has sent; None if it is missing or not valid.

    A ticket is valid for one user and one release of this package, and for SESSION_COOKIE_AGE seconds, unless each
    request extends the session.
    """
    text = request.POST.get(FIELD, "")
    age = None if settings.SESSION_SAVE_EVERY_REQUEST else settings.SESSION_COOKIE_AGE
    try:
        ticket = Ticket(**signing.loads(text, salt=SALT, max_age=age))
    except (signing.BadSignature, UnicodeError, TypeError):
        return None
    return ticket if ticket.user == user_key(request) else None


def owner_of(nonce: str) -> Secret:
    """Return the owner of a page's lock, a secret that no page and no listing shows."""
    return Secret(salted_hmac(SALT, nonce, algorithm="sha256").hexdigest()[:32])


def user_key(request: HttpRequest) -> str:
    """Return the primary key of the user as text; for an anonymous user, a text that identifies the browser."""
    pk = getattr(getattr(request, "user", None), "pk", None)
    if pk is not None:
        return str(pk)
    get_token(request)  # makes sure that the browser has a CSRF secret
    secret = request.META["CSRF_COOKIE"]
    return ANONYMOUS + salted_hmac(f"{SALT}.browser", secret, algorithm="sha256").hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an object that a form can change: a field, or the rows of an inline.

    *text* is compared to see a change. *values* are for people, and read only when shown, as they may need a query.
    """

    key: str
    label: str
    text: str
    values: Iterable[Any]
    shown: str = ""

    def with_shown(self) -> Part:
        """Return the part with its value for people, cut if it is long."""
        values = [*islice(self.values, FEW + 1)]
        texts = [str(formats.localize(value)) for value in values[:FEW] if value is not None]
        text = ", ".join(texts + ["..."] * (len(values) > FEW))
        return replace(self, shown=Truncator(text).chars(4 * LONGEST_SHOWN) or "-")


@dataclass(frozen=True, slots=True)
class Editor:
    """A user who edits an object, or other code that holds its lock. *nonce* is the page's, empty for other code."""

    held: Held
    name: str
    nonce: str
    is_me: bool

    @property
    def sentence(self) -> str:
        """A sentence for people: who edits the object, and since when."""
        since = Row(self.held, ()).since
        facts = {"who": self.name, "since": clock.time_of_day(since) if since else "-"}
        if self.is_me:
            return _("You have opened this in another window since %(since)s.") % facts
        return _("Being edited by %(who)s since %(since)s.") % facts


@dataclass(eq=False)
class EditLock:
    """The lock of an object that is edited, as one page sees it; edit_lock() makes it.

    *editor*: the other holder; None if this page has the lock. *failed*: the lock server did not answer, so that
    anybody can edit. *changes*: the parts that others have changed since the form was opened. *is_read_only*: the
    page was opened while somebody else edits the object, or its user may only look.
    """

    request: HttpRequest
    ticket: Ticket
    _url: str = ""
    #: Called after a take-over, with the former editor.
    _log: Callable[[EditLock, Editor], object] | None = None
    editor: Editor | None = None
    failed: bool = False
    changes: list[Part] = field(default_factory=list)
    is_read_only: bool = False
    #: Whether the user has lost the right to what the page asks for.
    is_refused: bool = False
    #: Whether problems() has compared the form.
    is_compared: bool = False
    #: Whether the page has the tag.
    is_shown: bool = False
    #: Whether the values that the form was opened with are unknown, so that every field counts as changed.
    _is_unknown: bool = False

    # For templates.

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
        """The text that the page shows when it is opened; usually empty."""
        if self.failed:
            return _(
                "It cannot be told whether somebody else edits this."
                " If it is changed meanwhile, you are told when you save."
            )
        return self.editor.sentence if self.editor else ""

    # For the view of a form.

    def begin(self, *, is_editor: bool = True) -> None:
        """Take the lock for the page that is being rendered, if it is free; NotSupported if pages cannot hold locks.

        If not *is_editor*, only find out who has the lock.
        """
        if not self.backend.supports_detach:
            instead = self.backend.instead or "Its locks end with a process."
            raise NotSupported(self.ticket.using, "edit_lock()", instead)
        self.backend.check_ttl(self.ticket.ttl)
        sent = read_ticket(self.request)
        if sent is not None and sent.key == self.ticket.key:
            self.ticket = replace(self.ticket, seen=sent.seen)
        else:
            self._is_unknown = FIELD in self.request.POST
        try:
            if is_editor:
                if shown := self.request.POST.get(TAKE_OVER):
                    self.take_over(shown)
                self.take(FIRST_TTL, sent.nonce if sent else "")
            else:
                self.editor = self.look()
        except LockBackendError as error:
            self.failed = True
            name, using = self.ticket.name, self.ticket.using
            warn("The form is shown without its lock: %s", error, name=name, using=using)
        is_opened = self.request.method != "POST" and self.editor is not None
        self.is_read_only = is_opened or not is_editor

    def note_seen(self, texts: dict[str, str]) -> None:
        """Note the values that the form is opened with, by field."""
        seen = {key: self.ticket.mark(text) for key, text in texts.items()}
        self.ticket = replace(self.ticket, seen=seen)

    def problems(self, form: BaseModelForm[Any], more: Iterable[Part] = ()) -> list[str]:
        """Return the reasons not to save the form: another editor has the lock, or has changed the shown values.

        The *form* has its object as it is now, without the input. *more*: other parts of the object.
        """
        self.is_compared = True
        problems = [_("Not saved. %s") % self.editor.sentence] if self.editor else []
        parts = [*parts_of(form), *more]
        texts = {part.key: part.text for part in parts}
        # A field that already has the sent value, such as after the first of two clicks, is no conflict. Django's
        # changed_data compares with the value that the page has shown, if the default of a field is a function.
        same = {each.name for each in form if not each.field.has_changed(each.initial, each.data)}
        # A field of the object that the page did not have, as it depends on the object, is not sent: it would be emptied.
        seen = texts if self.ticket.seen is None else self.ticket.seen
        unseen = model_to_dict(form.instance, form.fields).keys() - seen.keys()
        changed = (self.changed(texts) | unseen) - same
        self.changes = [part.with_shown() for part in parts if part.key in changed]
        if self.changes:
            text = _(
                "Not saved yet. It was changed after you had opened it:"
                " compare what you have typed with the current values, and save again."
            )
            problems.append(text)
        # The page shows the current values beside the typed ones: the next time, these are compared.
        if self.changes or self.ticket.seen is None:
            self.note_seen(texts)
        return problems

    def accepts(self, form: BaseModelForm[Any]) -> bool:
        """Return True if *form* is valid and may be saved; otherwise its errors say why not.

        Call accepts() instead of ``form.is_valid()``, in the transaction that saves the form. It locks the row and
        reloads the form's instance, so that save() leaves columns that the form does not have unchanged.
        """
        is_there = self.read_again(form)
        problems = self.problems(form) if is_there else [_("Not saved. It was deleted meanwhile.")]
        form.full_clean()
        for problem in problems:
            form.add_error(None, problem)
        return form.is_valid()

    def read_again(self, form: BaseModelForm[Any]) -> bool:
        """Lock the row of the form's instance, and reload the instance; return False if the row was deleted."""
        if self.row() is None:
            return False
        form.instance.refresh_from_db(using=self.ticket.database)
        form.initial = {**form.initial, **model_to_dict(form.instance, form.fields)}
        return True

    def release(self, *, for_good: bool = False) -> None:
        """Release the page's lock, because the form was saved or left. Call it after the commit.

        *for_good*: release once more later, as another request of the page may be about to take the lock.
        """
        request = self._asking()
        try:
            settled(partial(self.backend.release, request))
        except LockBackendError:
            for_good = True
        if for_good:
            self.backend.abandon_later(request)

    # For the page's script.

    def renew(self) -> bool:
        """Extend the lock of a page that is still open; return whether the page has it."""
        return settled(lambda: self.backend.extend([self._asking()]))[0]

    def take(self, ttl: float = inf, former: str = "", *, is_newest: bool = True) -> None:
        """Take the lock; if somebody else has it, set *editor*.

        With *is_newest*, also take the lock from another page of the same user. *former*: the nonce of the page that
        most likely has the lock.
        """
        request, self.editor = self._asking(ttl), None
        if former and self._is_moved(request, former):
            return
        busy = LockNotAcquired(request.name)
        for _try in range(TRIES):
            # Look first, because Redlock may refuse an owner that it has refused before.
            editor = self.look()
            if editor is None:
                try:
                    if self._is_taken(request):
                        return
                except LockNotAcquired as refused:
                    busy = refused
            elif editor.is_me and editor.nonce and (is_newest or editor.nonce == self.ticket.nonce):
                if self._is_moved(request, editor.nonce):
                    return
            else:
                self.editor = editor
                return
        held = Held(busy.name, request.key, busy.holder, busy.remaining, None, "")
        self.editor = _editor(held, user_key(self.request))

    def look(self) -> Editor | None:
        """Return the editor of the object, even if it is this page; None if nobody edits it."""
        if not self.backend.supports_listing:
            return None  # such a backend, as in tests, excludes nobody
        found = settled(lambda: [*self.backend.held(self.ticket.key)])
        return next(iter(editors(self.request, found)), None)

    def take_over(self, shown: str) -> None:
        """Take the lock from the holding with the digest *shown*, if it still exists and the user has the permission."""
        former = self.editor = self.look()
        if former is None or not self.can_take_over:
            return
        if self.backend.force_release(former.held.key, shown, by=self._username):
            try:
                self.take(FIRST_TTL)  # at once, as the page of the former editor asks for it again
            finally:
                if self._log and self.editor is None:
                    self._log(self, former)

    def row(self) -> Model | None:
        """Return the object as it is now; in a transaction, with its row locked."""
        model, database = apps.get_model(self.ticket.model), self.ticket.database
        pk = model._meta.pk.to_python(self.ticket.pk)  # noqa: SLF001 - documented
        # Not by a manager, which may join tables that cannot be locked, or hide rows.
        rows: QuerySet[Any] = QuerySet(model).using(database).filter(pk=pk)
        if connections[database].in_atomic_block:
            rows = rows.select_for_update()
        # Meta.ordering may join other tables, whose rows would be locked, too, or cannot be.
        row: Model | None = rows.order_by("pk").first()
        return row

    def changed(self, texts: dict[str, str]) -> set[str]:
        """Return the fields whose values have changed since the form was opened."""
        if self._is_unknown:
            return {*texts}
        marks = {key: self.ticket.mark(text) for key, text in texts.items()}
        seen = self.ticket.seen or {}
        return {key for key, mark in marks.items() if seen.get(key, mark) != mark}

    @property
    def backend(self) -> BaseLockBackend:
        return locks[self.ticket.using]

    @property
    def _username(self) -> str:
        user: Any = getattr(self.request, "user", None)
        if user is None or user.pk is None:
            return "an editor"
        name = user.get_username()
        return str(getattr(user, "get_full_name", str)() or name)

    def _asking(self, ttl: float = inf) -> Request:
        ticket = self.ticket
        task = f"edit {ticket.nonce} {quote(ticket.user, safe='')}"
        holder = replace(Holder.current(f"{EDITED_BY}{self._username}"), task=task)
        ttl = min(ttl, ticket.ttl)
        request = self.backend.request(ticket.name, ticket.key, ttl=ttl, holder=holder)
        return replace(request, owner=owner_of(ticket.nonce))

    def _is_taken(self, request: Request) -> bool:
        lease = Lease(self.backend, request, renew=False, release_when="at_exit")
        with suppress(LockLost):
            acquire(lease, 0)
            return lease.end(State.DETACHED)
        return False

    def _is_moved(self, request: Request, nonce: str) -> bool:
        return settled(partial(self.backend.take_over, request, owner_of(nonce)))


def editors(request: HttpRequest, found: Iterable[Held]) -> list[Editor]:
    """Return the editors of the holdings *found*."""
    me = user_key(request)
    return [_editor(held, me) for held in found if held.state == LockState.HELD]


def _editor(held: Held, me: str) -> Editor:
    holder = held.holder or Holder("", 0, "")
    is_page = holder.purpose.startswith(EDITED_BY) and holder.task.count(" ") == 2
    _word, nonce, user = map(unquote, holder.task.split(" ")) if is_page else ("", "", "")
    if is_page:
        name = "" if user.startswith(ANONYMOUS) else holder.purpose.removeprefix(EDITED_BY)
    elif me.startswith(ANONYMOUS):
        name = holder.purpose  # anonymous users do not see host and process
    else:
        name = str(held.holder or "")
    return Editor(held, unescaped(name) or _("somebody"), nonce, is_me=user == me)


def edit_lock(
    request: HttpRequest,
    instance: Model,
    *,
    using: str = DEFAULT_ALIAS,
    ttl: float | timedelta = TTL,
    may_take_over: bool | None = None,
) -> EditLock:
    """Take the lock of a saved *instance* for the page of *request*, which shows its form; return the EditLock.

    For GET, *is_read_only* of the result is true if somebody else edits the instance. For POST, call the result's
    accepts(form) instead of ``form.is_valid()``, and its release() after the form was saved.

    *ttl*: seconds that the lock lives after the page has vanished. *may_take_over*: whether the user may take the
    lock from somebody else; by default, users with the permission ``django_distlock.take_over_methodlock`` may.
    """
    ticket = new_ticket(request, instance, using, checked_ttl(ttl))
    edit = EditLock(request, replace(ticket, may_take_over=may_take_over))
    edit.begin()
    if request.method != "POST":
        edit.note_seen(texts_of(instance))
    return edit


def new_ticket(request: HttpRequest, instance: Model, using: str, ttl: float) -> Ticket:
    """Return the ticket of a new page."""
    opts: Any = instance._meta  # noqa: SLF001 - documented
    return Ticket(
        using=using,
        name=lock_name(instance),
        key=locks[using].key_of(lock_name(instance)),
        model=opts.label_lower,
        pk=opts.pk.value_to_string(instance),
        # The database that save() would write to.
        database=router.db_for_write(opts.model, instance=instance),
        user=user_key(request),
        ttl=ttl,
        path=request.get_full_path(),
    )


def lock_name(instance: Model) -> str:
    """Return the name of the edit lock of *instance*."""
    return f"edit:{object_name(instance)}"


def texts_of(instance: Model) -> dict[str, str]:
    """Return the texts by which the editable fields of *instance* are compared."""
    return {name: compared(value) for name, value in model_to_dict(instance).items()}


def parts_of(form: BaseModelForm[Any]) -> Iterator[Part]:
    """Return a part for each field of *form*, with the object's value, or the initial value if the model has no such field."""
    values = {name: form.initial.get(name, field.initial) for name, field in form.fields.items()}
    values |= model_to_dict(form.instance, form.fields)
    for name, value in values.items():
        if not callable(value):  # such as the current time
            shown = _values_of(form.instance, name, value)
            if _is_masked(form.fields[name].widget):
                shown = iter([MASKED])
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


def _is_masked(widget: Any) -> bool:
    """Return True if *widget*, or one of its inputs, shows no value to people, as that of a password."""
    is_password = getattr(widget, "input_type", "") == "password"
    is_shown = getattr(widget, "render_value", False)
    return (is_password and not is_shown) or any(map(_is_masked, getattr(widget, "widgets", ())))


def _values_of(instance: Model, name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, QuerySet)):
        yield from value
        return
    shown = getattr(instance, f"get_{name}_display", None)
    with suppress(ObjectDoesNotExist):  # a foreign key may point nowhere
        value = shown() if shown else getattr(instance, name, value)
    yield value


@never_atomic
@never_cache
@csrf_protect
@require_http_methods(["GET", "POST"])
def edit_lock_view(request: HttpRequest) -> HttpResponse:
    """Answer the script of a page with an edit lock, and the button "Take over" of a read-only page."""
    return answer(request, EditLock)


def answer(request: HttpRequest, make: Callable[[HttpRequest, Ticket], EditLock]) -> HttpResponse:
    """Return the answer of edit_lock_view(); *make* makes the lock."""
    if request.method == "GET":
        # After another login, the CSRF token of an open page is no longer valid.
        return JsonResponse({"csrf": get_token(request)})
    ticket, what = read_ticket(request), request.POST.get("what")
    if ticket is None:
        return JsonResponse({"state": "refused"})
    if life := request.POST.get("life"):
        ticket = replace(ticket, nonce=owner_of(f"{ticket.nonce} {life}")[:16])
    edit, told = make(request, ticket), {}
    try:
        if what == "take-over":
            if not edit.is_refused:
                edit.take_over(request.POST.get(TAKE_OVER, ""))
        else:
            told = _told(edit, what)
    except LockBackendError:
        edit.failed = True
        told = {"state": "failed", "message": edit.message}
    return HttpResponseRedirect(ticket.path) if what == "take-over" else JsonResponse(told)


def _told(edit: EditLock, what: str | None) -> dict[str, str]:
    """Return the answer to the script: a state, with a message unless it is just "held", "lost" or "left"."""
    if what in {"leave", "abandon"}:
        edit.release(for_good=what == "abandon")
        return {"state": "left"}
    if edit.is_refused:
        edit.release()
        text = _("You may not change this any more. What you have typed stays here.")
        return {"state": "refused", "message": text}
    if what == "look":
        edit.editor = edit.look()
    elif what == "renew":
        # The script asks again, as another page: a server may refuse an owner that has released the lock.
        return {"state": "held" if edit.renew() else "lost"}
    else:
        edit.take(is_newest=what == "begin")
    if edit.editor is None:
        return _told_of_row(edit, what)
    text = edit.message
    if what != "look":
        text += " " + _("What you have typed stays here.")
    shown = edit.editor.held.owner_digest if edit.can_take_over else ""
    return {"state": "busy", "message": text, "take_over": shown}


def _told_of_row(edit: EditLock, what: str | None) -> dict[str, str]:
    if what == "look":
        text = _("Nobody edits this any more: load the page again to edit it.")
        return {"state": "free", "message": "" if edit.is_read_only else text}
    row = edit.row()
    if row is None:
        edit.release()
        return {"state": "gone", "message": _("This was deleted.")}
    if not edit.changed(texts_of(row)):
        return {"state": "held"}
    text = _("This was changed after you had opened it. When you save, you are shown what.")
    return {"state": "changed", "message": text}


__all__ = ["EditLock", "edit_lock", "edit_lock_view"]
