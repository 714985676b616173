"""Celery tasks that are in the queue only once, and leases that are sent to a task in a header of its message."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Never, overload

from celery import Task, current_task, shared_task
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore
from celery.local import Proxy
from celery.signals import task_postrun, task_revoked
from celery.states import READY_STATES, SUCCESS
from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import OperationalError

from django_distlock.conf import DEFAULT_ALIAS, LEAST_TTL
from django_distlock.engine.handover import hand_over
from django_distlock.engine.lease import Lease
from django_distlock.engine.registry import registry
from django_distlock.exceptions import LockBackendError, LockError, LockLost, LockNotAcquired
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder, task_text
from django_distlock.ground.naming import log_fields, printable, warn
from django_distlock.lock import Lock

from .once import (
    HEADER,
    LEASE,
    Once,
    Postmark,
    adopt,
    checked_lease,
    checked_task,
    free,
    free_text,
    freed_by_errors,
    is_decorated,
    packed,
    refuse_event_loop,
    task_id,
    unless_ended,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from django_distlock.backends.base import BaseLockBackend
    from django_distlock.engine.values import Request

logger = logging.getLogger("django_distlock")

#: Most seconds after which a message that was put back into the queue tries for its lock again.
LOOK_AGAIN = 5.0
#: Most seconds that a sender waits until a task releases its lock, once the result of the task is stored.
RELEASED_WITHIN = 2.0


@overload
def unique_task(function: Callable[..., Any], /) -> Any: ...
@overload
def unique_task(
    name: str | Callable[..., str] | None = None,
    /,
    *,
    lease: float | timedelta = LEASE,
    using: str = DEFAULT_ALIAS,
    until: Literal["start", "end"] = "end",
    again: bool = False,
    debounce: float | timedelta | None = None,
    at_most: float | timedelta | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Any]: ...
def unique_task(
    name: Any = None,
    /,
    *,
    lease: float | timedelta = LEASE,
    using: str = DEFAULT_ALIAS,
    until: Literal["start", "end"] = "end",
    again: bool = False,
    debounce: float | timedelta | None = None,
    at_most: float | timedelta | None = None,
    **options: Any,
) -> Any:
    """Make a shared task that is queued or running at most once: its lock is held from the sending until the end.

    Sending the task again meanwhile returns the AsyncResult of the first message. *name* may have fields for
    arguments, ``"import:{shop_id}"``, or be a lambda that is called with the arguments; without *name*, the lock
    has the name of the function and all its arguments. *lease*: seconds for which a message that no worker runs
    keeps the name, counted from its eta; while the task runs, its lease is renewed. *options* are those of
    ``shared_task()``.

    *until*: "start" frees the name when the body begins, so that several bodies may run at once. *again* frees it
    then, too, but the next body waits until this one has ended: all calls meanwhile lead to one more run.

    *debounce*: the body begins so many seconds after the last call, and no more than *at_most* after the first one,
    by default ten times *debounce*. A call while the body runs leads to another run, as with *again*.
    """
    terms: Any = {"until": until, "again": again, "debounce": debounce, "at_most": at_most}
    seconds = checked_lease(name, {"lease": lease, "using": using, **terms, **options})
    named = None if is_decorated(name) else name

    def decorate(function: Callable[..., Any]) -> Any:
        if isinstance(function, (Proxy, Task)):
            msg = "unique_task() makes the task itself; leave @shared_task out and give its arguments to unique_task()."
            raise TypeError(msg)
        is_bound = bool(options.get("bind"))
        once = Once(function, named, seconds, using, is_bound=is_bound, **terms)
        base = options.get("base")
        kind = type("UniqueTask", (UniqueTask, base), {}) if base else _Shared
        # Celery logs errors in `throws` in one line, without a traceback.
        thrown = options.get("throws") or ()
        throws = (*(thrown if isinstance(thrown, Iterable) else [thrown]), LockNotAcquired)
        return shared_task(**{**options, "base": kind, "throws": throws}, once=once)(function)

    return decorate(name) if is_decorated(name) else decorate


class _QueueLock(Lock):
    """A lock whose holder is a task that is about to be sent."""

    task = ""

    def _request(self, backend: BaseLockBackend, key: str = "") -> Request:
        request = super()._request(backend, key)
        return replace(request, holder=replace(request.holder, task=self.task))


class UniqueTask(DjangoTask):  # type: ignore[misc]  # Celery has no types
    """The base class of tasks made by unique_task()."""

    abstract = True
    once: Once

    def apply_async(
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any
    ) -> Any:
        """Send the task, and return its AsyncResult; if the task is already under way, only return that AsyncResult.

        A step of a chain, a group or a chord, and what replaces a task, is always sent, because others wait for its
        result: it runs after the task that is under way. ValueError for an id that is too long, and for a countdown
        or eta with debounce.
        """
        headers, task_id = options.pop("headers", None) or {}, task_id or uuid()
        lease, text, first = None, unpacked(headers.get(HEADER, "")).text, None
        with freed_by_errors(text):
            name = self._name_for(args or (), kwargs or {}, task_id)
        if not text:
            options, first = self._debounced(task_id, options)
            try:
                lease, text = self._lock(name, task_id, options)
            except LockNotAcquired as busy:
                if not _is_step(options):
                    return self._under_way(busy)
        try:
            headers = {**headers, HEADER: packed(text, name, first)}
            return super().apply_async(args, kwargs, task_id=task_id, headers=headers, **options)
        except BaseException:
            if lease is not None:
                free(lease)
            elif text:
                free_text(text)  # the caller's lease, by handover()
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request, text, name, first = self.request, "", "", None
        is_function = request.called_directly or request.get("distlock_name")  # by its own body
        if not is_function:
            text, name, first = unpacked((request.headers or {}).get(HEADER, ""))
        lock = self.once.terms(self.name).lock(name or self.once.name_for(args, kwargs))
        body = self.once.body_lock(lock)
        if is_function:
            with nullcontext() if body is None else body.take(0):
                return super().__call__(*args, **kwargs)
        request.distlock_name, request.distlock_first = lock.name, first
        arrived = self._arrive(lock, text)
        adopt(arrived, lock)
        self._put_off(lock.name, first)
        lease = arrived if body is lock else self._begin(arrived, body)
        request.distlock_lease, request.distlock_first = lease, None
        if lease is not None and len(lease.entries) == 1:
            # Its finalizer releases it if a soft time limit comes as _release() begins, which Celery only logs.
            registry.let_go(lease)
        try:
            result = super().__call__(*args, **kwargs)
        except BaseException as error:
            if lease is not None and lease.lost:
                error.add_note(f"django_distlock: {LockLost(lease.name, lease.reason)}")
            raise
        finally:
            request.distlock_ended = lease
        if lease is not None and lease.lost:
            lease.check()
        return result

    def _under_way(self, busy: LockNotAcquired) -> Any:
        """Return the AsyncResult of the task that has the lock; raise *busy* if other code has it."""
        if (under_way := self._id_of(busy.holder)) is None:
            raise busy
        self.once.note_under_way(busy)
        self.once.note_call(busy.name)
        return self.AsyncResult(under_way)

    def _debounced(
        self, task_id: str, options: dict[str, Any]
    ) -> tuple[dict[str, Any], Postmark | None]:
        """Return *options* with the countdown of debounce, and the time of the first call; None without debounce."""
        if not self.once.debounce:
            return options, None
        if task_id == self.request.id:
            return options, self.request.get("distlock_first")
        if options.get("countdown") or options.get("eta"):
            raise ValueError(
                f"debounce says when {self.name} runs: send it without countdown and eta."
            )
        return {**options, "countdown": self.once.debounce}, clock.postmark()

    def _put_off(self, name: str, first: Postmark | None) -> None:
        """Send the message again, for later, if the task was called less than *debounce* seconds ago."""
        if self.request.is_eager or not (wait := self.once.wait_left(name, first)):
            return
        try:
            self._send_again(wait)
        except OperationalError as down:
            using = self.once.using
            warn("%s is not put off, and runs now: %s", self.name, down, name=name, using=using)

    def _name_for(self, args: Any, kwargs: Any, task_id: str) -> str:
        """Return the name of the lock; for a message that is sent again, the name in the message.

        JSON may have changed the arguments that the name was made of.
        """
        request = self.request
        is_again = task_id == request.id and [*args] == [*request.args] and kwargs == request.kwargs
        return (is_again and request.get("distlock_name")) or self.once.name_for(args, kwargs)

    def _lock(self, name: str, task_id: str, options: dict[str, Any]) -> tuple[Lease | None, str]:
        """Return the lease for a message and the lease's text; LockNotAcquired if another task has the name."""
        seconds = self._seconds_to_keep(options)
        if task_id == self.request.id:
            # The running task is sent again: it passes on the lock that it has.
            own = self.request.get("distlock_lease")
            if own and own.held and own.name == name:
                try:
                    return own, hand_over(own, seconds)
                except LockError as problem:  # sent without it, the task acquires it again
                    task = task_text(self.name, task_id)
                    warn("%s is sent again without its lock: %s", task, problem, of=own)
            return None, ""
        lock = _QueueLock(name)
        lock.terms = self.once.terms("in the queue", reentrant=False)
        lock.task = checked_task(self.name, task_id)
        _give_way(name)
        instead = f"await sync_to_async({self.__name__}.delay)(...)"
        refuse_event_loop(self.once.using, instead)
        with self._take(lock) as lease:
            return lease, hand_over(lease, seconds)

    def _take(self, lock: Lock) -> Lease:
        """Return a lease of *lock*; if its holder has stored its result, wait a moment for the release."""
        try:
            return lock.take(0)
        except LockNotAcquired as busy:
            under_way = self._id_of(busy.holder)
            if under_way is None or self._state_of(under_way) not in READY_STATES:
                raise
        return lock.take(RELEASED_WITHIN)

    def _state_of(self, task_id: str) -> str | None:
        """Return the state of a task; None if results are not kept, or cannot be read."""
        with suppress(NotImplementedError):
            try:
                return str(self.AsyncResult(task_id).state)
            except Exception as problem:  # noqa: BLE001 - of any client
                task = task_text(self.name, task_id)
                warn("The result of %s cannot be read: %s", task, problem)
        return None

    def _seconds_to_keep(self, options: dict[str, Any]) -> float:
        """Return for how long a message with *options* keeps the name: not after it has expired."""
        due = self._seconds_until(options.get("countdown") or options.get("eta")) or 0.0
        left = self._seconds_until(options.get("expires", self.expires))
        seconds = self.once.lease + max(0.0, due)
        return seconds if left is None else min(seconds, max(LEAST_TTL, left))

    def _seconds_until(self, when: Any) -> float | None:
        if when is None or isinstance(when, (int, float)):
            return when
        moment = maybe_make_aware(maybe_iso8601(when), self.app.timezone)
        return float((moment - self.app.now()).total_seconds())

    def _arrive(self, lock: Lock, text: str) -> Lease:
        """Return the lease in the *text* of the message, or a new lease."""
        request = self.request
        if text:
            with unless_ended(lock, text):
                request.headers.pop(HEADER)
                lease = request.distlock_lease = Lease.attach(text, lock.terms.purpose)
                return lease
        # The message waited for longer than its lease, is a second copy, or was sent without a lease.
        try:
            lease = request.distlock_lease = lock.take(0)
        except LockNotAcquired as busy:
            self._leave_out_copy(lock)
            # A step of a workflow must run, because others wait for it. A copy of the task that holds the lock
            # must run if that task died with its worker. Any other message has lost the lock to a later message.
            waits = (request.group, request.chord, request.callbacks, request.replaced_task_nesting)
            is_copy = self._id_of(busy.holder) == request.id
            if request.is_eager or not (any(waits) or is_copy or request.chain is not None):
                raise
            self._send_again(_pause(busy))
        # Checked under the lock, because the first copy stores its result before it releases the lock.
        self._leave_out_copy(lock)
        return lease

    def _send_again(self, wait: float) -> Never:
        """Put the message back into the queue for *wait* seconds, with the lock if the task has it."""
        again = self.signature_from_request(self.request)
        self.apply_async(again.args, again.kwargs, **{**again.options, "countdown": wait})
        raise Ignore

    def _begin(self, lease: Lease, body: Lock | None) -> Lease | None:
        """Release *lease*, the queued-once lock, and return a lease of *body*, the lock for the run.

        If *body* is busy, send the message again, with *lease*.
        """
        request, held = self.request, None
        if body is not None:
            try:
                held = request.distlock_body = body.take(0)
            except LockNotAcquired as busy:
                if request.is_eager:
                    raise
                self._send_again(_pause(busy))
        try:
            lease.release()
        except LockBackendError as down:
            # Until the name is free, calls send no message, and this body may not see what they wanted.
            if held is not None:
                held.leave(down)
            if request.is_eager:
                raise
            self._send_again(LOOK_AGAIN)
        except LockError:
            pass  # the lease was lost, which is logged, or could not be handed to another message
        return held

    def _leave_out_copy(self, lock: Lock) -> None:
        """Ignore a second copy of a message if the first one has succeeded; only with a result backend."""
        request = self.request
        if not request.is_eager and self._state_of(request.id) == SUCCESS:
            copy = task_text(self.name, request.id)
            fields = log_fields(lock.name, self.once.using)
            logger.info("%s has succeeded: its copy is left out", printable(copy), extra=fields)
            raise Ignore

    def _id_of(self, holder: Holder | None) -> str | None:
        """Return the id of the task that *holder* names; None if it is not this task."""
        return task_id(holder.task, self.name) or None if holder else None


class _OfAnyApp(type):
    """The class of _Shared: each app makes the task on top of its own task class, as it makes a shared task."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        if app := namespace.get("app"):
            return type(name, (UniqueTask, app.Task), namespace)
        return super().__new__(cls, name, bases, namespace)


class _Shared(UniqueTask, metaclass=_OfAnyApp):
    """Given to shared_task(), which has no other place to choose a base class for each app."""

    abstract = True


def _is_step(options: dict[str, Any]) -> bool:
    """Return True if *options* make the message a step of a workflow, or replace a task: others wait for its end."""
    has_others = any(
        options.get(key) for key in ("group_id", "chord", "link", "replaced_task_nesting")
    )
    return has_others or options.get("chain") is not None


def handover(lease: Lease, ttl: float | timedelta | None = None) -> dict[str, str]:
    """Return the headers that give *lease* to a task: ``task.apply_async(args, headers=handover(lease))``.

    *ttl*: seconds that the message may wait in the queue, see Lease.detach(). The task gets the lease by
    attached(); a unique task with the same lock name gets it by itself.
    """
    return {HEADER: lease.detach(ttl)}


def attached(task: Any) -> Lease:
    """Return the lease that handover() has sent to the running *task*; use it with ``with``.

    LockLost if the lease has ended meanwhile, or another copy of the message has it.
    """
    text = unpacked((task.request.headers or {}).get(HEADER, "")).text
    if not text:
        msg = f"{task.name} brought no lease; send it with headers=handover(lease)."
        raise LookupError(msg)
    return Lease.attach(text)


def _pause(busy: LockNotAcquired) -> float:
    """Return after how many seconds a message whose lock is *busy* tries again: random, so that not all try at once."""
    return min(busy.remaining or LOOK_AGAIN, LOOK_AGAIN) * random.uniform(0.5, 1)  # noqa: S311


def _give_way(name: str) -> None:
    """Release the lock *name* if the running task still has it: the body has ended, and Celery sends a linked task."""
    lease = current_task and current_task.request.get("distlock_ended")
    if lease and lease.name == name:
        lease.leave(Ignore())


@task_postrun.connect  # type: ignore[untyped-decorator]  # as above
def _release(task: Any, **_: Never) -> None:
    """Release the lease of a unique task that has ended, after its result or error is stored."""
    lease, body = task.request.get("distlock_lease"), task.request.get("distlock_body")
    for held in {lease, body} - {None}:  # usually the same
        held.leave(Ignore())  # a failed release can only be logged
    if lease is None and isinstance(task, UniqueTask):
        _free_message(task.request)  # before_start() has failed, or a soft time limit came first


@task_revoked.connect  # type: ignore[untyped-decorator]  # as above
def _free_message(request: Any, **_: Never) -> None:
    """Release the lease in the message of a task that was revoked, has expired or has failed before it began."""
    if text := unpacked((request.headers or {}).get(HEADER, "")).text:
        free_text(text)
