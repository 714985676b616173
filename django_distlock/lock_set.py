"""lock_all() and LockSet: several locks, all or none."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, Unpack

from asgiref.sync import markcoroutinefunction

from .engine.registry import Awaited
from .engine.waiting import Wait
from .exceptions import LockError, LockLost, LockNotAcquired, LockNotHeld
from .ground.caller import Caller
from .lock import EnteredWith, Lock, LockTerms, Terms, lists_terms, nothing_to_cancel

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from django.db.models import Model

    from .engine.lease import Lease

#: A lock, its block that is left, and the entries of its lease before.
_Left = tuple[Lock, EnteredWith, object]


class LockSet:
    """Several locks, acquired in the order of their names, so two sets never deadlock."""

    def __init__(self, names: tuple[str | Model, ...], terms: Terms) -> None:
        """Raise ValueError if there are no *names*."""
        if not names:
            raise ValueError("lock_all() takes at least one name.")
        named = [terms.lock(name) for name in names]
        self.names = tuple(lock.name for lock in named)
        self._locks = {lock.name: lock for lock in sorted(named, key=lambda lock: lock.name)}

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
        """As acquire(). The locks belong to the caller, even if another task awaits the result."""
        in_order = [self._locks[name] for name in self.names]
        awaited = [Awaited(lock.terms.using, lock.key()) for lock in in_order]
        return self._aacquire(Caller(), awaited)

    async def _aacquire(self, caller: Caller, awaited: list[Awaited]) -> tuple[Lease, ...] | None:
        try:
            for lock in self._locks.values():
                if lock.terms.cancel_when_lost:
                    raise nothing_to_cancel("acquire()")
            keys = {name: each.key for name, each in zip(self.names, awaited, strict=True)}
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
        """Release the locks that this thread or task acquired last; LockNotHeld, at the end, if one is not held."""
        leases, missing = self._recall()
        with ExitStack() as stack:
            for lease in leases:
                stack.callback(lease.release)
        for error in missing:
            raise error

    @markcoroutinefunction
    def arelease(self) -> Coroutine[Any, Any, None]:
        """Release what the caller acquired last, even if another task awaits it."""
        return self._arelease(*self._recall())

    async def _arelease(self, leases: list[Lease], missing: list[LockNotHeld]) -> None:
        async with AsyncExitStack() as stack:
            for lease in leases:
                stack.push_async_callback(lease.arelease)
        for error in missing:
            raise error

    def _recall(self) -> tuple[list[Lease], list[LockNotHeld]]:
        """Return what this caller acquired last, and forget it; and an error for each lock that it does not hold."""
        leases: list[Lease] = []
        missing: list[LockNotHeld] = []
        for lock in self._locks.values():
            try:
                leases.append(lock.recall())
            except LockNotHeld as error:
                missing.append(error)
        return leases, missing

    def __enter__(self) -> tuple[Lease, ...]:
        wait = Wait(self._timeout())
        while True:
            try:
                with ExitStack() as stack:
                    leases = {}
                    for name, lock in self._locks.items():
                        leases[name] = lock.enter(wait.left)
                        stack.push(lock.leave_at_once)
                    return self._all_held(leases, stack)
            except LockLost:  # one ended while another was waited for: all are free again
                if wait.is_over:
                    raise

    def __exit__(self, *error: Any) -> None:
        left: list[_Left] = []
        try:
            left = self._to_leave()
            stack = ExitStack()
            for lock in self._locks.values():
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
        self, caller: Caller | None = None, keys: dict[str, str] | None = None
    ) -> tuple[Lease, ...]:
        wait = Wait(self._timeout())
        while True:
            try:
                async with AsyncExitStack() as stack:
                    leases = {}
                    for name, lock in self._locks.items():
                        leases[name] = await lock.aenter(
                            wait.left, caller=caller, key=keys[name] if keys else ""
                        )
                        stack.push_async_exit(lock)
                    return self._all_held(leases, stack)
            except LockLost:
                if wait.is_over:
                    raise

    async def __aexit__(self, *error: Any) -> None:
        left: list[_Left] = []
        try:
            left = self._to_leave()
            stack = AsyncExitStack()
            for lock in self._locks.values():
                stack.push_async_exit(lock)
            await stack.__aexit__(*error)
        except (LockError, asyncio.CancelledError, GeneratorExit):
            raise  # as of a Lock
        except BaseException:
            self._finish_leaving(left)
            raise

    def _to_leave(self) -> list[_Left]:
        blocks = [(lock, lock.innermost()) for lock in self._locks.values()]
        return [(lock, block, block.lease.entries) for lock, block in blocks]

    def _finish_leaving(self, left: list[_Left]) -> None:
        """Leave in the background what an asynchronous exception kept from being left; nothing *left*: it came before."""
        for lock, block, entries in left or self._to_leave():
            lock.finish_leaving(block, entries)

    def __repr__(self) -> str:
        return f"<LockSet {list(self._locks.values())!r}>"

    def _keep_acquired(self, leases: tuple[Lease, ...]) -> None:
        try:
            for lease in {*leases}:
                self._locks[lease.name].keep_acquired(lease)
        except BaseException:  # asynchronous: nobody will have the leases
            for lease in {*leases}:
                lease.release_later()
            raise

    def _all_held(
        self, leases: dict[str, Lease], stack: ExitStack | AsyncExitStack
    ) -> tuple[Lease, ...]:
        """Return *leases* in the order of the names, and keep *stack* from releasing them; LockLost if one has ended."""
        for lease in leases.values():
            lease.check()
        in_order = tuple(leases[name] for name in self.names)
        stack.pop_all()  # last: an asynchronous exception must find them in it
        return in_order

    def _timeout(self) -> float | None:
        return next(iter(self._locks.values())).default_timeout()


@lists_terms
def lock_all(*names: str | Model, **terms: Unpack[LockTerms]) -> LockSet:
    """Return an object that acquires all locks or none, within one timeout.

    The block begins only while all of them are held: if a lease ends while another lock is waited
    for, all are released and acquired again; LockLost if no time is left for that.
    ``with lock_all("account:1", "account:2") as leases:`` gives one lease for each name, in order.
    """
    for several in names:
        if isinstance(several, (list, tuple, set, frozenset)):
            raise TypeError("lock_all() takes one argument for each name; write lock_all(*names).")
    return LockSet(names, Terms.of(terms, "lock_all()"))
