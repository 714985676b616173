"""locked(): the lock of a model instance, and its row read again."""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from asgiref.sync import sync_to_async
from django.db.models import Model

from .engine import fencing
from .engine.values import digest
from .lock import Lock

if TYPE_CHECKING:
    from .engine.lease import Lease
    from .lock import LockTerms

_M = TypeVar("_M", bound=Model)
#: The attribute of an instance that tells under which lease it was read again.
_READ_UNDER = "_distlock_read_under"


class LockedObject(Generic[_M]):
    """The lock of an instance, for ``with`` and ``async with``, which give the instance."""

    def __init__(self, instance: _M, **terms: Unpack[LockTerms]) -> None:
        self._instance = instance
        self._lock = Lock(instance, **terms)

    def __enter__(self) -> _M:
        with ExitStack() as stack:
            lease = self._lock.__enter__()
            stack.push(self._lock.leave_at_once)  # without an instance, the block does not begin
            self._read_under(lease)
            stack.pop_all()
        return self._instance

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)

    async def __aenter__(self) -> _M:
        async with AsyncExitStack() as stack:
            lease = await stack.enter_async_context(self._lock)
            await sync_to_async(self._read_under)(lease)
            stack.pop_all()
        return self._instance

    async def __aexit__(self, *error: Any) -> None:
        await self._lock.__aexit__(*error)

    def __repr__(self) -> str:
        return f"<LockedObject {self._lock!r}>"

    def _read_under(self, lease: Lease) -> None:
        """Read the instance again, once under each lease: what an outer block has changed is kept."""
        holding = digest(lease.request.owner)
        # By getattr() and setattr(): a lazy instance, such as request.user, has another __dict__.
        if getattr(self._instance, _READ_UNDER, None) != holding:
            fencing.read_again(lease, self._instance)
            setattr(self._instance, _READ_UNDER, holding)
        lease.check()  # the row may have been waited for


def locked(instance: _M, **terms: Unpack[LockTerms]) -> LockedObject[_M]:
    """Return the lock of a saved model *instance*; ``with`` and ``async with`` read it again, and give it.

    The lock is called like ``lock(instance)``, "shop.account:7". A FencedModel is claimed: see Lease.claim().
    *terms* are those of lock(). ValueError if it is not saved; DoesNotExist of its model if it was deleted.
    """
    return LockedObject(instance, **terms)
