"""Acquiring a lock: ask at once. Only who is refused waits, and only then is made what waiting needs."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockNotAcquired,
    LockOutcomeUnknown,
)
from django_distlock.signals import announce, backend_failed, lock_acquired, lock_busy

from . import clock
from .bells import TaskBell, ThreadBell
from .naming import LONGEST_SHOWN, log_fields, printable
from .registry import registry
from .steps import Steps, arun, asking_again, is_worth_asking_again, run
from .values import Busy, Grant, Request, new_owner
from .waiting import Place, Wait, Way
from .waits import LockId, Waiter, waits

if TYPE_CHECKING:
    from django_distlock.lease import Lease

    Answer = Grant | Busy | LockBackendError

logger = logging.getLogger("django_distlock")

#: Seconds to stand back for other processes, after many hand-offs inside this one.
GIVE_WAY = 0.1
#: Seconds between two looks of a waiter that another one of this process looks for.
BEHIND = 5.0
#: Seconds between two looks, in the line of this process, whether to wait on the server after all.
IN_LINE = 1.0


def acquire(lease: Lease, timeout: float | None) -> None:
    """Have the pending *lease* granted within *timeout* seconds: None: however long it takes, -1: as the alias says.

    LockNotAcquired if somebody else has it until then; LockBackendError, LockDeadlock.
    """
    backend, came = lease.backend, clock.wait_time()
    if timeout == -1:
        timeout = backend.timeout
    attempt: Attempt | None = None
    answer: Answer | None = None
    start = 0.0
    try:
        registry.add(lease)
        if _may_ask_at_once(lease):
            queued = timeout != 0 and backend.waiting.place is Place.BY_TRYING
            start = clock.lease_time()
            try:
                answer = backend.try_acquire(lease.request, queued=queued, left=timeout)
            except LockBackendError as error:
                # With its frames, which have the lease, it would keep that alive.
                answer = error.with_traceback(None)
        is_granted = isinstance(answer, Grant) and lease.grant(answer.start or start, answer.token)
        if not is_granted:
            attempt = Attempt(lease, Wait(timeout, came), ThreadBell())
            run(attempt.steps(start, answer), attempt.carry_out)
    except BaseException as error:
        _end(attempt or Attempt(lease, Wait(timeout, came)), error)
        raise
    if lock_acquired.receivers or logger.isEnabledFor(logging.DEBUG):
        _tell_acquired(lease, clock.wait_time() - came)


async def aacquire(lease: Lease, timeout: float | None) -> None:
    backend, came = lease.backend, clock.wait_time()
    if timeout == -1:
        timeout = backend.timeout
    attempt: Attempt | None = None
    answer: Answer | None = None
    start = 0.0
    try:
        registry.add(lease)
        if _may_ask_at_once(lease):
            queued = timeout != 0 and backend.waiting.place is Place.BY_TRYING
            start = clock.lease_time()
            try:
                answer = await backend.atry_acquire(lease.request, queued=queued, left=timeout)
            except LockBackendError as error:
                # With its frames, which have the lease, it would keep that alive.
                answer = error.with_traceback(None)
        is_granted = isinstance(answer, Grant) and lease.grant(answer.start or start, answer.token)
        if not is_granted:
            attempt = Attempt(lease, Wait(timeout, came), TaskBell())
            await arun(attempt.steps(start, answer), attempt.await_carried_out)
    except BaseException as error:
        _end(attempt or Attempt(lease, Wait(timeout, came)), error)
        raise
    if lock_acquired.receivers or logger.isEnabledFor(logging.DEBUG):
        _tell_acquired(lease, clock.wait_time() - came)


def _may_ask_at_once(lease: Lease) -> bool:
    """Return whether nobody of this process is in the way; then, in the line of this process, the lease is first."""
    backend, request = lease.backend, lease.request
    if request.shared or not backend.waiting.in_line:
        return True
    if request.key in backend.queue.turns.wanted:
        return False  # others may be let go first
    # Told first: an exception from outside may come between the two.
    lease.stand_in(backend.queue, lease.ref)
    if backend.queue.lines.setdefault(request.key, lease.ref) is lease.ref:
        return True
    lease.leave_line()
    return False


def _tell_acquired(lease: Lease, waited: float) -> None:
    fields = log_fields(lease.name, lease.using, waited=waited, token=lease.fencing_token)
    logger.debug(
        "Lock %s acquired, token %s", printable(lease.name), lease.fencing_token, extra=fields
    )
    announce(lock_acquired, lease, lease=lease, waited=waited)


def _end(attempt: Attempt, error: BaseException) -> None:
    attempt.abandon()
    lease = attempt.lease
    if isinstance(error, LockNotAcquired):
        fields = log_fields(lease.name, lease.using, waited=error.waited, holder=error.holder)
        logger.info("%s", printable(error, 2 * LONGEST_SHOWN), extra=fields)
        announce(
            lock_busy,
            lease,
            waited=error.waited,
            holder=error.holder,
            remaining=error.remaining,
            reserved_until=error.reserved_until,
        )
    elif isinstance(error, LockBackendError):
        fields = log_fields(lease.name, lease.using)
        logger.error("Lock %s: %s", printable(lease.name), printable(error), extra=fields)
        announce(backend_failed, lease, error=error, waited=attempt.wait.waited)


class Verb:
    """A verb of the backend, to be carried out by this thread or awaited by this task."""

    def __init__(self, name: str, *args: Any, **wishes: Any) -> None:
        self.name, self.args, self.wishes = name, args, wishes


class Pause(NamedTuple):
    """A wait for the bell, for so many seconds at most; None: until it rings."""

    seconds: float | None


class Attempt:
    """One attempt to get one lease by somebody who was refused, or who stands behind others of this process."""

    def __init__(self, lease: Lease, wait: Wait, bell: ThreadBell | TaskBell | None = None) -> None:
        self.backend = backend = lease.backend
        self.lease = lease
        self.wait = wait
        self.bell: Any = bell
        self.busy = Busy()
        self._way = backend.waiting.way
        self._came = waits.arrive() if lease.request.shared else 0
        self._waiter: Waiter | None = None
        self._tries = 1
        # Until an answer tells: what stopped the first try may have come after it was carried out.
        self._is_queued = backend.waiting.place is Place.BY_TRYING
        self._is_unsure = True
        self._is_last_try = False

    @property
    def request(self) -> Request:
        return self.lease.request

    @property
    def _callers(self) -> int:
        """For how many of this process it asks the server: the others in its line wait behind it."""
        return self.backend.queue.callers(self.request.key) if self.lease.is_in_line else 1

    def carry_out(self, asked: Verb | Pause) -> Any:
        if isinstance(asked, Pause):
            return self.bell.wait(asked.seconds)
        return getattr(self.backend, asked.name)(*asked.args, **asked.wishes)

    async def await_carried_out(self, asked: Verb | Pause) -> Any:
        if isinstance(asked, Pause):
            return await self.bell.wait(asked.seconds)
        return await getattr(self.backend, f"a{asked.name}")(*asked.args, **asked.wishes)

    def steps(self, start: float, first: Answer | None) -> Steps[Verb | Pause, None]:
        """Go on after the *first* answer, to a try begun at *start*; None: others of this process are before us."""
        if first is None:
            self._tries, self._is_queued, self._is_unsure = 0, False, False
            yield from self._take_turn()
        else:
            self._is_last_try = self.wait.is_for_one_try
            self._is_queued = self._is_queued and not self._is_last_try
            if isinstance(first, Contended):
                pause, first = self._give_others_time(first), None
                self._is_queued, self._is_unsure = False, False
                yield pause
        while True:
            # Others at work on the same rows do not have the lock: ask again.
            try:
                if first is None:
                    start = self._before_try()
                if (yield from self._try(start, first)):
                    break
                first = None
                yield from self._wait()
            except Contended as error:
                first = None
                yield self._give_others_time(error)
        self._wait_no_more()
        self.backend.forget_bell(self.request)
        if self.lease.is_in_line:
            self.backend.queue.hold(self.request.key, self.bell, self.lease.ref)
            self.backend.queue.turns.granted(self.request.key, clock.wait_time())

    # The line of this process.

    def _take_turn(self) -> Steps[Verb | Pause, None]:
        queue, key = self.backend.queue, self.request.key
        # A single try of a lock that nobody here holds needs no place in the line.
        needs_place = not self.wait.is_over or queue.held_by(key) is not None
        if needs_place:
            self.lease.stand_in(queue, self.bell)
        if needs_place and not queue.join(key, self.bell):
            while not self._may_ask():
                self._begin_to_wait(has_place=False)
                is_woken_only = self._way is not Way.ON_SERVER
                yield Pause(self.wait.left if is_woken_only else self.wait.bounded(IN_LINE))
        elif pause := queue.turns.first_pause(key, clock.wait_time()):
            yield Pause(self.wait.bounded(pause))
        if self.lease.is_in_line and queue.gives_way(key):
            yield Pause(self.wait.bounded(GIVE_WAY))

    def _may_ask(self) -> bool:
        """Return whether to ask the server: it is our turn, or there is time for one last try only."""
        queue, key = self.backend.queue, self.request.key
        if queue.has_turn(key, self.bell):
            return True
        if self.wait.is_over:
            holder = queue.held_by(key)
            if holder is not None and holder.held:
                self.busy = Busy(holder.holder, holder.remaining)
                self._refuse()
        elif self.wait.waited >= IN_LINE and self.backend.leaves_line(self.request):
            self.lease.leave_line()
            return True
        return self.wait.is_over

    # One try.

    def _before_try(self) -> float:
        """Note what is known before the answer; return when the try begins."""
        self._tries += 1
        self._is_unsure = True
        self._is_last_try = self.wait.is_over
        if self.backend.waiting.place is Place.BY_TRYING and not self._is_last_try:
            self._is_queued = True
        return clock.lease_time()

    def _try(self, start: float, answer: Answer | None) -> Steps[Verb | Pause, bool]:
        """Return whether the lease is granted; LockNotAcquired if there was time for this try only."""
        if not isinstance(answer, (Grant, Busy)):
            answer = yield from self._ask(start, answer)
        if isinstance(answer, Busy):
            self._is_unsure, self.busy = False, answer
        elif self.lease.grant(answer.start or start, answer.token):
            return True
        if self._is_last_try:
            self._refuse()
        if self._is_unsure:
            # The grant came after its own deadline. As another owner: the server may know that this one gave it back.
            yield from self._settled(Verb("abandon", self.request))
            self.lease.request = replace(self.request, owner=new_owner())
            self._is_queued = False
        return False

    def _ask(
        self, start: float, failed: LockBackendError | None
    ) -> Steps[Verb | Pause, Grant | Busy]:
        """Ask, or ask again after the first try *failed*: the same owner gets the same grant."""
        if self._way is Way.LOOK and self._tries > 1:
            busy: Busy | None = yield from self._settled(Verb("probe", self.request))
            if busy is not None:
                return busy
        waits_there = self._way is Way.ON_SERVER and self._tries > 1 and not self._is_last_try
        queued = (self._is_queued or waits_there) and self._callers
        ask = Verb("try_acquire", self.request, queued=queued, left=self.wait.left)
        answer: Grant | Busy
        if waits_there:
            answer = yield ask
            return answer
        try:
            answer = yield from self._settled(ask, failed, start)
        except LockOutcomeUnknown:
            raise
        except LockBackendError:
            # It did not reach the server: nothing is there, unless by an earlier one.
            self._is_unsure = False
            if self._tries == 1:
                self._is_queued = False
            raise
        return answer

    def _settled(
        self, ask: Verb, failed: LockBackendError | None = None, began: float = 0.0
    ) -> Steps[Verb | Pause, Any]:
        """Ask; once more if the reply was lost. *failed*: the first time, it did, and had *began* then."""
        if failed is None:
            began = clock.lease_time()
            try:
                return (yield ask)
            except LockOutcomeUnknown as lost:
                failed = lost.with_traceback(None)  # as in acquire()
        if not is_worth_asking_again(failed, began):
            raise failed
        return (yield from asking_again(ask, failed))

    # Between two tries.

    def _wait(self) -> Steps[Verb | Pause, None]:
        queue, waiting = self.backend.queue, self.backend.waiting
        if self.lease.is_in_line:
            queue.contest(self.request.key)
            if waiting.polls:
                queue.turns.refused(self.request.key)
        if not self._is_queued and waiting.place is not Place.NONE:
            # The next try follows at once: a release may have slipped in.
            self._is_queued = True
            try:
                yield Verb("enqueue", self.request, self.bell)
            except Contended:
                self._is_queued = False
                raise
            return
        self._begin_to_wait(has_place=True)
        if self._way is not Way.ON_SERVER:
            self.wait.holder = self.busy.mark or self.busy.holder
            if self.backend.is_behind(self.request):
                seconds = self.wait.bounded(BEHIND)
            else:
                seconds = waiting.pause(self.wait, self.busy.remaining)
            yield Verb("sleep", self.request, self.bell, seconds)

    def _begin_to_wait(self, *, has_place: bool) -> None:
        """Be known to wait, with a place on the server or without; LockDeadlock if it would be for ourselves."""
        if self._waiter is None and (caller := self.lease.caller) is not None:
            lock = LockId(self.backend.location, self.request.key)
            self._waiter = Waiter(
                self.lease.name, lock, caller, self.request.shared, self.wait, self._came
            )
            waits.begin(self._waiter)
        if has_place and self._waiter is not None and self.backend.waiting.writers_first:
            self._waiter.stand_before_readers()

    def _wait_no_more(self) -> None:
        if self._waiter is not None:
            waits.end(self._waiter)

    def _give_others_time(self, error: Contended) -> Pause:
        """Return how long to let others at work go on; raise *error*, which says so, once no time is left."""
        if self._is_last_try:
            raise error
        return Pause(self.wait.next_pause())

    def _refuse(self) -> NoReturn:
        busy, until = self.busy, None
        if busy.reserved and busy.remaining is not None:
            until = datetime.now(UTC) + timedelta(seconds=busy.remaining)
        raise LockNotAcquired(self.lease.name, self.wait.waited, busy.holder, busy.remaining, until)

    def abandon(self) -> None:
        """Leave nothing: what the server has, or may have, is given back in the background."""
        try:
            self._wait_no_more()
            self.backend.interrupt(self.request)
            self.backend.forget_bell(self.request)
            if self._is_unsure:
                self.backend.abandon_later(self.request)
            elif self._is_queued:
                self.backend.dequeue_later(self.request)
        finally:
            self.lease.give_up()
