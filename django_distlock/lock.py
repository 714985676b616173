"""lock(), try_lock(), distributed_lock() and Lock: for ``with``, ``async with`` and as decorators."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Never,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from asgiref.sync import markcoroutinefunction

from . import transactions
from .conf import DEFAULT_ALIAS, checked_limit, checked_ttl, flag, optional_seconds, seconds
from .decorators import Decorator, decorated
from .engine.acquisition import aacquire, acquire, check_asyncio
from .engine.cancelling import Cancelling
from .engine.holding import Awaited, all_held_here, held_here, note_held_here
from .engine.lease import Lease
from .engine.registry import registry
from .engine.steps import asettled, settled
from .engine.values import first_to_end
from .exceptions import (
    LockDeadlock,
    LockError,
    LockNotAcquired,
    LockNotHeld,
    NotSupported,
)
from .ground.caller import Caller, current_caller, forks
from .ground.holder import Holder
from .ground.naming import checked_name, printable
from .handler import locks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine
    from datetime import timedelta
    from types import FrameType
    from weakref import ref

    from django.db.models import Model

    from .backends.base import BaseLockBackend
    from .decorators import Policy, Skip, SkippingDecorator
    from .engine.values import Busy, Request

    Seconds = float | timedelta
    Note = Callable[[Lease], object]

_F = TypeVar("_F", bound="Callable[..., Any]")
_V = TypeVar("_V")
#: What to write instead of the keyword arguments of redis-py, django-redis, python-redis-lock, django-pglock, sherlock, pottery and others.
_ADVICE = {
    "use ttl": "expire expires expires_in expiry expire_time ex px lease lease_time lifetime lock_timeout lock_ttl "
    "auto_release_time max_age",
    "use timeout": "blocking_timeout wait wait_timeout wait_time max_wait acquire_timeout context_manager_timeout "
    "retry retries retry_count retry_times",
    "use timeout=0 to try once": "blocking block nowait no_wait non_blocking context_manager_blocking skip_locked",
    "use renew": "auto_renewal auto_renew auto_extend auto_refresh num_extensions keepalive keep_alive watchdog",
    "use max_hold": "lock_at_most_for max_lifetime",
    "use min_hold": "lock_at_least_for",
    "use using": "alias backend client connection database db redis cache masters",
    "use purpose": "reason description comment",
    'use release="on_commit"': "on_commit",
    "use transaction_lock()": "xact",
    "use on_busy of distributed_lock()": "side_effect policy graceful suppress_acquisition_exceptions",
    "use KEY_PREFIX in DISTLOCK": "namespace prefix key_prefix version",
    "use limit": "max_leases limits maximum max_concurrent concurrency permits slots count max_holders value",
    "leave it out: waiters are woken": "sleep sleep_time interval poll_interval retry_interval retry_delay",
    "leave it out: every lease has a secret owner": "id token owner identifier",
    "leave it out: fencing tokens refuse late writes": "lock_delay",
    "leave it out": "thread_local strict signal_expire raise_on_release_error raise_on_redis_errors ephemeral",
}


class LockTerms(TypedDict, total=False):
    """The keyword arguments of lock(); times are seconds or timedeltas.

    using: the alias in DISTLOCK.
    timeout: how long to wait; 0 tries once, None waits for ever. Default: TIMEOUT of the alias.
    ttl: how long the lease lives on the server unless extended. Default: TTL of the alias.
    limit: how many may hold the lock at once, from 1 to 1,000: each has a numbered place. None: one, without a number.
        A lock with a limit and one of the same name without a limit do not exclude each other.
        For distributed_lock(), *limit* may be a function, which is called with the arguments of the call.
    shared: hold the lock together with other readers; writers are excluded.
    reentrant: let the same thread or task enter again; True unless said otherwise.
    renew: extend the lease in the background at a third of its ttl; True unless said otherwise.
    max_hold: end renewal so that the lease lives no longer than this.
    min_hold: refuse the lock to others for so long after it was acquired, even if it is released earlier.
    free_on_error: do not apply min_hold if the block or function raised, or the view answered 400 or more.
    release: "auto": at the end of the block, or of the transaction that the lock was acquired in, if that
        is still open; "on_commit": after the end of all transactions open at the end of the block; "at_exit".
    cancel_when_lost: cancel the body of ``async with``, or the coroutine function, when the lease is lost:
        LockLost comes out. The rules are those of ``asyncio.timeout()``.
    purpose: why the lock is held, shown to people.
    """

    using: str
    timeout: Seconds | None
    ttl: Seconds
    limit: int | Callable[..., int] | None
    shared: bool
    reentrant: bool
    renew: bool
    max_hold: Seconds | None
    min_hold: Seconds
    free_on_error: bool
    release: Literal["auto", "at_exit", "on_commit"]
    cancel_when_lost: bool
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """LockTerms, checked. A timeout of -1 and a ttl of None come from the settings of the alias.

    *limit_for* returns the limit of one call of a decorated function.
    """

    using: str = DEFAULT_ALIAS
    timeout: float | None = -1
    ttl: float | None = None
    limit: int | None = None
    limit_for: Callable[..., object] | None = None
    shared: bool = False
    reentrant: bool = True
    renew: bool = True
    max_hold: float | None = None
    min_hold: float = 0.0
    free_on_error: bool = False
    release: str = "auto"
    cancel_when_lost: bool = False
    purpose: str = ""
    template: str = ""

    @classmethod
    def of(cls, wishes: LockTerms, call: str = "lock()") -> Terms:
        """Return *wishes*, checked; TypeError or ValueError names the wrong argument of *call*."""
        if not wishes:
            return _NO_WISHES
        known: dict[str, Any] = {**wishes}
        if call == "distributed_lock()" and callable(known.get("limit")):
            known["limit_for"] = known.pop("limit")
        for name, value in known.items():
            if name in _CHECKS:
                known[name] = _CHECKS[name](value, name)
        if known.get("release", "auto") not in ("auto", "at_exit", "on_commit"):
            msg = f'release must be "auto", "at_exit" or "on_commit", not {known["release"]!r}.'
            raise ValueError(msg)
        if unknown := [word for word in wishes if word not in _WORDS]:
            words = _WORDS | {"on_busy"} if call == "distributed_lock()" else _WORDS
            raise unknown_word(call, unknown[0], words)
        terms = cls(**known)
        if terms.shared and "limit" in wishes and wishes["limit"] is not None:
            raise NotSupported(terms.using, "shared=True with a limit", "A place has one holder.")
        return terms

    def check_against(self, backend: BaseLockBackend) -> None:
        """Raise NotSupported if *backend* cannot keep a lock on these terms."""
        if self.shared and not backend.supports_shared:
            raise NotSupported(backend.alias, "shared locks", backend.instead)
        if self.min_hold and not backend.supports_min_hold:
            raise NotSupported(backend.alias, "min_hold", backend.instead)

    def lock(self, name: str | Model) -> Lock:
        """Return the lock *name* on these terms."""
        lock = Lock(name)
        lock.terms = self
        return lock


class _OfAlias(str):
    """The default that help() shows for an argument with a default in the alias."""

    __slots__ = ()
    __repr__ = str.__str__


_OF_ALIAS = {"timeout": _OfAlias("<TIMEOUT of the alias>"), "ttl": _OfAlias("<TTL of the alias>")}
_NO_WISHES = Terms()
_WORDS = LockTerms.__optional_keys__


def lists_terms(function: _F) -> _F:
    """Show the arguments of LockTerms, with their defaults, in help(), instead of **terms."""
    signature = inspect.signature(function)
    # *extra only serves an error that says what to write instead.
    kept = [p for p in signature.parameters.values() if p.name not in {"extra", "terms"}]
    words = [
        inspect.Parameter(
            word,
            inspect.Parameter.KEYWORD_ONLY,
            default=_OF_ALIAS.get(word, getattr(_NO_WISHES, word)),
        )
        for word in LockTerms.__annotations__
    ]
    listed = signature.replace(parameters=[*kept, *words])
    function.__signature__ = listed  # type: ignore[attr-defined]  # inspect and help() look for it
    return function


_CHECKS: dict[str, Callable[[object, str], object]] = {
    "shared": flag,
    "reentrant": flag,
    "renew": flag,
    "free_on_error": flag,
    "cancel_when_lost": flag,
    "timeout": optional_seconds,
    "ttl": checked_ttl,
    "limit": lambda value, what: None if value is None else checked_limit(value, what),
    "max_hold": lambda value, what: None if value is None else checked_ttl(value, what),
    "min_hold": partial(seconds, zero=True),
}


def unknown_word(
    call: str, word: str, known: Collection[str], of_lock: Collection[str] = ()
) -> TypeError:
    """Return the error for *word*, an unknown argument of *call*; it says what to write instead.

    *known* are the arguments of *call*, *of_lock* those that only lock() has.
    """
    near = get_close_matches(word, {*known, *of_lock}, 1)
    advice = f"use {near[0]}" if near else f"it takes {', '.join(sorted(known))}"
    advice = next((to for to, words in _ADVICE.items() if word in words.split()), advice)
    if advice.removeprefix("use ").partition("=")[0] in of_lock:
        advice += " of lock()"
    return TypeError(f"{call} has no {word!r}; {advice}")


def _too_many(name: object, extra: tuple[object, ...]) -> TypeError:
    """Return the error for positional arguments after the *name* of a lock; it says what to write instead."""
    if isinstance(extra[0], str):
        return TypeError(
            f"A lock has one name; for several, write lock_all({name!r}, {extra[0]!r})."
        )
    return TypeError(f"A lock has one name; write {extra[0]!r} as timeout=... or ttl=...")


#: Modules whose frames come between a ``with`` and its lock.
_OF_WITH = {__name__, "contextlib", f"{__package__}.lock_set", f"{__package__}.objects"}


def nothing_to_cancel(what: str) -> ValueError:
    """Return the error for cancel_when_lost with *what*, where no body of a task could be cancelled."""
    return ValueError(
        f'cancel_when_lost=True is for "async with" and coroutine functions, not for {what}.'
    )


class EnteredWith(NamedTuple):
    """A ``with`` that has been entered. *frame* identifies its stack frame."""

    lease: Lease
    frame: object
    cancelling: Cancelling | None


def _frame_of_with() -> object:
    """Return a value that identifies the frame of the ``with`` that is entered or left now."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - nothing else tells one block from another
    while frame and frame.f_globals.get("__name__") in _OF_WITH:
        frame = frame.f_back
    # The code, too: if one function enters and another one leaves, the id may belong to a frame that has ended.
    return frame and (id(frame), frame.f_code)


class Lock:
    """A recipe for taking one lock: it opens no connection until it is used.

    One object may serve many threads and tasks; each acquisition makes a Lease of its own. A Lock has
    the methods of ``threading.RLock``: ``acquire()``, ``release()``, ``locked()``, ``with``.
    The methods with an *a* in front, such as ``alocked()``, do the same for asyncio.
    """

    @lists_terms
    def __init__(self, name: str | Model, *extra: Never, **terms: Unpack[LockTerms]) -> None:
        """*terms* are those of LockTerms."""
        # append(), remove() and copying are single steps: no thread or exception comes in between. Other threads
        # change the lists, so a search goes through a copy. _acquired has weak references: a lease that its caller
        # drops ends. _blocks keeps the leases of open ``with`` blocks alive.
        self._acquired: list[ref[Lease]] = []
        self._blocks: list[EnteredWith] = []
        if extra:
            raise _too_many(name, extra)
        self.name = checked_name(name)
        self.terms = Terms.of(terms)

    def __call__(self, function: _F, /) -> _F:
        """Return *function* with this lock around each call; see distributed_lock()."""
        return decorated(function, self.name, self.terms, None)

    # The protocol of threading.Lock.

    def acquire(
        self, blocking: bool = True, timeout: Seconds | None = -1, **unknown: Never
    ) -> Lease | None:
        """Return a lease, or None if the lock is still busy after *timeout* seconds.

        -1 means the timeout of the lock, None no limit; with *blocking* False it tries once.
        LockLost if the lease has ended before it can be returned.
        """
        try:
            patience = self._patience(timeout, blocking, unknown)
            return self.take(patience, self._remember, what="acquire()")
        except LockNotAcquired:
            return None

    @markcoroutinefunction
    def aacquire(
        self, blocking: bool = True, timeout: Seconds | None = -1, **unknown: Never
    ) -> Coroutine[Any, Any, Lease | None]:
        """Do what acquire() does, for asyncio. The lock belongs to the caller, even if another task awaits the result."""
        awaited = Awaited(self.key())
        work = self._aacquire(blocking, timeout, unknown, Caller(), awaited)
        awaited.note(self.terms.using, work)
        return work

    async def _aacquire(
        self,
        blocking: bool,
        timeout: Seconds | None,
        unknown: dict[str, Any],
        caller: Caller,
        awaited: Awaited,
    ) -> Lease | None:
        try:
            if self.terms.cancel_when_lost:
                raise nothing_to_cancel("acquire()")
            patience = self._patience(timeout, blocking, unknown)
            lease = await self.atake(patience, self._remember, caller, awaited.key)
            awaited.known = lease.ref
        except LockNotAcquired:
            return None
        finally:
            awaited.is_over = True
        return lease

    def release(self) -> None:
        """Release the lease that this thread or task acquired last; LockNotHeld if there is none."""
        acquired = None
        try:
            acquired = lease, _ = self.last_acquired(current_caller())
            self.forget(lease)
            lease.give_back()
        except LockError:
            raise
        except BaseException:
            with suppress(LockNotHeld):
                lease, entries = acquired or self.last_acquired(current_caller())
                lease.finish_leaving(entries)
            raise

    @markcoroutinefunction
    def arelease(self) -> Coroutine[Any, Any, None]:
        """Release the lease that the caller acquired last, even if another task awaits the result."""
        return self._arelease(Caller())

    async def _arelease(self, caller: Caller) -> None:
        # Not found and forgotten before: a task that is cancelled before its first step never comes here.
        lease, _ = self.last_acquired(caller)
        self.forget(lease)
        await lease.arelease()

    def locked(self) -> bool:
        """Return True if somebody holds the lock now, or min_hold reserves it; with a limit, if all places are taken.

        This can change at any moment.
        """
        return self._look() is not None

    async def alocked(self) -> bool:
        return await self._alook() is not None

    def holder(self) -> Holder | None:
        """Return the present holder of the lock; one of them, if *limit* or *shared* allow several.

        None if the lock is free or only reserved by min_hold, or if its server does not name the holder.
        This can change at any moment.
        """
        found = self._look()
        return None if found is None else found.holder

    async def aholder(self) -> Holder | None:
        found = await self._alook()
        return None if found is None else found.holder

    def _look(self) -> Busy | None:
        backend = self._backend()
        places = self._request(backend).holdings
        return first_to_end(settled(partial(backend.probe_all, places)))

    async def _alook(self) -> Busy | None:
        backend = self._backend()
        check_asyncio(backend.alias)
        places = self._request(backend).holdings
        return first_to_end(await asettled(partial(backend.aprobe_all, places)))

    def __enter__(self) -> Lease:
        return self.take(self.terms.timeout, self._note_entry)

    def __exit__(self, *error: Any, at_once: bool = False) -> None:
        block = entries = None
        try:
            block = self.innermost()
            entries = block.lease.entries
            self._blocks.remove(block)
            block.lease.leave(error[1], at_once=at_once)
        except LockError:
            raise
        except BaseException:
            self.finish_leaving(block, entries)
            raise

    async def __aenter__(self) -> Lease:
        return await self.aenter(self.terms.timeout)

    async def __aexit__(self, *error: Any) -> None:
        block = entries = lost = None
        try:
            block = self.innermost()
            entries = block.lease.entries
            self._blocks.remove(block)
            lost = block.cancelling and await block.cancelling.end(block.lease, *error)
            await block.lease.aleave(lost or error[1])
        except (LockError, asyncio.CancelledError, GeneratorExit):
            raise  # cancelled, the release goes on in the background
        except BaseException:
            self.finish_leaving(block, entries)
            raise
        if lost:
            raise lost from error[1]

    def __repr__(self) -> str:
        return f"<Lock {printable(self.name)!r} using={self.terms.using!r}>"

    def __reduce_ex__(self, protocol: object) -> Never:
        """Refuse copies and pickles: the leases of a Lock belong to this process."""
        raise TypeError(
            "A Lock cannot be copied or pickled; make another one by lock(), "
            "and hand its lease to another process by detach()."
        )

    # What the decorator and lock_all() build on.

    def enter(self, timeout: float | None) -> Lease:
        """Enter a block as ``with`` does, within *timeout* seconds."""
        return self.take(timeout, self._note_entry)

    async def aenter(
        self, timeout: float | None, *, caller: Caller | None = None, key: str = ""
    ) -> Lease:
        if not self.terms.cancel_when_lost:
            return await self.atake(timeout, self._note_entry, caller, key)
        check_asyncio(self.terms.using)
        cancelling = Cancelling()
        await cancelling.begin()
        note = partial(self._note_entry, cancelling=cancelling)
        return await self.atake(timeout, note, caller, key)

    async def end_cancelling(self) -> None:
        """Stop cancelling this task when the lease is lost: the task goes on after the body, to stream a response."""
        block = self.innermost()
        if block.cancelling is not None:
            await block.cancelling.end(block.lease, None, None, None)

    def leave_at_once(self, *error: Any) -> None:
        """Leave a block whose body has not begun: release the lease of enter() at once, also in a transaction."""
        self.innermost().lease.note_unused()
        self.__exit__(*error, at_once=True)  # type: ignore[call-arg]  # mypy drops names in special methods

    async def aleave_at_once(self, *error: Any) -> None:
        """Leave a block whose body has not begun."""
        self.innermost().lease.note_unused()
        await self.__aexit__(*error)

    def keep_acquired(self, lease: Lease) -> None:
        """Keep *lease*, which enter() returned, until release(): the end of a block does not release it."""
        self._remember(lease)
        self._blocks.remove(next(block for block in [*self._blocks] if block.lease is lease))

    def take(self, timeout: float | None, note: Note = id, *, what: str = "with") -> Lease:
        """Return a held lease, after a call of *note* with it; LockNotAcquired if the lock is busy for *timeout* seconds.

        -1: TIMEOUT of the alias. Errors name the call *what*. LockLost if the lease has ended since its grant, LockNotHeld if it was released.
        """
        if self.terms.cancel_when_lost:
            raise nothing_to_cancel(what)
        backend = self._backend()
        key = backend.key_of(self.name)
        entered = self._reentered(key)
        lease = entered or self._pending(backend, key)
        entries = lease.entries
        try:
            if entered is None:
                note_held_here(backend.alias, key, lease.ref)
                acquire(lease, timeout)
            else:
                lease.enter()
            note(lease)
        except BaseException:
            if lease.entries is not entries:  # an asynchronous exception may come after the grant
                lease.give_back_unused()
            raise
        return lease

    async def atake(
        self, timeout: float | None, note: Note = id, caller: Caller | None = None, key: str = ""
    ) -> Lease:
        """Do what take() does; the lease belongs to *caller*, if one is given, who got *key* from key()."""
        if self.terms.release == "on_commit":
            raise NotSupported(
                self.terms.using,
                'release="on_commit" in async code',
                "Transactions are not either.",
            )
        backend = self._backend()
        key = key or backend.key_of(self.name)
        entered = self._reentered(key)
        lease = entered or self._pending(backend, key)
        entries = lease.entries
        try:
            if entered is None:
                note_held_here(backend.alias, key, lease.ref)
                await aacquire(lease, timeout)
            else:
                lease.enter()
            if caller is not None:
                lease.give_to(caller)
            note(lease)
        except BaseException:
            if lease.entries is not entries:
                lease.give_back_unused()
            raise
        return lease

    def key(self) -> str:
        """Return the key of the lock for the calling code: each tenant may have its own key."""
        return self._backend().key_of(self.name)

    def default_timeout(self) -> float | None:
        """Return how long to wait when the call does not say."""
        timeout = self.terms.timeout
        return self._backend().timeout if timeout == -1 else timeout

    def _patience(
        self, timeout: Seconds | None, blocking: bool, unknown: dict[str, Any]
    ) -> float | None:
        for word in unknown:
            raise unknown_word(
                "Lock.acquire()", word, {"blocking", "timeout"}, _WORDS - {"timeout"}
            )
        if not blocking:
            if timeout != -1:
                raise ValueError("A timeout makes no sense with blocking=False.")
            return 0.0
        return self.terms.timeout if timeout == -1 else optional_seconds(timeout, "timeout")

    def _backend(self) -> BaseLockBackend:
        made = locks.made.get(self.terms.using)
        if made is None or os.getpid() != forks.pid or "django.test.utils" in sys.modules:
            made = locks[self.terms.using]
        return made

    def _request(self, backend: BaseLockBackend, key: str = "") -> Request:
        terms = self.terms
        ttl = backend.ttl if terms.ttl is None else terms.ttl
        if terms.max_hold is not None:
            ttl = min(ttl, terms.max_hold)
        request = backend.request(
            self.name,
            key,
            ttl=ttl,
            holder=Holder.current(terms.purpose),
            shared=terms.shared,
            min_hold=0.0 if terms.free_on_error else terms.min_hold,
        )
        return request if terms.limit is None else request.with_limit(terms.limit)

    def _pending(self, backend: BaseLockBackend, key: str) -> Lease:
        terms = self.terms
        terms.check_against(backend)
        request = self._request(backend, key)
        backend.check_ttl(request.ttl)
        lease = Lease(
            backend,
            request,
            renew=terms.renew,
            max_hold=terms.max_hold,
            release_when=terms.release,
            template=terms.template,
            hold_on_success=terms.min_hold if terms.free_on_error else 0.0,
        )
        if lease.began_in:
            transactions.tell_of_snapshots(self.name, lease.began_in, strict=backend.strict)
        return lease

    def _reentered(self, key: str) -> Lease | None:
        """Return the lease that this context holds already and can enter again; None if there is none."""
        lease: Lease
        for lease in held_here(self.terms.using, key):
            if not self._is_of(lease) or (not self.terms.reentrant and not lease.is_left):
                continue
            if lease.is_mine():
                if lease.shared and not self.terms.shared:
                    until = ", until its transaction ends," if lease.is_left else ","
                    raise LockDeadlock(
                        self.name, f"this caller holds it shared{until} and would wait for itself"
                    )
                if self.terms.release == "on_commit":
                    lease.release_when = "on_commit"
                return lease
        return None

    def _is_of(self, lease: Lease) -> bool:
        """Return True if *lease*, which has the same key, holds this lock: with a limit, one of its places."""
        if self.terms.limit is None or lease.place is None:
            return self.terms.limit is lease.place
        return lease.place < self.terms.limit

    def _remember(self, lease: Lease) -> None:
        for known in [*self._acquired]:
            if (old := known()) is None or not old.may_be_left:
                with suppress(ValueError):  # another thread may have been faster
                    self._acquired.remove(known)
        self._acquired.append(lease.ref)

    def last_acquired(self, caller: Caller) -> tuple[Lease, object]:
        """Return the lease that *caller* acquired last and has not released by release(), and its entries now.

        LockNotHeld if there is none.
        """
        for known in reversed([*self._acquired]):
            if (lease := known()) is not None and lease.is_of(caller):
                return lease, lease.entries
        raise LockNotHeld(self.name)

    def forget(self, lease: Lease) -> None:
        """Forget one acquisition of *lease*, which is released now."""
        self._acquired.remove(lease.ref)

    def _note_entry(self, lease: Lease, cancelling: Cancelling | None = None) -> None:
        self._blocks.append(EnteredWith(lease, _frame_of_with(), cancelling))
        if cancelling is not None:
            cancelling.watch(lease)

    def innermost(self) -> EnteredWith:
        """Return the block that is being left: the last one of the frame, or else of this caller, or else of all.

        The frame identifies the block of a generator, which another thread may close, perhaps after the lease
        was lost.
        """
        blocks = [*self._blocks]
        if len(blocks) > 1:
            frame = _frame_of_with()
            of_frame = [block for block in blocks if block.frame == frame]
            blocks = of_frame or [each for each in blocks if each.lease.is_of_caller()] or blocks
        if not blocks:
            raise LockNotHeld(self.name)
        return blocks[-1]

    def finish_leaving(self, block: EnteredWith | None, entries: object) -> None:
        """Leave *block* in the background, after an asynchronous exception; None: find the block, too."""
        block = block or self.innermost()
        if block in self._blocks:
            self._blocks.remove(block)
        block.lease.finish_leaving(block.lease.entries if entries is None else entries)

    def finish_blocks(self) -> None:
        """Leave all blocks in the background: an asynchronous exception ended them before __exit__() began."""
        for block in [*self._blocks]:
            self.finish_leaving(block, None)

    def __del__(self) -> None:
        """Let go of the leases of blocks that an asynchronous exception ended before __exit__() began."""
        # An asynchronous exception may have ended __init__() before it set _blocks.
        for block in self.__dict__.get("_blocks", ()):
            if len(block.lease.entries) == 1:
                registry.let_go(block.lease)


class TryLock:
    """The object that try_lock() returns, for one ``with`` or ``async with``; a second one raises RuntimeError."""

    def __init__(self, lock: Lock) -> None:
        # pop() is a single step: only one thread gets the lock.
        self._unused = [lock]
        self._entered: Lock | None = None

    def __enter__(self) -> Lease | None:
        lock = self._use()
        try:
            lease = lock.__enter__()
        except LockNotAcquired:
            return None
        self._entered = lock
        return lease

    def __exit__(self, *error: Any) -> None:
        if self._entered is not None:
            self._entered.__exit__(*error)

    async def __aenter__(self) -> Lease | None:
        lock = self._use()
        try:
            lease = await lock.__aenter__()
        except LockNotAcquired:
            return None
        self._entered = lock
        return lease

    async def __aexit__(self, *error: Any) -> None:
        if self._entered is not None:
            await self._entered.__aexit__(*error)

    def _use(self) -> Lock:
        try:
            return self._unused.pop()
        except IndexError:
            msg = "What try_lock() returns is for one block: call it for each."
            raise RuntimeError(msg) from None


@lists_terms
def lock(name: str | Model, *extra: Never, **terms: Unpack[LockTerms]) -> Lock:
    """Return the lock called *name*, or that of a saved model instance, for ``with``, ``async with`` or acquire().

    See LockTerms for *terms*; wrong ones raise TypeError or ValueError. No connection is opened yet.
    """
    return Lock(name, *extra, **terms)


@lists_terms
def try_lock(name: str | Model, *extra: Never, **terms: Unpack[LockTerms]) -> TryLock:
    """Return the lock called *name* for one ``with`` or ``async with``, which gets a lease, or None if the lock is busy.

    The block runs in both cases. Without a *timeout*, the lock is tried once. See lock() for the rest.
    """
    terms.setdefault("timeout", 0)
    return TryLock(lock(name, *extra, **terms))


def current_lease(name: str | Model | None = None) -> Lease | None:
    """Return the lease that the running thread or task acquired last, or that of *name*; None if it holds none.

    A decorated function gets its lease from it. LockDeadlock in a thread of ``sync_to_async()`` if the
    holder's event loop does not say whether the holder waits for this thread.
    """
    lease: Lease
    wanted = None if name is None else checked_name(name)
    for lease in reversed(all_held_here()):
        if (wanted is None or _is_called(lease, wanted)) and lease.is_mine():
            return lease
    return None


def _is_called(lease: Lease, name: str) -> bool:
    """Return True if *lease* holds the lock that *name* means for the caller, whose tenant may be another."""
    return lease.name == name and lease.request.lock_key == lease.backend.key_of(name)


@overload
def distributed_lock(function: _F, /) -> _F: ...
@overload
def distributed_lock(
    name: str | Callable[..., str] | None = None,
    /,
    *,
    on_busy: Skip[_V],
    **terms: Unpack[LockTerms],
) -> SkippingDecorator[_V]: ...
@overload
def distributed_lock(
    *,
    name: str | Callable[..., str],
    on_busy: Skip[_V],
    **terms: Unpack[LockTerms],
) -> SkippingDecorator[_V]: ...
@overload
def distributed_lock(
    name: str | Callable[..., str] | None = None,
    /,
    *,
    on_busy: Policy | None = None,
    **terms: Unpack[LockTerms],
) -> Decorator: ...
@overload
def distributed_lock(
    *,
    name: str | Callable[..., str],
    on_busy: Policy | None = None,
    **terms: Unpack[LockTerms],
) -> Decorator: ...
@lists_terms
def distributed_lock(
    function: Any = None,
    /,
    *extra: Any,
    name: Any = None,
    on_busy: Policy | None = None,
    **terms: Unpack[LockTerms],
) -> Any:
    """Run the decorated function only while it holds a lock.

    *name* may have fields for arguments of the call: ``"fee:{account_id}"``, ``"{account.pk}"``.
    *name* may also be a lambda, which is called with the arguments: ``lambda account: f"fee:{account.pk}"``;
    or any other function, as ``name=...``.
    Without *name*, the lock is named by the module and the qualified name of the function.
    If the lock is busy, *on_busy* is called with LockNotAcquired and the arguments of the call,
    and its result is returned (see skip(), respond() and retry()); without *on_busy*, LockNotAcquired is raised.
    See LockTerms for *terms*.

    The decorator works on functions, coroutine functions, views and generators. Generators and streaming
    responses hold the lock until they are exhausted or closed; the code that makes the parts of such a
    response can acquire the lock again, and gets the lease from ``current_lease()``. Under ATOMIC_REQUESTS,
    a view's transaction begins inside the lock and is committed before the release.
    """
    if extra:
        raise _too_many(function, extra)
    checked = Terms.of(terms, "distributed_lock()")
    if function is not None and name is not None:
        raise TypeError("distributed_lock() has one name, in front or as name=...")
    is_name = terms or on_busy or getattr(function, "__name__", "") == "<lambda>"
    if isinstance(function, (staticmethod, classmethod)) or (callable(function) and not is_name):
        return decorated(function, None, checked, on_busy)
    name = function if name is None else name
    if not (name is None or isinstance(name, str) or callable(name)):
        msg = f"A lock's name must be text or a function, not {name!r}; put it below @property and the like."
        raise TypeError(msg)
    return lambda function: decorated(function, name, checked, on_busy)
