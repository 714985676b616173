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

#: What claim() is given, and returns.
_M = TypeVar("_M", bound="Model | QuerySet[Any]")


class Lease(Holding):
    """One holding of one lock. It is made by ``Lock.acquire()``; use it with ``with`` or release it.

    Methods that begin with an *a* more, such as ``aextend()``, are awaited and do the same.

    It is *held* until it is released, or lost: when its deadline passes by this machine's
    clock, or the server says that the lock is not ours any more. Lost is final.
    """

    # What Holding has, and dir() is to show.
    template: str
    fencing_token: int | None
    name, using = Holding.name, Holding.using
    reason, deadline = Holding.reason, Holding.deadline
    held, check, checked_token = Holding.held, Holding.check, Holding.checked_token
    in_jeopardy, remaining = Holding.in_jeopardy, Holding.remaining

    # What it is.

    @property
    def ttl(self) -> float:
        """How many seconds it lives on the server unless it is extended."""
        return self.request.ttl

    @property
    def holder(self) -> Holder:
        """The holder, as it is shown to people."""
        return self.request.holder

    @property
    def place(self) -> int | None:
        """The number of the place that it has, from 0 to below its limit; None for a lock without a limit."""
        return self.request.place

    @property
    def shared(self) -> bool:
        """Whether other readers may hold it too."""
        return self.request.shared

    @property
    def state(self) -> State:
        """Its state now, by the clock of this machine."""
        return self.look()

    @property
    def lost(self) -> bool:
        """Whether it was lost. This compares the deadline with our clock, and sends no request."""
        return self.look() is State.LOST

    def on_lost(self, callback: Callable[[str], object]) -> None:
        """Call *callback* with the reason, once, when the lease is lost; at once if it is already.

        It is called in the thread that notices the loss, mostly the one that renews leases: be quick.
        """
        with self._mutex:
            if self._state in NOT_ENDED:
                self._on_lost = [*self._on_lost, callback]
                return
        if self._state is State.LOST:
            callback(self.reason)

    def off_lost(self, callback: Callable[[str], object]) -> None:
        """Do not call *callback* any more, which was given to on_lost()."""
        with self._mutex:
            self._on_lost = [each for each in self._on_lost if each != callback]

    # What its holder does.

    def release(self) -> None:
        """Release the lock; if it was entered several times, only the last release does.

        Inside a transaction, the *release* of lock() says when others get it.

        LockNotHeld if it was released before, LockLost if the lease has ended, LockNotOwned if
        somebody else has the lock.
        """
        self.give_back()

    async def arelease(self) -> None:
        """Release it, at once; a cancelled call is completed in the background."""
        await self.agive_back()

    def extend(self, ttl: float | timedelta | None = None) -> None:
        """Extend it to at least *ttl* seconds from now (by default its own ttl).

        It is never shortened, and later renewals use the same ttl. LockLost if the lock is not ours
        any more: it is never acquired again.
        """
        run(self.extending(ttl), lambda asked: settled(partial(self.backend.extend, asked)))

    async def aextend(self, ttl: float | timedelta | None = None) -> None:
        check_asyncio(self.using)
        aextend = self.backend.aextend
        await arun(self.extending(ttl), lambda asked: asettled(partial(aextend, asked)))

    def detach(self, ttl: float | timedelta | None = None) -> str:
        """Hand the lock to another process: return a text for its ``Lease.attach()``.

        The lease is extended a last time, to *ttl* seconds (its own by default), for the text to
        reach the other process, which renews it with its own ttl. Whoever has the text can hold the
        lock: keep it as secret as a password. In this process, the lease has ended.

        Inside a transaction, it warns ReleasedBeforeCommit, or raises it with STRICT: call it after the commit.
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

        *purpose*: what it is held for now, shown to people.

        LockLost if the lease has ended meanwhile, or was attached already.

        ``django.core.signing.BadSignature`` if *text* is not one that detach() made.
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

    # What it protects.

    def guard(self, using: str = "default") -> None:
        """Keep later holders out until the caller's transaction on *using* has ended.

        The locks must be in that same database. Until the commit or rollback nobody else can acquire
        the lock, even if the lease expires. StaleFencingToken if somebody else already has.
        Call it in the outermost block: on PostgreSQL it ends with a savepoint that is rolled back.
        """
        self.check()
        self.backend.guard(self.request, self.checked_token(), using)

    def claim(self, target: _M) -> _M:
        """Raise the fence of fenced rows (FencedModel) to our token, *then* read them again.

        *target* is an instance or a queryset, and so is the result: a queryset gives only rows that
        were claimed, even if others match it by now.
        StaleFencingToken if a later holder has claimed a row; DoesNotExist of the model for an
        instance that was deleted.
        """
        self.check()
        claimed: _M = fencing.claim(self, target)
        return claimed

    def save(self, instance: Model, **kwargs: Any) -> None:
        """Save an *instance* that is new or claimed.

        StaleFencingToken if a later holder has claimed it, or if there is a row with its key that
        is not claimed.
        """
        self.check()
        fencing.save(self, instance, **kwargs)

    def update(self, queryset: QuerySet[Any], **values: Any) -> int:
        """Update claimed rows and return how many; StaleFencingToken if one is not ours any more."""
        self.check()
        return fencing.update(self, queryset, values)

    # ``with lease:`` and ``async with lease:`` release it.

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
