"""Lease: the proof of one holding, and what its holder does with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.core import signing

from . import fencing, transactions
from .conf import checked_ttl
from .engine import clock
from .engine.background import background
from .engine.caller import Caller
from .engine.naming import printable
from .engine.settling import asettled, settled
from .engine.values import Release
from .exceptions import LockError, LockLost, LockNotOwned, NotSupported
from .holding import Holding, State
from .signals import announce, lock_extended, lock_released

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from datetime import timedelta
    from types import TracebackType

    from django.db.models import Model, QuerySet

    from .engine.values import Request
    from .holding import LeaseBackend

logger = logging.getLogger("django_distlock")
#: Salt of the text that detach() signs.
HANDOVER = "django_distlock.lease"
_T = TypeVar("_T")
_M = TypeVar("_M", bound="Model")

_BACKGROUND: set[asyncio.Task[Any]] = set()


class Lease(Holding):
    """One holding of one lock. It is made by ``Lock.acquire()``; use it with ``with`` or release it.

    It is *held* until it is released, or lost: when its deadline passes by this machine's
    clock, or the server says that the lock is not ours any more. Lost is final.
    """

    #: Set by lock.py, which knows the backends.
    _attach: ClassVar[Callable[[str], Lease]]
    _aattach: ClassVar[Callable[[str], Awaitable[Lease]]]

    def __init__(
        self,
        backend: LeaseBackend,
        request: Request,
        *,
        renew: bool = True,
        max_hold: float | None = None,
    ) -> None:
        """Made by backends: a pending lease, registered before anything is sent."""
        #: Whether it is released after the transaction that is open at its release has ended.
        self.on_commit = False
        self._began_in = transactions.open_blocks()
        super().__init__(backend, request, renew=renew, max_hold=max_hold)

    # What the holder does.

    def release(self) -> None:
        """Give the lock back; the inner end of a re-entry only counts.

        LockNotHeld: released before. LockLost: it had ended. LockNotOwned: somebody else has it.
        """
        if self.on_commit and self.is_entered and transactions.release_at_end(self):
            return
        if self.release_now():
            transactions.warn_if_before_commit(self, self._began_in, strict=self._backend.strict)

    def release_now(self) -> bool:
        """See release(), whatever transaction is open; return whether the lock is free now."""
        if self._leaves_reentry():
            return False
        with self._ending():
            outcome = settled(partial(self._backend.release, self.request))
        self._conclude(outcome)
        announce(lock_released, type(self._backend), name=self.name, using=self.using, lease=self)
        return True

    async def arelease(self) -> None:
        """See release(). A cancelled call is completed in the background."""
        if not _is_in_loop():
            self.release_later()  # its task was destroyed: there is nothing to wait in
        elif not self._leaves_reentry():
            await finished(self._arelease())

    def extend(self, ttl: float | timedelta | None = None) -> None:
        """Let it live for at least *ttl* seconds from now (by default its own ttl).

        Never shortens; later renewals use the same ttl. LockLost if the lock is not ours any
        more: it is never taken anew.
        """
        start, request = self._before_extend(ttl)
        kept = settled(partial(self._backend.extend, [request]))[0]
        self._after_extend(start, request, kept=kept)
        announce(lock_extended, type(self._backend), name=self.name, using=self.using, lease=self)

    async def aextend(self, ttl: float | timedelta | None = None) -> None:
        """See extend()."""
        start, request = self._before_extend(ttl)
        kept = (await asettled(partial(self._backend.aextend, [request])))[0]
        self._after_extend(start, request, kept=kept)
        announce(lock_extended, type(self._backend), name=self.name, using=self.using, lease=self)

    def detach(self, ttl: float | timedelta | None = None) -> str:
        """Hand the lock to another process: return a text for its ``Lease.attach()``.

        The lease is extended a last time, to *ttl* seconds (its own by default), for the text to
        reach the other process. The text is the right to hold the lock: keep it as secret as a
        password. Here, the lease is over.
        """
        self._check_detach()
        self.extend(ttl)
        return self._hand_over()

    async def adetach(self, ttl: float | timedelta | None = None) -> str:
        """See detach()."""
        self._check_detach()
        await self.aextend(ttl)
        return self._hand_over()

    @classmethod
    def attach(cls, text: str) -> Lease:
        """Take over what another process detached, under a new owner: a text serves once.

        LockLost if it has ended meanwhile, or is attached already.

        ``django.core.signing.BadSignature`` if *text* is not one that detach() made.
        """
        return cls._attach(text)

    @classmethod
    async def aattach(cls, text: str) -> Lease:
        """See attach()."""
        return await cls._aattach(text)

    # What it protects.

    def guard(self, using: str = "default") -> None:
        """In the caller's transaction on *using*: let no later holder in before its end.

        Works where the locks live in that same database. From here to commit or rollback the
        fencing token cannot rise, even if the lease runs out. StaleFencingToken if it has.
        Call it in the outermost block: on PostgreSQL it ends with a savepoint that is rolled back.
        """
        self.check()
        self._backend.guard(self.request, self.checked_token(), using)

    def claim(self, target: _M | QuerySet[_M]) -> Any:
        """Raise the fence of fenced rows (FencedModel) to our token, *then* read them fresh.

        Takes an instance or a queryset and gives the same kind of thing back.
        StaleFencingToken if a later holder has claimed a row; DoesNotExist of the model for an
        instance that was deleted.
        """
        self.check()
        return fencing.claim(self, target)

    def save(self, instance: Model, **kwargs: Any) -> None:
        """Save an *instance* that is new or claimed, with the arguments of its own method.

        StaleFencingToken once a later holder has claimed it, or if there is a row with its key that
        is not claimed.
        """
        self.check()
        fencing.save(self, instance, **kwargs)

    def update(self, queryset: QuerySet[Any], **values: Any) -> int:
        """Update claimed rows and return how many; StaleFencingToken if one is not ours any more."""
        self.check()
        return fencing.update(self, queryset, values)

    def checked_token(self) -> int:
        """Return the fencing token; NotSupported where the backend gives none."""
        if self.fencing_token is None:
            raise NotSupported(self.using, "fencing tokens", "Guard the data by another backend.")
        return self.fencing_token

    # ``with lease:`` and ``async with lease:`` release it.

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with unmasked(self, error):
            if self.is_entered:
                self.release()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with unmasked(self, error):
            if self.is_entered:
                await self.arelease()

    def release_later(self) -> None:
        """Release it in the background, if nobody has yet: for places that must not do I/O, finalizers too."""
        if self._entries:  # all else might take a lock that the finalizer's thread has
            if len(self._entries) == 1:
                self.caller = None  # it may end before
            submit = partial(background.submit, self.using, self._release_quietly)
            background.at(clock.lease_time(), submit)

    def _release_quietly(self) -> None:
        try:
            if self.is_entered:
                self.release_now()
        except LockError as problem:
            logger.warning("Leaving lock %s: %s", printable(self.name), printable(problem))

    def _leaves_reentry(self) -> bool:
        with self._mutex:
            if not self._entries or self._state not in (State.HELD, State.LOST):
                raise self._not_held()
            mine = [each for each in self._entries if each.is_current]
            self._entries.remove((mine or self._entries)[-1])
            if self._entries:
                if self.caller is not None:  # handed on: nobody's
                    self.caller = self._entries[0]
                return True
            # Whoever gives it back answers for it: a task that is cancelled meanwhile ends before.
            self.caller = Caller()
            return False

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Whatever stops a release half-way, the rest of it is done in the background."""
        self._lose_if_over()
        try:
            yield
        except BaseException:
            self._end(State.RELEASED)
            self._backend.abandon_later(self.request)
            raise

    def _conclude(self, outcome: Release) -> None:
        if outcome is not Release.RELEASED:
            self.lose(f"the server says that it is {outcome.value}")
        if self._end(State.RELEASED):
            return
        if outcome is Release.TAKEN:
            raise LockNotOwned(self.name)
        raise LockLost(self.name, self._reason)

    async def _arelease(self) -> None:
        self.caller = Caller()  # as above
        with self._ending():
            outcome = await asettled(partial(self._backend.arelease, self.request))
        self._conclude(outcome)
        announce(lock_released, type(self._backend), name=self.name, using=self.using, lease=self)

    def _before_extend(self, ttl: float | timedelta | None) -> tuple[float, Request]:
        self.check()
        if not self._backend.supports_extend:
            raise NotSupported(self.using, "extend()", "A lease ends with its ttl.")
        if ttl is not None:
            wanted = checked_ttl(ttl)
            self._backend.check_ttl(wanted)
            self.request = replace(self.request, ttl=wanted)
        request = self.renewal()
        if request is None:
            raise LockLost(self.name, "its max_hold is over")
        return clock.lease_time(), request

    def _after_extend(self, start: float, request: Request, *, kept: bool) -> None:
        if not kept:
            self.lose("the server says that it is not ours any more")
            raise LockLost(self.name, self._reason)
        self.confirm(start, request.ttl)

    def _check_detach(self) -> None:
        if not self._backend.supports_detach:
            raise NotSupported(self.using, "detach()", "The lock is bound to this process.")

    def _hand_over(self) -> str:
        if not self._end(State.DETACHED):
            raise LockLost(self.name, self._reason)
        return signing.dumps(self._handover(), salt=HANDOVER)

    def _handover(self) -> dict[str, Any]:
        request, ends = self.request, self._holds_until
        return {
            "renew": self.renews,
            "max_hold": None if ends is None else max(0.0, ends - clock.lease_time()),
            "postmark": clock.postmark(),
            "using": self.using,
            "name": request.name,
            "owner": request.owner,
            "ttl": request.ttl,
            "shared": request.shared,
            "min_hold": request.min_hold,
            "lock_delay": request.lock_delay,
            "token": self.fencing_token,
        }


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def finished(work: Coroutine[Any, Any, _T]) -> _T:
    """Await *work*; a cancelled caller leaves, and the work is completed all the same."""
    task = asyncio.ensure_future(work)
    _BACKGROUND.add(task)
    task.add_done_callback(_BACKGROUND.discard)
    return await asyncio.shield(task)


@contextlib.contextmanager
def unmasked(lease: Lease, error: BaseException | None) -> Iterator[None]:
    """Let a failed release not hide what the body raised: it goes up with a note."""
    try:
        yield
    except LockError as problem:
        if error is None:
            raise
        error.add_note(f"django_distlock: {problem}")
        logger.warning("Leaving lock %s: %s", printable(lease.name), printable(problem))
