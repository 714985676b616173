"""Acquiring a lock: the first try is sent at once. Only if it is refused, an Attempt is made, which waits."""

from __future__ import annotations

import enum
import logging
import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockDeadlock,
    LockNotAcquired,
    LockNotHeld,
    LockOutcomeUnknown,
    NotSent,
    NotSupported,
)
from django_distlock.ground import clock
from django_distlock.ground.caller import current_task, runs_foreign_tasks
from django_distlock.ground.mutexes import has_interrupted_a_section
from django_distlock.ground.naming import LONGEST_SHOWN, log_fields, printable
from django_distlock.signals import backend_failed, lock_acquired, lock_busy

from .background import background
from .bells import TaskBell, ThreadBell
from .deadlocks import LockId, Waiter, wait_graph
from .holding import held_here
from .local_queue import ASKS, SILENT
from .registry import registry
from .steps import SETTLE, Steps, arun, asking_again, is_worth_asking_again, run
from .values import Busy, Grant, Request, State, first_place, first_to_end
from .waiting import LOOK, Queueing, Wait, Way

if TYPE_CHECKING:
    from django_distlock.backends.base import BaseLockBackend
    from django_distlock.ground.holder import Holder

    from .holding import Holding

    Answer = Grant | Busy | LockBackendError

logger = logging.getLogger("django_distlock")

#: A request to the backend, or a wait: a function that a thread calls, or whose result a task awaits.
Act = Callable[[], Any]

#: The reason in LockDeadlock for a signal handler or finalizer that would wait for the code that it has interrupted.
INTERRUPTS = "this code has interrupted its own thread in the midst of a lock: use timeout=0 here, or another thread"
#: The reason in LockDeadlock for a task, such as of trio, whose wait would stop all tasks of its thread.
STOPS_HOLDER = "a task of this thread holds it, which cannot go on while this one waits: use trio.to_thread.run_sync"
#: The holder before the first answer.
_UNKNOWN = Busy()
#: Seconds for which a process lets others go first, after many hand-offs inside it.
GIVE_WAY = 0.1
#: Seconds for which a caller behind the first one relies on the answer that the first one got.
YOUNG = 1.0
#: Up to so many callers each look every second or two whether the first one is stuck; more callers look less often.
FEW = 32
#: Seconds that the last try of a waiting task waits for a thread.
LAST = 0.25


def acquire(lease: Holding, timeout: float | None) -> None:
    """Acquire the lock of the pending *lease* within *timeout* seconds; None: no limit, -1: TIMEOUT of the alias.

    If the lease has a *stop*, there is no timeout: the wait ends within a second after *stop* is set.
    LockNotAcquired if the lock is busy until then; LockBackendError, LockDeadlock.
    """
    backend, came, start = lease.backend, clock.wait_time(), clock.lease_time()
    if timeout == -1:
        timeout = backend.timeout
    left = timeout if lease.stop is None else LOOK
    attempt: Attempt | None = None
    answer: Answer | None = None
    try:
        registry.add(lease)
        if _may_ask_at_once(lease):
            queued = left != 0 and _queues_by_trying(lease)
            try:
                answer = backend.try_acquire(lease.request, queued=queued, left=left)
            except LockBackendError as error:
                # With its frames, which have the lease, it would keep that alive.
                answer = error.with_traceback(None)
        is_granted = isinstance(answer, Grant) and registry.grant(lease, answer, start)
        if not is_granted:
            wait = Wait(left, came, lease.stop)
            attempt = Attempt(lease, wait, Calls.of(backend), ThreadBell())
            run(attempt.steps(start, answer), call)
    except BaseException as error:
        attempt = attempt or Attempt(lease, Wait(left, came, lease.stop))
        try:
            _end(attempt, error)
        except BaseException:
            # An asynchronous exception: all of it again, in a thread that none is raised in.
            background.at(clock.lease_time(), attempt.abandon)
            raise
        raise
    if lock_acquired.receivers or logger.isEnabledFor(logging.DEBUG):
        _tell_acquired(lease, clock.wait_time() - came, attempt)


def check_asyncio(alias: str) -> None:
    """Raise NotSupported unless an asyncio task runs."""
    if current_task() is None:
        raise NotSupported(
            alias,
            "async code outside asyncio",
            "Under trio, hold the lock in a thread: await trio.to_thread.run_sync(work).",
        )


async def aacquire(lease: Holding, timeout: float | None) -> None:
    backend, came, start = lease.backend, clock.wait_time(), clock.lease_time()
    check_asyncio(backend.alias)
    if timeout == -1:
        timeout = backend.timeout
    attempt: Attempt | None = None
    answer: Answer | None = None
    try:
        registry.add(lease)
        if _may_ask_at_once(lease):
            queued = timeout != 0 and _queues_by_trying(lease)
            try:
                answer = await backend.atry_acquire(lease.request, queued=queued, left=timeout)
            except LockBackendError as error:
                # With its frames, which have the lease, it would keep that alive.
                answer = error.with_traceback(None)
        is_granted = (
            isinstance(answer, Grant)
            and (lease.in_line_as is None or backend.queue.keeps_turn(lease.line, lease.ref))
            and registry.grant(lease, answer, start)
        )
        if not is_granted:
            attempt = Attempt(lease, Wait(timeout, came), Calls.of(backend, "a"), TaskBell())
            await arun(attempt.steps(start, answer), call)
    except BaseException as error:
        attempt = attempt or Attempt(lease, Wait(timeout, came))
        try:
            _end(attempt, error)
        except BaseException:
            # An asynchronous exception: all of it again, in a thread that none is raised in.
            background.at(clock.lease_time(), attempt.abandon)
            raise
        raise
    if lock_acquired.receivers or logger.isEnabledFor(logging.DEBUG):
        _tell_acquired(lease, clock.wait_time() - came, attempt)


def _may_ask_at_once(lease: Holding) -> bool:
    """Return True if no other caller of this process wants the lock; the lease is then the first in its local queue."""
    backend = lease.backend
    if backend.waiting.in_line:
        if (line := lease.line) in backend.queue.contested.wanted:
            return False  # other processes may have to go first
        # Set before setdefault(), because an asynchronous exception may come between the two.
        lease.in_line_as = lease.ref
        if backend.queue.lines.setdefault(line, lease.ref) is not lease.ref:
            lease.leave_line()
            return False
    if (limit := lease.request.limit) is not None:
        lease.ask_for(first_place(limit))
    return True


def _queues_by_trying(lease: Holding) -> bool:
    return lease.backend.waiting.queueing is Queueing.BY_TRYING and lease.request.limit is None


def _tell_acquired(lease: Holding, waited: float, attempt: Attempt | None) -> None:
    requests, waited_for = (attempt.requests, attempt.waited_for) if attempt else (1, None)
    fields = log_fields(lease.name, lease.using, waited=waited, token=lease.fencing_token)
    logger.debug(
        "Lock %s acquired, token %s", printable(lease.name), lease.fencing_token, extra=fields
    )
    lease.announce(
        lock_acquired, lease=lease, waited=waited, requests=requests, waited_for=waited_for
    )
    lease.check()  # a receiver may have been slow, or have released the lease


def _end(attempt: Attempt, error: BaseException) -> None:
    attempt.abandon()
    lease = attempt.lease
    if isinstance(error, LockNotAcquired):
        fields = log_fields(lease.name, lease.using, waited=error.waited, holder=error.holder)
        logger.info("%s", printable(error, 2 * LONGEST_SHOWN), extra=fields)
        lease.announce(
            lock_busy,
            waited=error.waited,
            requests=attempt.requests,
            holder=error.holder,
            remaining=error.remaining,
            reserved_until=error.reserved_until,
        )
    elif isinstance(error, LockBackendError):
        fields = log_fields(lease.name, lease.using)
        logger.error("Lock %s: %s", printable(lease.name), printable(error), extra=fields)
        waited, requests = attempt.wait.waited, attempt.requests
        lease.announce(backend_failed, error=error, waited=waited, requests=requests)


def _lock_of(lease: Holding) -> LockId:
    return LockId(lease.backend.location, lease.request.key)


class OnServer(enum.Enum):
    """The traces that an attempt may have left on the server; they decide what to clean up."""

    NOTHING = "nothing"
    POSITION = "a position in its queue"
    UNKNOWN = "perhaps the lock: a try was sent, and its answer is not known"


class Try(NamedTuple):
    """One try, begun at *start* (``clock.lease_time()``)."""

    start: float
    is_first: bool
    #: Whether no time is left for another try.
    is_last: bool


class Calls(NamedTuple):
    """The verbs of the backend that an attempt needs: a thread calls them, a task awaits their twins."""

    try_acquire: Callable[..., Any]
    wait_for: Callable[..., Any]
    probe: Callable[..., Any]
    probe_all: Callable[..., Any]
    abandon: Callable[..., Any]
    enqueue: Callable[..., Any]
    dequeue: Callable[..., Any]
    sleep: Callable[..., Any]

    @classmethod
    def of(cls, backend: BaseLockBackend, prefix: str = "") -> Calls:
        """Return the verbs of *backend*; *prefix* is "a" for the verbs that are awaited."""
        return cls(*(getattr(backend, f"{prefix}{verb}") for verb in cls._fields))


class Attempt:
    """One attempt to get one lease, after a refused first try, or behind other callers of this process."""

    def __init__(
        self,
        lease: Holding,
        wait: Wait,
        calls: Calls | None = None,
        bell: ThreadBell | TaskBell | None = None,
    ) -> None:
        self.backend = backend = lease.backend
        self.lease = lease
        self.wait = wait
        self.calls: Any = calls
        self.bell: Any = bell
        #: How many requests were sent to the server, without waits for a wake-up.
        self.requests = 0
        self.busy = _UNKNOWN
        #: The last holder that the server has named.
        self.waited_for: Holder | None = None
        # An asynchronous exception may have ended the first try after the server carried it out.
        self.on_server = OnServer.UNKNOWN
        self._limit = lease.request.limit
        self._waiting = backend.waiting if self._limit is None else backend.waiting.for_places()
        self._way = self._waiting.way
        #: The key of the local queue.
        self._line = lease.line
        self._came = wait_graph.arrive() if lease.request.shared else 0
        self._waiter: Waiter | None = None
        self._has_waited = False
        self._was_first = lease.in_line_as is lease.ref

    @property
    def request(self) -> Request:
        return self.lease.request

    def steps(self, start: float, answer: Answer | None) -> Steps[Act, None]:
        """Continue after the first try, begun at *start*, and its *answer*; None: other callers here came first."""
        if self.lease.in_line_as is self.lease.ref:
            self.lease.in_line_as = self.bell
            self.backend.queue.stay(self._line, self.lease.ref, self.bell)
        try:
            yield from self._until_granted(start, answer)
        except LockNotAcquired:
            yield from self._leave_queues()
            raise
        self._wait_no_more()
        self.backend.forget_bell(self.request)
        queue, lease = self.backend.queue, self.lease
        queue.contested.granted(self._line, clock.wait_time())
        if lease.in_line_as is not None:
            queue.hold(self._line, self.bell, lease.ref)

    def _until_granted(self, start: float, answer: Answer | None) -> Steps[Act, None]:
        this = Try(start, is_first=True, is_last=self.wait.is_for_one_try)
        self.requests = int(answer is not None)
        if answer is None:
            self.on_server = OnServer.NOTHING
            yield from self._join_queue()
            waits_at_once = self._would_be_refused()
            if waits_at_once:
                self._begin_to_wait()
            this = self._begin_try(is_first=not waits_at_once)
        elif isinstance(answer, (Contended, NotSent)):
            self.on_server = OnServer.NOTHING
            pause, answer = self._give_others_time(answer, this), None
            yield pause
            this = self._begin_try(is_first=False)
        while not (yield from self._is_granted(this, answer)):
            answer = None
            # Even if the timeout ended the wait, try once more: the lock may have come free meanwhile.
            this = self._begin_try(is_first=False)

    def _is_granted(self, this: Try, answer: Answer | None) -> Steps[Act, bool]:
        """Try once, and wait if the lock is not granted; return whether it is."""
        # Contended, NotSent: others use the same rows or connections, but need not have the lock, so try again.
        try:
            if (yield from self._try(this, answer)):
                return True
            if not (is_passed := self._was_passed_over()):
                yield from self._wait()
                is_passed = self._was_passed_over()
            if is_passed:
                yield from self._await_turn()
        except (Contended, NotSent) as error:
            yield self._give_others_time(error, this)
        return False

    def _rest(self, act: Callable[..., Any], *args: Any) -> Act:
        """Return *act* with *args*, and note that this caller now waits and has no request under way."""
        self.lease.is_resting = True
        return partial(act, *args)

    # The local queue.

    def _join_queue(self) -> Steps[Act, None]:
        queue, line = self.backend.queue, self._line
        is_in_order = self._waiting.is_in_order
        # A single try joins the queue only if it must wait for its turn: otherwise it delays no other caller.
        waits = is_in_order and queue.waiters(line) > 0
        joins = not self.wait.is_over or queue.held_by(line) is not None or waits
        if joins:
            self.lease.in_line_as = self.bell
        if joins and not queue.join(line, self.bell):
            yield from self._await_turn()
        elif self._waiting.polls and (
            pause := queue.contested.first_pause(line, clock.wait_time())
        ):
            yield self._rest(self.bell.wait, self.wait.bounded(pause))
        if self.lease.in_line_as is not None and not is_in_order and queue.gives_way(line):
            yield self._rest(self.bell.wait, self.wait.bounded(GIVE_WAY))

    def _await_turn(self) -> Steps[Act, None]:
        """Wait in the local queue until it is our turn to ask the server, or no time is left."""
        queue, line = self.backend.queue, self._line
        while not self._has_turn():
            if self.wait.is_over:
                yield from self._look_without_turn()
                return
            self._begin_to_wait()
            # With FEW callers or more, all together look about FEW times in one or two seconds.
            share = max(1.0, queue.waiters(line) / FEW)
            seconds = share * random.uniform(SILENT, 2 * SILENT)  # noqa: S311 - to differ is enough
            yield self._rest(self.bell.wait, self.wait.bounded(seconds))
        queued = queue.queued(line)
        if queued is None:
            return
        if self._waiting.position_is_grant or queued.shared != self.request.shared:
            queue.note_queued(line, None)
            self.backend.dequeue_later(queued)
        else:
            self.lease.queue_as(queued.waiter)
            self.on_server = OnServer.POSITION
            if self._waiting.queueing is Queueing.ENQUEUE:
                with suppress(Contended, NotSent):  # enqueue() is called again after the next try
                    yield from self._enqueue()

    def _has_turn(self) -> bool:
        """Return True if it is our turn to ask the server; LockBackendError if it failed for the callers before us."""
        queue, line = self.backend.queue, self._line
        if (failure := queue.failure(self.bell)) is not None:
            raise failure
        return queue.has_turn(line, self.bell) or queue.pass_over(line, self.bell)

    def _was_passed_over(self) -> bool:
        """Return True if another caller of this process has taken our turn, because we were silent for too long."""
        is_in_line = self.lease.in_line_as is not None
        if not is_in_line or not self.backend.queue.was_passed_over(self._line, self.bell):
            return False
        if self._waiting.position_is_grant and self.on_server is not OnServer.NOTHING:
            # The caller that passed it over may have come before its position.
            self.backend.dequeue_later(self.request)
        self.backend.forget_bell(self.request)
        self.lease.change_owner()  # the old owner may yet be given up, in the background
        self.on_server = OnServer.NOTHING
        return True

    def _look_without_turn(self) -> Steps[Act, None]:
        """Raise LockNotAcquired, because no time is left, unless the lock is free by now."""
        queue, line = self.backend.queue, self._line
        holder = queue.held_by(line)
        if holder is not None and holder.held:
            self.busy = Busy(holder.request.holder, holder.remaining)
            self._refuse()
        self.busy = Busy()  # other callers of this process are before us
        answer, busy = queue.answer(line, YOUNG), None
        if answer is not None and answer.limit == self._limit:
            busy = answer.busy
        else:
            ask = partial(self.calls.probe_all, self.request.holdings)
            busy = first_to_end((yield from self._settled(ask)))
        if busy is None and not self._waiting.is_in_order:
            self.lease.leave_line()  # the last try does not need the turn
            return
        if busy is None and answer and answer.limit and self._limit and answer.limit < self._limit:
            # The first caller does not want the free place, because its limit is lower.
            busy, self._limit = answer.busy, answer.limit
        self.busy = busy or self.busy
        self._refuse()

    def _leave_queues(self) -> Steps[Act, None]:
        """Leave the local queue and the server's before LockNotAcquired is raised, so that no other waits behind us."""
        lease, line = self.lease, self._line
        queued: Request | None = None
        if self._waiting.position_is_grant and self.on_server is OnServer.POSITION:
            queued = self.request
            self.backend.queue.note_queued(line, None)
        elif lease.in_line_as is not None:
            queued, lease.in_line_as = self.backend.queue.leave(line, lease.in_line_as), None
        if queued is None:
            return
        self.on_server = OnServer.NOTHING
        try:
            yield partial(self.calls.dequeue, queued)
        except BaseException as error:
            self.backend.dequeue_later(queued)
            if not isinstance(error, LockBackendError):
                raise

    # One try.

    def _begin_try(self, *, is_first: bool) -> Try:
        self.lease.is_resting = self._way is Way.ON_SERVER
        self._expect(math.inf if self._way is Way.ON_SERVER else ASKS)
        registry.refuse_at_end()
        return Try(clock.lease_time(), is_first, is_last=self.wait.is_over)

    def _expect(self, seconds: float) -> None:
        """Note for the others in the local queue how many seconds this caller may be silent."""
        if self.bell.may_stall and self.lease.in_line_as is not None:
            self.backend.queue.expect(self._line, self.bell, seconds, self.request.owner)

    def _try(self, this: Try, answer: Answer | None) -> Steps[Act, bool]:
        """Return True if the lease is granted; LockNotAcquired if there was only time for this try."""
        by_trying = self._limit is None and self._waiting.queueing is Queueing.BY_TRYING
        queued = (by_trying and not this.is_last) or self.on_server is OnServer.POSITION
        if by_trying and queued and self.lease.in_line_as is not None:
            self.backend.queue.note_queued(self._line, self.request)
        if not isinstance(answer, Grant) and self._limit is not None:
            answer = yield from self._ask_places(this, answer)
        elif not isinstance(answer, (Grant, Busy)):
            answer = yield from self._ask(this, answer, queued=queued)
        if isinstance(answer, Busy):
            self._note_refusal(answer, queued=queued)
        elif self._accepts(answer, this):
            return True
        # A server that lets requests wait has looked until the last moment.
        if this.is_last or (self._waits_on_server(this) and self.wait.is_over):
            self._refuse()
        if isinstance(answer, Grant):
            yield from self._give_back()
        return False

    def _note_refusal(self, busy: Busy, *, queued: bool) -> None:
        self.on_server, self.busy = OnServer.POSITION if queued else OnServer.NOTHING, busy
        self.waited_for = busy.holder or self.waited_for
        if self._waiting.new_owners:
            self.lease.queue_as(self.request.waiter)
            self.lease.change_owner()
        if self.lease.in_line_as is not None:
            self.backend.queue.refused(self._line, busy, self._limit)

    def _accepts(self, granted: Grant, this: Try) -> bool:
        """Let the lease become held, unless its deadline has passed already, or another caller has taken our turn."""
        queue, line = self.backend.queue, self._line
        if self.lease.in_line_as is None:
            return registry.grant(self.lease, granted, this.start)
        if not queue.keeps_turn(line, self.bell):
            return False
        queue.note_queued(line, None)  # the grant has ended the position in the server's queue
        return registry.grant(self.lease, granted, this.start)

    def _give_back(self) -> Steps[Act, None]:
        """Give back a grant that is not accepted, and use a new owner: the server may have recorded the old one as released."""
        unused = replace(self.request, min_hold=0.0)
        yield from self._settled(partial(self.calls.abandon, unused))
        if self.lease.is_granted:  # its state is not PENDING: abandon() was called meanwhile
            raise LockNotHeld(self.lease.name)
        self.backend.forget_bell(self.request)
        self.lease.change_owner()
        self.on_server = OnServer.NOTHING

    def _waits_on_server(self, this: Try) -> bool:
        return self._way is Way.ON_SERVER and not (this.is_first or this.is_last)

    def _ask(
        self, this: Try, failed: LockBackendError | None, *, queued: bool
    ) -> Steps[Act, Grant | Busy]:
        """Send a try, or repeat the first try, which *failed*: the same owner gets the same grant."""
        if self.backend.waiting.way is Way.LOOK and not this.is_first:
            busy: Busy | None = yield from self._settled(partial(self.calls.probe, self.request))
            if busy is not None:
                return busy
        if self._waits_on_server(this):
            return (yield from self._wait_on_server())
        is_late = this.is_last and not self.wait.is_for_one_try
        left = LAST if is_late else self.wait.left
        ask = partial(self.calls.try_acquire, self.request, queued=queued, left=left)
        had_position, self.on_server = self.on_server is OnServer.POSITION, OnServer.UNKNOWN
        answer: Grant | Busy
        try:
            answer = yield from self._settled(ask, failed, this.start)
        except LockBackendError as error:
            if not isinstance(error, LockOutcomeUnknown):
                # The request did not reach the server, which has what it had before.
                self.on_server = OnServer.POSITION if had_position else OnServer.NOTHING
                if self.lease.in_line_as is not None and not had_position:
                    self.backend.queue.note_queued(self._line, None)
            if self.lease.in_line_as is not None and not isinstance(error, (Contended, NotSent)):
                self.backend.queue.failed(self._line, error)
            raise
        return answer

    def _would_be_refused(self) -> bool:
        """Return whether to wait on the server without a try: this process has just released the lock to others.

        A reader tries, as readers share the lock, and so does a signal handler that must not wait.
        """
        if self._way is not Way.ON_SERVER or has_interrupted_a_section():
            return False
        contested = self.backend.queue.contested
        if self.request.shared:
            contested.wanted.pop(self._line, None)  # the next reader asks at once again
            return False
        _held, since = contested.last_release(self._line, clock.wait_time())
        left = self.wait.left
        return since < YOUNG and (left is None or left > LOOK)

    def _wait_on_server(self) -> Steps[Act, Grant | Busy]:
        self.on_server = OnServer.UNKNOWN
        self.requests += 1
        left = self._waiting.on_server(self.wait)
        self.backend.queue.note_queued(self._line, self.request)
        answer: Grant | Busy = yield partial(self.calls.wait_for, self.request, left)
        self.backend.queue.note_queued(self._line, None)
        return answer

    def _ask_places(self, this: Try, answer: Answer | None) -> Steps[Act, Grant | Busy]:
        """Probe all places, and try the free ones, from a random one on; return the Busy that ends first if all are taken."""
        if isinstance(answer, LockBackendError):
            answer = yield from self._ask(this, answer, queued=False)
            if isinstance(answer, Grant):
                return answer
        if isinstance(answer, Busy) and self._waiting.new_owners:
            self.lease.change_owner()
        had_position, line = self.on_server is OnServer.POSITION, self.request.at(None)
        self.lease.ask_for(None)
        found: list[Busy | None] = yield from self._settled(
            partial(self.calls.probe_all, line.holdings)
        )
        limit = len(found)
        first = first_place(limit)
        for place in (*range(first, limit), *range(first)):
            if found[place] is None:
                self.lease.ask_for(place)
                start = clock.lease_time()
                again = this._replace(start=start, is_first=True)
                try:
                    answer = yield from self._ask(again, None, queued=had_position)
                except Contended:
                    answer = _UNKNOWN  # other clients work on the rows of this place
                if isinstance(answer, Grant):
                    return Grant(answer.token, answer.start or start)
                self.on_server = OnServer.POSITION if had_position else OnServer.NOTHING
                self.lease.ask_for(None)
                found[place] = answer
        return first_to_end(found) or _UNKNOWN

    def _settled(
        self, ask: Act, failed: LockBackendError | None = None, began: float = 0.0
    ) -> Steps[Act, Any]:
        """Send the request, and once more if its reply is lost. *failed*, *began*: error and start of a first attempt already made.

        The first attempt may have taken long, as on a connection that a router has forgotten, if as much time is left.
        """
        if failed is None:
            began = clock.lease_time()
            self.requests += 1
            try:
                return (yield ask)
            except LockOutcomeUnknown as lost:
                failed = lost.with_traceback(None)  # as in acquire()
        left = self.wait.left
        if not is_worth_asking_again(
            failed, began, math.inf if left is None else max(left, SETTLE)
        ):
            raise failed
        self.requests += 1
        answer = yield from asking_again(ask, failed)
        if isinstance(answer, Grant):
            # The first request may be the one that was carried out: the ttl counts from its start.
            return replace(answer, start=min(began, answer.start or began))
        return answer

    # Between two tries.

    def _wait(self) -> Steps[Act, None]:
        queue, waiting = self.backend.queue, self._waiting
        must_know_others = waiting.polls or self._way is Way.ON_SERVER
        if must_know_others and self.lease.in_line_as is not None:
            queue.contested.refused(self._line)
        had_position = self.on_server is OnServer.POSITION
        # enqueue() keeps a position for any place of a lock; a position for a lock without a limit is kept by tries.
        if waiting.queueing is not Queueing.NONE and (not had_position or self._limit is not None):
            queue.note_queued(self._line, self.request)
            yield from self._enqueue()
            if not had_position:
                return  # The next try follows at once, because the lock may have been released before enqueue().
        self._begin_to_wait()
        if self._way is not Way.ON_SERVER:
            seconds = waiting.pause(self.wait, self.busy)
            self._expect(seconds)
            yield self._rest(self.calls.sleep, self.request, self.bell, seconds)

    def _enqueue(self) -> Steps[Act, None]:
        """Take or keep a position in the server's queue; Contended or NotSent if we have none."""
        self.on_server = OnServer.POSITION
        try:
            yield from self._settled(partial(self.calls.enqueue, self.request, self.bell))
        except (Contended, NotSent):
            self.on_server = OnServer.NOTHING
            raise

    def _begin_to_wait(self) -> None:
        """Enter this caller in the wait graph; LockDeadlock if it would wait for itself."""
        if self._has_waited:
            return
        self._has_waited = True
        self._refuse_to_wait_for_oneself()
        lease, is_reader = self.lease, self.request.shared
        # With a limit, there is no deadlock: another holder may always go on.
        if self._limit is None and (caller := lease.caller) is not None:
            since = None
            if self._waiting.writers_first and not is_reader:
                # All readers in a local queue that we began are behind us.
                since = 0 if self._was_first else wait_graph.arrive()
            lock, came = _lock_of(lease), self._came
            self._waiter = Waiter(lease.name, lock, caller, is_reader, self.wait, came, since)
            wait_graph.begin(self._waiter)

    def _wait_no_more(self) -> None:
        if self._waiter is not None:
            wait_graph.end(self._waiter)

    def _give_others_time(self, error: Contended | NotSent, this: Try) -> Act:
        """Return the pause after *error*; once no time is left, raise *error*.

        If the last try was not sent, but an earlier one was refused, raise LockNotAcquired instead.
        """
        was_not_sent = isinstance(error, NotSent)
        if this.is_last or (was_not_sent and self.wait.is_over):
            if was_not_sent and self.busy is not _UNKNOWN:
                self._refuse()
            raise error
        self._refuse_to_wait_for_oneself()
        return self._rest(self.bell.wait, self.wait.next_pause())

    def _refuse_to_wait_for_oneself(self) -> None:
        """Raise LockDeadlock if this code, a signal handler, a finalizer or a task of trio, would wait for its own thread."""
        lease = self.lease
        mine = held_here(lease.using, lease.request.lock_key)
        changing = [_lock_of(each) for each in mine if each is not lease and each.is_changing_here]
        if has_interrupted_a_section() or _lock_of(lease) in changing:
            raise LockDeadlock(lease.name, INTERRUPTS)
        if runs_foreign_tasks() and self._limit is None:
            held = (each for each in registry.leases() if each.held and each.is_of_caller())
            if any(_lock_of(each) == _lock_of(lease) for each in held):
                raise LockDeadlock(lease.name, STOPS_HOLDER)

    def _refuse(self) -> NoReturn:
        busy, until = self.busy, None
        if busy.reserved and busy.remaining is not None:
            until = datetime.now(UTC) + timedelta(seconds=busy.remaining)
        raise LockNotAcquired(
            self.lease.name, self.wait.waited, busy.holder, busy.remaining, until, self._limit
        )

    def abandon(self) -> None:
        """Give up: release in the background what the server has granted, or may have, with no min_hold.

        Safe to call twice; the second call finishes what an asynchronous exception interrupted.
        """
        backend = self.backend
        request = self.lease.request = replace(self.request, min_hold=0.0)
        try:
            self._wait_no_more()
            backend.interrupt(request)
            backend.forget_bell(request)
            queued = backend.queue.queued(self._line)
            is_ours = queued is not None and queued.owner == request.owner
            if self._waiting.position_is_grant and is_ours:
                backend.queue.note_queued(self._line, None)
            if self.on_server is OnServer.UNKNOWN:
                backend.abandon_later(request)
                may_be_queued = _queues_by_trying(self.lease) and self.lease.in_line_as is not None
                if may_be_queued and queued is None and not self._waiting.position_is_grant:
                    backend.queue.note_queued(self._line, request)
            elif self.on_server is OnServer.POSITION and self._waiting.position_is_grant:
                backend.dequeue_later(request)
        finally:
            self.lease.end(State.RELEASED)
