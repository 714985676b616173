"""lock(), lock_all(), distributed_lock() and Lock: what stands after ``with`` and ``async with``, or decorates."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never, TypedDict, TypeVar, Unpack, overload

from asgiref.sync import markcoroutinefunction

from . import transactions
from .conf import DEFAULT_ALIAS, checked_ttl, optional_seconds, seconds
from .decorators import Decorator, decorated
from .engine.acquisition import aacquire, acquire
from .engine.caller import Caller, forks
from .engine.holder import Holder
from .engine.naming import checked_name, printable
from .engine.steps import asettled, settled
from .engine.waiting import Wait
from .exceptions import LockDeadlock, LockNotAcquired, LockNotHeld, NotSupported
from .handler import locks
from .lease import Awaited, Lease, held_here, note_held_here

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine
    from datetime import timedelta

    from .backends.base import BaseLockBackend
    from .decorators import Policy
    from .engine.values import Request
    from .lease import Known

    Seconds = float | timedelta
    Note = Callable[[Lease], object]

_F = TypeVar("_F", bound="Callable[..., Any]")
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
    "leave it out: waiters are woken": "sleep sleep_time interval poll_interval retry_interval retry_delay",
    "leave it out: every lease has a secret owner": "id token owner identifier",
    "leave it out": "thread_local strict signal_expire raise_on_release_error raise_on_redis_errors ephemeral",
}


class LockTerms(TypedDict, total=False):
    """The keyword arguments of lock(); times are seconds or timedeltas.

    using: the alias in DISTLOCK.
    timeout: how long to wait; 0 tries once, None waits for ever. Default: TIMEOUT of the alias.
    ttl: how long the lease lives on the server unless extended. Default: TTL of the alias.
    shared: hold it together with other readers; writers are excluded.
    reentrant: let the same thread or task enter again; True unless said otherwise.
    renew: extend the lease in the background at a third of its ttl; True unless said otherwise.
    max_hold: end renewal so that the lease lives no longer than this.
    min_hold: refuse the name to others for so long after it was acquired, even if it is released.
    free_on_error: do not apply min_hold if the block or function raised, or the view answered 400 or more.
    lock_delay: refuse it to others for so long after a lease ended by expiry, not by release.
    release: "auto": at the exit, or after the end of the transaction that it was acquired in, if that
        is still open; "on_commit": after the end of all transactions that are open at the exit; "at_exit".
    purpose: what it is held for, shown to people.
    """

    using: str
    timeout: Seconds | None
    ttl: Seconds
    shared: bool
    reentrant: bool
    renew: bool
    max_hold: Seconds | None
    min_hold: Seconds
    free_on_error: bool
    lock_delay: Seconds
    release: Literal["auto", "at_exit", "on_commit"]
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """LockTerms, checked. A timeout of -1 and a ttl of None come from the settings of the alias."""

    using: str = DEFAULT_ALIAS
    timeout: float | None = -1
    ttl: float | None = None
    shared: bool = False
    reentrant: bool = True
    renew: bool = True
    max_hold: float | None = None
    min_hold: float = 0.0
    free_on_error: bool = False
    lock_delay: float = 0.0
    release: str = "auto"
    purpose: str = ""
    template: str = ""

    @classmethod
    def of(cls, wishes: LockTerms, call: str = "lock()") -> Terms:
        """Return *wishes*, checked; TypeError or ValueError says which is wrong in *call*."""
        if not wishes:
            return _NO_WISHES
        known: dict[str, Any] = {**wishes}
        for name, check in _CHECKS.items():
            if name in known:
                known[name] = check(known[name], name)
        if known.get("release", "auto") not in {"auto", "at_exit", "on_commit"}:
            msg = f'release must be "auto", "at_exit" or "on_commit", not {known["release"]!r}.'
            raise ValueError(msg)
        try:
            return cls(**known)
        except TypeError:
            unknown = next(word for word in wishes if word not in _WORDS)
            words = _WORDS | {"on_busy"} if call == "distributed_lock()" else _WORDS
            raise unknown_word(call, unknown, words) from None

    def lock(self, name: str) -> Lock:
        """Return the lock *name* on these terms."""
        lock = Lock(name)
        lock.terms = self
        return lock


_NO_WISHES = Terms()
_WORDS = LockTerms.__optional_keys__


_CHECKS: dict[str, Callable[[object, str], float | None]] = {
    "timeout": optional_seconds,
    "ttl": checked_ttl,
    "max_hold": lambda value, what: None if value is None else seconds(value, what),
    "min_hold": partial(seconds, zero=True),
    "lock_delay": partial(seconds, zero=True),
}


def unknown_word(
    call: str, word: str, known: Collection[str], of_lock: Collection[str] = ()
) -> TypeError:
    """Return the error for *word*, which *call* does not have, with what to write instead.

    *known* are the words that it has, *of_lock* those that only lock() has.
    """
    near = get_close_matches(word, {*known, *of_lock}, 1)
    advice = f"use {near[0]}" if near else f"it takes {', '.join(sorted(known))}"
    advice = next((to for to, words in _ADVICE.items() if word in words.split()), advice)
    if advice.removeprefix("use ").partition("=")[0] in of_lock:
        advice += " of lock()"
    return TypeError(f"{call} has no {word!r}; {advice}")


class Lock:
    """A recipe for taking one lock: it opens no connection until it is used.

    One object may serve many threads and tasks; each acquisition makes a Lease of its own. It keeps
    to the protocol of ``threading.RLock``: ``acquire()``, ``release()``, ``locked()``, ``with``.
    Methods that begin with an *a* more, such as ``alocked()``, are awaited and do the same.
    """

    def __init__(self, name: str, **terms: Unpack[LockTerms]) -> None:
        """*terms* are those of LockTerms."""
        self.name = checked_name(name)
        self.terms = Terms.of(terms)
        self._mutex = threading.Lock()
        # Whoever acquires must keep the lease, or live; what a ``with`` stands in is kept here.
        self._acquired: list[Known] = []
        self._entered: list[Known] = []

    def __call__(self, function: _F, /) -> _F:
        """Return *function* with this lock around each call; see distributed_lock()."""
        return decorated(function, self.name, self.terms, None)

    # The protocol of threading.Lock.

    def acquire(
        self, blocking: bool = True, timeout: Seconds | None = -1, **unknown: Never
    ) -> Lease | None:
        """Return a lease, or None if the lock is still busy after *timeout* seconds.

        -1 means the timeout of the lock, None no limit; with *blocking* False it tries once.
        """
        try:
            return self.take(self._patience(timeout, blocking, unknown), self._remember)
        except LockNotAcquired:
            return None

    @markcoroutinefunction
    def aacquire(
        self, blocking: bool = True, timeout: Seconds | None = -1, **unknown: Never
    ) -> Coroutine[Any, Any, Lease | None]:
        """Return what acquire() does, awaited. The lock belongs to the caller, even if another task awaits the result."""
        return self._aacquire(blocking, timeout, unknown, Caller(), Awaited())

    async def _aacquire(
        self,
        blocking: bool,
        timeout: Seconds | None,
        unknown: dict[str, Any],
        caller: Caller,
        awaited: Awaited,
    ) -> Lease | None:
        try:
            patience = self._patience(timeout, blocking, unknown)
            lease = await self.atake(patience, self._remember, caller)
            awaited.known = lease.ref
        except LockNotAcquired:
            return None
        finally:
            awaited.is_over = True
        return lease

    def release(self) -> None:
        """Release the lease that this thread or task acquired last; LockNotHeld if there is none."""
        self._recall().release()

    @markcoroutinefunction
    def arelease(self) -> Coroutine[Any, Any, None]:
        """Release what the caller acquired last, even if another task awaits it."""
        return self._recall().arelease()

    def locked(self) -> bool:
        """Return whether anybody holds the lock now; this can change at any moment."""
        backend = self._backend()
        return settled(partial(backend.probe, self._request(backend))) is not None

    async def alocked(self) -> bool:
        backend = self._backend()
        return await asettled(partial(backend.aprobe, self._request(backend))) is not None

    def __enter__(self) -> Lease:
        return self.take(self.terms.timeout, self._note_entry)

    def __exit__(self, *error: Any) -> None:
        self._leave().leave(error[1])

    async def __aenter__(self) -> Lease:
        return await self.atake(self.terms.timeout, self._note_entry)

    async def __aexit__(self, *error: Any) -> None:
        await self._leave().aleave(error[1])

    def __repr__(self) -> str:
        return f"<Lock {printable(self.name)!r} using={self.terms.using!r}>"

    # What the decorator and lock_all() build on.

    def enter(self, timeout: float | None, *, kept: bool = True) -> Lease:
        """Do what ``with`` does at its begin, within *timeout* seconds; *kept*: keep the lease alive."""
        return self.take(timeout, partial(self._note_entry, kept=kept))

    async def aenter(
        self, timeout: float | None, *, kept: bool = True, caller: Caller | None = None
    ) -> Lease:
        return await self.atake(timeout, partial(self._note_entry, kept=kept), caller)

    def take(self, timeout: float | None, note: Note = id) -> Lease:
        """Return a lease, once *note* has it; LockNotAcquired if somebody else has it for *timeout* seconds.

        -1 stands for the timeout of the alias.
        """
        backend = self._backend()
        entered = self._reentered()
        lease = entered or self._pending(backend)
        try:
            if entered is None:
                acquire(lease, timeout)
                note_held_here(lease)
            note(lease)
        except BaseException:
            lease.release_later()  # what came from outside may have come after the grant
            raise
        return lease

    async def atake(
        self, timeout: float | None, note: Note = id, caller: Caller | None = None
    ) -> Lease:
        """Do what take() does, for *caller* if there is one: the lease is that one's."""
        if self.terms.release == "on_commit":
            raise NotSupported(
                self.terms.using,
                'release="on_commit" in async code',
                "Transactions are not either.",
            )
        backend = self._backend()
        entered = self._reentered()
        lease = entered or self._pending(backend)
        try:
            if entered is None:
                await aacquire(lease, timeout)
                note_held_here(lease)
            if caller is not None:
                lease.give_to(caller)
            note(lease)
        except BaseException:
            lease.release_later()  # as above
            raise
        return lease

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

    def _request(self, backend: BaseLockBackend) -> Request:
        terms = self.terms
        ttl = backend.ttl if terms.ttl is None else terms.ttl
        if terms.max_hold is not None:
            ttl = min(ttl, terms.max_hold)
        return backend.request(
            self.name,
            ttl=ttl,
            holder=Holder.current(terms.purpose),
            shared=terms.shared,
            min_hold=0.0 if terms.free_on_error else terms.min_hold,
            lock_delay=terms.lock_delay,
        )

    def _pending(self, backend: BaseLockBackend) -> Lease:
        terms = self.terms
        if terms.shared and not backend.supports_shared:
            raise NotSupported(backend.alias, "shared locks")
        if terms.min_hold or terms.lock_delay:
            if not backend.supports_delays:
                raise NotSupported(backend.alias, "min_hold and lock_delay")
            if terms.lock_delay > (longest := backend.longest_lock_delay):
                msg = f"DISTLOCK[{backend.alias!r}]: lock_delay must be at most {longest:g} seconds, not {terms.lock_delay!r}."
                raise ValueError(msg)
        request = self._request(backend)
        backend.check_ttl(request.ttl)
        lease = Lease(backend, request, renew=terms.renew, max_hold=terms.max_hold)
        lease.release_when, lease.template = terms.release, terms.template
        if terms.free_on_error:
            lease.hold_on_success = terms.min_hold
        if lease.began_in:
            transactions.tell_of_snapshots(self.name, lease.began_in, strict=backend.strict)
        return lease

    def _reentered(self) -> Lease | None:
        """Return the lease that this context holds already, entered once more."""
        for lease in held_here():
            if not self.terms.reentrant and not lease.is_left:
                continue
            if lease.name == self.name and lease.using == self.terms.using and lease.is_mine():
                if lease.shared and not self.terms.shared:
                    until = ", until its transaction ends," if lease.is_left else ","
                    raise LockDeadlock(
                        self.name, f"this caller holds it shared{until} and would wait for itself"
                    )
                if self.terms.release == "on_commit":
                    lease.release_when = "on_commit"
                return lease.enter()
        return None

    def _remember(self, lease: Lease) -> None:
        with self._mutex:
            self._acquired = [
                known
                for known in self._acquired
                if (old := known()) and old.is_entered and not old.is_left
            ]
            self._acquired.append(lease.ref)

    def _note_entry(self, lease: Lease, *, kept: bool = True) -> None:
        with self._mutex:
            self._entered.append((lambda: lease) if kept else lease.ref)

    def _recall(self) -> Lease:
        with self._mutex:
            return self._taken_out(self._acquired)

    def _leave(self) -> Lease:
        """Return what this caller entered last; a generator may be closed by another thread than its own."""
        with self._mutex:
            if len(self._entered) == 1 and (only := self._entered[0]()) is not None:
                self._entered.clear()
                return only
            return self._taken_out(self._entered, or_of_others=True)

    def _taken_out(self, known: list[Known], *, or_of_others: bool = False) -> Lease:
        alive = [(each, lease) for each in known if (lease := each()) is not None]
        mine = [place for place, (_, lease) in enumerate(alive) if lease.is_of_caller()]
        if not mine and not (alive and or_of_others):
            raise LockNotHeld(self.name)
        _, found = alive.pop(mine[-1] if mine else -1)
        known[:] = [each for each, _ in alive]
        return found


def lock(name: str, **terms: Unpack[LockTerms]) -> Lock:
    """Return the lock called *name*, for ``with``, ``async with`` or acquire().

    See LockTerms for *terms*. TypeError or ValueError for wrong ones; nothing is opened yet.
    """
    return Lock(name, **terms)


def current_lease(name: str | None = None) -> Lease | None:
    """Return the lease that the running thread or task holds: the last that it acquired, or that of *name*.

    A decorated function gets its lease from it: ``current_lease().claim(account)``.
    """
    wanted = None if name is None else checked_name(name)
    for lease in reversed(held_here()):
        if lease.is_mine() and wanted in (None, lease.name):
            return lease
    return None


@overload
def distributed_lock(function: _F, /) -> _F: ...
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
def distributed_lock(
    function: Any = None,
    /,
    *,
    name: Any = None,
    on_busy: Policy | None = None,
    **terms: Unpack[LockTerms],
) -> Any:
    """Run the decorated function only while it holds a lock.

    *name* may have fields for arguments of the call: ``"fee:{account_id}"``, ``"{account.pk}"``.
    It may also be a lambda, which is called with the arguments: ``lambda account: f"fee:{account.pk}"``;
    or any other function, as ``name=...``.
    Without *name*, the lock has the module and the qualified name of the function.
    If the lock is busy, *on_busy* is called with LockNotAcquired and the arguments of the call,
    and its result is returned (see skip(), respond() and retry()); without *on_busy*, LockNotAcquired is raised.
    See LockTerms for *terms*.

    Works on functions, coroutine functions, views and generators. Generators and streaming
    responses hold the lock until they are exhausted or closed. Under ATOMIC_REQUESTS, a view's
    transaction begins inside the lock and is committed before the release.
    """
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


class LockSet:
    """Several locks, acquired in the order of their names, so two sets never deadlock."""

    def __init__(self, names: tuple[str, ...], terms: Terms) -> None:
        """Raise ValueError if there are no *names*."""
        if not names:
            raise ValueError("lock_all() takes at least one name.")
        named = [terms.lock(name) for name in names]
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
                each.known = lease.ref
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
        wait = Wait(self._timeout())
        with ExitStack() as stack:
            leases = {}
            for name, lock in self._locks.items():
                leases[name] = lock.enter(wait.left, kept=kept)
                stack.push(lock)
            stack.pop_all()
        return tuple(leases[name] for name in self.names)

    def __exit__(self, *error: Any) -> None:
        stack = ExitStack()
        for lock in self._locks.values():
            stack.push(lock)
        stack.__exit__(*error)

    async def __aenter__(self) -> tuple[Lease, ...]:
        return await self._aenter(kept=True)

    async def _aenter(self, *, kept: bool, caller: Caller | None = None) -> tuple[Lease, ...]:
        wait = Wait(self._timeout())
        async with AsyncExitStack() as stack:
            leases = {}
            for name, lock in self._locks.items():
                leases[name] = await lock.aenter(wait.left, kept=kept, caller=caller)
                stack.push_async_exit(lock)
            stack.pop_all()
        return tuple(leases[name] for name in self.names)

    async def __aexit__(self, *error: Any) -> None:
        stack = AsyncExitStack()
        for lock in self._locks.values():
            stack.push_async_exit(lock)
        await stack.__aexit__(*error)

    def __repr__(self) -> str:
        return f"<LockSet {list(self._locks.values())!r}>"

    def _timeout(self) -> float | None:
        return next(iter(self._locks.values())).default_timeout()


def lock_all(*names: str, **terms: Unpack[LockTerms]) -> LockSet:
    """Return an object that acquires all locks or none, within one timeout.

    ``with lock_all("account:1", "account:2") as leases:`` gives one lease for each name, in order.
    """
    return LockSet(names, Terms.of(terms, "lock_all()"))
