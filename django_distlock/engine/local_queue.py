"""The local queue: of the callers in this process that want a lock, the first asks the server, the others wait here."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from django_distlock.ground import clock
from django_distlock.ground.mutexes import section

from .waiting import ContestedLocks

if TYPE_CHECKING:
    from django_distlock.exceptions import LockBackendError

    from .bells import Bell
    from .holding import Holding
    from .values import Busy, Request

    #: A caller in a local queue: its bell, or if it was the first from the beginning, a reference to its lease.
    LocalCaller = Bell | ref[Any]

#: Hand-offs inside a process before it lets another process that wants the lock go first.
IN_A_ROW = 16
#: Seconds within which a task that has asked the server goes on, unless its event loop is blocked.
ASKS = 3.0
#: Seconds after which a first caller that should have asked the server is passed over: its event loop may be blocked.
SILENT = 1.0


class Answer(NamedTuple):
    """The last answer of the server to the first caller in a queue, received at *time* (``clock.wait_time()``).

    *limit* is that caller's; other callers may want more places, or fewer.
    """

    busy: Busy
    time: float
    limit: int | None


@dataclass(eq=False, slots=True)
class _Line:
    """The callers that want one lock. The first has the turn: it asks the server. It keeps the turn while it alone holds the lock."""

    callers: deque[LocalCaller] = field(default_factory=deque)
    #: The caller that was told that it has the turn.
    turn: LocalCaller | None = None
    #: By when the caller with the turn must go on, or another one takes the turn (``clock.wait_time()``).
    expected: float = math.inf
    #: The lease that holds the lock; a weak reference, so that the queue does not keep the lease alive.
    holding: ref[Holding] | None = None
    #: The request with the position in the server's queue, which belongs to all callers of this local queue.
    queued: Request | None = None
    answer: Answer | None = None
    in_a_row: int = 0
    is_contested: bool = False
    #: Callers that have lost the turn because they were silent, and have not noticed that yet.
    passed: set[LocalCaller] = field(default_factory=set)
    #: The owner of the request that the caller with the turn has sent.
    asker: str = ""
    #: Whether the last answer to a caller was an error of the server.
    has_failed: bool = False

    @property
    def first(self) -> LocalCaller | None:
        return self.callers[0] if self.callers else None

    def pass_on(self) -> None:
        """Ring the first caller that can take the turn, unless it has the turn already."""
        while self.callers and (first := self.callers[0]) is not self.turn:
            # A caller without a bell was the first from the beginning, so it has the turn or has ended.
            if not isinstance(first, ref) and first.ring():
                self.give_turn(first)
                self.in_a_row += 1
            else:
                self.callers.popleft()

    def give_turn(self, bell: Bell) -> None:
        """Give *bell* the turn; if other code may stall its caller, the caller must go on soon."""
        self.turn, self.holding, self.asker = bell, None, ""
        self.expected = clock.wait_time() + SILENT if bell.may_stall else math.inf


class LocalQueue:
    """First come, first served, for the threads and tasks of one process.

    For a single caller, *lines* has only a reference to its lease, added by ``lines.setdefault(key, ref)``.
    A _Line is made from the reference when a second caller comes, or when the first one must wait.
    """

    def __init__(self) -> None:
        self.lines: dict[str, ref[Holding] | _Line] = {}
        #: The locks that other processes want, too, for backends that do not wake waiters.
        self.contested = ContestedLocks()
        self._failures: dict[Bell, LockBackendError] = {}
        self._mutex = section()

    def join(self, key: str, bell: Bell) -> bool:
        """Join the queue for *key*; return True if *bell* has the turn at once. If not, *bell* rings later."""
        with self._mutex:
            line = self._line(key)
            line.callers.append(bell)
            if line.callers[0] is not bell:
                return False
            line.give_turn(bell)
            return True

    def stay(self, key: str, lease: ref[Holding], bell: Bell) -> None:
        """Replace *lease*, the entry of a caller that came first and was refused, by its *bell*."""
        with self._mutex:
            line = self._line(key)
            if line.first is lease is line.turn:
                line.callers[0] = bell
                line.give_turn(bell)
                return
            # Another caller has taken the turn during the first try.
            with suppress(ValueError):
                line.callers.remove(lease)
            line.callers.append(bell)
            line.passed.discard(lease)
            line.passed.add(bell)
            line.pass_on()

    def has_turn(self, key: str, bell: Bell) -> bool:
        """Return True if *bell* has the turn; if it had lost the turn before, it now begins again."""
        with self._mutex:
            line = self._found(key)
            if line is None or line.first is not bell:
                return False
            line.passed.discard(bell)
            return True

    def was_passed_over(self, key: str, bell: Bell) -> bool:
        """Return True if *bell* has lost the turn since has_turn(), even if it has the turn again by now."""
        with self._mutex:
            line = self._found(key)
            return line is not None and (line.turn is not bell or bell in line.passed)

    def expect(self, key: str, bell: Bell, seconds: float, asker: str = "") -> None:
        """Note that the caller of *bell*, which has the turn, will go on within *seconds*."""
        with self._mutex:
            line = self._found(key)
            if line is not None and line.turn is bell:
                line.expected, line.asker = clock.wait_time() + seconds + SILENT, asker

    def heard(self, key: str, owner: str) -> None:
        """Note that a thread has the answer for the caller with the turn, a task, which should go on now."""
        with self._mutex:
            line = self._found(key)
            if line is not None and line.holding is None and line.asker == owner:
                line.expected = clock.wait_time() + SILENT

    def keeps_turn(self, key: str, bell: LocalCaller) -> bool:
        """Return True if *bell* still has the turn; then no other caller takes it any more."""
        if self.lines.get(key) is bell:
            return True  # no other caller waits
        with self._mutex:
            line = self._found(key)
            if line is None or line.turn is not bell or bell in line.passed:
                return False
            line.expected = math.inf
            return True

    def pass_over(self, key: str, bell: Bell) -> bool:
        """If the caller with the turn has been silent, give *bell* the turn, put it first, and return True."""
        with self._mutex:
            line = self._found(key)
            if line is None or clock.wait_time() < line.expected:
                return False
            if line.turn is not None:
                line.passed.add(line.turn)
            with suppress(ValueError):
                line.callers.remove(bell)
            line.callers.appendleft(bell)
            line.give_turn(bell)
            return True

    def leave(self, key: str, caller: LocalCaller) -> Request | None:
        """Remove *caller* from the queue for *key*; if it had the turn, the next caller gets it.

        The last caller gets the request whose position in the server's queue it must give up, if there is one.
        Safe to call twice; the second call finishes what an asynchronous exception interrupted.
        """
        with self._mutex:
            line = self.lines.get(key)
            if isinstance(line, _Line):
                if self.contested.wanted and line.first is caller:
                    self.contested.released(key, clock.wait_time())
                if not isinstance(caller, ref):
                    self._failures.pop(caller, None)
                with suppress(ValueError):
                    line.callers.remove(caller)
                line.passed.discard(caller)
                line.pass_on()
                if not line.callers:
                    self.lines.pop(key, None)
                    return line.queued
            elif line is caller:
                self.lines.pop(key, None)
            return None

    def look_again(self, key: str) -> None:
        """Ring the first caller for a lock that several may hold: one of them has released it."""
        with self._mutex:
            self.contested.released(key, clock.wait_time())
            line = self._found(key)
            if line is not None and line.first is not None and not isinstance(line.first, ref):
                line.first.ring()

    def hold(self, key: str, bell: Bell, lease: ref[Holding]) -> None:
        """Note that the caller of *bell*, which has the turn, holds the lock by *lease*; do nothing if it has left already."""
        with self._mutex:
            line = self._found(key)
            if line is not None and line.first is bell:
                line.holding, line.has_failed, line.expected = lease, False, math.inf

    def waiters(self, key: str) -> int:
        """Return how many callers wait in the queue for *key*."""
        with self._mutex:
            if (line := self._found(key)) is None:
                return 0
            return len(line.callers) - (line.holding is not None)

    def held_by(self, key: str) -> Holding | None:
        with self._mutex:
            line = self.lines.get(key)
            holding = line.holding if isinstance(line, _Line) else line
            lease = None if holding is None else holding()
            return lease if lease is not None and lease.is_granted else None

    # Notes of the caller with the turn for the callers behind it.

    def refused(self, key: str, busy: Busy, limit: int | None = None) -> None:
        """Note that another process has the lock, as the server answered just now to a caller with this *limit*."""
        with self._mutex:
            if (line := self._found(key)) is not None:
                line.is_contested, line.has_failed = True, False
                line.answer = Answer(busy, clock.wait_time(), limit)

    def answer(self, key: str, within: float) -> Answer | None:
        """Return the last answer to the first caller, if it is younger than *within* seconds."""
        with self._mutex:
            line = self._found(key)
            if line is None or line.answer is None:
                return None
            return line.answer if clock.wait_time() - line.answer.time < within else None

    def queued(self, key: str) -> Request | None:
        """Return the request with the position in the server's queue of these callers; None if they have none."""
        with self._mutex:
            line = self._found(key)
            return None if line is None else line.queued

    def note_queued(self, key: str, request: Request | None) -> None:
        """Note that *request* has a position in the server's queue; None: the position has ended."""
        with self._mutex:
            line = self._found(key)
            if line is None and request is not None and key in self.lines:
                line = self._line(key)  # of a single caller
            if line is not None:
                line.queued = request

    def failure(self, bell: Bell) -> LockBackendError | None:
        """Return the error with which *bell* must give up; None if it need not."""
        return self._failures.get(bell)

    def failed(self, key: str, error: LockBackendError) -> None:
        """Note that the server failed for one caller; after two failures in a row, all others give up with *error*.

        A single failure may concern one connection, such as an idle one that had died.
        """
        with self._mutex:
            if (line := self._found(key)) is None:
                return
            if line.has_failed:
                for caller in line.callers:
                    if not isinstance(caller, ref):
                        self._failures[caller] = error.copy()
                        caller.ring()
            line.has_failed = True

    def gives_way(self, key: str) -> bool:
        """Return True if another process should get the lock now; the count of hand-offs then starts again."""
        with self._mutex:
            line = self._line(key)
            if line.in_a_row < IN_A_ROW or not line.is_contested:
                return False
            line.in_a_row, line.is_contested = 0, False
            return True

    def _found(self, key: str) -> _Line | None:
        """Return the _Line for *key*; None if there is none, or only a single caller that has not waited."""
        line = self.lines.get(key)
        return line if isinstance(line, _Line) else None

    def _line(self, key: str) -> _Line:
        """Return the _Line for *key*; make one if there is none, or only a single caller."""
        line = self.lines.setdefault(key, new := _Line())
        if isinstance(line, _Line):
            return line
        # Callers without the mutex only use setdefault(), which finds the entry, and leave() takes the mutex.
        new.callers.append(line)
        new.turn = new.holding = line
        lease = line()
        if lease is not None and not lease.is_granted and lease.caller and lease.caller.task:
            new.expected = clock.wait_time() + ASKS + SILENT  # its loop may be blocked
        self.lines[key] = new
        return new
