"""locked(): the lock of a model instance, and its row read again."""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from asgiref.sync import sync_to_async
from django.db.models import Model

from .engine import fencing
from .engine.values import Read
from .lock import Lock

if TYPE_CHECKING:
    from .engine.lease import Lease
    from .lock import LockTerms

_M = TypeVar("_M", bound=Model)


class LockedObject(Generic[_M]):
    """The lock of an instance; ``with`` and ``async with`` reload the instance and return it."""

    def __init__(self, instance: _M, **terms: Unpack[LockTerms]) -> None:
        self._instance = instance
        self._lock = Lock(instance, **terms)

    def __enter__(self) -> _M:
        with ExitStack() as stack:
            lease = self._lock.__enter__()
            stack.push(self._lock.leave_at_once)  # if the reload fails, the block does not begin
            self._read_under(lease)
            stack.pop_all()
        return self._instance

    def __exit__(self, *error: Any) -> None:
        try:
            self._end_read()
        finally:
            self._lock.__exit__(*error)

    async def __aenter__(self) -> _M:
        async with AsyncExitStack() as stack:
            lease = await self._lock.__aenter__()
            stack.push_async_exit(self._lock.aleave_at_once)
            await sync_to_async(self._read_under)(lease)
            stack.pop_all()
        return self._instance

    async def __aexit__(self, *error: Any) -> None:
        try:
            self._end_read()
        finally:
            await self._lock.__aexit__(*error)

    def __repr__(self) -> str:
        return f"<LockedObject {self._lock!r}>"

    def _read_under(self, lease: Lease) -> None:
        """Reload the instance, unless a block around this one has: changes made there are kept."""
        # The state identifies the instance, also through a lazy object such as request.user.
        state = self._instance._state  # noqa: SLF001 - documented
        using = fencing.written_database(self._instance)
        outer = [read for read in lease.reads if read.using == using]
        if not outer:
            fencing.read_again(lease, self._instance)
        elif outer[0].state is not state:
            raise ValueError(
                f"A block around this one has locked another instance of {lease.name!r}, whose save() "
                "would overwrite what is saved here: pass that instance on."
            )
        lease.check()  # the reload may have waited for the row
        if not outer:
            lease.reads = [*lease.reads, Read(using, state, len(lease.entries))]

    def _end_read(self) -> None:
        """Forget the reload at the end of the block that made it, so that the next block reloads again."""
        lease = self._lock.innermost().lease
        lease.reads = [read for read in lease.reads if read.depth < len(lease.entries)]


def locked(instance: _M, **terms: Unpack[LockTerms]) -> LockedObject[_M]:
    """Return the lock of a saved model *instance*; ``with`` and ``async with`` reload the instance and return it.

    The lock has the name of ``lock(instance)``, "shop.account:7". A FencedModel is claimed: see Lease.claim().
    *terms* are those of lock(). ValueError for an unsaved instance; the model's DoesNotExist for a deleted one.
    """
    if not isinstance(instance, Model):
        what = type(instance).__name__
        msg = f"locked() takes a saved model instance, not {what}. For a lock by its name, write lock(...)."
        raise TypeError(msg)
    return LockedObject(instance, **terms)
