"""lock_all(): several locks at once, all or none."""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, Unpack

from asgiref.sync import markcoroutinefunction

from .engine.caller import Caller
from .engine.waiting import Wait
from .exceptions import LockNotAcquired
from .lease import Awaited
from .lock import Lock, LockTerms, Terms

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

    from .lease import Lease


class LockSet:
    """Several locks, acquired in the order of their names, so two sets never deadlock."""

    def __init__(self, names: tuple[str, ...], terms: Terms) -> None:
        """Raise ValueError if there are no *names*."""
        if not names:
            msg = "lock_all() takes at least one name."
            raise ValueError(msg)
        named = [Lock.on_terms(name, terms) for name in names]
        self.names = tuple(lock.name for lock in named)
        self._locks = {lock.name: lock for lock in sorted(named, key=lambda lock: lock.name)}

    def acquire(self) -> tuple[Lease, ...] | None:
        """Return the leases in the order of the names, or None if a lock was busy until the timeout.

        Release them by release().
        """
        try:
            return self._enter(kept=False)
        except LockNotAcquired:
            return None

    @markcoroutinefunction
    def aacquire(self) -> Coroutine[Any, Any, tuple[Lease, ...] | None]:
        """As acquire(). The locks belong to the caller, even if another task awaits the result."""
        return self._aacquire(Caller(), [Awaited() for _ in self.names])

    async def _aacquire(self, caller: Caller, awaited: list[Awaited]) -> tuple[Lease, ...] | None:
        try:
            leases = await self._aenter(kept=False, caller=caller)
            for each, lease in zip(awaited, leases, strict=True):
                each.bring(lease)
        except LockNotAcquired:
            return None
        finally:
            for each in awaited:
                each.is_over = True
        return leases

    def release(self) -> None:
        """Release the locks that this thread or task acquired last."""
        self.__exit__(None, None, None)

    async def arelease(self) -> None:
        """As release(), in async code."""
        await self.__aexit__(None, None, None)

    def __enter__(self) -> tuple[Lease, ...]:
        return self._enter(kept=True)

    def _enter(self, *, kept: bool) -> tuple[Lease, ...]:
        wait = self._wait()
        with ExitStack() as stack:
            leases = {}
            for name, lock in self._locks.items():
                leases[name] = lock.enter(wait.left, kept=kept)
                stack.push(lock)
            stack.pop_all()
        return tuple(leases[name] for name in self.names)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stack = ExitStack()
        for lock in self._locks.values():
            stack.push(lock)
        stack.__exit__(kind, error, trace)

    async def __aenter__(self) -> tuple[Lease, ...]:
        return await self._aenter(kept=True)

    async def _aenter(self, *, kept: bool, caller: Caller | None = None) -> tuple[Lease, ...]:
        wait = self._wait()
        async with AsyncExitStack() as stack:
            leases = {}
            for name, lock in self._locks.items():
                leases[name] = await lock.aenter(wait.left, kept=kept, caller=caller)
                stack.push_async_exit(lock)
            stack.pop_all()
        return tuple(leases[name] for name in self.names)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stack = AsyncExitStack()
        for lock in self._locks.values():
            stack.push_async_exit(lock)
        await stack.__aexit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<LockSet {list(self._locks.values())!r}>"

    def _wait(self) -> Wait:
        """Begin the wait: all locks share one timeout."""
        return Wait(next(iter(self._locks.values())).default_timeout())


def lock_all(*names: str, **terms: Unpack[LockTerms]) -> LockSet:
    """Return an object that acquires all locks or none, within one timeout.

    ``with lock_all("account:1", "account:2") as leases:`` gives one lease for each name, in order.
    """
    return LockSet(names, Terms.of(terms))
