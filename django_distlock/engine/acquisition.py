"""The acquire loop: try, wait to be woken, try; whatever stops it leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockNotAcquired,
    LockOutcomeUnknown,
)
from django_distlock.holding import LeaseBackend

from . import clock, waiting
from .bells import TaskBell, ThreadBell
from .settling import asettled, settled
from .values import Busy, Grant, new_owner
from .waits import Lock, Waiter, waits

if TYPE_CHECKING:
    from django_distlock.lease import Lease

    from .local_queue import LocalQueue
    from .values import Request

    AnyBell = ThreadBell | TaskBell

#: Seconds to stand back for other processes, after many hand-offs inside this one.
GIVE_WAY = 0.1
#: Seconds between two looks of a waiter that another one of this process looks for.
BEHIND = 5.0
#: Seconds between two looks, in the line of this process, whether to wait on the server after all.
IN_LINE = 1.0


class WaitableBackend(LeaseBackend, Protocol):
    """What the loop asks of a backend; BaseLockBackend says what each verb means."""

    queue: LocalQueue
    queues_locally: bool
    queues_waiters: bool
    readers_stand_behind: bool
    wakes_waiters: bool
    looks_before_retry: bool
    queues_by_trying: bool
    listening_time: float | None
    waits_on_server: bool

    def try_acquire(self, request: Request, *, queued: bool) -> Grant | Busy:
        """Ask once."""

    async def atry_acquire(self, request: Request, *, queued: bool) -> Grant | Busy:
        """See try_acquire()."""

    def wait_acquire(self, request: Request, seconds: float | None) -> Grant | Busy:
        """Have the server make us wait."""

    async def await_acquire(self, request: Request, seconds: float | None) -> Grant | Busy:
        """See wait_acquire()."""

    def leaves_line(self, request: Request) -> bool:
        """Tell whether other processes must see that the caller waits."""

    def interrupt(self, request: Request) -> None:
        """End a wait_acquire() that another thread is in."""

    def probe(self, request: Request) -> Busy | None:
        """Look without taking it."""

    async def aprobe(self, request: Request) -> Busy | None:
        """See probe()."""

    def enqueue(self, request: Request, bell: AnyBell) -> None:
        """Stand in the server's queue."""

    async def aenqueue(self, request: Request, bell: AnyBell) -> None:
        """See enqueue()."""

    def forget_bell(self, request: Request) -> None:
        """Ring no more; no I/O."""

    def is_behind(self, request: Request) -> bool:
        """Tell whether another waiter of this process looks for it."""

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        """Wait until woken."""

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        """See sleep()."""

    async def aabandon(self, request: Request) -> None:
        """See abandon()."""

    def dequeue_later(self, request: Request) -> None:
        """Leave the server's queue, in the background."""


class _Acquisition:
    """One attempt to get one lease: what both loops decide, without I/O."""

    def __init__(self, backend: WaitableBackend, lease: Lease, timeout: float | None) -> None:
        self.backend = backend
        self.lease = lease
        self.request = lease.request
        self.wait = waiting.Wait(timeout)
        self.busy = Busy()
        self._came = waits.arrive() if self.request.shared else 0
        self._waiter: Waiter | None = None
        self._tries = 0
        self._is_in_line = False
        self._is_queued = False
        self._is_unsure = False
        self._is_last_try = False

    def _must_wait_in_line(self, bell: AnyBell) -> bool:
        """Join the line of this process. Readers need none, nor does a single try of a free lock."""
        key = self.request.key
        if self.request.shared or not self.backend.queues_locally:
            return False
        if self.wait.is_over and self.backend.queue.held_by(key) is None:
            return False
        self._is_in_line = True
        return not self.backend.queue.join(key, bell)

    def _may_ask(self, bell: AnyBell) -> bool:
        """Return whether to ask the server: it is our turn, or there is time for one last try only."""
        if self.backend.queue.has_turn(self.request.key, bell):
            return True
        if self.wait.is_over:
            self._refuse_for_local_holder()
        elif self.wait.waited >= IN_LINE and self.backend.leaves_line(self.request):
            self.backend.queue.leave(self.request.key, bell)
            self._is_in_line = False
            return True
        return self.wait.is_over

    def _patience_in_line(self) -> float | None:
        return self.wait.bounded(IN_LINE) if self.backend.waits_on_server else self.wait.left

    def _begin_to_wait(self, *, has_place: bool) -> None:
        """Be known to wait, with a place on the server or without; LockDeadlock if it would be for ourselves."""
        if self._waiter is None and (caller := self.lease.caller) is not None:
            lock = Lock(self.backend.place, self.request.key)
            self._waiter = Waiter(
                self.lease.name, lock, caller, self.request.shared, self.wait, self._came
            )
            waits.begin(self._waiter)
        if has_place and self._waiter is not None and self.backend.readers_stand_behind:
            self._waiter.stand_before_readers()

    def _refuse_for_local_holder(self) -> None:
        lease = self.backend.queue.held_by(self.request.key)
        if lease is not None and lease.held:
            self.busy = Busy(lease.holder, lease.remaining)
            self._refuse()

    def _gives_way(self) -> bool:
        return self._is_in_line and self.backend.queue.gives_way(self.request.key)

    def _before_try(self) -> float:
        self._is_unsure = True
        self._is_last_try = self.wait.is_over
        if self.backend.queues_by_trying and not self._is_last_try:
            self._is_queued = True
        return clock.lease_time()

    def _is_granted(self, start: float, answer: Grant | Busy) -> bool:
        """Take the answer in. A grant that came after its own deadline is none."""
        if isinstance(answer, Grant):
            granted = self.lease.grant(answer.start or start, answer.token)
        else:
            granted, self._is_unsure, self.busy = False, False, answer
        if not granted and self._is_last_try:
            self._refuse()
        return granted

    def _give_others_time(self, error: Contended) -> float:
        """Return how long to let others at work go on; raise *error*, which says so, once no time is left."""
        if self._is_last_try:
            raise error
        return self.wait.next_pause()

    def _was_not_asked(self) -> None:
        """Take note of a try that did not reach the server: nothing is there, unless by an earlier one."""
        self._is_unsure = False
        if self._tries == 1:
            self._is_queued = False

    def _begin_anew(self) -> None:
        """Ask as another owner after a grant that came too late: the server may know that this one gave it back."""
        self.request = self.lease.request = replace(self.request, owner=new_owner())
        self._is_queued = False

    def _waits_on_server(self) -> bool:
        """Return whether to ask by waiting: after a first try, and with time left."""
        return self.backend.waits_on_server and self._tries > 0 and not self._is_last_try

    def _looks_first(self) -> bool:
        """Return whether to ask read-only whether a try is worth it: after it was refused once."""
        self._tries += 1
        return self._tries > 1 and self.backend.looks_before_retry

    def _refuse(self) -> NoReturn:
        raise LockNotAcquired(
            self.lease.name, self.wait.waited, self.busy.holder, self.busy.remaining
        )

    def _pause(self) -> float:
        if self.backend.waits_on_server:
            return 0.0
        if self.backend.is_behind(self.request):
            return self.wait.bounded(BEHIND)
        if (seconds := self.backend.listening_time) is not None:
            left = self.busy.remaining
            return self.wait.bounded(seconds if left is None else min(seconds, left))
        wakeable = self.backend.wakes_waiters
        longest = waiting.LONGEST_WAKEABLE_PAUSE if wakeable else waiting.LONGEST_PAUSE
        return self.wait.next_pause(self.busy.remaining, longest=longest)

    def _joins_server_queue(self) -> bool:
        """Return whether to enqueue now; the next try follows at once: a release may have slipped in."""
        if self._is_in_line:
            self.backend.queue.contest(self.request.key)
        if self._is_queued or not self.backend.queues_waiters:
            return False
        self._is_queued = True
        return True

    def _settle(self, bell: AnyBell) -> Lease:
        """Be done: whose turn is next is told when the lease ends."""
        self._wait_no_more()
        self.backend.forget_bell(self.request)
        if self._is_in_line:
            self.backend.queue.hold(self.request.key, self.lease)
            # Nothing here may refer to the lease: it would never be unreferenced.
            self.lease.at_end(partial(self.backend.queue.leave, self.request.key, bell))
        return self.lease

    def _abandon(self, bell: AnyBell) -> None:
        """Leave nothing: what the server has, or may have, is given back in the background."""
        try:
            self._wait_no_more()
            self.lease.give_up()
            self.backend.interrupt(self.request)
            self.backend.forget_bell(self.request)
            self._leave_server()
        finally:
            if self._is_in_line:
                self.backend.queue.leave(self.request.key, bell)

    def _wait_no_more(self) -> None:
        if self._waiter is not None:
            waits.end(self._waiter)

    def _leave_server(self) -> None:
        if self._is_unsure:
            self.backend.abandon_later(self.request)
        elif self._is_queued:
            self.backend.dequeue_later(self.request)


class Acquisition(_Acquisition):
    """The loop for threads."""

    def run(self) -> Lease:
        """Return the lease, held; raise LockNotAcquired or LockBackendError."""
        bell = ThreadBell()
        try:
            self.lease.begin()
            self._take_turn(bell)
            while not self._step(bell):
                pass
            return self._settle(bell)
        except BaseException:
            self._abandon(bell)
            raise

    def _take_turn(self, bell: ThreadBell) -> None:
        if self._must_wait_in_line(bell):
            while not self._may_ask(bell):
                self._begin_to_wait(has_place=False)
                bell.wait(self._patience_in_line())
        if self._gives_way():
            bell.wait(self.wait.bounded(GIVE_WAY))

    def _step(self, bell: ThreadBell) -> bool:
        """Ask, and wait if it is refused. Others at work on the same rows do not have the lock: ask again."""
        try:
            if self._try():
                return True
            self._wait(bell)
        except Contended as error:
            bell.wait(self._give_others_time(error))
        return False

    def _try(self) -> bool:
        start = self._before_try()
        answer = self._ask()
        granted = self._is_granted(start, answer)
        if self._is_unsure and not granted:
            settled(partial(self.backend.abandon, self.request))
            self._begin_anew()
        return granted

    def _ask(self) -> Grant | Busy:
        """Ask; if the reply is lost, ask again: the same owner gets the same grant."""
        if self._waits_on_server():
            return self.backend.wait_acquire(self.request, self.wait.left)
        if self._looks_first() and (busy := settled(partial(self.backend.probe, self.request))):
            return busy
        ask = partial(self.backend.try_acquire, self.request, queued=self._is_queued)
        try:
            return settled(ask)
        except LockOutcomeUnknown:
            raise
        except LockBackendError:
            self._was_not_asked()
            raise

    def _wait(self, bell: ThreadBell) -> None:
        if self._joins_server_queue():
            try:
                self.backend.enqueue(self.request, bell)
            except Contended:
                self._is_queued = False
                raise
        else:
            self._begin_to_wait(has_place=True)
            self.backend.sleep(self.request, bell, self._pause())


class AsyncAcquisition(_Acquisition):
    """The loop for asyncio tasks, of the same shape."""

    async def run(self) -> Lease:
        """See Acquisition.run()."""
        bell = TaskBell()
        try:
            self.lease.begin()
            await self._take_turn(bell)
            while not await self._step(bell):
                pass
            return self._settle(bell)
        except BaseException:
            self._abandon(bell)
            raise

    async def _take_turn(self, bell: TaskBell) -> None:
        if self._must_wait_in_line(bell):
            while not self._may_ask(bell):
                self._begin_to_wait(has_place=False)
                await bell.wait(self._patience_in_line())
        if self._gives_way():
            await bell.wait(self.wait.bounded(GIVE_WAY))

    async def _step(self, bell: TaskBell) -> bool:
        """See Acquisition._step()."""
        try:
            if await self._try():
                return True
            await self._wait(bell)
        except Contended as error:
            await bell.wait(self._give_others_time(error))
        return False

    async def _try(self) -> bool:
        start = self._before_try()
        answer = await self._ask()
        granted = self._is_granted(start, answer)
        if self._is_unsure and not granted:
            await asettled(partial(self.backend.aabandon, self.request))
            self._begin_anew()
        return granted

    async def _ask(self) -> Grant | Busy:
        """See Acquisition._ask()."""
        if self._waits_on_server():
            return await self.backend.await_acquire(self.request, self.wait.left)
        look = partial(self.backend.aprobe, self.request)
        if self._looks_first() and (busy := await asettled(look)):
            return busy
        ask = partial(self.backend.atry_acquire, self.request, queued=self._is_queued)
        try:
            return await asettled(ask)
        except LockOutcomeUnknown:
            raise
        except LockBackendError:
            self._was_not_asked()
            raise

    async def _wait(self, bell: TaskBell) -> None:
        if self._joins_server_queue():
            try:
                await self.backend.aenqueue(self.request, bell)
            except Contended:
                self._is_queued = False
                raise
        else:
            self._begin_to_wait(has_place=True)
            await self.backend.asleep(self.request, bell, self._pause())
