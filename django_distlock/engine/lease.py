"""Lease: the proof of one holding of a lock, by our own clock, and what its holder does with it."""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import threading
import weakref
from asyncio import _get_running_loop
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, Never, Self, TypeVar

from django_distlock import transactions
from django_distlock.conf import checked_ttl
from django_distlock.exceptions import (
    LockDeadlock,
    LockError,
    LockLost,
    LockNotHeld,
    LockNotOwned,
    NotSupported,
)
from django_distlock.ground import clock
from django_distlock.ground.caller import Caller, current_caller, forks, here, runs_foreign_tasks
from django_distlock.ground.clock import drift
from django_distlock.ground.naming import log_fields, printable, warn
from django_distlock.ground.sync_to_async import entering_caller, waits_for_us
from django_distlock.signals import lock_detached, lock_extended, lock_lost, lock_released

from . import fencing, handover
from .acquisition import check_asyncio
from .announcements import announce
from .background import background
from .registry import forget_here, held_here, note_held_here, registry
from .steps import Steps, arun, asettled, run, settled
from .values import Grant, Release, Request, new_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from datetime import timedelta

    from django.db.models import Model, QuerySet

    from django_distlock.backends.base import BaseLockBackend
    from django_distlock.ground.holder import Holder

    from .local_queue import LocalCaller

logger = logging.getLogger("django_distlock")
#: A lease with less than this part of its ttl left should have been renewed by now.
LATE = 0.5
#: The reason in LockDeadlock for a thread of sync_to_async().
UNCLEAR = "the event loop of its holder is blocked, perhaps by the holder itself: does that wait for this thread?"
#: What claim() is given, and returns.
_M = TypeVar("_M", bound="Model | QuerySet[Any]")

_BACKGROUND: set[asyncio.Task[Any]] = set()


#: A server forgets who has released: asked again much later, it may say that somebody else has the lock.
_is_released = partial(is_, Release.RELEASED)


class State(enum.Enum):
    """The states of a lease; all but the first two are final."""

    PENDING = "pending"
    HELD = "held"
    LOST = "lost"
    RELEASED = "released"
    DETACHED = "handed to another process"
    INHERITED = "held by the process that this one was forked from"


#: The states that are not final, and those in which there is something to release.
_NOT_ENDED = State.PENDING, State.HELD
_TO_RELEASE = State.HELD, State.LOST

#: What dir() and help() show of a lease. The other names are for this package.
_FOR_USERS = {
    *("name", "using", "template", "fencing_token", "ttl", "holder", "place", "shared", "state"),
    "held",
    *("lost", "in_jeopardy", "reason", "remaining", "deadline", "check", "on_lost", "off_lost"),
    *("release", "arelease", "extend", "aextend", "detach", "adetach", "attach", "aattach"),
    *("guard", "claim", "save", "update", "checked_token"),
}


class _Shown(type):
    def __dir__(cls) -> list[str]:
        names = super().__dir__()
        return [name for name in names if name in _FOR_USERS or name.startswith("__")]


class Lease(metaclass=_Shown):
    """One holding of one lock. It is made by ``Lock.acquire()``; use it with ``with`` or release it.

    Methods that begin with an *a* more, such as ``aextend()``, are awaited and do the same.

    It is *held* until it is released, or lost: when its deadline passes by this machine's
    clock, or the server says that the lock is not ours any more. Lost is final.
    """

    fencing_token: int | None = None
    #: When it is renewed next: seconds on ``clock.lease_time()``.
    due = 0.0
    #: What its name was made of, as distributed_lock() was given it: "fee:{account_id}"; "" if that is not known.
    template = ""
    #: Its min_hold, where that counts only if nothing fails until the release.
    hold_on_success = 0.0
    #: Whether its last entry has been left, and the end of a transaction is going to release it.
    awaits_end = False
    #: Ends the wait of lead() for it.
    stop: threading.Event | None = None
    #: What stands for it in the line of this process while it waits for the lock, or holds it alone.
    in_line_as: LocalCaller | None = None
    _state = State.PENDING
    _reason = ""
    _deadline = 0.0
    _granted_at = 0.0
    _holds_until: float | None = None
    _is_in_jeopardy = False
    _is_waiting = False
    #: The callers that have entered it and not left it yet, the innermost last. Each change makes a new list.
    entries: list[Caller] | tuple[()] = ()
    #: The instances that open blocks of locked() have read.
    reads: list[fencing.Read] | tuple[()] = ()
    _on_lost: list[Callable[[str], object]] | tuple[()] = ()

    def __init__(
        self,
        backend: BaseLockBackend,
        request: Request,
        *,
        renew: bool = True,
        max_hold: float | None = None,
        release_when: str = "auto",
        template: str = "",
        hold_on_success: float = 0.0,
    ) -> None:
        """Make it pending; it is registered before anything is sent. *release_when*: *release* of LockTerms."""
        self.backend = backend
        self.request = request
        self.renews = renew
        self.release_when = release_when
        self.template = template
        self.hold_on_success = hold_on_success
        # As current_caller(), without a call: this is on the way of every acquire.
        self.caller: Caller | None = here.caller if _get_running_loop() is None else Caller()
        #: For those that must not keep it alive.
        self.ref = weakref.ref(self)
        hash(self.ref)  # it keeps the result: once its object is gone, it has no other
        self._max_hold = max_hold
        self._mutex = threading.RLock()
        #: The transactions that it was taken in.
        self.began_in: Collection[Any] = transactions.open_here()

    # What it is.

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self.request.name

    @property
    def using(self) -> str:
        """The alias of the backend."""
        return self.backend.alias

    @property
    def ttl(self) -> float:
        """How many seconds it lives on the server unless it is extended."""
        return self.request.ttl

    @property
    def holder(self) -> Holder:
        """The holder, as it is shown to people."""
        return self.request.holder

    @property
    def place(self) -> int | None:
        """The number of the place that it has, from 0 to below its limit; None for a lock without a limit."""
        return self.request.place

    @property
    def shared(self) -> bool:
        """Whether other readers may hold it too."""
        return self.request.shared

    @property
    def state(self) -> State:
        """Its state now, by the clock of this machine."""
        if os.getpid() != forks.pid:
            forks.notice()
        self._lose_if_over()
        return self._state

    @property
    def held(self) -> bool:
        """Whether it is certain that the lock is still ours."""
        return self.state is State.HELD

    @property
    def lost(self) -> bool:
        """Whether it was lost. This compares the deadline with our clock, and sends no request."""
        return self.state is State.LOST

    @property
    def in_jeopardy(self) -> bool:
        """Whether a renewal is late or has failed, while the deadline has not passed yet."""
        renewal = self.renewal()  # a shorter one, or none, towards the end of its max_hold
        is_late = self.renews and renewal is not None and self.remaining < renewal.ttl * LATE
        return self.held and (self._is_in_jeopardy or is_late)

    @property
    def reason(self) -> str:
        """Why it was lost; empty while it is not."""
        return self._reason

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, by our own clock; 0 if it is not held."""
        return max(0.0, self._deadline - clock.lease_time()) if self.held else 0.0

    @property
    def deadline(self) -> float:
        """When it is lost unless it is extended before: seconds on ``clock.lease_time()``."""
        return self._deadline

    def check(self) -> None:
        """Raise LockLost unless it is certain that the lock is still ours, LockNotHeld if it was released.

        It compares the deadline with our clock and, where a session holds the lock, looks whether it
        has ended. It sends no request.
        """
        state = self.state
        if state is State.HELD and self.lose_with_session():
            state = self._state
        if state is State.LOST:
            raise LockLost(self.name, self._reason)
        if state is not State.HELD:
            raise self._not_held()

    def on_lost(self, callback: Callable[[str], object]) -> None:
        """Call *callback* with the reason, once, when the lease is lost; at once if it is already.

        It is called in the thread that notices the loss, mostly the one that renews leases: be quick.
        """
        with self._mutex:
            if self._state in _NOT_ENDED:
                self._on_lost = [*self._on_lost, callback]
                return
        if self._state is State.LOST:
            callback(self._reason)

    def off_lost(self, callback: Callable[[str], object]) -> None:
        """Do not call *callback* any more, which was given to on_lost()."""
        with self._mutex:
            self._on_lost = [each for each in self._on_lost if each != callback]

    # What its holder does.

    def release(self) -> None:
        """Release the lock; if it was entered several times, only the last release does.

        Inside a transaction, the *release* of lock() says when others get it.

        LockNotHeld if it was released before, LockLost if the lease has ended, LockNotOwned if
        somebody else has the lock.
        """
        if self.began_in or self.release_when == "on_commit":
            of_which = None if self.release_when == "on_commit" else self.began_in
            open_ones = transactions.still_open(of_which)
            is_last = len(self.entries) == 1 and not self.awaits_end
            if open_ones and is_last and self.release_when != "at_exit" and self.held:
                transactions.release_at_end(self, open_ones)
                return
        if self.release_now():
            transactions.tell_of_release(self.request.name, strict=self.backend.strict)

    async def arelease(self) -> None:
        """Release it, at once; a cancelled call is completed in the background."""
        if _get_running_loop() is None:
            self.release_later()  # its task was destroyed: there is nothing to wait in
        elif not self._leaves_reentry():
            task = asyncio.ensure_future(self._arelease())
            _BACKGROUND.add(task)
            task.add_done_callback(_BACKGROUND.discard)
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                task.add_done_callback(self._tell_unless_released)
                raise

    def extend(self, ttl: float | timedelta | None = None) -> None:
        """Extend it to at least *ttl* seconds from now (by default its own ttl).

        It is never shortened, and later renewals use the same ttl. LockLost if the lock is not ours
        any more: it is never acquired again.
        """
        run(self.extending(ttl), lambda asked: settled(partial(self.backend.extend, asked)))

    async def aextend(self, ttl: float | timedelta | None = None) -> None:
        check_asyncio(self.using)
        aextend = self.backend.aextend
        await arun(self.extending(ttl), lambda asked: asettled(partial(aextend, asked)))

    def detach(self, ttl: float | timedelta | None = None) -> str:
        """Hand the lock to another process: return a text for its ``Lease.attach()``.

        The lease is extended a last time, to *ttl* seconds (its own by default), for the text to
        reach the other process, which renews it with its own ttl. Whoever has the text can hold the
        lock: keep it as secret as a password. In this process, the lease has ended.

        Inside a transaction, it warns ReleasedBeforeCommit, or raises it with STRICT: call it after the commit.
        """
        transactions.tell_of_release(self.name, strict=self.backend.strict)
        return self.hand_over(ttl)

    async def adetach(self, ttl: float | timedelta | None = None) -> str:
        check_asyncio(self.using)
        aextend = self.backend.aextend
        return await arun(
            handover.detaching(self, ttl), lambda asked: asettled(partial(aextend, asked))
        )

    @classmethod
    def attach(cls, text: str, purpose: str = "") -> Lease:
        """Take over the lease that another process has detached. Each text works once.

        *purpose*: what it is held for now, shown to people.

        LockLost if the lease has ended meanwhile, or was attached already.

        ``django.core.signing.BadSignature`` if *text* is not one that detach() made.
        """
        return run(
            handover.attaching(cls, text, purpose),
            lambda asked: settled(partial(asked.backend.take_over, asked.request, asked.former)),
        )

    @classmethod
    async def aattach(cls, text: str, purpose: str = "") -> Lease:
        async def take_over(asked: handover.TakeOver) -> bool:
            check_asyncio(asked.backend.alias)
            verb = partial(asked.backend.atake_over, asked.request, asked.former)
            return await asettled(verb)

        return await arun(handover.attaching(cls, text, purpose), take_over)

    # What it protects.

    def guard(self, using: str = "default") -> None:
        """Keep later holders out until the caller's transaction on *using* has ended.

        The locks must be in that same database. Until the commit or rollback nobody else can acquire
        the lock, even if the lease expires. StaleFencingToken if somebody else already has.
        Call it in the outermost block: on PostgreSQL it ends with a savepoint that is rolled back.
        """
        self.check()
        self.backend.guard(self.request, self.checked_token(), using)

    def claim(self, target: _M) -> _M:
        """Raise the fence of fenced rows (FencedModel) to our token, *then* read them again.

        *target* is an instance or a queryset, and so is the result: a queryset gives only rows that
        were claimed, even if others match it by now.
        StaleFencingToken if a later holder has claimed a row; DoesNotExist of the model for an
        instance that was deleted.
        """
        self.check()
        claimed: _M = fencing.claim(self, target)
        return claimed

    def save(self, instance: Model, **kwargs: Any) -> None:
        """Save an *instance* that is new or claimed.

        StaleFencingToken if a later holder has claimed it, or if there is a row with its key that
        is not claimed.
        """
        self.check()
        fencing.save(self, instance, **kwargs)

    def update(self, queryset: QuerySet[Any], **values: Any) -> int:
        """Update claimed rows and return how many; StaleFencingToken if one is not ours any more."""
        self.check()
        return fencing.update(self, queryset, values)

    def checked_token(self) -> int:
        """Return the fencing token; NotSupported where the backend gives none, or the lock has a limit."""
        if self.place is not None:
            what = "fencing by a lock with a limit"
            raise NotSupported(
                self.using, what, "Its tokens do not order the holders of several places."
            )
        if self.fencing_token is None:
            raise NotSupported(self.using, "fencing tokens", "Guard the data by another backend.")
        return self.fencing_token

    # ``with lease:`` and ``async with lease:`` release it.

    def __enter__(self) -> Lease:
        self.check()
        return self

    def __exit__(self, *error: Any) -> None:
        entries = self.entries
        try:
            self.leave(error[1])
        except LockError:
            raise
        except BaseException:
            self.finish_leaving(entries)
            raise

    async def __aenter__(self) -> Lease:
        self.check()
        return self

    async def __aexit__(self, *error: Any) -> None:
        entries = self.entries
        try:
            await self.aleave(error[1])
        except (LockError, asyncio.CancelledError, GeneratorExit):
            raise  # cancelled, the release goes on in the background
        except BaseException:
            self.finish_leaving(entries)
            raise

    def __dir__(self) -> list[str]:
        return dir(type(self))

    def __repr__(self) -> str:
        token = f" token={self.fencing_token}" if self.fencing_token is not None else ""
        return f"<Lease {printable(self.name)!r} using={self.using!r} {self._state.name.lower()}{token}>"

    def __reduce_ex__(self, protocol: object) -> Never:
        """Refuse copies and pickles: when a copy ends, it would release the lock of the original."""
        raise TypeError(
            "A Lease cannot be copied or pickled; hand it to another process by detach()."
        )

    # All that follows is for this package: first, who has it.

    def grant(self, granted: Grant, asked: float) -> bool:
        """Become held, as *granted* to a request of *asked*; False if it is past its deadline already, or was abandoned."""
        ttl, start = self.request.ttl, granted.start or asked
        ends = start + ttl - drift(ttl)
        now = clock.lease_time()
        if now >= ends:
            return False
        with self._mutex:
            if self._state is not State.PENDING:
                return False
            self.entries = [self.caller or current_caller()]
            self.fencing_token, self._deadline, self._granted_at = granted.token, ends, now
            self._holds_until = None if self._max_hold is None else start + self._max_hold
            # Before it is held, and so may be renewed. Not from now: after a late answer, less of it is left.
            self.due = max(now, start + ttl / 3)
            self._state = State.HELD
        registry.granted(self, now)
        if self._lets_others_in:
            self.leave_line()
        return True

    def enter(self) -> Self:
        """Count one more entry of the same holder; LockNotHeld if that has just left, as a task that was cancelled does."""
        with self._mutex:
            if not self.entries:
                raise self._not_held()
            self.entries = [*self.entries, entering_caller()]
            if begun := transactions.open_here():
                self.began_in = weakref.WeakSet((*self.began_in, *begun))
        return self

    def give_to(self, caller: Caller) -> None:
        """Make *caller* the owner of the last entry, which another task has made for it."""
        with self._mutex:
            self.entries = [*self.entries[:-1], caller]
            self.caller = self.entries[0]

    def hand_on(self) -> None:
        """Take it from its caller: its work goes on in any thread or task that uses lent()."""
        self.caller = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Make the running thread or task its caller in the block; before and after, it has none."""
        with self._mutex:
            self.caller = current_caller()
            self.entries = [self.caller] * len(self.entries)
        if self not in held_here(self.using, self.request.lock_key):
            note_held_here(self.using, self.request.lock_key, self.ref)
        try:
            yield
        finally:
            self.caller = None

    def is_mine(self) -> bool:
        """Return True if the running code may enter it again: it holds it, or the holder waits for this code.

        LockDeadlock in a thread that cannot find out.
        """
        last = self.entries[-1:]  # none: it is being released, and may be free already
        if self.caller is None or not last or not self.held or runs_foreign_tasks():
            return False
        try:
            is_ours = last[0].is_current or waits_for_us(last[0])
        except TimeoutError:
            raise LockDeadlock(self.name, UNCLEAR) from None
        return is_ours and not self.lose_with_session()

    def is_of_caller(self) -> bool:
        """Return whether the running thread or task has entered it."""
        return self.caller is not None and any(each.is_current for each in self.entries)

    @property
    def is_changing_here(self) -> bool:
        """Whether the running thread or task is in the midst of acquiring or releasing it."""
        is_changing = not self.is_entered and not self.has_ended
        return is_changing and self.caller is not None and self.caller.is_current

    @property
    def is_unattended(self) -> bool:
        """Whether it was handed on, or all callers that have it or are releasing it have ended."""
        caller = self.caller
        return caller is None or all(each.is_gone for each in [caller, *self.entries])

    @property
    def is_entered(self) -> bool:
        """Whether there is still something to release: also after it was lost."""
        return self._state in _TO_RELEASE and bool(self.entries)

    @property
    def is_kept(self) -> bool:
        """Whether it is held and not being released. Unlike *held*, it reports no loss."""
        is_held = self._state is State.HELD and bool(self.entries)
        return is_held and clock.lease_time() < self._deadline

    @property
    def is_left(self) -> bool:
        """Whether all have left it, and it is kept until a transaction has ended."""
        return self.awaits_end and len(self.entries) == 1

    @property
    def is_granted(self) -> bool:
        """Whether it was granted, even if it has ended since."""
        return self._state is not State.PENDING

    @property
    def has_ended(self) -> bool:
        """Whether it was released, lost or handed on, and blocks no other caller. Unlike *lost*, it reports no loss."""
        return self._state not in _NOT_ENDED and self.in_line_as is None

    # Its renewal.

    def extending(self, ttl: float | timedelta | None) -> Steps[list[Request], None]:
        """Do the steps of extend(); they yield the requests to extend, and are sent whether each is kept."""
        self.check()
        if not self.backend.supports_extend:
            raise NotSupported(self.using, "extend()", "A lease ends with its ttl.")
        if ttl is not None:
            ttl = checked_ttl(ttl)
            self.backend.check_ttl(ttl)
        request = self.renewal(ttl)
        if request is None:
            raise LockLost(self.name, "its max_hold is over")
        start = clock.lease_time()
        [is_kept] = yield [request]
        if not is_kept:
            self.lose("the server says that it is not ours any more")
            raise LockLost(self.name, self._reason)
        self.confirm(start, request.ttl)
        if ttl is not None:
            self.request = replace(self.request, ttl=ttl)
        announce(lock_extended, self, lease=self)

    def renewal(self, ttl: float | None = None) -> Request | None:
        """Return the request that extends it now, to *ttl* or its own; None when it may not live longer (max_hold)."""
        longest = self.ttl if ttl is None else ttl
        if self._holds_until is not None:
            longest = min(longest, self._holds_until - clock.lease_time())
        if longest == self.ttl:
            return self.request
        return replace(self.request, ttl=longest) if longest > 0 else None

    def confirm(self, start: float, ttl: float) -> None:
        """Note an extension that was asked for at *start*; a lost lease stays lost."""
        with self._mutex:
            self._deadline = max(self._deadline, start + ttl - drift(ttl))
            self._is_in_jeopardy = False

    def endanger(self) -> None:
        """Note a renewal that failed or is late."""
        self._is_in_jeopardy = True

    @property
    def max_hold_left(self) -> float | None:
        """How many seconds are left of its max_hold; None if it has none."""
        ends = self._holds_until
        return None if ends is None else max(0.0, ends - clock.lease_time())

    def change_owner(self) -> None:
        """Ask as another owner from now on: the server may know that the one before gave the lock back."""
        self.request = replace(self.request, owner=new_owner())

    # Its release.

    def leave(self, error: BaseException | None, *, at_once: bool = False) -> None:
        """Release it at the end of a block that raised *error*, which a failed release does not hide.

        *at_once*: whatever transaction is open.
        """
        if error is not None:
            self.note_failure()
        try:
            if self.is_entered and not self.is_left:
                release = self.release_now if at_once else self.release
                release()
        except LockError as problem:
            self._add_note(error, problem)

    async def aleave(self, error: BaseException | None) -> None:
        if error is not None:
            self.note_failure()
        try:
            if self.is_entered and not self.is_left:
                await self.arelease()
        except LockError as problem:
            self._add_note(error, problem)

    def finish_leaving(self, entries: object) -> None:
        """Release it in the background after an asynchronous exception broke leave() off; it had *entries* before."""
        if self.entries is entries:
            if not self.is_left:
                self.release_later()
        elif not self.entries and self._state in _TO_RELEASE:
            self.break_off()

    def _add_note(self, error: BaseException | None, problem: LockError) -> None:
        if error is None:
            raise problem
        if str(error) == str(problem):
            return  # check() has told it
        error.add_note(f"django_distlock: {problem}")
        self._warn_of(problem)

    def _warn_of(self, problem: BaseException) -> None:
        warn("Leaving lock %s: %s", self.name, problem, of=self, token=self.fencing_token)

    def release_now(self) -> bool:
        """Release it, whatever transaction is open; return whether the lock is free now."""
        if os.getpid() != forks.pid:
            forks.notice()
        if self._leaves_reentry():
            return False
        try:
            self._lose_if_over()
            began = clock.lease_time()
            outcome = settled(partial(self.backend.release, self.request), is_sure=_is_released)
            self._conclude(began, outcome)
        except LockNotHeld:
            raise
        except BaseException:
            self.break_off()
            raise
        return True

    def release_later(self) -> None:
        """Release it in the background, if nobody has yet: for places that must not do I/O, finalizers too."""
        if self.entries:  # all else might take a lock that the finalizer's thread has
            if len(self.entries) == 1:
                self.caller = None  # it may end before
            submit = partial(background.submit, self.using, self._release_quietly)
            background.at(clock.lease_time(), submit)

    def _release_quietly(self) -> None:
        try:
            if self.is_entered:
                self.release_now()
        except LockError as problem:
            self._warn_of(problem)

    async def _arelease(self) -> None:
        try:
            self.caller = current_caller()  # as in _leaves_reentry()
            self._lose_if_over()
            began = clock.lease_time()
            outcome = await asettled(partial(self.backend.arelease, self.request), _is_released)
            self._conclude(began, outcome)
        except LockNotHeld:
            raise
        except BaseException:
            self.break_off()
            raise

    def _tell_unless_released(self, release: asyncio.Task[None]) -> None:
        """Log how a *release* failed that nobody waits for any more."""
        if not release.cancelled() and (problem := release.exception()):
            self._warn_of(problem)

    def _leaves_reentry(self) -> bool:
        """Remove the last entry of this caller; return whether others are left."""
        with self._mutex:
            entries = [*self.entries]
            if not entries or self.is_left or self._state not in _TO_RELEASE:
                raise self._not_held()
            if len(entries) == 1:
                # The caller that releases it owns it now: a task that is cancelled meanwhile ends before.
                self.caller = current_caller()
                if self.hold_on_success:
                    self.request = replace(self.request, min_hold=self.hold_on_success)
                self.entries = ()
                return False
            mine = [index for index, each in enumerate(entries) if each.is_current]
            entries.pop(mine[-1] if mine else -1)
            self.entries = entries
            if self.caller is not None:  # handed on: nobody's
                self.caller = entries[0]
            return True

    def _conclude(self, began: float, outcome: Release) -> None:
        if outcome is not Release.RELEASED:
            self.lose(f"the server says that it is {outcome.value}")
        is_ended_now = self._end(State.RELEASED)
        forget_here(self)  # last: until then, a signal handler finds it there
        if not is_ended_now and self._state is State.LOST:
            if outcome is Release.TAKEN:
                raise LockNotOwned(self.name)
            raise LockLost(self.name, self._reason)
        if lock_released.receivers:
            took = clock.lease_time() - began
            announce(lock_released, self, lease=self, held=self._held_for - took, took=took)

    def break_off(self) -> None:
        """End, and give the lock back in the background: a request for it was interrupted."""
        self._end(State.RELEASED)
        self.backend.abandon_later(self.request)

    def note_failure(self) -> None:
        """Note that what it is held for has failed: with free_on_error, its min_hold does not count."""
        self.hold_on_success = 0.0

    def release_on_commit(self) -> None:
        """Release it at the ends of all open transactions, also of those that were open before it."""
        self.release_when = "on_commit"

    def await_end(self) -> None:
        """Note that its last entry has been left, and the end of a transaction will release it."""
        self.awaits_end = True

    def note_end(self, *, is_committed: bool) -> None:
        """Note that this end has come."""
        self.awaits_end = False
        if not is_committed:
            self.note_failure()

    # What it asks for, and the line of this process.

    def ask_for(self, place: int | None) -> None:
        """Ask for this place of the lock from now on; None: for any."""
        self.request = self.request.at(place)

    def queue_as(self, position: str) -> None:
        """Wait from now on in this position of the server's queue, which belongs to this process."""
        self.request = replace(self.request, position=position)

    @property
    def line(self) -> str:
        """The key of its line in this process."""
        return self.backend.line_of(self.request)

    @property
    def _lets_others_in(self) -> bool:
        """Whether others may hold the lock with it: other readers, or in other places."""
        return self.request.shared or self.request.limit is not None

    @property
    def is_asking(self) -> bool:
        """Whether a request for it is under way, or will be sent by a caller that has not ended."""
        is_pending = self._state is State.PENDING and not self._is_waiting
        return is_pending and not self.is_unattended

    def note_waiting(self, *, asks: bool) -> None:
        """Note that its acquire waits; *asks*: by a request, otherwise it looks whether it may ask again."""
        self._is_waiting = not asks

    def leave_line(self) -> None:
        """Give up its position in the line of this process; does nothing the second time."""
        if (caller := self.in_line_as) is not None:
            queue, line = self.backend.queue, self.line
            queued = queue.leave(line, caller)
            if caller is not self.ref:
                queued = queue.leave(line, self.ref) or queued  # if stay() was broken off
            self.in_line_as = None
            if queued is not None:
                self.backend.dequeue_later(queued)

    # Its end.

    def lose(self, reason: str) -> None:
        """Become lost, unless it has ended already."""
        if self._end(State.LOST, reason):
            token = self.fencing_token
            warn("Lock %s was lost: %s", self.name, reason, of=self, token=token)
            for callback in self._on_lost:
                try:
                    callback(reason)
                except Exception:
                    fields = log_fields(self.name, self.using, token=token)
                    logger.exception("A callback of a lock failed", extra=fields)
            announce(lock_lost, self, lease=self, held=self._held_for, reason=reason)

    def lose_with_session(self) -> bool:
        """Become lost if the session that holds it is known to have ended; return whether it has."""
        is_over = self.backend.is_session_over(self.request)
        if is_over:
            self.lose("the session that held it has ended")
        return is_over

    def end_here(self) -> None:
        """End, as another process is to have the lock; LockLost if it had ended before."""
        if not self._end(State.DETACHED):
            raise LockLost(self.name, self._reason)
        announce(lock_detached, self, lease=self, held=self._held_for)

    def hand_over(self, ttl: float | timedelta | None = None) -> str:
        """Do what detach() does, for a lock that protects no data of the open transaction."""
        return run(
            handover.detaching(self, ttl),
            lambda asked: settled(partial(self.backend.extend, asked)),
        )

    def abandon(self) -> None:
        """Release it on the server without signals or errors: the process ends."""
        self.entries = ()
        if self._end(State.RELEASED):
            settled(partial(self.backend.abandon, self.request))

    def end_unowned(self) -> None:
        """Become lost, and release it on the server: its caller has ended."""
        if self.held:
            self.lose("the thread or task that held it ended without releasing it")
            self.backend.abandon_later(self.request)

    def give_up(self) -> None:
        """End a pending lease that will not be granted."""
        self._end(State.RELEASED)

    def disown(self) -> None:
        """Become inert in a forked child. No mutex: its owner may be a thread that is not here."""
        self._mutex = threading.RLock()
        self._state, self.in_line_as = State.INHERITED, None

    def __del__(self) -> None:
        """Release it: nothing refers to it, and the thread or task that acquired it has ended."""
        if self._state is State.HELD:
            background.at(clock.lease_time(), self.end_unowned)

    def _lose_if_over(self) -> None:
        if self._state is State.HELD and clock.lease_time() >= self._deadline:
            self.lose("its deadline passed before it was extended")

    def _end(self, state: State, reason: str = "") -> bool:
        try:
            with self._mutex:
                if self._state not in _NOT_ENDED:
                    return False
                self._state, self._reason = state, reason
            self._tell_of_the_end()
        except BaseException:
            # An asynchronous exception: those who were not told yet are told all the same.
            if self._state not in _NOT_ENDED:
                background.at(clock.lease_time(), self._tell_of_the_end)
            raise
        return True

    def _tell_of_the_end(self) -> None:
        self.leave_line()
        if self._lets_others_in:
            # A writer waits in the line of writers, also where readers have one of their own.
            self.backend.queue.look_again(self.request.line)
        registry.discard(self)

    @property
    def _held_for(self) -> float:
        return clock.lease_time() - self._granted_at

    def _not_held(self) -> LockNotHeld:
        if self._state is State.RELEASED or self.is_left:
            return LockNotHeld(self.name)
        return LockNotHeld(self.name, f"it is {self._state.value}")
