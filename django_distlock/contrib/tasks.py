"""Tasks of Django itself that are in the queue only once; their lease is sent in an argument of the message."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import fields
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Literal, Never, overload

from asgiref.sync import sync_to_async
from django.dispatch import receiver

from django_distlock.conf import DEFAULT_ALIAS
from django_distlock.engine.lease import Lease
from django_distlock.exceptions import LockNotAcquired
from django_distlock.ground.holder import task_text
from django_distlock.ground.naming import title_of
from django_distlock.lock import Lock
from django_distlock.transactions import call_at_rollback

from .once import (
    HEADER,
    LEASE,
    Once,
    checked_lease,
    free,
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
    from datetime import timedelta

    from django.tasks import TaskResult

#: The function that a worker is about to call, and the id of its task.
_started: ContextVar[tuple[object, str]] = ContextVar("distlock_started", default=(None, ""))


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
    **options: Any,
) -> Any:
    """Make a task that is under way once: it is locked when it is enqueued, and until it has ended.

    Enqueuing it again meanwhile sends nothing and returns None. *name* may have fields for arguments,
    ``"import:{shop_id}"``, or be a lambda that is called with them; without *name*, the lock has the name
    of the function and all its arguments. *lease*: seconds for which a message
    that is never run keeps the name, counted from its ``run_after``; while the task runs, its lease is
    renewed. *options* are those of ``django.tasks.task()``.

    *until*: "start" frees the name when the body begins, so that several bodies may run at once. *again* frees it
    then, too, but the next body waits, in its worker, until this one has ended: what is enqueued meanwhile
    runs after it, once.
    """
    words = {"lease": lease, "using": using, "until": until, "again": again, **options}
    seconds = checked_lease(name, words)
    named = None if is_decorated(name) else name

    def decorate(function: Callable[..., Any]) -> UniqueTask:
        if isinstance(function, Task):
            msg = "unique_task() makes the task itself; leave @task out and give its arguments to unique_task()."
            raise TypeError(msg)
        has_context = bool(options.get("takes_context"))
        once = Once(function, named, seconds, using, is_bound=has_context, until=until, again=again)

        def arriving(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Lock]:
            """Take the text of a lease, maybe empty, out of *kwargs*; return it and the lock of the call."""
            started, task_id = _started.get()
            _started.set((None, ""))
            purpose = task_text(title_of(function), task_id if started is run else "")
            text, name = unpacked(kwargs.pop(HEADER, ""))
            # The name as it was sent: JSON may have changed the arguments that it was made of.
            name = name or once.name_for(args[has_context:], kwargs)
            return text, Lock(name, **once.terms(purpose))

        # Workers call this function directly, or through the task.
        if iscoroutinefunction(function):

            @wraps(function)
            async def run(*args: Any, **kwargs: Any) -> Any:
                text, lock = arriving(args, kwargs)
                async with await _aarrive(text, lock) as held, once.beside(held, lock):
                    await once.abegin(held)
                    return await function(*args, **kwargs)
        else:

            @wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                text, lock = arriving(args, kwargs)
                with _arrive(text, lock) as held, once.beside(held, lock):
                    once.begin(held)
                    return function(*args, **kwargs)

        run.once = once  # type: ignore[attr-defined]
        made = task(**options)(run)
        # A task backend may have a Task class of its own.
        kind: Any = UniqueTask
        if type(made) is not Task:
            kind = type("UniqueTask", (UniqueTask, type(made)), {"__slots__": ()})
        unique: UniqueTask = kind(**{each.name: getattr(made, each.name) for each in fields(made)})
        return unique

    return decorate(name) if is_decorated(name) else decorate


class UniqueTask(Task):  # type: ignore[type-arg]  # only its stubs are generic
    """A task made by unique_task()."""

    __slots__ = ()

    def enqueue(self, *args: Any, **kwargs: Any) -> TaskResult[..., Any] | None:  # type: ignore[override]  # None
        """Send the task and return its result; None if it is already under way.

        The text of ``Lease.detach()`` as the argument *distlock* gives the caller's lease to the task.
        """
        once: Once = self.func.once  # type: ignore[attr-defined]
        handed = kwargs.pop(HEADER, None)
        name, terms = once.name_for(args, kwargs), once.terms(self.module_path)
        if handed is not None:
            return super().enqueue(*args, **kwargs, **{HEADER: packed(handed, name)})
        wait = self.run_after.timestamp() - time.time() if self.run_after else 0.0
        lock = Lock(name, **terms, timeout=0, reentrant=False)
        try:
            refuse_event_loop(once.using, "await task.aenqueue(...)")
            with lock as lease:
                text = lease.hand_over(once.lease + max(0.0, wait))
        except LockNotAcquired as busy:
            if not busy.holder or task_id(busy.holder.purpose, self.module_path) is None:
                raise  # no task of this kind holds it
            once.note_under_way(busy)
            return None
        try:
            result = super().enqueue(*args, **kwargs, **{HEADER: packed(text, name)})
        except BaseException:
            free(lease)
            raise
        # A queue in the database drops the message at a rollback, too.
        call_at_rollback(partial(free, lease))
        return result

    async def aenqueue(self, *args: Any, **kwargs: Any) -> TaskResult[..., Any] | None:  # type: ignore[override]  # as above
        """Run enqueue() in a thread, as Django's own task backends do."""
        return await sync_to_async(self.enqueue)(*args, **kwargs)


@receiver(task_started)
def _note(task_result: TaskResult[..., Any], **_: Never) -> None:
    _started.set((task_result.task.func, task_result.id))


def _arrive(text: str, lock: Lock) -> Lease:
    """Return the lease in the message, or a new one."""
    if text:
        with unless_ended(lock, text):
            return Lease.attach(text, lock.terms.purpose)
    # It waited for longer than its lease, is a second copy, or the task is called as a function.
    return lock.take(0)


async def _aarrive(text: str, lock: Lock) -> Lease:
    if text:
        with unless_ended(lock, text):
            return await Lease.aattach(text, lock.terms.purpose)
    return await lock.atake(0)
