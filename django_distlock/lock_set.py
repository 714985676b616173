"""lock_all() and LockSet: several locks, all or none."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from asgiref.sync import markcoroutinefunction

from .engine.holding import Awaited
from .engine.waiting import Wait
from .exceptions import LockError, LockLost, LockNotAcquired, LockNotHeld
from .ground.caller import Caller, current_caller
from .ground.naming import printable
from .lock import EnteredWith, Lock, LockTerms, Terms, lists_terms, nothing_to_cancel

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from django.db.models import Model

    from .engine.lease import Lease

#: A lock, the block of it that is being left, and the entries of its lease before.
_Left = tuple[Lock, EnteredWith, object]
#: A lock, the lease that its caller acquired last, and the entries of the lease before it is released.
_Acquired = tuple[Lock, "Lease", object]


class LockSet:
    """Several locks, acquired in the order of their names and aliases, so two sets never deadlock."""

    def __init__(self, wanted: tuple[str | Model | Lock, ...], terms: Terms) -> None:
        """*terms* apply to the names, their timeout to the whole set; ValueError if locks contradict each other."""
        if not wanted:
            raise ValueError("lock_all() takes at least one name.")
        self._timeout = terms.timeout
        of_names = replace(terms, timeout=-1)
        named = [each if isinstance(each, Lock) else of_names.lock(each) for each in wanted]
        self.names = tuple(lock.name for lock in named)
        first_of = {_identity(lock): lock for lock in reversed(named)}
        #: The locks in the order of the call, and below in the order in which they are acquired.
        self._as_written = [first_of[_identity(lock)] for lock in named]
        self._locks = [first_of[identity] for identity in sorted(first_of)]
        for lock, first in zip(named, self._as_written, strict=True):
            _check_together(lock, first)

    def acquire(self) -> tuple[Lease, ...] | None:
        """Return the leases in the order of the names, or None if a lock was busy until the timeout.

        Release them by release(). If a lease ends while another lock is waited for, all are released
        and acquired again; LockLost if no time is left for that.
        """
        try:
            leases = self.__enter__()
        except LockNotAcquired:
            return None
        self._keep_acquired(leases)
        return leases

    @markcoroutinefunction
    def aacquire(self) -> Coroutine[Any, Any, tuple[Lease, ...] | None]:
        """Do what acquire() does, for asyncio. The locks belong to the caller, even if another task awaits the result."""
        awaited = [Awaited(lock.key()) for lock in self._as_written]
        work = self._aacquire(Caller(), awaited)
        for lock, each in zip(self._as_written, awaited, strict=True):
            each.note(lock.terms.using, work)
        return work

    async def _aacquire(self, caller: Caller, awaited: list[Awaited]) -> tuple[Lease, ...] | None:
        try:
            for lock in self._locks:
                if lock.terms.cancel_when_lost:
                    raise nothing_to_cancel("acquire()")
            keys = {lock: each.key for lock, each in zip(self._as_written, awaited, strict=True)}
            leases = await self._aenter(caller, keys)
            self._keep_acquired(leases)
            for each, lease in zip(awaited, leases, strict=True):
                each.known = lease.ref
        except LockNotAcquired:
            return None
        finally:
            for each in awaited:
                each.is_over = True
        return leases

    def release(self) -> None:
        """Release the locks that this thread or task acquired last; then raise LockNotHeld if one was not held."""
        acquired: list[_Acquired] = []
        try:
            acquired, missing = self._last_acquired(current_caller())
            with ExitStack() as stack:
                for lock, lease, _ in acquired:
                    lock.forget(lease)
                    stack.callback(lease.give_back)
        except BaseException:  # a LockError, too: it may have replaced an asynchronous exception
            for _, lease, entries in acquired or self._last_acquired(current_caller())[0]:
                lease.finish_leaving(entries)
            raise
        if missing:
            raise missing[0]

    @markcoroutinefunction
    def arelease(self) -> Coroutine[Any, Any, None]:
        """Release the locks that the caller acquired last, even if another task awaits the result."""
        return self._arelease(Caller())

    async def _arelease(self, caller: Caller) -> None:
        acquired, missing = self._last_acquired(caller)
        async with AsyncExitStack() as stack:
            for lock, lease, _ in acquired:
                lock.forget(lease)
                stack.push_async_callback(lease.arelease)
        if missing:
            raise missing[0]

    def _last_acquired(self, caller: Caller) -> tuple[list[_Acquired], list[LockNotHeld]]:
        """Return the leases that *caller* acquired last, and an error for each lock that it does not hold."""
        acquired: list[_Acquired] = []
        missing: list[LockNotHeld] = []
        for lock in self._locks:
            try:
                acquired.append((lock, *lock.last_acquired(caller)))
            except LockNotHeld as error:
                missing.append(error)
        return acquired, missing

    def __enter__(self) -> tuple[Lease, ...]:
        wait = Wait(self._patience())
        while True:
            try:
                with ExitStack() as stack:
                    leases = {}
                    for lock in self._locks:
                        leases[lock] = lock.enter(wait.left)
                        stack.push(lock.leave_at_once)
                    return self._all_held(leases, stack)
            except LockLost:  # one lease ended during the wait for another lock: all are free again
                if wait.is_over:
                    raise

    def __exit__(self, *error: Any) -> None:
        left: list[_Left] = []
        try:
            left = self._to_leave()
            stack = ExitStack()
            for lock in self._locks:
                stack.push(lock)
            stack.__exit__(*error)
        except LockError:
            raise
        except BaseException:
            self._finish_leaving(left)
            raise

    async def __aenter__(self) -> tuple[Lease, ...]:
        return await self._aenter()

    async def _aenter(
        self, caller: Caller | None = None, keys: dict[Lock, str] | None = None
    ) -> tuple[Lease, ...]:
        wait = Wait(self._patience())
        while True:
            try:
                async with AsyncExitStack() as stack:
                    leases = {}
                    for lock in self._locks:
                        leases[lock] = await lock.aenter(
                            wait.left, caller=caller, key=keys[lock] if keys else ""
                        )
                        stack.push_async_exit(lock.aleave_at_once)
                    return self._all_held(leases, stack)
            except LockLost:
                if wait.is_over:
                    raise

    async def __aexit__(self, *error: Any) -> None:
        left: list[_Left] = []
        try:
            left = self._to_leave()
            stack = AsyncExitStack()
            for lock in self._locks:
                stack.push_async_exit(lock)
            await stack.__aexit__(*error)
        except (LockError, asyncio.CancelledError, GeneratorExit):
            raise  # as of a Lock
        except BaseException:
            self._finish_leaving(left)
            raise

    def _to_leave(self) -> list[_Left]:
        blocks = [(lock, lock.innermost()) for lock in self._locks]
        return [(lock, block, block.lease.entries) for lock, block in blocks]

    def _finish_leaving(self, left: list[_Left]) -> None:
        """Leave the blocks *left* in the background, after an asynchronous exception; if empty, find them, too."""
        for lock, block, entries in left or self._to_leave():
            lock.finish_leaving(block, entries)

    def __repr__(self) -> str:
        return f"<LockSet {self._locks!r}>"

    def _keep_acquired(self, leases: tuple[Lease, ...]) -> None:
        try:
            for lock, lease in dict(zip(self._as_written, leases, strict=True)).items():
                lock.keep_acquired(lease)
        except BaseException:  # an asynchronous exception: the caller never gets the leases
            for lease in {*leases}:
                lease.give_back_unused()
            raise

    def _all_held(
        self, leases: dict[Lock, Lease], stack: ExitStack | AsyncExitStack
    ) -> tuple[Lease, ...]:
        """Return *leases* in the order of the names, and empty *stack*, which would release them; LockLost if one has ended."""
        for lease in leases.values():
            lease.check()
        in_order = tuple(leases[lock] for lock in self._as_written)
        stack.pop_all()  # last: on an asynchronous exception before, *stack* releases them
        return in_order

    def _patience(self) -> float | None:
        """Return how long to wait for all locks: without a timeout, the shortest TIMEOUT of the aliases."""
        if self._timeout != -1:
            return self._timeout
        limits = [lock.default_timeout() for lock in self._locks]
        return min((limit for limit in limits if limit is not None), default=None)


def _identity(lock: Lock) -> tuple[str, str, bool]:
    """Return the sort key of *lock*, equal for the same lock: the name first, as two aliases may share a server."""
    return lock.name, lock.terms.using, lock.terms.limit is not None


def _check_together(lock: Lock, first: Lock) -> None:
    """Raise ValueError if *lock* has a timeout of its own, or is *first* again on other terms."""
    if lock.terms.timeout != -1:
        msg = f"lock_all() waits for all within one timeout: give it timeout=..., and the lock {printable(lock.name)!r} none."
        raise ValueError(msg)
    if lock.terms != first.terms:
        msg = f"lock_all() got the lock {printable(lock.name)!r} twice, with different arguments; give it once."
        raise ValueError(msg)


@lists_terms
def lock_all(*names: str | Model | Lock, **terms: Unpack[LockTerms]) -> LockSet:
    """Return an object that acquires all locks or none, within one timeout.

    The block begins only while all of them are held: if a lease ends while another lock is waited
    for, all are released and acquired again; LockLost if no time is left for that.
    ``with lock_all("account:1", "account:2") as leases:`` gives one lease for each name, in order.
    An argument may be a lock with *terms* of its own: ``lock_all("a", lock("b", shared=True))``.
    """
    for several in names:
        if isinstance(several, (list, tuple, set, frozenset)):
            raise TypeError("lock_all() takes one argument for each name; write lock_all(*names).")
    checked = Terms.of(terms, "lock_all()")
    if names and all(isinstance(each, Lock) for each in names):
        for word in sorted(terms.keys() - {"timeout"}):
            msg = f"lock_all() has only locks, which have arguments of their own; write lock(..., {word}=...)."
            raise TypeError(msg)
    return LockSet(names, checked)
