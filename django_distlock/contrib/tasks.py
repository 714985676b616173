"""Tasks of Django itself that are in the queue only once; their lease is sent in an argument of the message."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Literal, Never, Self, overload

from asgiref.sync import sync_to_async
from django.dispatch import receiver
from django.utils import timezone

from django_distlock.conf import DEFAULT_ALIAS
from django_distlock.engine.handover import hand_over
from django_distlock.engine.lease import Lease
from django_distlock.exceptions import LockNotAcquired, NotSupported
from django_distlock.ground import clock
from django_distlock.ground.holder import task_text
from django_distlock.lock import Lock
from django_distlock.transactions import call_at_rollback

from .once import (
    HEADER,
    LEASE,
    Once,
    Postmark,
    checked_lease,
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

try:
    from django.tasks.base import Task, task
    from django.tasks.signals import task_started
except ImportError:  # Django 5.2 has them by the package django-tasks
    from django_tasks.base import Task, task  # type: ignore[no-redef]
    from django_tasks.signals import task_started  # type: ignore[no-redef]

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.tasks import TaskResult

    from django_distlock.ground.holder import Holder

#: The task that a worker is about to run, and the id of its message.
_started: ContextVar[tuple[Any, str]] = ContextVar("distlock_started", default=(None, ""))


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
) -> Callable[[Callable[..., Any]], UniqueTask]: ...
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
    """Make a task that is queued or running at most once: its lock is held from the enqueuing until the end.

    Enqueuing the task again meanwhile sends nothing and returns None. *name* may have fields for arguments,
    ``"import:{shop_id}"``, or be a lambda that is called with the arguments; without *name*, the lock has the
    name of the function and all its arguments. *lease*: seconds for which a message that no worker runs keeps
    the name, counted from its ``run_after``; while the task runs, its lease is renewed. *options* are those of
    ``django.tasks.task()``.

    *until*: "start" frees the name when the body begins, so that several bodies may run at once. *again* frees it
    then, too, but the next body waits, in its worker, until this one has ended: all calls meanwhile lead to one
    more run.

    *debounce*: the body begins so many seconds after the last call, and no more than *at_most* after the first one,
    by default ten times *debounce*. A call while the body runs leads to another run, as with *again*.
    """
    terms: Any = {"until": until, "again": again, "debounce": debounce, "at_most": at_most}
    seconds = checked_lease(name, {"lease": lease, "using": using, **terms, **options})
    named = None if is_decorated(name) else name

    def decorate(function: Callable[..., Any]) -> UniqueTask:
        if isinstance(function, Task):
            msg = "unique_task() makes the task itself; leave @task out and give its arguments to unique_task()."
            raise TypeError(msg)
        has_context = bool(options.get("takes_context"))
        once = Once(function, named, seconds, using, is_bound=has_context, **terms)

        # Workers call this function directly, or through the task.
        if iscoroutinefunction(function):

            @wraps(function)
            async def run(*args: Any, **kwargs: Any) -> Any:
                return await _Message.of(unique, args, kwargs).arun(function)
        else:

            @wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                return _Message.of(unique, args, kwargs).run(function)

        run.once = once  # type: ignore[attr-defined]
        made = task(**options)(run)
        # A task backend may have a Task class of its own.
        kind: Any = UniqueTask
        if type(made) is not Task:
            kind = type("UniqueTask", (UniqueTask, type(made)), {"__slots__": ()})
        unique: UniqueTask = kind(**{each.name: getattr(made, each.name) for each in fields(made)})
        if once.debounce:
            once.check_queue = partial(check_queue, unique)
        return unique

    return decorate(name) if is_decorated(name) else decorate


class UniqueTask(Task):  # type: ignore[type-arg]  # only its stubs are generic
    """A task made by unique_task()."""

    __slots__ = ()

    def enqueue(self, *args: Any, **kwargs: Any) -> TaskResult[..., Any] | None:  # type: ignore[override]  # None
        """Send the task and return its result; None if the task is already under way.

        An argument *distlock* with the text of ``Lease.detach()`` gives the caller's lease to the task.
        """
        once, handed = _once(self), kwargs.pop(HEADER, None)
        if handed is not None and not isinstance(handed, str):
            msg = f"distlock must be the text of Lease.detach(), not {type(handed).__name__}."
            raise TypeError(msg)
        with freed_by_errors(handed):
            name = once.name_for(args, kwargs)
            lock = once.terms(self.module_path, timeout=0, reentrant=False).lock(name)
        if handed is not None:
            carried = packed(handed, name)
            return _send_or_free(self, partial(free_text, handed), carried, args, kwargs)
        task, first = self._debounced() if once.debounce else (self, None)
        lease = result = None
        try:
            refuse_event_loop(once.using, "await task.aenqueue(...)")
            with lock as lease:
                carried = _handed_over(task, lease, first)
            result = _send(task, carried, args, kwargs)
            # A queue in the database drops the message at a rollback, too.
            call_at_rollback(partial(free, lease))
        except BaseException as error:
            if lease is not None and result is None:
                free(lease)
            elif lease is None and isinstance(error, LockNotAcquired) and self._has(error.holder):
                once.note_under_way(error)
                once.note_call(name)
                return None
            raise
        return result

    def _has(self, holder: Holder | None) -> bool:
        """Return True if *holder* is a task of this kind."""
        return holder is not None and task_id(holder.purpose, self.module_path) is not None

    def _debounced(self) -> tuple[UniqueTask, Postmark]:
        """Return the task to send for a first call, and the time of that call."""
        if self.run_after:
            raise ValueError(f"debounce says when {self.name} runs: enqueue it without run_after.")
        check_queue(self)
        return _later(self, _once(self).debounce), clock.postmark()

    async def aenqueue(self, *args: Any, **kwargs: Any) -> TaskResult[..., Any] | None:  # type: ignore[override]  # as above
        """Run enqueue() in a thread, as Django's own task backends do."""
        return await sync_to_async(self.enqueue)(*args, **kwargs)


class _CannotDelay(NotSupported):
    """The queue of a task with debounce, an alias of TASKS, runs all tasks at once."""

    def __str__(self) -> str:
        return super().__str__().replace("DISTLOCK", "TASKS", 1)


def check_queue(task: UniqueTask) -> None:
    """Raise NotSupported if a task with debounce cannot be sent for later."""
    if not task.get_backend().supports_defer:
        instead = "Give the task a backend= that does, or in tests the dummy backend."
        raise _CannotDelay(task.backend, "run_after, which debounce needs", instead)


def _once(task: UniqueTask) -> Once:
    once: Once = task.func.once  # type: ignore[attr-defined]
    return once


def _later(task: UniqueTask, wait: float) -> Any:
    """Return *task* for a message that is due in *wait* seconds."""
    return task.using(run_after=timezone.now() + timedelta(seconds=wait))


def _handed_over(task: UniqueTask, lease: Lease, first: Postmark | None) -> str:
    """Return the argument *distlock* for a message of *task*, with *lease* in it."""
    wait = task.run_after.timestamp() - time.time() if task.run_after else 0.0
    return packed(hand_over(lease, _once(task).lease + max(0.0, wait)), lease.name, first)


def _send(
    task: UniqueTask, carried: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TaskResult[..., Any]:
    return super(UniqueTask, task).enqueue(*args, **kwargs, **{HEADER: carried})


def _send_or_free(
    task: UniqueTask,
    free_lease: Callable[[], object],
    carried: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> TaskResult[..., Any]:
    """Send *task* with *carried*; if the sending fails or is rolled back, call *free_lease*."""
    try:
        result = _send(task, carried, args, kwargs)
    except BaseException:
        free_lease()
        raise
    # A queue in the database drops the message at a rollback, too.
    call_at_rollback(free_lease)
    return result


@dataclass(frozen=True)
class _Message:
    """A call of a unique task, by a worker or as a function, with the *text* of the lease in its message; *first*: see Carried."""

    task: UniqueTask
    lock: Lock
    text: str
    first: Postmark | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, task: UniqueTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Return the message that calls *task*; remove the argument *distlock* from *kwargs*."""
        started, task_id = _started.get()
        _started.set((None, ""))
        once = _once(task)
        if started is None or started.func is not task.func:
            started, task_id = task, ""
        text, name, first = unpacked(kwargs.pop(HEADER, ""))
        # The name in the message comes first: JSON may have changed the arguments that the name was made of.
        name = name or once.name_for(args[task.takes_context :], kwargs)
        lock = once.terms(task_text(once.title, task_id)).lock(name)
        return cls(started, lock, text, first, args, kwargs)

    def run(self, function: Callable[..., Any]) -> Any:
        """Call *function* under its locks, or put the message off."""
        once = _once(self.task)
        with self._arrive() as held:
            if self._is_put_off(held):
                return None
            with once.beside(held, self.lock):
                once.begin(held)
                return function(*self.args, **self.kwargs)

    async def arun(self, function: Callable[..., Any]) -> Any:
        once = _once(self.task)
        async with await self._aarrive() as held:
            if self.first is not None and await sync_to_async(self._is_put_off)(held):
                return None
            async with once.beside(held, self.lock):
                await once.abegin(held)
                return await function(*self.args, **self.kwargs)

    def _arrive(self) -> Lease:
        """Return the lease in the message, or a new lease."""
        if self.text:
            with unless_ended(self.lock, self.text):
                return Lease.attach(self.text, self.lock.terms.purpose)
        # The message waited for longer than its lease, or is a second copy, or the task is called as a function.
        return self.lock.take(0)

    async def _aarrive(self) -> Lease:
        if self.text:
            with unless_ended(self.lock, self.text):
                return await Lease.aattach(self.text, self.lock.terms.purpose)
        return await self.lock.atake(0)

    def _is_put_off(self, held: Lease) -> bool:
        """If the task was called meanwhile, send the message again with the lease *held*, and return True."""
        wait = _once(self.task).wait_left(held.name, self.first)
        if wait:
            task = _later(self.task, wait)
            carried = _handed_over(task, held, self.first)
            args = self.args[task.takes_context :]
            _send_or_free(task, partial(free, held), carried, args, self.kwargs)
        return wait > 0


@receiver(task_started)
def _note(task_result: TaskResult[..., Any], **_: Never) -> None:
    _started.set((task_result.task, task_result.id))
