"""The common part of unique tasks for Celery and for Django: their arguments, and the lease in a message."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard
from urllib.parse import unquote
from uuid import UUID

from django.core import signing
from django.core.signing import BadSignature
from django.db.models import Model
from django.utils.asyncio import async_unsafe
from django.utils.crypto import salted_hmac

from django_distlock.conf import DEFAULT_ALIAS, checked_ttl, flag
from django_distlock.engine.handover import name_in
from django_distlock.engine.lease import Lease
from django_distlock.engine.leftovers import until_done
from django_distlock.engine.steps import settled
from django_distlock.engine.values import Secret
from django_distlock.exceptions import (
    LockBackendError,
    LockError,
    LockLost,
    LockNotAcquired,
    NotSupported,
)
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder, task_text
from django_distlock.ground.naming import (
    NameFor,
    checked_name,
    log_fields,
    name_maker,
    printable,
    signature_of,
    title_of,
    warn,
)
from django_distlock.ground.objects import object_name
from django_distlock.handler import declared, locks
from django_distlock.lock import Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from inspect import Signature

    from django_distlock.backends.base import BaseLockBackend
    from django_distlock.engine.values import Request
    from django_distlock.lock import Lock

    Name = str | Callable[..., str]

logger = logging.getLogger("django_distlock")

#: What clock.postmark() returns.
Postmark = tuple[float, str, float]
#: The header or argument with a text of packed() or Lease.detach(). It is as secret as the queue.
HEADER = "distlock"
#: Salt of the signature in packed().
SALT = "django_distlock.task"
#: Seconds that a message may wait in the queue, unless the task says otherwise.
LEASE = 3600.0
#: How many times debounce a body is put off at most, unless the task says otherwise.
AT_MOST = 10
#: A name with all arguments is cut after so many characters; its digest follows.
LONGEST_CALL = 200
#: The arguments of a bare @unique_task.
_DEFAULTS = {
    "lease": LEASE,
    "using": DEFAULT_ALIAS,
    "until": "end",
    "again": False,
    "debounce": None,
    "at_most": None,
}
#: What to write instead of the arguments of lock(), which the decorator of a task would drop or refuse.
_AT_A_TIME = "put @distributed_lock below the decorator of the task"
_INSTEAD = {
    "ttl": "use lease: how long a message keeps the name; while it runs, its lease is renewed",
    "timeout": "nothing waits for it to be sent: with again=True, the next body waits for this one",
    **dict.fromkeys(
        ("limit", "on_busy", "shared", "min_hold", "max_hold", "free_on_error"),
        f"for a lock around its body alone, {_AT_A_TIME}",
    ),
    **dict.fromkeys(
        ("reentrant", "renew", "release", "cancel_when_lost", "purpose"), "leave it out"
    ),
}


def checked_lease(name: object, words: dict[str, Any]) -> float:
    """Check *words*, the arguments of unique_task(), and return their *lease* in seconds; TypeError or ValueError."""
    for word in words:
        if word in _INSTEAD:
            raise TypeError(f"unique_task() has no {word!r}; {_INSTEAD[word]}.")
    if not (name is None or isinstance(name, str) or callable(name)):
        msg = f'The name must be text, such as "import:{{shop_id}}", or a lambda, not {name!r}.'
        raise TypeError(msg)
    task_name = words.get("name")
    if callable(task_name) or "{" in (task_name or ""):
        msg = "name= is the name of the task; write the lock's name first, without name=."
        raise TypeError(msg)
    if is_decorated(name) and words != _DEFAULTS:
        title = title_of(name)
        raise TypeError(
            f"For a name by {title}(), write unique_task(lambda ...: {title}(...), ...); "
            f"to make a task of it, write @unique_task(...) above {title}()."
        )
    return checked_ttl(words["lease"], "lease")


def _checked_debounce(debounce: Any, at_most: Any, until: str) -> tuple[float, float]:
    """Return *debounce* and *at_most* in seconds, 0.0 without debounce; TypeError or ValueError for wrong ones."""
    if debounce is None:
        if at_most is not None:
            raise ValueError("at_most says how long debounce puts a body off: give debounce, too.")
        return 0.0, 0.0
    if until == "start":
        raise ValueError(
            'debounce frees the name when the body begins, as again=True does: leave out until="start".'
        )
    quiet = checked_ttl(debounce, "debounce")
    most = AT_MOST * quiet if at_most is None else checked_ttl(at_most, "at_most")
    if most < quiet:
        raise ValueError(f"at_most must be debounce ({quiet:g} seconds) or more, not {at_most!r}.")
    return quiet, most


def is_decorated(name: object) -> TypeGuard[Callable[..., Any]]:
    """Return True if *name*, the first argument of unique_task(), is the decorated function, not a name for the lock."""
    return callable(name) and getattr(name, "__name__", "") != "<lambda>"


class Once:
    """The arguments of unique_task(), for one task."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: Name | None,
        lease: float,
        using: str,
        *,
        is_bound: bool,
        until: str = "end",
        again: bool = False,
        debounce: float | timedelta | None = None,
        at_most: float | timedelta | None = None,
    ) -> None:
        """Fields of *name* are arguments of *function*, except the first one if it *is_bound*; None: all arguments.

        TypeError or ValueError for a wrong time, or if *until*, *again*, *debounce* and *at_most* contradict each other.
        """
        self.lease, self.using, self.title = lease, using, title_of(function)
        if until not in {"start", "end"}:
            raise ValueError(f'until must be "start" or "end", not {until!r}.')
        if flag(again, "again") and until == "start":
            raise ValueError(
                'again=True waits for the body that runs; with until="start", both run.'
            )
        self.debounce, self.at_most = _checked_debounce(debounce, at_most, until)
        again = again or self.debounce > 0
        #: Whether the name is free while the body runs; and whether bodies then wait for each other.
        self.frees_at_start, self.again = again or until == "start", again
        #: Raises NotSupported if messages cannot be put off.
        self.check_queue: Callable[[], None] = lambda: None
        # The sender of the task passes no first argument.
        called = MethodType(function, object()) if is_bound else function
        self._name_for: NameFor
        #: The label of all locks of the task in metrics; "" if it is not known.
        self.template: str
        if name is None:
            self._name_for = partial(_name_of_call, self.title, signature_of(called))
            self.template = f"{self.title}(...)"
        else:
            self._name_for, self.template = name_maker(name, called)
        declared.add(self)

    def check_against(self, backend: BaseLockBackend) -> None:
        """Raise NotSupported if the lease cannot be sent in a message, or the message not be put off."""
        self._check_lease(backend)
        self.check_queue()

    def _check_lease(self, backend: BaseLockBackend) -> None:
        if not backend.supports_detach:
            raise NotSupported(
                self.using, "unique_task()", backend.instead or "Its locks cannot be handed over."
            )

    def name_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the name of the lock for one call."""
        return checked_name(self._name_for(args, kwargs))

    def terms(self, purpose: str, **more: Any) -> Terms:
        """Return the terms of the lock; NotSupported if its lease cannot be sent."""
        backend = locks[self.using]
        self._check_lease(backend)
        # While the task runs, its lease is renewed.
        ttl = min(backend.ttl, self.lease)
        return Terms(using=self.using, ttl=ttl, purpose=purpose, template=self.template, **more)

    def body_lock(self, lock: Lock) -> Lock | None:
        """Return the lock to hold while the body runs: *lock*, another one with *again*, None if bodies may overlap."""
        if not self.frees_at_start:
            return lock
        if not self.again:
            return None
        template = self.template and f"{self.template}:running"
        terms = replace(lock.terms, timeout=None, template=template)
        return terms.lock(f"{lock.name}:running")

    def beside(self, held: Lease, lock: Lock) -> Lock | nullcontext[None]:
        """Return the lock to hold around the body besides *held*, or an empty context; ValueError if *held* is not of *lock*."""
        adopt(held, lock)
        body = self.body_lock(lock)
        return nullcontext() if body is None or body is lock else body

    def begin(self, held: Lease) -> None:
        """Release *held*, the lease of the name, which may be lost, if the name is to be free while the body runs."""
        if self.frees_at_start:
            with suppress(LockLost):
                held.release()

    async def abegin(self, held: Lease) -> None:
        if self.frees_at_start:
            with suppress(LockLost):
                await held.arelease()

    def note_call(self, name: str) -> None:
        """Note another call: the message that holds the lock *name* is put off until *debounce* seconds from now."""
        if self.debounce:
            backend, mark = self._mark(name)
            if not settled(partial(backend.extend, [mark]))[0]:
                settled(partial(backend.try_acquire, mark, queued=False))

    def wait_left(self, name: str, first: Postmark | None) -> float:
        """Return for how many more seconds a message that holds *name* is put off.

        *first*: when the first call was made; None for a retry, or a message with the lease of its sender: these
        are not put off.
        """
        if first is None:
            return 0.0
        backend, mark = self._mark(name)
        busy = settled(partial(backend.probe, mark))
        since_last = (busy and busy.remaining) or 0.0
        return max(0.0, min(since_last, self.at_most - clock.travelled(*first)))

    def _mark(self, name: str) -> tuple[BaseLockBackend, Request]:
        """Return the request of the lock that is held until *debounce* after the last call; all callers are one owner."""
        backend = locks[self.using]
        holder = Holder.current(f"calls of {self.title}")
        request = backend.request(f"{name}:called", ttl=self.debounce, holder=holder)
        owner = salted_hmac(SALT, request.key, algorithm="sha256").hexdigest()[:32]
        return backend, replace(request, owner=Secret(owner))

    def note_under_way(self, busy: LockNotAcquired) -> None:
        """Log that a message was not sent, because the task is under way."""
        name, holder = busy.name, busy.holder
        fields = log_fields(name, self.using, holder=holder)
        logger.info(
            "Lock %s is held by %s: not sent", printable(name), printable(holder), extra=fields
        )


def _name_of_call(
    title: str, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Return the name for one call of the function *title*, with all arguments; TypeError if one has no stable text."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments.items()
    try:
        told = ", ".join(
            f"{word}={json.dumps(value, sort_keys=True, default=_as_text)}" for word, value in given
        )
    except (TypeError, ValueError) as problem:
        msg = (
            f"unique_task() cannot name {title}() by all its arguments ({problem}); give it a name."
        )
        raise TypeError(msg) from problem
    name = f"{title}({told})"
    if len(name) <= LONGEST_CALL:
        return name
    return f"{name[:LONGEST_CALL]}...#{hashlib.sha256(name.encode()).hexdigest()}"


def _as_text(value: object) -> str:
    """Return the text of an argument that JSON does not know: the same text in every process."""
    if isinstance(value, Model):
        return object_name(value)
    if isinstance(value, (date, time, timedelta, Decimal, UUID)):
        return str(value)
    raise TypeError(f"{value.__class__.__name__} has no text that is the same in every process")


class Carried(NamedTuple):
    """The content of a message's header: the text of a lease and the name of its lock, each maybe empty.

    *first*: when the first call of a task with debounce was made; None for a message that is not put off.
    """

    text: str
    name: str
    first: Postmark | None = None


def packed(text: str, name: str, first: Postmark | None = None) -> str:
    """Return the header of a message: *text*, that of a lease or empty.

    A signed text follows if *text* does not have the *name*, or if there is a *first*.
    """
    if first is not None:
        return f"{text} {signing.dumps([name, first], salt=SALT)}"
    # Workers of an earlier release can read the text alone.
    return text if name_in(text) == name else f"{text} {signing.dumps(name, salt=SALT)}"


def unpacked(carried: str) -> Carried:
    """Return the content of a header made by packed() or by Lease.detach()."""
    text, _, signed = carried.partition(" ")
    with suppress(BadSignature, UnicodeError):
        told = signing.loads(signed, salt=SALT)
        return Carried(text, told) if isinstance(told, str) else Carried(text, *told)
    return Carried(text, name_in(text))


def free(lease: Lease) -> None:
    """Release *lease*, which was handed to a message that could not be sent."""
    try:
        lease.backend.abandon(lease.request)
    except LockError:
        lease.backend.abandon_later(lease.request)


def free_text(text: str) -> None:
    """Release the lease in a message that no worker will run; if its server is down, in the background."""
    try:
        _release(text)
    except LockBackendError as problem:
        _release_later(text, problem.alias)


@contextmanager
def freed_by_errors(text: str | None) -> Iterator[None]:
    """If the block raises, release the lease in *text*, if there is one."""
    try:
        yield
    except BaseException:
        if text:
            free_text(text)
        raise


def _release(text: str) -> None:
    with suppress(LockLost, BadSignature):
        Lease.attach(text).release()


def _release_later(text: str, alias: str) -> None:
    until_done(alias, partial(_release, text), clock.lease_time() + LEASE)


def refuse_event_loop(using: str, instead: str) -> None:
    """Raise SynchronousOnlyOperation in the thread of an event loop, if the locks of *using* are in a database.

    *instead*: what to write in async code. Django itself raises that error when a connection is opened, but not
    when an idle one is used.
    """
    if locks[using].asks_database:
        text = f"The lock of a unique task is in a database: in async code, write {instead}."
        async_unsafe(text)(bool)()


@contextmanager
def unless_ended(lock: Lock, text: str) -> Iterator[None]:
    """Suppress errors of attaching the lease in *text*, if it has ended, was attached before, or cannot be read."""
    try:
        yield
    except LockLost:
        pass
    except BadSignature:
        warn(
            "%s brought a lease of lock %s that cannot be read, and counts as ended:"
            " was SECRET_KEY changed without SECRET_KEY_FALLBACKS?",
            lock.terms.purpose,
            lock.name,
            name=lock.name,
            using=lock.terms.using,
        )
    except BaseException:
        # The task fails, and must not keep the name until the lease of its message has ended.
        _release_later(text, lock.terms.using)
        raise


def adopt(lease: Lease, lock: Lock) -> None:
    """Give *lease*, which came with a message, the template of *lock*; ValueError for the lease of another lock."""
    if lease.name != lock.name:
        task = lock.terms.purpose
        raise ValueError(f"{task} needs lock {lock.name!r}, and was handed {lease.name!r}.")
    lease.template = lock.terms.template  # which is not in the message


def checked_task(name: str, task_id: str) -> str:
    """Return the text for the task *name* with this id in a holder; ValueError if the id is too long."""
    text = task_text(name, task_id)
    if not text.endswith("]"):
        msg = f"The id {printable(task_id)!r} is too long for unique_task(): it may have up to 108 ASCII characters."
        raise ValueError(msg)
    return text


def task_id(told: str, name: str) -> str | None:
    """Return the id, maybe empty, in *told*, the task of a holder; None if that is not the task *name*."""
    found = unquote(told.rpartition("[")[2][:-1], errors="surrogatepass") if "[" in told else ""
    return found if told == task_text(name, found) else None
