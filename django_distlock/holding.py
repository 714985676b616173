"""Holding: where one holding of a lock stands, by our own clock, and how it was lost."""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from .engine import clock
from .engine.background import background
from .engine.caller import Caller
from .engine.forks import forks
from .engine.naming import printable
from .engine.registry import registry
from .engine.settling import settled
from .engine.values import Release, Request
from .exceptions import LockLost, LockNotHeld
from .signals import announce, lock_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from .engine.holder import Holder
    from .engine.local_queue import LocalQueue, Place

logger = logging.getLogger("django_distlock")
#: A lease with less than this part of its ttl left should have been renewed by now.
LATE = 0.5


class State(enum.Enum):
    """Where a lease stands; all but the first two are final."""

    PENDING = "pending"
    HELD = "held"
    LOST = "lost"
    RELEASED = "released"
    DETACHED = "handed to another process"
    INHERITED = "held by the process that this one was forked from"


class LeaseBackend(Protocol):
    """What a lease asks of its backend."""

    alias: str
    place: Hashable
    strict: bool
    supports_detach: ClassVar[bool]
    supports_extend: ClassVar[bool]

    def check_ttl(self, ttl: float) -> None:
        """Raise ValueError for a ttl that the server cannot keep."""

    def release(self, request: Request) -> Release:
        """Give the lock back."""

    async def arelease(self, request: Request) -> Release:
        """See release()."""

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Let leases live for at least *ttl* seconds from now; tell of each if it is still ours."""

    async def aextend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """See extend()."""

    def server_of(self, request: Request) -> Hashable:
        """Tell apart servers that may fail one without the other."""

    def abandon(self, request: Request) -> Release:
        """Give back whatever the server holds for this owner, granted or waiting."""

    def abandon_later(self, request: Request) -> None:
        """See abandon(); in the background, until it has worked."""

    def is_session_over(self, request: Request) -> bool:
        """Tell whether the session that holds it is known to be gone."""

    def guard(self, request: Request, token: int, using: str) -> None:
        """Lock the fencing token in the caller's transaction."""


def drift(ttl: float) -> float:
    """Return how many seconds before the server our clock must give up a lease of *ttl* seconds.

    1 % for clocks of different rates and 2 ms for their steps, as Redlock reckons
    (S. Sanfilippo, "Distributed Locks with Redis").
    """
    return ttl * 0.01 + 0.002


class Holding:
    """What a lease knows of itself: pending, held, then lost or released; no I/O."""

    _state = State.PENDING

    def __init__(
        self,
        backend: LeaseBackend,
        request: Request,
        *,
        renew: bool = True,
        max_hold: float | None = None,
    ) -> None:
        """Made pending; begin() comes before anything is sent."""
        self.request = request
        self.fencing_token: int | None = None
        self.renews = renew
        self.caller: Caller | None = Caller()
        #: When it is renewed next: seconds on ``clock.lease_time()``.
        self.due = 0.0
        self._backend = backend
        self._max_hold = max_hold
        self._holds_until: float | None = None
        self._deadline = 0.0
        self._reason = ""
        #: Who has entered and not left yet, the innermost last: each was let in by the one before.
        self._entries: list[Caller] = []
        self._is_in_jeopardy = False
        self._mutex = threading.Lock()
        self._on_lost: list[Callable[[str], object]] = []
        #: What others know it by who must not keep it alive.
        self.ref = weakref.ref(self)
        self._line: tuple[LocalQueue, Place] | None = None

    # What it is.

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self.request.name

    @property
    def using(self) -> str:
        """The alias of the backend."""
        return self._backend.alias

    @property
    def backend(self) -> LeaseBackend:
        """The backend that granted it."""
        return self._backend

    @property
    def ttl(self) -> float:
        """Seconds it lives on the server unless extended."""
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
        """Where it stands by our clock now."""
        forks.notice()
        self._lose_if_over()
        return self._state

    @property
    def held(self) -> bool:
        """Whether the lock is surely ours now."""
        return self.state is State.HELD

    @property
    def lost(self) -> bool:
        """Whether it was lost: no I/O, our clock is compared with the deadline."""
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
        """Whether a renewal is late or failed, and the deadline not reached yet."""
        is_late = self.renews and self.remaining < self.ttl * LATE
        return self.held and (self._is_in_jeopardy or is_late)

    @property
    def reason(self) -> str:
        """Why it was lost; empty while it is not."""
        return self._reason

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, by our own clock; 0 when it is not held."""
        return max(0.0, self._deadline - clock.lease_time()) if self.held else 0.0

    @property
    def deadline(self) -> float:
        """When it is lost unless extended before: seconds on ``clock.lease_time()``."""
        return self._deadline

    def check(self) -> None:
        """Raise LockLost unless the lock is surely ours now (no I/O); LockNotHeld once released."""
        state = self.state
        if state is State.LOST:
            raise LockLost(self.name, self._reason)
        if state is not State.HELD:
            raise self._not_held()

    def on_lost(self, callback: Callable[[str], object]) -> None:
        """Call *callback* with the reason, once, when the lease is lost; at once if it is already.

        It is called in the thread that finds out, mostly the renewing one: be quick.
        """
        with self._mutex:
            if self._state in (State.PENDING, State.HELD):
                self._on_lost.append(callback)
                return
        if self._state is State.LOST:
            callback(self._reason)

    def __repr__(self) -> str:
        token = f" token={self.fencing_token}" if self.fencing_token is not None else ""
        return f"<Lease {printable(self.name)!r} using={self.using!r} {self._state.name.lower()}{token}>"

    # What the machinery around it does.

    def begin(self) -> None:
        """Be known to forks and to the exit, until it ends: whoever calls this sees to that."""
        registry.add(self)

    def grant(self, start: float, token: int | None) -> bool:
        """Become held, by a grant asked for at *start*; False if it is past its deadline already."""
        ends = start + self.ttl - drift(self.ttl)
        if clock.lease_time() >= ends:
            return False
        with self._mutex:
            self._state, self._entries = State.HELD, [self.caller or Caller()]
            self.fencing_token, self._deadline = token, ends
            self._holds_until = None if self._max_hold is None else start + self._max_hold
        registry.granted(self)
        return True

    def enter(self) -> Self:
        """Count one more entry of the same holder."""
        with self._mutex:
            self._entries.append(Caller())
        return self

    def give_to(self, caller: Caller) -> None:
        """Have the last entry be that of *caller*, for whom another task has made it."""
        with self._mutex:
            self._entries[-1] = caller
            self.caller = self._entries[0]

    def renewal(self) -> Request | None:
        """Return the request that renews it now; None when it may not live longer (max_hold)."""
        left = self._holding_left()
        return (
            self.request if left is None else replace(self.request, ttl=left) if left > 0 else None
        )

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
            logger.warning("Lock %s was lost: %s", printable(self.name), printable(reason))
            for callback in self._on_lost:
                _call(callback, reason)
            facts = {"name": self.name, "using": self.using, "lease": self, "reason": reason}
            announce(lock_lost, type(self._backend), **facts)

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
        return self.state in (State.HELD, State.LOST) and bool(self._entries)

    def is_mine(self) -> bool:
        """Return whether the running code holds it now, or who waits for it, so that it may enter again."""
        last = self._entries[-1:]  # none: what is being given back may be free already
        if self.caller is None or not last or not self.held:
            return False
        return last[0].is_current or last[0].waits_for_us

    def abandon(self) -> None:
        """Give back whatever the server has of it, with no word to anyone; used where all ends."""
        self._entries = []
        if self._end(State.RELEASED):
            settled(partial(self._backend.abandon, self.request))

    def end_unowned(self) -> None:
        """Be lost and given back: nobody can release it any more."""
        if self.held:
            self.lose("the thread or task that held it ended without releasing it")
            self._backend.abandon_later(self.request)

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

    def _holding_left(self) -> float | None:
        if self._holds_until is None:
            return None
        left = self._holds_until - clock.lease_time()
        return None if left >= self.ttl else left

    def _not_held(self) -> LockNotHeld:
        if self._state is State.RELEASED:
            return LockNotHeld(self.name)
        return LockNotHeld(self.name, f"it is {self._state.value}")


def _call(callback: Callable[..., object], *args: Any) -> None:
    try:
        callback(*args)
    except Exception:
        logger.exception("A callback of a lock failed")
