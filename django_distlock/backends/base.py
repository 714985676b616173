"""The base class of backends: the verbs that each backend writes, and async twins that run them in threads."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from secrets import token_hex
from typing import Any, ClassVar, Protocol, Self, TypeVar

from django.core.checks import CheckMessage, Error

from django_distlock.conf import BackendSettings, NoOptions, checked_options
from django_distlock.engine.announcements import send
from django_distlock.engine.background import VerbThreads
from django_distlock.engine.bells import TaskBell, ThreadBell
from django_distlock.engine.leftovers import Leftovers, until_done
from django_distlock.engine.local_queue import LocalQueue
from django_distlock.engine.registry import registry
from django_distlock.engine.steps import Steps, settled
from django_distlock.engine.values import (
    Busy,
    Grant,
    Held,
    Purged,
    Release,
    Request,
    Secret,
    State,
    digest,
)
from django_distlock.engine.waiting import Wait, Waiting
from django_distlock.exceptions import (
    InvalidLockBackend,
    KeyFunctionFailed,
    LockBackendError,
    LockOutcomeUnknown,
    NotSupported,
)
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import log_fields, printable, server_key, title_of
from django_distlock.signals import lock_forced

logger = logging.getLogger("django_distlock")

#: By alias: locks in the memory of this process, kept here so that a change of settings does not drop held locks.
memory: dict[str, Any] = {}
#: How many free locks an alias lists: a table may have a row for each of a million names.
MOST_FREE = 1000
#: How many keys a backend caches.
KEYS = 1024
_T = TypeVar("_T")


class BaseLockBackend(ABC):
    """One alias of DISTLOCK in this process, shared by all its threads and tasks.

    A backend implements the verbs. Each verb is one round trip if the server can, does not wait for a busy lock, and raises
    LockBackendError (LockOutcomeUnknown if the request may have arrived). The verbs with an *a* in front are
    for asyncio; this class runs the other verbs in threads for them.
    """

    #: The class of the OPTIONS: a frozen dataclass with one field for each option.
    options_class: ClassVar[type] = NoOptions
    #: The features; in some backends they depend on the server or the OPTIONS.
    supports_fencing: bool = False
    supports_shared: bool = False
    supports_fair: ClassVar[bool] = False
    supports_listing: bool = False
    supports_purge: bool = False
    supports_detach: bool = False
    supports_min_hold: bool = False
    #: Which settings would give the backend a feature that it lacks; empty if none would.
    instead: str = ""
    #: Whether extend() prolongs a lease; otherwise it only returns whether the lease is still held.
    supports_extend: ClassVar[bool] = True
    #: Whether a lock ends with the connection or session that holds it, not with a ttl alone.
    session_bound: ClassVar[bool] = False
    #: Whether its verbs ask a database, which Django forbids in the thread of an event loop.
    asks_database: ClassVar[bool] = False
    #: The first part of the keys, for backends that share a table.
    kind: ClassVar[str] = ""
    #: The class of the requests that request() makes.
    make_request: Callable[..., Request] = Request

    #: How waiters wait; in some backends it depends on the server or the OPTIONS.
    waiting: Waiting = Waiting()

    def __init__(self, settings: BackendSettings) -> None:
        """Make the backend of one alias; ValueError or TypeError for wrong OPTIONS."""
        self.alias = settings.alias
        self.ttl = settings.ttl
        self.timeout = settings.timeout
        self.key_prefix = settings.key_prefix
        self.strict = settings.strict
        self.options: Any = self.options_class(**settings.options)
        #: Where the locks are: in aliases with the same location, the same key is the same lock.
        self.location: Hashable = (type(self), settings.alias)
        self._key_in = lru_cache(KEYS)(partial(server_key, kind=self.kind))
        self.queue = LocalQueue()
        self._threads = VerbThreads(settings.alias)
        self.leftovers = Leftovers(settings.alias, self.revoke_all)

    @classmethod
    def for_settings(cls, found: BackendSettings) -> BaseLockBackend:
        """Return a backend with the settings *found*: of this class, or of another that this class chooses."""
        return cls(checked_options(cls, found))

    # The verbs to write.

    @abstractmethod
    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        """Try to acquire the lock once. The same owner gets the same grant again.

        *queued*: whether the request has a position in the server's queue, or gets one if it is refused. *left*: how
        many seconds the try may wait for a connection or a thread (None: no limit).
        """

    @abstractmethod
    def release(self, request: Request) -> Release:
        """Release the lock of this owner, and wake the next waiter. A repetition returns the same answer.

        The ``min_hold`` of *request* reserves the lock only if its lease has not ended yet. It is 0 if the lease was
        never used: the lock is then free at once, whatever *min_hold* it was granted with.
        """

    @abstractmethod
    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Prolong each lease that its owner still holds to at least its ttl from now; return which are held."""

    @abstractmethod
    def probe(self, request: Request) -> Busy | None:
        """Return the holder of the lock without acquiring it; None if it is free."""

    def probe_all(self, requests: Sequence[Request]) -> list[Busy | None]:
        """Return the holder of each lock, None where it is free; by one request where the server can."""
        return [self.probe(each) for each in requests]

    def server_of(self, request: Request) -> Hashable:
        """Return a value that identifies the request's server; each call of extend() gets requests of one server."""
        return None

    def wait_for(self, request: Request, left: float | None) -> Grant | Busy:
        """With ``Way.ON_SERVER``: wait until the server grants the lock, for *left* seconds at most (None: no limit)."""
        raise NotImplementedError

    def interrupt(self, request: Request) -> None:
        """End the wait_for() of another thread for this request. Must not block."""

    def is_session_over(self, request: Request) -> bool:
        """Return True if the session that holds the lock is known to have ended. Must not block."""
        return False

    def enqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        """Take a position in the server's queue; *bell* rings when the waiter should try again."""

    def dequeue(self, request: Request) -> None:
        """Give up the position in the server's queue."""

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        """Wait for up to *seconds* until *bell*, or the server's own signal for this waiter, wakes it."""
        bell.wait(seconds)

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        await bell.wait(seconds)

    def forget_bell(self, request: Request) -> None:
        """Stop ringing the bell of this request. No I/O."""

    def take_over(self, request: Request, former: str) -> bool:
        """Move the lease of *former* to the owner of *request*, for its ttl from now; return False if it was not held.

        The token stays the same, and *former* no longer holds the lock, so only one owner can take it over.
        A repetition returns the same answer.
        """
        raise NotSupported(self.alias, "Lease.attach()", "The lock is bound to its process.")

    async def atake_over(self, request: Request, former: str) -> bool:
        return await self._threads.run_release(lambda: self.take_over(request, former))

    def guard(self, request: Request, token: int, using: str) -> None:
        """Implement ``Lease.guard()``."""
        raise NotSupported(
            self.alias, "guard()", "Locks must live in the database that they protect."
        )

    def held(self, key: str | None = None) -> Iterable[Held]:
        """Return the held locks of this alias, for operators: all of them, or the one with this *key*."""
        raise NotSupported(self.alias, "listing", self.instead)

    def free_locks(self, text: str) -> Iterable[Held]:
        """Return at most MOST_FREE free locks with *text* in their names or keys that the server has a record of."""
        return ()

    def end_holding(self, key: str, owner_digest: str) -> bool:
        """End the holding with this *owner_digest*, and no other; return whether there was one."""
        raise NotSupported(self.alias, "force_release()")

    def purge(
        self, older_than: float, *, batch_size: int = 1000, dry_run: bool = False
    ) -> Iterator[Purged]:
        """Delete records that have been stale or free for more than *older_than* seconds, in batches.

        With *dry_run* only count them. Safe to run several times at once, and while locks are used.
        """
        raise NotSupported(self.alias, "purge()", "It leaves no records behind.")

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        """Return the messages for ``manage.py check``; connect to servers only if *databases* are given."""
        return []

    def check_server(self, address: str) -> list[CheckMessage]:
        """Probe a lock; return an error if the server does not answer. *address*: where it should listen, for the error."""
        try:
            self.probe(self.request("check", ttl=self.ttl, holder=Holder.current("check")))
        except LockBackendError as error:
            return [server_error(error, address)]
        return []

    def close(self) -> None:
        """Close connections and end threads; the next use opens and starts them again."""
        self._threads.close()

    def close_at_exit(self, seconds: float) -> None:
        """Close the sessions at the exit of the process, to free their locks, within *seconds*."""

    def abandon_after_fork(self) -> None:
        """Drop the parent's connections in a forked child, and send nothing to the server."""

    # The rest needs no change in a backend.

    def check_ttl(self, ttl: float) -> None:
        """Raise ValueError if the server cannot keep a lock for *ttl* seconds."""

    def request(self, name: str, key: str = "", **wishes: Any) -> Request:
        """Return a request for *name* with a new owner; *key* is by default that of key_of()."""
        owner = Secret(token_hex(16))  # as new_owner(), without a call
        return self.make_request(name, key or self.key_of(name), owner=owner, **wishes)

    def key_of(self, name: str) -> str:
        """Return the key of *name* on the server; it may depend on the tenant of the caller.

        A request keeps the key that it was made with.
        """
        return self._key_in(name, self.prefix(), self.label())

    def line_of(self, request: Request) -> str:
        """Return the key of the local queue that *request* joins: readers that may pass writers have their own."""
        is_apart = request.shared and not self.waiting.writers_first
        return f"{request.line}\0shared" if is_apart else request.line

    def prefix(self) -> str:
        """Return KEY_PREFIX; if it is a function, its present result."""
        if isinstance(self.key_prefix, str):
            return self.key_prefix
        prefix = self.key_prefix()
        if not isinstance(prefix, str):
            function = title_of(self.key_prefix)
            raise KeyFunctionFailed(
                f"DISTLOCK[{self.alias!r}]: KEY_PREFIX is the function {function}(), which must return a str, not {prefix!r}."
            )
        return prefix

    def check_key(self) -> None:
        """Raise KeyFunctionFailed if the project's function for the keys fails, as outside of a tenant."""
        try:
            self.key_of("x")
        except InvalidLockBackend:
            raise
        except Exception as error:
            raise KeyFunctionFailed(
                f"DISTLOCK[{self.alias!r}]: KEY_PREFIX, or the KEY_FUNCTION of its cache, failed: {printable(repr(error))}. "
                "Run this for a tenant, or let the function return a text where there is none."
            ) from error

    def label(self) -> str:
        """Return a label for the present prefix and version of the cache that keeps the locks; "" without a cache."""
        return ""

    @property
    def keys_vary(self) -> bool:
        """Whether the keys of key_of() depend on the caller."""
        has_label = type(self).label is not BaseLockBackend.label
        return has_label or not isinstance(self.key_prefix, str)

    def seen_from_here(self) -> Self:
        """Return a copy of this backend with which another thread lists the locks of the present caller."""
        self.check_key()
        seen, label = copy(self), self.label()
        seen.key_prefix = self.prefix()
        seen.label = lambda: label  # type: ignore[method-assign]  # only in this copy
        return seen

    def force_release(self, key: str, owner_digest: str, *, by: str = "an operator") -> bool:
        """Free the lock if it still has the holding with this *owner_digest*; return whether it had.

        A holder in this process gets LockLost at once, any other at its next renewal. Fenced data refuses the
        former holder's writes. *by* is named in the log.
        """
        if not self.supports_listing:
            raise NotSupported(self.alias, "force_release()", self.instead)
        if not self.keeps(key):
            return False
        # Read the whole result: an open query blocks writers.
        shown = {held.owner_digest: held for held in settled(lambda: [*self.held(key)])}
        ended = shown.get(owner_digest)
        if ended is None or not self._end_shown(key, owner_digest):
            return False
        for lease in registry.leases():
            is_here = lease.backend.location == self.location
            if is_here and digest(lease.request.owner) == owner_digest:
                lease.end(State.LOST, "its release was forced by an operator")
        state = "reserved by min_hold" if ended.reserved else f"held by {ended.holder}"
        logger.warning(
            "Lock %s, %s: its release was forced by %s",
            printable(ended.name),
            printable(state),
            printable(by),
            extra=log_fields(ended.name, self.alias, holder=ended.holder, token=ended.token),
        )
        send(lock_forced, type(self), name=ended.name, using=self.alias, holder=ended.holder)
        return True

    def keeps(self, key: str) -> bool:
        """Return True if *key* has the kind of this alias, and the caller's prefix."""
        return key.rpartition("|")[0] == self.key_of("x").rpartition("|")[0]

    def may_keep(self, key: str) -> bool:
        """Return True if *key* may belong to this alias, whatever prefix a function as KEY_PREFIX returned."""
        if isinstance(self.key_prefix, str):
            return self.keeps(key)
        return key.startswith(f"{self.kind}|") if self.kind else key.count("|") < 2

    def _end_shown(self, key: str, owner_digest: str) -> bool:
        try:
            return self.end_holding(key, owner_digest)
        except LockOutcomeUnknown:
            # The lock was held a moment ago: if it is free now, the request without a reply has freed it.
            self.end_holding(key, owner_digest)
            return True

    def abandon(self, request: Request) -> Release:
        """Release the lock of an owner that may hold it or wait for it."""
        return self.release(request)

    def revoke_all(self, requests: Sequence[Request]) -> Sequence[Release | Exception]:
        """Release the locks of *requests* for good: some servers then refuse late requests of the same owners.

        An error is not raised, but returned as the outcome of its request.
        """
        return [self._outcome(request) for request in requests]

    def _outcome(self, request: Request) -> Release | Exception:
        try:
            return self.abandon(request)
        except Exception as error:  # noqa: BLE001 - one failure must not stop the others
            return error

    def abandon_later(self, request: Request) -> None:
        """Release the lock for good in the background; try until it works or the ttl has passed."""
        self._threads.after(request, partial(self.leftovers.add, request))

    def dequeue_later(self, request: Request) -> None:
        """Give up the position in the server's queue, in the background."""
        job, ends = partial(self.dequeue, request), clock.lease_time() + request.ttl
        self._threads.after(request, partial(until_done, self.alias, job, ends))

    async def atry_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        ask = partial(self._answered, request, partial(self.try_acquire, queued=queued), Wait(left))
        return await self._threads.run_try(request, ask, left)

    async def await_for(self, request: Request, left: float | None) -> Grant | Busy:
        ask = partial(self._answered, request, self.wait_for, Wait(left))
        return await self._threads.run_wait(request, ask, left)

    def _answered(
        self, request: Request, verb: Callable[..., Grant | Busy], wait: Wait
    ) -> Grant | Busy:
        """Call *verb* for a task, in a thread: the ttl counts from now, not from before the wait for the thread."""
        start = clock.lease_time()
        answer = verb(request, left=wait.left)
        self.queue.heard(self.line_of(request), request.owner)
        if isinstance(answer, Grant) and answer.start is None:
            return replace(answer, start=start)
        return answer

    async def aenqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        await self._threads.run_try(request, lambda: self.enqueue(request, bell))

    async def adequeue(self, request: Request) -> None:
        await self._threads.run_release(lambda: self.dequeue(request))

    async def arelease(self, request: Request) -> Release:
        return await self._threads.run_release(lambda: self.release(request))

    async def aextend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return await self._threads.run_release(lambda: self.extend(requests))

    async def aprobe(self, request: Request) -> Busy | None:
        return await self._threads.run_release(lambda: self.probe(request))

    async def aprobe_all(self, requests: Sequence[Request]) -> list[Busy | None]:
        return await self._threads.run_release(lambda: self.probe_all(requests))

    async def aabandon(self, request: Request) -> None:
        await self._threads.run_release(lambda: self.abandon(request))


#: The hints for errors, by patterns in their texts. The first match is used.
ADVICE = {
    r"no master found": (
        "Start the Sentinels, or correct the settings: are they listening on {address}, and is that the master's name?"
    ),
    r"invalid connection option|unexpected keyword|invalid keyword|invalid integer": (
        "Correct the settings: the driver refuses one of them."
    ),
    r"pooling mode": "Or let OPTIONS 'using' name an alias of DATABASES that connects to the server directly.",
    r"to database|database \S+ does not exist|unknown database|db index": (
        "Create the database, or correct its name in the settings; the user needs the right to use it."
    ),
    r"password|access denied|authent|authfailed|authoriz|invalid username|pg_hba|role \S+ does not exist": (
        "The server refuses the login: correct the user and the password in the settings."
    ),
    r"noperm|no permissions|permission denied|denied to user": (
        "The server refuses the command: give the user the rights that locks need."
    ),
    r"(database|table) is locked|image is malformed|disk i/o": "Another program uses the file, or the file is damaged.",
    r"ssl|tls|certificate": "Correct the settings for TLS, here or on the server.",
    r"resolve|name or service|translate host|getaddrinfo|unknown.*host|name resolution": (
        "Correct the name of the host in the settings."
    ),
    r"too many|connection slots|max number of clients": (
        "The server has as many connections as it allows: raise its limit, or use fewer."
    ),
    r"unable to open|not a database": (
        "Correct the name of the file; its folder must exist, and this process must be able to write there."
    ),
    r"timed out|timeout|in time|no reply|\(110\)": (
        "Start it, or correct the settings: can this machine reach {address}?"
    ),
    "": "Start it, or correct the settings: is it listening on {address}?",
}


def server_error(error: LockBackendError, address: str) -> Error:
    """Return the message for *error*; *address* is where the server should listen."""
    text = str(error)
    advice = next(ADVICE[each] for each in ADVICE if re.search(each, text, re.IGNORECASE))
    return Error(text, hint=advice.format(address=address), id="distlock.E006")


class Run(Protocol):
    """Runs steps to their end and returns their result."""

    def __call__(self, steps: Steps[Any, _T], /) -> _T: ...


class VerbSteps(Protocol):
    """The verbs of a backend, written as steps."""

    def acquire(self, request: Request, *, queued: bool) -> Steps[Any, Grant | Busy]: ...
    def release(self, request: Request) -> Steps[Any, Release]: ...
    def extend(self, requests: Sequence[Request]) -> Steps[Any, list[bool]]: ...
    def take_over(self, request: Request, former: str) -> Steps[Any, bool]: ...
    def probe(self, request: Request) -> Steps[Any, Busy | None]: ...
    def probe_all(self, requests: Sequence[Request]) -> Steps[Any, list[Busy | None]]: ...
    def dequeue(self, request: Request) -> Steps[Any, None]: ...


class StepsBackend(BaseLockBackend):
    """A backend whose verbs are written once, as steps, for threads and for asyncio."""

    _verbs: VerbSteps
    _run: Run

    @abstractmethod
    async def _arun(self, steps: Steps[Any, _T]) -> _T:
        raise NotImplementedError

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        return self._run(self._verbs.acquire(request, queued=queued))

    async def atry_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        return await self._arun(self._verbs.acquire(request, queued=queued))

    def release(self, request: Request) -> Release:
        return self._run(self._verbs.release(request))

    async def arelease(self, request: Request) -> Release:
        return await self._arun(self._verbs.release(request))

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return self._run(self._verbs.extend(requests))

    async def aextend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return await self._arun(self._verbs.extend(requests))

    def take_over(self, request: Request, former: str) -> bool:
        return self._run(self._verbs.take_over(request, former))

    async def atake_over(self, request: Request, former: str) -> bool:
        return await self._arun(self._verbs.take_over(request, former))

    def probe(self, request: Request) -> Busy | None:
        return self._run(self._verbs.probe(request))

    async def aprobe(self, request: Request) -> Busy | None:
        return await self._arun(self._verbs.probe(request))

    def probe_all(self, requests: Sequence[Request]) -> list[Busy | None]:
        return self._run(self._verbs.probe_all(requests))

    async def aprobe_all(self, requests: Sequence[Request]) -> list[Busy | None]:
        return await self._arun(self._verbs.probe_all(requests))

    def dequeue(self, request: Request) -> None:
        self._run(self._verbs.dequeue(request))

    async def adequeue(self, request: Request) -> None:
        await self._arun(self._verbs.dequeue(request))

    async def aabandon(self, request: Request) -> None:
        await self.arelease(request)
