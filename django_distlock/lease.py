"""Lease: the proof of one holding of a lock, by our own clock, and what its holder does with it."""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import threading
import weakref
from asyncio import _get_running_loop
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from django.core import signing

from . import fencing, transactions
from .conf import LEAST_TTL, checked_ttl
from .engine import clock
from .engine.background import background
from .engine.caller import Caller, current_caller, forks, here
from .engine.clock import drift
from .engine.holder import Holder
from .engine.naming import checked_name, log_fields, printable, warn
from .engine.registry import registry
from .engine.steps import Steps, arun, asettled, run, settled
from .engine.values import Release, Request
from .exceptions import LockError, LockLost, LockNotHeld, LockNotOwned, NotSupported
from .handler import locks
from .signals import announce, lock_detached, lock_extended, lock_lost, lock_released

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from datetime import timedelta

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Model, QuerySet

    from .backends.base import BaseLockBackend
    from .engine.local_queue import LocalQueue, Place

    #: Brings a lease, or None if there is none (any more).
    Known = Callable[[], "Lease | None"]

logger = logging.getLogger("django_distlock")
#: Salt of the text that detach() signs.
HANDOVER = "django_distlock.lease"
#: A lease with less than this part of its ttl left should have been renewed by now.
LATE = 0.5
_M = TypeVar("_M", bound="Model")

_BACKGROUND: set[asyncio.Task[Any]] = set()
#: The leases held in this chain of contexts: what re-entry looks at. They are not kept alive by it:
#: copies of a context outlive the task in callbacks and in tasks that were begun by it.
_held_here: ContextVar[tuple[Known, ...]] = ContextVar("distlock_held_here", default=())


class State(enum.Enum):
    """Where a lease stands; all but the first two are final."""

    PENDING = "pending"
    HELD = "held"
    LOST = "lost"
    RELEASED = "released"
    DETACHED = "handed to another process"
    INHERITED = "held by the process that this one was forked from"


class _TakeOver(NamedTuple):
    """What attach() asks a backend: to have the owner of *request* hold what *former* holds."""

    backend: BaseLockBackend
    request: Request
    former: str


class Lease:
    """One holding of one lock. It is made by ``Lock.acquire()``; use it with ``with`` or release it.

    Methods that begin with an *a* more, such as ``aextend()``, are awaited and do the same.

    It is *held* until it is released, or lost: when its deadline passes by this machine's
    clock, or the server says that the lock is not ours any more. Lost is final.
    """

    fencing_token: int | None = None
    #: When it is renewed next: seconds on ``clock.lease_time()``.
    due = 0.0
    #: See LockTerms.
    release_when = "auto"
    #: What its name was made of, as distributed_lock() was given it: "fee:{account_id}"; "" if that is not known.
    template = ""
    #: Its min_hold, where that counts only if nothing fails until the release.
    hold_on_success = 0.0
    #: Whether its last entry has been left, and the end of a transaction is going to release it.
    awaits_end = False
    _state = State.PENDING
    _reason = ""
    _deadline = 0.0
    _granted_at = 0.0
    _holds_until: float | None = None
    _is_in_jeopardy = False
    _line: tuple[LocalQueue, Place] | None = None
    #: Who has entered and not left yet, the innermost last: each was let in by the one before.
    _entries: list[Caller] | tuple[()] = ()
    _on_lost: list[Callable[[str], object]] | tuple[()] = ()

    def __init__(
        self,
        backend: BaseLockBackend,
        request: Request,
        *,
        renew: bool = True,
        max_hold: float | None = None,
    ) -> None:
        """Made pending; it is registered before anything is sent."""
        self.backend = backend
        self.request = request
        self.renews = renew
        # As current_caller(), without a call: this is on the way of every acquire.
        self.caller: Caller | None = here.caller if _get_running_loop() is None else Caller()
        #: What others know it by who must not keep it alive.
        self.ref = weakref.ref(self)
        self._max_hold = max_hold
        self._mutex = threading.Lock()
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
        """Who holds it, for people."""
        return self.request.holder

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
    def is_kept(self) -> bool:
        """Whether it is held and not being given back. Unlike *held*, it tells nobody of its end."""
        is_held = self._state is State.HELD and bool(self._entries)
        return is_held and clock.lease_time() < self._deadline

    @property
    def is_unattended(self) -> bool:
        """Whether it was handed on, or all who have it or are giving it back have ended."""
        caller = self.caller
        return caller is None or all(each.is_gone for each in [caller, *self._entries])

    @property
    def in_jeopardy(self) -> bool:
        """Whether a renewal is late or has failed, while the deadline has not passed yet."""
        is_late = self.renews and self.remaining < self.ttl * LATE
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

        It compares the deadline with our clock, and sends no request.
        """
        state = self.state
        if state is State.LOST:
            raise LockLost(self.name, self._reason)
        if state is not State.HELD:
            raise self._not_held()

    def on_lost(self, callback: Callable[[str], object]) -> None:
        """Call *callback* with the reason, once, when the lease is lost; at once if it is already.

        It is called in the thread that notices the loss, mostly the one that renews leases: be quick.
        """
        with self._mutex:
            if self._state in (State.PENDING, State.HELD):
                self._on_lost = [*self._on_lost, callback]
                return
        if self._state is State.LOST:
            callback(self._reason)

    def __repr__(self) -> str:
        token = f" token={self.fencing_token}" if self.fencing_token is not None else ""
        return f"<Lease {printable(self.name)!r} using={self.using!r} {self._state.name.lower()}{token}>"

    # What the holder does.

    def release(self) -> None:
        """Release the lock; if it was entered several times, only the last release does.

        Inside a transaction, the *release* of lock() says when others get it.

        LockNotHeld if it was released before, LockLost if the lease has ended, LockNotOwned if
        somebody else has the lock.
        """
        open_ones: list[BaseDatabaseWrapper] = []
        if self.began_in or self.release_when == "on_commit":
            of_which = None if self.release_when == "on_commit" else self.began_in
            open_ones = transactions.still_open(of_which)
            is_last = len(self._entries) == 1 and not self.awaits_end
            if open_ones and is_last and self.release_when != "at_exit" and self.held:
                transactions.release_at_end(self, open_ones)
                self.awaits_end = True
                return
        if self.release_now() and open_ones:
            transactions.tell_of_release(self.name, open_ones, strict=self.backend.strict)

    def release_now(self) -> bool:
        """Release it, whatever transaction is open; return whether the lock is free now."""
        if os.getpid() != forks.pid:
            forks.notice()
        if self._leaves_reentry():
            return False
        self._lose_if_over()
        began = clock.lease_time()
        try:
            outcome = settled(partial(self.backend.release, self.request))
        except BaseException:
            self._break_off()
            raise
        self._conclude(began, outcome)
        return True

    async def arelease(self) -> None:
        """Release it, at once; a cancelled call is completed in the background."""
        if _get_running_loop() is None:
            self.release_later()  # its task was destroyed: there is nothing to wait in
        elif not self._leaves_reentry():
            task = asyncio.ensure_future(self._arelease())
            _BACKGROUND.add(task)
            task.add_done_callback(_BACKGROUND.discard)
            await asyncio.shield(task)

    def extend(self, ttl: float | timedelta | None = None) -> None:
        """Let it live for at least *ttl* seconds from now (by default its own ttl).

        It is never shortened, and later renewals use the same ttl. LockLost if the lock is not ours
        any more: it is never acquired again.
        """
        run(self._extending(ttl), lambda asked: settled(partial(self.backend.extend, asked)))

    async def aextend(self, ttl: float | timedelta | None = None) -> None:
        aextend = self.backend.aextend
        await arun(self._extending(ttl), lambda asked: asettled(partial(aextend, asked)))

    def detach(self, ttl: float | timedelta | None = None) -> str:
        """Hand the lock to another process: return a text for its ``Lease.attach()``.

        The lease is extended a last time, to *ttl* seconds (its own by default), for the text to
        reach the other process, which renews it with its own ttl. Whoever has the text can hold the
        lock: keep it as secret as a password. In this process, the lease has ended.
        """
        return run(self._detaching(ttl), lambda asked: settled(partial(self.backend.extend, asked)))

    async def adetach(self, ttl: float | timedelta | None = None) -> str:
        aextend = self.backend.aextend
        return await arun(self._detaching(ttl), lambda asked: asettled(partial(aextend, asked)))

    @classmethod
    def attach(cls, text: str, purpose: str = "") -> Lease:
        """Take over the lease that another process has detached. Each text works once.

        *purpose*: what it is held for now, shown to people.

        LockLost if the lease has ended meanwhile, or was attached already.

        ``django.core.signing.BadSignature`` if *text* is not one that detach() made.
        """
        return run(
            cls._attaching(text, purpose),
            lambda asked: settled(partial(asked.backend.take_over, asked.request, asked.former)),
        )

    @classmethod
    async def aattach(cls, text: str, purpose: str = "") -> Lease:
        return await arun(
            cls._attaching(text, purpose),
            lambda asked: asettled(partial(asked.backend.atake_over, asked.request, asked.former)),
        )

    # What it protects.

    def guard(self, using: str = "default") -> None:
        """Keep later holders out until the caller's transaction on *using* has ended.

        The locks must be in that same database. Until the commit or rollback nobody else can acquire
        the lock, even if the lease expires. StaleFencingToken if somebody else already has.
        Call it in the outermost block: on PostgreSQL it ends with a savepoint that is rolled back.
        """
        self.check()
        self.backend.guard(self.request, self.checked_token(), using)

    def claim(self, target: _M | QuerySet[_M]) -> Any:
        """Raise the fence of fenced rows (FencedModel) to our token, *then* read them again.

        *target* is an instance or a queryset, and so is the result.
        StaleFencingToken if a later holder has claimed a row; DoesNotExist of the model for an
        instance that was deleted.
        """
        self.check()
        return fencing.claim(self, target)

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
        """Return the fencing token; NotSupported where the backend gives none."""
        if self.fencing_token is None:
            raise NotSupported(self.using, "fencing tokens", "Guard the data by another backend.")
        return self.fencing_token

    # ``with lease:`` and ``async with lease:`` release it.

    def __enter__(self) -> Lease:
        self.check()
        return self

    def __exit__(self, *error: Any) -> None:
        self.leave(error[1])

    async def __aenter__(self) -> Lease:
        self.check()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.aleave(error[1])

    def leave(self, error: BaseException | None) -> None:
        """Release it at the end of a block that raised *error*, which a failed release does not hide."""
        if error is not None:
            self.hold_on_success = 0.0
        try:
            if self.is_entered and not self.is_left:
                self.release()
        except LockError as problem:
            self._add_note(error, problem)

    async def aleave(self, error: BaseException | None) -> None:
        if error is not None:
            self.hold_on_success = 0.0
        try:
            if self.is_entered and not self.is_left:
                await self.arelease()
        except LockError as problem:
            self._add_note(error, problem)

    def _add_note(self, error: BaseException | None, problem: LockError) -> None:
        if error is None:
            raise problem
        error.add_note(f"django_distlock: {problem}")
        warn("Leaving lock %s: %s", self.name, problem, of=self, token=self.fencing_token)

    def release_later(self) -> None:
        """Release it in the background, if nobody has yet: for places that must not do I/O, finalizers too."""
        if self._entries:  # all else might take a lock that the finalizer's thread has
            if len(self._entries) == 1:
                self.caller = None  # it may end before
            submit = partial(background.submit, self.using, self._release_quietly)
            background.at(clock.lease_time(), submit)

    def _release_quietly(self) -> None:
        try:
            if self.is_entered:
                self.release_now()
        except LockError as problem:
            warn("Leaving lock %s: %s", self.name, problem, of=self, token=self.fencing_token)

    def _leaves_reentry(self) -> bool:
        """Take note that the last entry of this caller is over; return whether there are others."""
        with self._mutex:
            entries = [*self._entries]
            if not entries or self.is_left or self._state not in (State.HELD, State.LOST):
                raise self._not_held()
            if len(entries) == 1:
                self._entries = ()
                # Whoever gives it back answers for it: a task that is cancelled meanwhile ends before.
                self.caller = current_caller()
                if self.hold_on_success:
                    self.request = replace(self.request, min_hold=self.hold_on_success)
                return False
            mine = [each for each in entries if each.is_current]
            entries.remove((mine or entries)[-1])
            self._entries = entries
            if self.caller is not None:  # handed on: nobody's
                self.caller = entries[0]
            return True

    def _break_off(self) -> None:
        """Have a release that was stopped half-way done in the background."""
        self._end(State.RELEASED)
        self.backend.abandon_later(self.request)

    def _conclude(self, began: float, outcome: Release) -> None:
        if outcome is not Release.RELEASED:
            self.lose(f"the server says that it is {outcome.value}")
        forget_here(self)
        if not self._end(State.RELEASED):
            if outcome is Release.TAKEN:
                raise LockNotOwned(self.name)
            raise LockLost(self.name, self._reason)
        if lock_released.receivers:
            took = clock.lease_time() - began
            announce(lock_released, self, lease=self, held=self._held_for - took, took=took)

    @property
    def _held_for(self) -> float:
        return clock.lease_time() - self._granted_at

    async def _arelease(self) -> None:
        self.caller = current_caller()  # as in _leaves_reentry()
        self._lose_if_over()
        began = clock.lease_time()
        try:
            outcome = await asettled(partial(self.backend.arelease, self.request))
        except BaseException:
            self._break_off()
            raise
        self._conclude(began, outcome)

    def _extending(self, ttl: float | timedelta | None) -> Steps[list[Request], None]:
        self.check()
        if not self.backend.supports_extend:
            raise NotSupported(self.using, "extend()", "A lease ends with its ttl.")
        if ttl is not None:
            wanted = checked_ttl(ttl)
            self.backend.check_ttl(wanted)
            self.request = replace(self.request, ttl=wanted)
        request = self.renewal()
        if request is None:
            raise LockLost(self.name, "its max_hold is over")
        start = clock.lease_time()
        [is_kept] = yield [request]
        if not is_kept:
            self.lose("the server says that it is not ours any more")
            raise LockLost(self.name, self._reason)
        self.confirm(start, request.ttl)
        announce(lock_extended, self, lease=self)

    def _detaching(self, ttl: float | timedelta | None) -> Steps[list[Request], str]:
        if not self.backend.supports_detach:
            raise NotSupported(self.using, "detach()", "The lock is bound to this process.")
        own_ttl = self.request.ttl
        yield from self._extending(ttl)
        if not self._end(State.DETACHED):
            raise LockLost(self.name, self._reason)
        announce(lock_detached, self, lease=self, held=self._held_for)
        request, ends = self.request, self._holds_until
        known = {
            "renew": self.renews,
            "max_hold": None if ends is None else max(0.0, ends - clock.lease_time()),
            "postmark": clock.postmark(),
            "using": self.using,
            "name": request.name,
            "owner": request.owner,
            "ttl": own_ttl,
            "shared": request.shared,
            "min_hold": request.min_hold,
            "hold_on_success": self.hold_on_success,
            "lock_delay": request.lock_delay,
            "token": self.fencing_token,
        }
        return signing.dumps(known, salt=HANDOVER)

    @classmethod
    def _attaching(cls, text: str, purpose: str) -> Steps[_TakeOver, Lease]:
        """Return the lease, held by a new owner; LockLost if it had ended, or another process has attached it."""
        try:
            known = signing.loads(text, salt=HANDOVER)
        except (signing.BadSignature, UnicodeError) as error:
            # Django tells the end of the text as it is: the cause, too, would.
            raise signing.BadSignature(printable(error)) from None
        backend, former, token = locks[known.pop("using")], known.pop("owner"), known.pop("token")
        renew, max_hold = known.pop("renew"), known.pop("max_hold")
        hold_on_success = known.pop("hold_on_success", 0.0)
        name = checked_name(known.pop("name"))
        start, on_its_way = clock.lease_time(), clock.travelled(*known.pop("postmark"))
        if max_hold is not None:
            max_hold -= on_its_way
            known["ttl"] = min(known["ttl"], max_hold)
            if max_hold < LEAST_TTL:
                raise LockLost(name, "its max_hold is over")
        request = backend.request(name, **known, holder=Holder.current(purpose))
        lease = cls(backend, request, renew=renew, max_hold=max_hold)
        lease.hold_on_success = hold_on_success
        try:
            registry.add(lease)
            is_ours = yield _TakeOver(backend, request, former)
        except BaseException:
            lease.give_up()
            backend.abandon_later(request)
            raise
        if is_ours and lease.grant(start, token):
            note_held_here(lease)
            return lease
        lease.give_up()
        raise LockLost(name, "it had ended, or was attached elsewhere, before")

    # What the machinery around it does.

    def grant(self, start: float, token: int | None) -> bool:
        """Become held, by a grant asked for at *start*; False if it is past its deadline already."""
        ttl = self.request.ttl
        ends = start + ttl - drift(ttl)
        now = clock.lease_time()
        if now >= ends:
            return False
        with self._mutex:
            self._entries = [self.caller or current_caller()]
            self.fencing_token, self._deadline, self._granted_at = token, ends, now
            self._holds_until = None if self._max_hold is None else start + self._max_hold
            self._state = State.HELD
        registry.granted(self, now)
        return True

    def enter(self) -> Self:
        """Count one more entry of the same holder."""
        with self._mutex:
            self._entries = [*self._entries, current_caller()]
            if begun := transactions.open_here():
                self.began_in = weakref.WeakSet((*self.began_in, *begun))
        return self

    def give_to(self, caller: Caller) -> None:
        """Have the last entry be that of *caller*, for whom another task has made it."""
        with self._mutex:
            self._entries = [*self._entries[:-1], caller]
            self.caller = self._entries[0]

    def renewal(self) -> Request | None:
        """Return the request that renews it now; None when it may not live longer (max_hold)."""
        left = self.ttl if self._holds_until is None else self._holds_until - clock.lease_time()
        if left >= self.ttl:
            return self.request
        return replace(self.request, ttl=left) if left > 0 else None

    def confirm(self, start: float, ttl: float) -> None:
        """Take note of an extension that was asked for at *start*; nothing revives a lost lease."""
        with self._mutex:
            self._deadline = max(self._deadline, start + ttl - drift(ttl))
            self._is_in_jeopardy = False

    def endanger(self) -> None:
        """Take note of a renewal that failed or is late."""
        self._is_in_jeopardy = True

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

    def disown(self) -> None:
        """Become inert in a forked child. No mutex: its owner may be a thread that is not here."""
        self._mutex = threading.Lock()
        self._state = State.INHERITED

    def is_of_caller(self) -> bool:
        """Return whether the running thread or task has entered it."""
        return self.caller is not None and any(each.is_current for each in self._entries)

    @property
    def is_entered(self) -> bool:
        """Whether there is still something to release: also after it was lost."""
        self._lose_if_over()
        return self._state in (State.HELD, State.LOST) and bool(self._entries)

    @property
    def is_left(self) -> bool:
        """Whether all have left it, and it is kept until a transaction has ended."""
        return self.awaits_end and len(self._entries) == 1

    def is_mine(self) -> bool:
        """Return whether the running code holds it now, or who waits for it, so that it may enter again."""
        last = self._entries[-1:]  # none: what is being given back may be free already
        if self.caller is None or not last or not self.held:
            return False
        return last[0].is_current or last[0].waits_for_us

    def abandon(self) -> None:
        """Give back whatever the server has of it, with no word to anyone; used where all ends."""
        self._entries = ()
        if self._end(State.RELEASED):
            settled(partial(self.backend.abandon, self.request))

    def end_unowned(self) -> None:
        """Be lost and given back: nobody can release it any more."""
        if self.held:
            self.lose("the thread or task that held it ended without releasing it")
            self.backend.abandon_later(self.request)

    @property
    def is_granted(self) -> bool:
        """Whether it was granted, even if it has ended since."""
        return self._state is not State.PENDING

    @property
    def is_in_line(self) -> bool:
        """Whether those of this process that want the lock stand behind it."""
        return self._line is not None

    def stand_in(self, queue: LocalQueue, place: Place) -> None:
        """Stand in the line of this process, as *place*, until it ends."""
        self._line = queue, place

    def leave_line(self) -> None:
        """Let those behind it have their turn. Twice does no harm."""
        if self._line is not None:
            queue, place = self._line
            queue.leave(self.request.key, place)
            self._line = None

    def give_up(self) -> None:
        """Be a pending lease that will never be granted."""
        self._end(State.RELEASED)

    def __del__(self) -> None:
        """Nobody has it any more, and who took it has ended: only now it is given back."""
        if self._state is State.HELD:
            background.at(clock.lease_time(), self.end_unowned)

    def _lose_if_over(self) -> None:
        if self._state is State.HELD and clock.lease_time() >= self._deadline:
            self.lose("its deadline passed before it was extended")

    def _end(self, state: State, reason: str = "") -> bool:
        with self._mutex:
            if self._state not in (State.PENDING, State.HELD):
                return False
            self._state, self._reason = state, reason
        try:
            self._tell_of_the_end()
        except BaseException:
            # It comes from outside: those who were not told yet are told all the same.
            background.at(clock.lease_time(), self._tell_of_the_end)
            raise
        return True

    def _tell_of_the_end(self) -> None:
        registry.discard(self)
        self.leave_line()

    def _not_held(self) -> LockNotHeld:
        if self._state is State.RELEASED or self.is_left:
            return LockNotHeld(self.name)
        return LockNotHeld(self.name, f"it is {self._state.value}")


class Awaited:
    """The lease that aacquire() will bring, in the context of its caller: another task may await it."""

    def __init__(self) -> None:
        self.is_over = False
        self.known: Known | None = None
        _held_here.set((*_still_held(_held_here.get()), self))

    def __call__(self) -> Lease | None:
        return self.known() if self.known else None


def held_here() -> list[Lease]:
    """Return the leases that this chain of contexts knows of, the last one last; some may have ended."""
    all_known = _held_here.get()
    return [lease for known in all_known if (lease := known()) is not None] if all_known else []


def note_held_here(lease: Lease) -> None:
    """Have re-entry look at *lease* from now on, in this chain of contexts."""
    known = _held_here.get()
    _held_here.set((*_still_held(known), lease.ref) if known else (lease.ref,))


def forget_here(lease: Lease) -> None:
    """Have re-entry look at *lease* no more, which has ended: most often it is the last one."""
    known = _held_here.get()
    if known and known[-1] is lease.ref:
        _held_here.set(known[:-1])


def _still_held(known: Iterable[Known]) -> Iterable[Known]:
    """Return what re-entry is to look at from now on, each lease once."""
    kept: dict[int, Known] = {}
    for each in known:
        lease = each()
        if lease is not None:
            if lease.is_kept:
                kept[id(lease)] = lease.ref
        elif isinstance(each, Awaited) and not each.is_over:
            kept[id(each)] = each
    return kept.values()
