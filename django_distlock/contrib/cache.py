"""get_or_compute() and aget_or_compute(): a cached value that one caller computes while the others get the old one."""

from __future__ import annotations

import inspect
import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from asgiref.sync import iscoroutinefunction
from django.core.cache import DEFAULT_CACHE_ALIAS, caches

from django_distlock.conf import DEFAULT_ALIAS, seconds
from django_distlock.decorators import refuse_unfinished
from django_distlock.engine.acquisition import check_asyncio
from django_distlock.exceptions import LockBackendError, LockError, LockNotAcquired
from django_distlock.lock import Lock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from datetime import timedelta

    from django_distlock.engine.lease import Lease

    Seconds = float | timedelta

_T = TypeVar("_T")
_Copy = TypeVar("_Copy", bound=tuple[Any, float])

#: The last part of what is stored; it tells that from the values of other code.
_MARK: Final = "django_distlock"
_RIGHT = "return the value itself"


def get_or_compute(
    key: str,
    compute: Callable[[], _T],
    *,
    timeout: Seconds,
    stale: Seconds,
    cache: str = DEFAULT_CACHE_ALIAS,
    using: str = DEFAULT_ALIAS,
    wait: Seconds | None = -1,
    if_down: Literal["old", "compute"] = "old",
) -> _T:
    """Return the value of *key* in the *cache*; if it is older than *timeout* seconds, one caller computes it.

    Meanwhile the others get the old value, for up to *stale* more seconds. Without an old value they wait for
    *wait* seconds (-1: TIMEOUT of the alias *using*, None: no limit), then LockNotAcquired is raised.
    *compute* is called without arguments, under the lock; its exceptions are raised, and then nothing is stored.

    *if_down*: while the lock server fails, "old" returns the old value, and raises LockBackendError if there is
    none; with "compute", each caller computes. *key* is for this function alone: values that other code stores there
    count as missing; after ``cache.delete(key)``, the next caller computes.
    """
    if iscoroutinefunction(compute):
        raise TypeError("get_or_compute() calls a function; write await aget_or_compute(...).")
    entry = _Entry(key, timeout, stale, cache, using, wait, if_down)
    copy: tuple[_T, float] | None = _known(entry.cache.get(key))
    if fresh := _fresh(copy):
        return fresh[0]
    lock, lease = entry.lock(copy), None
    try:
        lease = lock.take(lock.terms.timeout)
    except (LockNotAcquired, LockBackendError) as problem:
        copy = copy or _known(entry.cache.get(key))  # stored meanwhile
        if old := entry.instead(copy, problem):
            return old[0]
    try:
        return _computed(entry, key, compute, lease)
    finally:
        if lease is not None:
            entries = lease.entries
            try:
                lease.give_back_now()  # the value is in the cache, whatever transaction is open
            except LockError as problem:
                lease.warn_of(problem)
            except BaseException:
                lease.finish_leaving(entries)
                raise


def _computed(entry: _Entry, key: str, compute: Callable[[], _T], lease: Lease | None) -> _T:
    """Return the new value, and store it unless *lease* was lost meanwhile."""
    latest: tuple[_T, float] | None = _known(entry.cache.get(key))
    if fresh := _fresh(latest):  # somebody has just computed it
        return fresh[0]
    value = compute()
    refuse_unfinished(value, "The function of get_or_compute", _RIGHT)
    if lease is None or lease.held:
        entry.cache.set(key, *entry.to_store(value))
    return value


async def aget_or_compute(
    key: str,
    compute: Callable[[], Awaitable[_T]],
    *,
    timeout: Seconds,
    stale: Seconds,
    cache: str = DEFAULT_CACHE_ALIAS,
    using: str = DEFAULT_ALIAS,
    wait: Seconds | None = -1,
    if_down: Literal["old", "compute"] = "old",
) -> _T:
    """Do what get_or_compute() does; *compute* is a coroutine function without arguments."""
    check_asyncio(using)
    entry = _Entry(key, timeout, stale, cache, using, wait, if_down)
    copy: tuple[_T, float] | None = _known(await entry.cache.aget(key))
    if fresh := _fresh(copy):
        return fresh[0]
    lock, lease = entry.lock(copy), None
    try:
        lease = await lock.atake(lock.terms.timeout)
    except (LockNotAcquired, LockBackendError) as problem:
        copy = copy or _known(await entry.cache.aget(key))
        if old := entry.instead(copy, problem):
            return old[0]
    try:
        latest: tuple[_T, float] | None = _known(await entry.cache.aget(key))
        if fresh := _fresh(latest):
            return fresh[0]
        computing = compute()
        if not inspect.isawaitable(computing):
            raise TypeError(
                "aget_or_compute() awaits a coroutine function; write get_or_compute(...)."
            )
        value = await computing
        refuse_unfinished(value, "The function of aget_or_compute", _RIGHT)
        if lease is None or lease.held:
            await entry.cache.aset(key, *entry.to_store(value))
        return value
    finally:
        if lease is not None:
            with noted(lease):
                await lease.arelease()


class _Entry:
    """The arguments of get_or_compute(), checked."""

    def __init__(  # noqa: PLR0917 - all of get_or_compute()
        self,
        key: str,
        timeout: Seconds,
        stale: Seconds,
        cache: str,
        using: str,
        wait: Seconds | None,
        if_down: str,
    ) -> None:
        self.cache = caches[cache]
        self._timeout, self._stale = seconds(timeout, "timeout"), seconds(stale, "stale", zero=True)
        if if_down not in {"old", "compute"}:
            raise ValueError(f'if_down must be "old" or "compute", not {if_down!r}.')
        self._computes_if_down = if_down == "compute"
        # With the prefix and version of the cache, so that each tenant has its own lock.
        self._name = f"cache:{cache}:{self.cache.make_key(key)}"
        self._terms: dict[str, Any] = {"using": using, "reentrant": False}
        if wait != -1:
            self._terms["timeout"] = wait

    def lock(self, copy: object) -> Lock:
        """Return the lock of the computation; with a *copy*, it is tried only once."""
        return Lock(self._name, **(self._terms | {"timeout": 0} if copy else self._terms))

    def instead(self, copy: _Copy | None, problem: LockError) -> _Copy | None:
        """Return the *copy* to use after *problem*, or None to compute without the lock; raise *problem* without a copy."""
        if self._computes_if_down and isinstance(problem, LockBackendError):
            return None
        if copy is None:
            raise problem
        return copy

    def to_store(self, value: object) -> tuple[tuple[object, float, str], float]:
        """Return what to store for *value*, and for how many seconds."""
        # Some caches cut fractions of a second.
        return (value, time.time() + self._timeout, _MARK), math.ceil(self._timeout + self._stale)


def _known(stored: object) -> tuple[Any, float] | None:
    """Return *stored* if to_store() made it; None for anything else, such as a value of ``cache.set()``."""
    match stored:  # some serializers turn the tuple into a list
        case (value, float() as until, str(mark)) if mark == _MARK:
            return value, until
    return None


def _fresh(copy: _Copy | None) -> _Copy | None:
    """Return *copy*, a value with the time.time() until which it is fresh; None if that time is over."""
    return copy if copy is not None and time.time() < copy[1] else None


@contextmanager
def noted(lease: Lease) -> Iterator[None]:
    """Log that *lease* was lost or could not be released, instead of raising: the work under the lock is done."""
    try:
        yield
    except LockError as problem:
        lease.warn_of(problem)
