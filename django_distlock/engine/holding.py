"""Holding: one holding of a lock, from its request to its end; and which leases the running code holds."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from asyncio import _get_running_loop
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, Self

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
from django_distlock.ground.mutexes import new_mutex
from django_distlock.ground.naming import log_fields, printable, warn
from django_distlock.ground.sync_to_async import entering_caller, waits_for_us
from django_distlock.signals import lock_detached, lock_extended, lock_lost, lock_released

from .announcements import send
from .background import background, kept_task
from .steps import Steps, asettled, settled
from .values import NOT_ENDED, Grant, Release, Request, State, new_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
    from datetime import timedelta

    from django.dispatch import Signal

    from django_distlock.backends.base import BaseLockBackend

    from .bells import Bell
    from .values import Read

    #: Returns a lease, or None if there is none, or no longer one.
    Known = Callable[[], Any]
    #: Alias and Request.lock_key.
    _Lock = tuple[str, str]
    _Level = dict[_Lock, tuple[Known, ...]]

logger = logging.getLogger("django_distlock")
#: A lease with less than this part of its ttl left should have been renewed already.
LATE = 0.5
#: The reason in LockDeadlock for a thread of sync_to_async().
UNCLEAR = "the event loop of its holder is blocked, perhaps by the holder itself: does that wait for this thread?"
#: The states in which there is something to release.
_TO_RELEASE = State.HELD, State.LOST
#: For settled(): only this answer is sure, because a server forgets after a while which owners have released.
_is_released = partial(is_, Release.RELEASED)
_NOWHERE: dict[int, Any] = {}


class Holding:
    """One holding of one lock, for the engine. Users get it as a Lease, which adds their methods."""

    fencing_token: int | None = None
    #: The text from which the name was made, as in distributed_lock("fee:{account_id}"); "" if that is not known.
    template = ""
    #: When the next renewal is due: seconds on ``clock.lease_time()``.
    due = 0.0
    #: With free_on_error: the min_hold that counts if nothing fails until the release.
    hold_on_success = 0.0
    #: Whether it was entered again, so that work may have been done under it.
    was_entered_again = False
    #: Whether the last entry has been left, and the end of a transaction will release the lease.
    awaits_end = False
    #: Ends the wait of lead() for the lock.
    stop: threading.Event | None = None
    #: Whether the acquire waits, so that it sends no request before it has looked whether it may.
    is_resting = False
    #: The entry in the local queue, while the lease waits for the lock or holds it alone.
    in_line_as: Bell | weakref.ref[Any] | None = None
    #: The dict, by id, in which the registry keeps the lease until it ends.
    kept_in = _NOWHERE
    granted_at = 0.0
    _state = State.PENDING
    _reason = ""
    _deadline = 0.0
    _holds_until: float | None = None
    _is_in_jeopardy = False
    #: The callers that have entered the lease and not left it yet, the innermost last. Each change makes a new list.
    entries: list[Caller] | tuple[()] = ()
    #: The instances that open blocks of locked() have read.
    reads: list[Read] | tuple[()] = ()
    _on_lost: list[Callable[[str], object]] | tuple[()] = ()

    def __init__(
        self: Self,
        backend: BaseLockBackend,
        request: Request,
        *,
        renew: bool = True,
        max_hold: float | None = None,
        release_when: str = "auto",
        template: str = "",
        hold_on_success: float = 0.0,
    ) -> None:
        """Make a pending lease; registry.add() comes before the first request. *release_when*: *release* of LockTerms."""
        self.backend = backend
        self.request = request
        #: The key of the local queue.
        self.line = backend.line_of(request)
        #: Whether others may hold the lock at the same time: other readers, or in other places.
        self._lets_others_in = request.shared or request.limit is not None
        self.renews = renew
        self.release_when = release_when
        self.template = template
        self.hold_on_success = hold_on_success
        # The same as current_caller(), without a call, because every acquire comes here.
        self.caller: Caller | None = here.caller if _get_running_loop() is None else Caller()
        #: For code that must not keep the lease alive.
        self.ref = weakref.ref(self)
        hash(self.ref)  # computed now: a weak reference keeps its hash when its object is gone
        self._max_hold = max_hold
        self._mutex = new_mutex()
        #: The transactions in which the lock was acquired.
        self.began_in: Collection[Any] = transactions.open_here()

    # The facts.

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self.request.name

    @property
    def using(self) -> str:
        """The alias of the backend."""
        return self.backend.alias

    @property
    def reason(self) -> str:
        """Why the lease was lost; empty otherwise."""
        return self._reason

    @property
    def deadline(self) -> float:
        """When the lease is lost unless it is extended before: seconds on ``clock.lease_time()``."""
        return self._deadline

    # Whether the lease is held.

    def look(self) -> State:
        """Return the present state, by the clock of this machine: a lease whose deadline has passed becomes lost."""
        if os.getpid() != forks.pid:
            forks.notice()
        if self._state is State.HELD and clock.lease_time() >= self._deadline:
            self.end(State.LOST, "its deadline passed before it was extended")
        return self._state

    @property
    def held(self) -> bool:
        """Whether it is certain that the lock is still ours."""
        return self.look() is State.HELD

    def check(self) -> None:
        """Raise LockLost unless it is certain that the lock is still ours, LockNotHeld if it was released.

        check() compares the deadline with our clock and, if a session holds the lock, looks whether the
        session has ended. It sends no request.
        """
        state = self.look()
        if state is State.HELD and self.lose_with_session():
            state = self._state
        if state is State.LOST:
            raise LockLost(self.name, self._reason)
        if state is not State.HELD:
            raise self._not_held()

    @property
    def in_jeopardy(self) -> bool:
        """Whether a renewal is late or has failed, while the deadline has not passed yet."""
        renewal = self.renewal()  # shorter, or None, towards the end of max_hold
        late = renewal.ttl * LATE if self.renews and renewal is not None else 0.0
        left = self.remaining  # 0 if the lease is not held
        return left > 0 and (self._is_in_jeopardy or left < late)

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, by our own clock; 0 if the lease is not held."""
        return max(0.0, self._deadline - clock.lease_time()) if self.held else 0.0

    @property
    def is_kept(self) -> bool:
        """Whether the lease is held and not being released. Unlike look(), this reports no loss."""
        is_held = self._state is State.HELD and bool(self.entries)
        return is_held and clock.lease_time() < self._deadline

    @property
    def is_granted(self) -> bool:
        """Whether the lease was granted, even if it has ended since."""
        return self._state is not State.PENDING

    @property
    def has_ended(self) -> bool:
        """Whether the lease was released, lost or handed on, and blocks no other caller. Unlike look(), this reports no loss."""
        return self._state not in NOT_ENDED and self.in_line_as is None

    def checked_token(self) -> int:
        """Return the fencing token; NotSupported if the backend has none, or the lock has a limit."""
        if self.request.place is not None:
            what = "fencing by a lock with a limit"
            raise NotSupported(
                self.using, what, "Its tokens do not order the holders of several places."
            )
        if self.fencing_token is None:
            raise NotSupported(self.using, "fencing tokens", "Guard the data by another backend.")
        return self.fencing_token

    # Grant and entries.

    def grant(self, granted: Grant, asked: float) -> bool:
        """Become held by *granted*, requested at *asked* (lease time); False if that is too late, or the lease was abandoned."""
        ttl, start = self.request.ttl, granted.start or asked
        ends = start + ttl - drift(ttl)
        now = clock.lease_time()
        if now >= ends:
            return False
        with self._mutex:
            if self._state is not State.PENDING:
                return False
            self.entries = [self.caller or current_caller()]
            self.fencing_token, self._deadline, self.granted_at = granted.token, ends, now
            self._holds_until = None if self._max_hold is None else start + self._max_hold
            # Set before the state, as a held lease may be renewed. Not counted from now, as the answer may be late.
            self.due = max(now, start + ttl / 3)
            self._state = State.HELD
        if self._lets_others_in:
            self.leave_line()
        return True

    def enter(self) -> Self:
        """Count one more entry of the same holder; LockNotHeld if the holder, such as a cancelled task, has just left."""
        with self._mutex:
            if not self.entries:
                raise self._not_held()
            self.entries, self.was_entered_again = [*self.entries, entering_caller()], True
            if begun := transactions.open_here():
                self.began_in = weakref.WeakSet((*self.began_in, *begun))
        return self

    def give_to(self, caller: Caller) -> None:
        """Make *caller* the owner of the last entry, which another task has made for *caller*."""
        with self._mutex:
            self.entries = [*self.entries[:-1], caller]
            self.caller = self.entries[0]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Make the running thread or task the caller in the block; before and after, the lease has no caller."""
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
        """Return True if the running code may enter again: it is the holder, or the holder waits for this code.

        LockDeadlock in a thread that cannot find that out.
        """
        last = self.entries[
            -1:
        ]  # empty: the lease is being released, and the lock may be free already
        if self.caller is None or not last or not self.held or runs_foreign_tasks():
            return False
        try:
            is_ours = last[0].is_current or waits_for_us(last[0])
        except TimeoutError:
            raise LockDeadlock(self.name, UNCLEAR) from None
        return is_ours and not self.lose_with_session()

    def is_of_caller(self) -> bool:
        """Return True if the running thread or task has entered the lease."""
        return self.is_of(current_caller())

    def is_of(self, caller: Caller) -> bool:
        """Return True if *caller* has entered the lease and not left it yet."""
        return self.caller is not None and caller in self.entries

    @property
    def is_changing_here(self) -> bool:
        """Whether the running thread or task is in the midst of acquiring or releasing the lease."""
        is_changing = not self.is_entered and not self.has_ended
        return is_changing and self.caller is not None and self.caller.is_current

    @property
    def is_unattended(self) -> bool:
        """Whether nobody is left who could release the lease: it was handed on, or all its callers have ended."""
        caller = self.caller
        return caller is None or all(each.is_gone for each in [caller, *self.entries])

    @property
    def is_entered(self) -> bool:
        """Whether there is still something to release, also after a loss."""
        return self._state in _TO_RELEASE and bool(self.entries)

    @property
    def is_left(self) -> bool:
        """Whether all callers have left, and the lease is kept until a transaction has ended."""
        return self.awaits_end and len(self.entries) == 1

    @property
    def may_be_left(self) -> bool:
        """Whether a caller has entered and not left yet, also after a loss."""
        return self._state in _TO_RELEASE and len(self.entries) > self.awaits_end

    # Renewal.

    def extending(self, ttl: float | timedelta | None) -> Steps[list[Request], None]:
        """The steps of extend(): they yield the requests to extend, and are sent for each whether it is held."""
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
            self.end(State.LOST, "the server says that it is not ours any more")
            raise LockLost(self.name, self._reason)
        self.confirm(start, request.ttl)
        if ttl is not None:
            self.request = replace(self.request, ttl=ttl)
        self.announce(lock_extended, lease=self)

    def renewal(self, ttl: float | None = None) -> Request | None:
        """Return the request that extends the lease now, to *ttl*, by default its own; None if max_hold is over."""
        own = self.request.kept_for
        longest = own if ttl is None else ttl
        if self._holds_until is not None:
            longest = min(longest, self._holds_until - clock.lease_time())
        if longest == own:
            return self.request
        return replace(self.request, ttl=longest) if longest > 0 else None

    def confirm(self, start: float, ttl: float) -> None:
        """Note an extension that was requested at *start* (lease time); a lost lease stays lost."""
        with self._mutex:
            self._deadline = max(self._deadline, start + ttl - drift(ttl))
            self._is_in_jeopardy = False

    def endanger(self) -> None:
        """Note that a renewal has failed or is late."""
        self._is_in_jeopardy = True

    @property
    def max_hold_left(self) -> float | None:
        """How many seconds of max_hold are left; None without a max_hold."""
        ends = self._holds_until
        return None if ends is None else max(0.0, ends - clock.lease_time())

    def change_owner(self) -> None:
        """Use a new owner from here: the server may have recorded the old one as released."""
        self.request = replace(self.request, owner=new_owner())

    # Release.

    def leave(self, error: BaseException | None, *, at_once: bool = False) -> None:
        """Release the lease at the end of a block that raised *error*, which a failed release does not hide.

        *at_once*: do not wait for the end of open transactions.
        """
        if error is not None:
            self.note_failure()
        try:
            if self.may_be_left:
                give_back = self.give_back_now if at_once else self.give_back
                give_back()
        except LockError as problem:
            self._add_note(error, problem)

    async def aleave(self, error: BaseException | None) -> None:
        if error is not None:
            self.note_failure()
        try:
            if self.may_be_left:
                await self.agive_back()
        except LockError as problem:
            self._add_note(error, problem)

    def finish_leaving(self, entries: object) -> None:
        """Finish leave() in the background after an asynchronous exception; *entries* are those from before leave()."""
        if self.entries is entries:
            if not self.is_left:
                self.give_back_later()
        elif not self.entries and self._state in _TO_RELEASE:
            self.end(State.RELEASED, frees=True)

    def _add_note(self, error: BaseException | None, problem: LockError) -> None:
        if error is None:
            raise problem
        if str(error) == str(problem):
            return  # check() has raised the same error in the block
        error.add_note(f"django_distlock: {problem}")
        self.warn_of(problem)

    def warn_of(self, problem: BaseException) -> None:
        """Log that the lease was lost or could not be released, where that must not be raised."""
        warn("Leaving lock %s: %s", self.name, problem, of=self, token=self.fencing_token)

    def give_back(self) -> None:
        """Release the lease now, or at the end of open transactions (*release* of LockTerms)."""
        if self.began_in or self.release_when == "on_commit":
            of_which = None if self.release_when == "on_commit" else self.began_in
            open_ones = transactions.still_open(of_which)
            is_last = len(self.entries) == 1 and not self.awaits_end
            waits = open_ones and is_last and self.release_when != "at_exit"
            if waits and self.held:
                transactions.call_at_end(open_ones, self._give_back_at_end)
                self.awaits_end = True
                return
        if self.give_back_now():
            transactions.tell_of_release(self.name, strict=self.backend.strict)

    def _give_back_at_end(self, is_committed: bool) -> None:
        """Release the lease at the end of a transaction; a rollback counts as a failure."""
        entries, self.awaits_end = self.entries, False
        if not is_committed:
            self.note_failure()
        try:
            if self.is_entered:
                self.give_back_now()
        except LockError:
            # Log the error: raised after a commit, it would look as if the data was not committed.
            logger.exception(
                "Lock %s could not be released after the end of its transaction",
                printable(self.name),
                extra=log_fields(self.name, self.using),
            )
        except BaseException:
            self.finish_leaving(entries)
            raise

    def give_back_now(self) -> bool:
        """Release the lease, also inside a transaction; return whether the lock is free now."""
        if self._leaves_reentry():
            return False
        try:
            self.look()
            began = clock.lease_time()
            outcome = settled(partial(self.backend.release, self.request), is_sure=_is_released)
            self._conclude(began, outcome)
        except LockNotHeld:
            raise
        except BaseException:
            self.end(State.RELEASED, frees=True)
            raise
        return True

    async def agive_back(self) -> None:
        """Release the lease, at once; a cancelled call is completed in the background."""
        if _get_running_loop() is None:
            self.give_back_later()  # the task was destroyed, so nothing can be awaited
        elif not self._leaves_reentry():
            task = kept_task(self._agive_back_now())
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                task.add_done_callback(self._tell_unless_released)
                raise

    async def _agive_back_now(self) -> None:
        try:
            self.caller = current_caller()  # as in _leaves_reentry()
            self.look()
            began = clock.lease_time()
            outcome = await asettled(partial(self.backend.arelease, self.request), _is_released)
            self._conclude(began, outcome)
        except LockNotHeld:
            raise
        except BaseException:
            self.end(State.RELEASED, frees=True)
            raise

    def give_back_later(self) -> None:
        """Release the lease in the background, unless it was released: for code without I/O, such as finalizers."""
        if self.entries:  # other checks might need a mutex that the finalizer's thread has
            if len(self.entries) == 1:
                self.caller = None  # the caller may end before the release
            submit = partial(background.submit, self.using, self._give_back_quietly)
            background.at(clock.lease_time(), submit)

    def give_back_unused(self) -> None:
        """Release the lease in the background, as no work has begun under it."""
        self.note_unused()
        self.give_back_later()

    def _give_back_quietly(self) -> None:
        try:
            if self.is_entered:
                self.give_back_now()
        except LockError as problem:
            self.warn_of(problem)

    def _tell_unless_released(self, release: asyncio.Task[None]) -> None:
        """Log the error of *release*, a task that nobody awaits any more."""
        if not release.cancelled() and (problem := release.exception()):
            self.warn_of(problem)

    def _leaves_reentry(self) -> bool:
        """Remove the last entry of this caller; return whether other entries are left."""
        if os.getpid() != forks.pid:
            forks.notice()
        with self._mutex:
            entries = [*self.entries]
            if not self.may_be_left:
                raise self._not_held()
            if self._state is State.LOST and self.caller is not None and not self.is_of_caller():
                return False  # as from a callback of the loss: the caller learns of the loss when it leaves
            if len(entries) == 1:
                # The caller that releases becomes the caller: a cancelled task may end before the release does.
                self.caller = current_caller()
                if self.hold_on_success:
                    self.request = replace(self.request, min_hold=self.hold_on_success)
                self.entries = ()
                return False
            mine = [index for index, each in enumerate(entries) if each.is_current]
            entries.pop(mine[-1] if mine else -1)
            self.entries = entries
            if self.caller is not None:  # a lease that was handed on has no caller
                self.caller = entries[0]
            return True

    def _conclude(self, began: float, outcome: Release) -> None:
        if outcome is Release.RELEASED:
            self.end(State.RELEASED)
        else:
            self.end(State.LOST, f"the server says that it is {outcome.value}")
        forget_here(self)  # last: until then, a signal handler finds the lease there
        if self._state is State.LOST:
            if outcome is Release.TAKEN:
                raise LockNotOwned(self.name)
            raise LockLost(self.name, self._reason)
        if lock_released.receivers:
            took = clock.lease_time() - began
            self.announce(lock_released, lease=self, held=self._held_for - took, took=took)

    def note_failure(self) -> None:
        """Note that the work under the lock has failed: with free_on_error, min_hold does not count."""
        self.hold_on_success = 0.0

    def note_unused(self) -> None:
        """Note that no work has begun under the lock, so that min_hold does not count; does nothing after another entry."""
        if not self.was_entered_again:
            self.hold_on_success, self.request = 0.0, replace(self.request, min_hold=0.0)

    # The request, and the local queue.

    def ask_for(self, place: int | None) -> None:
        """Request this place of the lock from now on; None: any place."""
        self.request = self.request.at(place)

    def queue_as(self, position: str) -> None:
        """From now on, wait in this *position* of the server's queue, which belongs to this process."""
        self.request = replace(self.request, position=position)

    @property
    def is_asking(self) -> bool:
        """Whether a request for the lease is under way, or a caller that has not ended will send one."""
        is_pending = self._state is State.PENDING and not self.is_resting
        return is_pending and not self.is_unattended

    def leave_line(self) -> None:
        """Leave the local queue; does nothing the second time."""
        if (caller := self.in_line_as) is not None:
            queue, line = self.backend.queue, self.line
            queued = queue.leave(line, caller)
            if caller is not self.ref:
                queued = queue.leave(line, self.ref) or queued  # if stay() was interrupted
            self.in_line_as = None
            if queued is not None:
                self.backend.dequeue_later(queued)

    # The end.

    def end(self, state: State, reason: str = "", *, frees: bool = False) -> bool:
        """Become *state*, which is final, unless the lease has ended already; return whether it has ended now.

        *reason*: why it is lost. *frees*: release in the background what the server has granted, or may have.
        """
        is_news = False
        try:
            with self._mutex:
                if self._state in NOT_ENDED:
                    self._state, self._reason, is_news = state, reason, True
            if is_news:
                self._leave_all()
        except BaseException:
            # An asynchronous exception: notify waiters and the registry all the same.
            if self._state not in NOT_ENDED:
                self.caller = None  # this thread may wait for the lock: it does not wait for itself
                background.at(clock.lease_time(), self._leave_all)
            raise
        if is_news and state is State.LOST:
            self._tell_of_the_loss()
        elif is_news and state is State.DETACHED:
            self.announce(lock_detached, lease=self, held=self._held_for)
        if frees:
            self.backend.abandon_later(self.request)
        return is_news

    def end_unattended(self) -> None:
        """Become lost, because the thread or task that held or was releasing the lease has ended."""
        if self.held:
            reason = "the thread or task that held it ended without releasing it"
            self.end(State.LOST, reason, frees=True)

    def lose_with_session(self) -> bool:
        """Become lost if the session that holds the lock is known to have ended; return whether it has."""
        is_over = self.backend.is_session_over(self.request)
        if is_over:
            self.end(State.LOST, "the session that held it has ended")
        return is_over

    def disown(self) -> None:
        """Become inert in a forked child. Without the mutex, which a thread of the parent may hold."""
        self._mutex = new_mutex()
        self._state, self.in_line_as = State.INHERITED, None

    def _leave_all(self) -> None:
        self.leave_line()
        if self._lets_others_in:
            # Writers wait in the queue of writers, also if readers have a separate one.
            self.backend.queue.look_again(self.request.line)
        self.kept_in.pop(id(self), None)

    def _tell_of_the_loss(self) -> None:
        reason, token = self._reason, self.fencing_token
        warn("Lock %s was lost: %s", self.name, reason, of=self, token=token)
        for callback in self._on_lost:
            try:
                callback(reason)
            except Exception:
                fields = log_fields(self.name, self.using, token=token)
                logger.exception("A callback of a lock failed", extra=fields)
        self.announce(lock_lost, lease=self, held=self._held_for, reason=reason)

    def announce(self, signal: Signal, /, **facts: Any) -> None:
        """Send *signal* about this lease to its receivers."""
        if signal.receivers:
            known = {"name": self.name, "using": self.using, "template": self.template}
            send(signal, type(self.backend), **known, **facts)

    @property
    def _held_for(self) -> float:
        return clock.lease_time() - self.granted_at

    def _not_held(self) -> LockNotHeld:
        if self._state is State.RELEASED or self.is_left:
            return LockNotHeld(self.name)
        return LockNotHeld(self.name, f"it is {self._state.value}")

    def __del__(self) -> None:
        """Release the lease: nothing refers to it, and the thread or task that acquired it has ended."""
        if self._state is State.HELD:
            background.at(clock.lease_time(), self.end_unattended)


# The leases that the running code holds, by its context, for re-entry.

#: The leases held in this chain of contexts, at which re-entry looks. The references are weak, because
#: copies of a context outlive the task in callbacks and in tasks that it began.
#: A level is never changed, as copies of the context share it; each level is longer than the next one, so
#: that one more lease costs a few steps, however many are held.
_held_here: ContextVar[tuple[_Level, ...]] = ContextVar("distlock_held_here", default=())


class Awaited:
    """The lease that aacquire() will return, in the context of its caller: another task may await the result."""

    def __init__(self, key: str) -> None:
        self.is_over = False
        self.known: Known | None = None
        self.key = key
        self._work: Callable[[], object] = lambda: None

    def note(self, using: str, work: Coroutine[Any, Any, Any]) -> None:
        """Make this known to re-entry until *work*, the coroutine of aacquire(), is over, or dropped before it began."""
        self._work = weakref.ref(work)
        note_held_here(using, self.key, self)

    @property
    def may_come(self) -> bool:
        return not self.is_over and self._work() is not None

    def __call__(self) -> Holding | None:
        return self.known() if self.known else None


def held_here(using: str, key: str) -> list[Any]:
    """Return the leases of a lock that this chain of contexts knows, the newest last; some may have ended."""
    levels = _held_here.get()
    if not levels:
        return []
    known = [each for level in levels for each in level.get((using, key), ())]
    return [lease for each in known if (lease := each()) is not None]


def all_held_here() -> list[Any]:
    """Return the leases of all locks that this chain of contexts knows; see held_here()."""
    known = [each for level in _held_here.get() for of_lock in level.values() for each in of_lock]
    return [lease for each in known if (lease := each()) is not None]


def note_held_here(using: str, key: str, known: Known) -> None:
    """Let re-entry in this chain of contexts find the lease that *known* returns."""
    level: _Level = {(using, key): (known,)}
    levels = _held_here.get()
    while levels and len(levels[-1]) <= len(level):
        level = _merged(levels[-1], level)
        levels = levels[:-1]
    _held_here.set((*levels, level))


def forget_here(lease: Holding) -> None:
    """Remove *lease*, which has ended, from the leases for re-entry, if it is the newest one, as it usually is."""
    levels = _held_here.get()
    if levels and [*levels[-1].values()] == [(lease.ref,)]:
        _held_here.set(levels[:-1])


def _merged(older: _Level, newer: _Level) -> _Level:
    """Return both levels as one, the newest lease last, without ended leases."""
    locks = [*(lock for lock in older if lock not in newer), *newer]
    merged = {lock: _still_held((*older.get(lock, ()), *newer.get(lock, ()))) for lock in locks}
    return {lock: known for lock, known in merged.items() if known}


def _still_held(known: Iterable[Known]) -> tuple[Known, ...]:
    """Return those of *known* at which re-entry must still look, each lease once."""
    kept: dict[int, Known] = {}
    for each in known:
        lease = each()
        if lease is not None:
            if not lease.has_ended:
                kept[id(lease)] = lease.ref
        elif isinstance(each, Awaited) and each.may_come:
            kept[id(each)] = each
    return tuple(kept.values())
