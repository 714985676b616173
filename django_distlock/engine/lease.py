"""Lease: what users call of one holding of a lock."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Never, TypeVar

from django_distlock import transactions
from django_distlock.exceptions import LockError
from django_distlock.ground.naming import printable

from . import fencing, handover
from .acquisition import check_asyncio
from .holding import Holding
from .steps import arun, asettled, run, settled
from .values import NOT_ENDED, State

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from django.db.models import Model, QuerySet

    from django_distlock.ground.holder import Holder

#: The argument and the result of claim().
_M = TypeVar("_M", bound="Model | QuerySet[Any]")


class Lease(Holding):
    """One holding of one lock, made by ``Lock.acquire()``: use it with ``with``, or release it.

    The methods with an *a* in front, such as ``aextend()``, do the same for asyncio.

    A lease is *held* until it is released, or lost: when its deadline passes by this machine's
    clock, or the server says that the lock is not ours any more. Lost is final.
    """

    # Attributes of Holding that dir() shows, too.
    template: str
    fencing_token: int | None
    name, using = Holding.name, Holding.using
    reason, deadline = Holding.reason, Holding.deadline
    held, check, checked_token = Holding.held, Holding.check, Holding.checked_token
    in_jeopardy, remaining = Holding.in_jeopardy, Holding.remaining

    # The facts.

    @property
    def ttl(self) -> float:
        """How many seconds the lease lives on the server unless it is extended."""
        return self.request.ttl

    @property
    def holder(self) -> Holder:
        """The description of the holder, for people."""
        return self.request.holder

    @property
    def place(self) -> int | None:
        """The number of the place, from 0 to one below the limit; None for a lock without a limit."""
        return self.request.place

    @property
    def shared(self) -> bool:
        """Whether other readers may hold the lock, too."""
        return self.request.shared

    @property
    def state(self) -> State:
        """The present state, by the clock of this machine."""
        return self.look()

    @property
    def lost(self) -> bool:
        """Whether the lease was lost. This compares the deadline with our clock, and sends no request."""
        return self.look() is State.LOST

    def on_lost(self, callback: Callable[[str], object]) -> None:
        """Call *callback* with the reason, once, when the lease is lost; at once if it is lost already.

        The thread that notices the loss, usually the one that renews leases, runs *callback*: be quick.
        """
        with self._mutex:
            if self._state in NOT_ENDED:
                self._on_lost = [*self._on_lost, callback]
                return
        if self._state is State.LOST:
            callback(self.reason)

    def off_lost(self, callback: Callable[[str], object]) -> None:
        """Undo on_lost(): do not call *callback*."""
        with self._mutex:
            self._on_lost = [each for each in self._on_lost if each != callback]

    # Release, extension and hand-over.

    def release(self) -> None:
        """Release the lock; if it was entered several times, only the last release frees it.

        Inside a transaction, the argument *release* of lock() says when others get the lock.

        LockNotHeld if it was released before, LockLost if the lease has ended, LockNotOwned if
        somebody else has the lock.
        """
        entries = self.entries
        try:
            self.give_back()
        except LockError:
            raise
        except BaseException:
            self.finish_leaving(entries)
            raise

    async def arelease(self) -> None:
        """Release the lock, at once; a cancelled call is completed in the background."""
        entries = self.entries
        try:
            await self.agive_back()
        except (LockError, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:
            self.finish_leaving(entries)
            raise

    def extend(self, ttl: float | timedelta | None = None) -> None:
        """Extend the lease to at least *ttl* seconds from now (by default its own ttl).

        A lease is never shortened, and later renewals use the same ttl. LockLost if the lock is not ours
        any more: extend() never acquires it again.
        """
        run(self.extending(ttl), lambda asked: settled(partial(self.backend.extend, asked)))

    async def aextend(self, ttl: float | timedelta | None = None) -> None:
        check_asyncio(self.using)
        aextend = self.backend.aextend
        await arun(self.extending(ttl), lambda asked: asettled(partial(aextend, asked)))

    def detach(self, ttl: float | timedelta | None = None) -> str:
        """Hand the lock to another process: return a text for its ``Lease.attach()``.

        The lease is extended a last time, to at least *ttl* seconds (its own by default), so that the text can
        reach the other process, which renews the lease with the lease's own ttl. The text is as secret as a
        password: anybody with it can hold the lock. In this process, the lease has ended.

        Call detach() after the commit: inside a transaction, it warns ReleasedBeforeCommit, with STRICT an error.
        """
        transactions.tell_of_release(self.name, strict=self.backend.strict)
        return handover.hand_over(self, ttl)

    async def adetach(self, ttl: float | timedelta | None = None) -> str:
        check_asyncio(self.using)
        aextend = self.backend.aextend
        return await arun(
            handover.detaching(self, ttl), lambda asked: asettled(partial(aextend, asked))
        )

    @classmethod
    def attach(cls, text: str, purpose: str = "") -> Lease:
        """Take over the lease that another process has detached. Each text works once.

        *purpose*: why the lock is held now, shown to people.

        LockLost if the lease has ended meanwhile, or was attached already.

        ``django.core.signing.BadSignature`` if detach() did not make *text*.
        """
        return run(
            handover.attaching(cls, text, purpose),
            lambda asked: settled(partial(asked.backend.take_over, asked.request, asked.former)),
        )

    @classmethod
    async def aattach(cls, text: str, purpose: str = "") -> Lease:
        async def take_over(asked: handover.TakeOver) -> bool:
            check_asyncio(asked.backend.alias)
            verb = partial(asked.backend.atake_over, asked.request, asked.former)
            return await asettled(verb)

        return await arun(handover.attaching(cls, text, purpose), take_over)

    # The protection of data.

    def guard(self, using: str = "default") -> None:
        """Keep later holders out until the caller's transaction on *using* has ended.

        The locks must be in that same database. Until the commit or rollback nobody else can acquire
        the lock, even if the lease expires. StaleFencingToken if somebody else has already acquired it.
        Call guard() in the outermost block: on PostgreSQL the protection ends with a savepoint that is rolled back.
        """
        self.check()
        self.backend.guard(self.request, self.checked_token(), using)

    def claim(self, target: _M) -> _M:
        """Raise the fence of fenced rows (FencedModel) to our token, *then* read them again.

        *target* is an instance or a queryset, and so is the result: the queryset returns only claimed
        rows, even if other rows match it by now.
        StaleFencingToken if a later holder has claimed a row; DoesNotExist of the model for an
        instance that was deleted.
        """
        self.check()
        claimed: _M = fencing.claim(self, target)
        return claimed

    def save(self, instance: Model, **kwargs: Any) -> None:
        """Save an *instance* that is new or claimed.

        StaleFencingToken if a later holder has claimed the row, or if a row with this key exists that
        this lease has not claimed.
        """
        self.check()
        fencing.save(self, instance, **kwargs)

    def update(self, queryset: QuerySet[Any], **values: Any) -> int:
        """Update claimed rows and return how many; StaleFencingToken if a row is not claimed by this lease any more."""
        self.check()
        return fencing.update(self, queryset, values)

    # ``with lease:`` and ``async with lease:`` release the lock.

    def __enter__(self) -> Lease:
        self.check()
        return self

    def __exit__(self, *error: Any) -> None:
        entries = self.entries
        try:
            self.leave(error[1])
        except LockError:
            raise
        except BaseException:
            self.finish_leaving(entries)
            raise

    async def __aenter__(self) -> Lease:
        self.check()
        return self

    async def __aexit__(self, *error: Any) -> None:
        entries = self.entries
        try:
            await self.aleave(error[1])
        except (LockError, asyncio.CancelledError, GeneratorExit):
            raise  # cancelled, the release goes on in the background
        except BaseException:
            self.finish_leaving(entries)
            raise

    def __dir__(self) -> list[str]:
        return [*{*dir(object), *vars(Lease), *Lease.__annotations__}]

    def __repr__(self) -> str:
        token = f" token={self.fencing_token}" if self.fencing_token is not None else ""
        return f"<Lease {printable(self.name)!r} using={self.using!r} {self._state.name.lower()}{token}>"

    def __reduce_ex__(self, protocol: object) -> Never:
        """Refuse copies and pickles: when a copy ends, it would release the lock of the original."""
        raise TypeError(
            "A Lease cannot be copied or pickled; hand it to another process by detach()."
        )
