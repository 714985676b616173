"""What every backend is: a few verbs to write; the acquire loop and the async twins for free."""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol, TypeVar

from django.core.checks import CheckMessage, Error

from django_distlock.conf import BackendSettings, NoOptions, checked_options
from django_distlock.engine import clock
from django_distlock.engine.background import VerbThreads
from django_distlock.engine.bells import TaskBell, ThreadBell
from django_distlock.engine.holder import Holder
from django_distlock.engine.leftovers import Leftovers, until_done
from django_distlock.engine.local_queue import LocalQueue
from django_distlock.engine.naming import log_fields, printable, server_key
from django_distlock.engine.registry import registry
from django_distlock.engine.steps import Steps, settled
from django_distlock.engine.values import Busy, Grant, Held, Purged, Release, Request, digest
from django_distlock.engine.waiting import Place, Waiting, Way
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, NotSupported
from django_distlock.signals import lock_forced, send

logger = logging.getLogger("django_distlock")

#: Keys that a backend remembers, so as not to make them anew.
KEYS = 1024
_T = TypeVar("_T")


class BaseLockBackend(ABC):
    """One alias of DISTLOCK in this process, shared by all its threads and tasks.

    A backend writes the verbs; each is one round trip, waits for nobody, and raises
    LockBackendError (LockOutcomeUnknown where a request may have arrived). Those that begin with
    an *a* more are for asyncio; here they run the others in threads.
    """

    #: The class of its OPTIONS: a frozen dataclass, its fields are the known options.
    options_class: ClassVar[type] = NoOptions
    #: What it can do; for some it depends on the server or the OPTIONS.
    supports_fencing: bool = False
    supports_shared: bool = False
    supports_fair: ClassVar[bool] = False
    supports_listing: bool = False
    supports_purge: bool = False
    supports_detach: ClassVar[bool] = False
    #: min_hold and lock_delay.
    supports_delays: ClassVar[bool] = False
    #: Seconds for which the server can refuse a lock to others after its lease has ended.
    longest_lock_delay: ClassVar[float] = math.inf
    #: Whether extend() lets a lease live longer; else it only tells whether it is still there.
    supports_extend: ClassVar[bool] = True
    #: Whether a lock ends with the connection or session that holds it, not with a ttl alone.
    session_bound: ClassVar[bool] = False
    #: Whose clock ends a lease on the server: "server", "client" or "session".
    clock: ClassVar[str] = "server"
    #: What stands in front of its keys, for backends that share a table.
    kind: ClassVar[str] = ""
    #: What request() makes.
    request_class: ClassVar[type[Request]] = Request

    #: How waiters wait; for some it depends on the server or the OPTIONS.
    waiting: Waiting = Waiting()

    def __init__(self, settings: BackendSettings) -> None:
        """Make the backend of one alias; ValueError or TypeError for wrong OPTIONS."""
        self.alias = settings.alias
        self.ttl = settings.ttl
        self.timeout = settings.timeout
        self.key_prefix = settings.key_prefix
        self.strict = settings.strict
        self.options: Any = self.options_class(**settings.options)
        #: Where its locks are: aliases of one location meet the same locks by the same keys.
        self.location: Hashable = (type(self), settings.alias)
        #: Returns what the server knows a name by.
        self.key_of = lru_cache(KEYS)(partial(server_key, prefix=self.key_prefix, kind=self.kind))
        self.queue = LocalQueue()
        self._threads = VerbThreads(settings.alias)
        self._leftovers = Leftovers(settings.alias, self.revoke_all)

    @classmethod
    def for_settings(cls, found: BackendSettings) -> BaseLockBackend:
        """Return the backend that *found* stands for: of this class, or of one that this class chooses."""
        return cls(checked_options(cls, found))

    # The verbs to write.

    @abstractmethod
    def try_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
    ) -> Grant | Busy:
        """Ask once. The same owner again gets the same grant.

        *queued*: for how many callers of this process it has a place on the server, or is to get one if it
        is refused; 0: none. With ``Way.ON_SERVER`` the server makes it wait for the *left* seconds that
        its caller has (None: as long as it takes).
        """

    @abstractmethod
    def release(self, request: Request) -> Release:
        """Give back what this owner holds, and wake who is next. Again: the same answer."""

    @abstractmethod
    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Let each live at least its ttl from now, if it is still its owner's; tell which are."""

    @abstractmethod
    def probe(self, request: Request) -> Busy | None:
        """Look, without taking it, whether the lock is held, and by whom."""

    def server_of(self, request: Request) -> Hashable:
        """Tell apart servers that may fail one without the other; extend() is asked for those of one."""
        return None

    def leaves_line(self, request: Request) -> bool:
        """Return whether to wait on the server, not in the line of this process: other processes see it there."""
        return False

    def interrupt(self, request: Request) -> None:
        """End a try of this request that another thread waits in on the server. No I/O that blocks."""

    def is_session_over(self, request: Request) -> bool:
        """Return whether the session that holds it is known to be gone. No I/O that blocks."""
        return False

    def enqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        """Take a place in the server's queue; *bell* is rung when it is worth to try again."""

    def dequeue(self, request: Request) -> None:
        """Give the place up."""

    def is_behind(self, request: Request) -> bool:
        """Return whether another waiter of this process is before it, looks for both, and rings when it leaves."""
        return False

    def sleep(self, request: Request, bell: ThreadBell, seconds: float) -> None:
        """Wait until woken, for up to *seconds*: on *bell*, or on what the server has for this waiter."""
        bell.wait(seconds)

    async def asleep(self, request: Request, bell: TaskBell, seconds: float) -> None:
        await bell.wait(seconds)

    def forget_bell(self, request: Request) -> None:
        """Ring no more for this request. No I/O."""

    def take_over(self, request: Request, former: str) -> bool:
        """Have this owner hold what *former* holds, for its own ttl from now; tell whether it was held still.

        The same token. Again: the same answer. *former* holds it no more: only one can take it over.
        """
        raise NotSupported(self.alias, "Lease.attach()", "The lock is bound to its process.")

    async def atake_over(self, request: Request, former: str) -> bool:
        return await self._threads.run_release(lambda: self.take_over(request, former))

    def guard(self, request: Request, token: int, using: str) -> None:
        """Do what ``Lease.guard()`` promises."""
        raise NotSupported(
            self.alias, "guard()", "Locks must live in the database that they protect."
        )

    def held(self, key: str | None = None) -> Iterable[Held]:
        """Tell the locks of this alias that are held, for operators: all, or the one with this *key*."""
        raise NotSupported(self.alias, "listing")

    def end_holding(self, key: str, owner_digest: str) -> bool:
        """End the holding that *owner_digest* names, and no other; tell whether it was there."""
        raise NotSupported(self.alias, "force_release()")

    def purge(
        self, older_than: float, *, batch_size: int = 1000, dry_run: bool = False
    ) -> Iterator[Purged]:
        """Delete what has been stale or free for longer than *older_than* seconds, batch by batch.

        With *dry_run* tell what would be deleted. Safe beside itself and beside traffic.
        """
        raise NotSupported(self.alias, "purge()", "It leaves no records behind.")

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        """Return what ``manage.py check`` should say; servers are asked only for *databases*."""
        return []

    def check_server(self, place: str) -> list[CheckMessage]:
        """Look at a lock, and return an error if the server cannot be asked; *place* is where it should listen."""
        try:
            self.probe(self.request("check", ttl=self.ttl, holder=Holder.current("check")))
        except LockBackendError as error:
            return [server_error(error, place)]
        return []

    def close(self) -> None:
        """Let connections and threads go; they come back when they are needed."""
        self._threads.close()

    def say_goodbye(self, seconds: float) -> None:
        """Free at the exit of the process, in so many seconds at most, what a session alone keeps."""

    def abandon_after_fork(self) -> None:
        """Drop what belongs to the parent process, without a word to the server."""

    # What comes for free.

    @property
    def wakes_waiters(self) -> bool:
        """Whether a release wakes who is next."""
        return self.waiting.way is Way.LISTEN

    def check_ttl(self, ttl: float) -> None:
        """Raise ValueError if the server cannot keep a lock for *ttl* seconds."""

    def request(self, name: str, **wishes: Any) -> Request:
        """Return a request for *name*, with its key and a new owner."""
        return self.request_class(name, self.key_of(name), **wishes)

    def force_release(self, key: str, owner_digest: str, *, by: str = "an operator") -> bool:
        """Free what somebody holds, if it is the holding that was shown; tell whether it was.

        The holder learns it at its next renewal at the latest, at once in this process; fenced data refuses it.
        The log says who did it: *by*.
        """
        if not self.supports_listing:
            raise NotSupported(self.alias, "force_release()")
        if not self.keeps(key):
            return False
        # To its end: a query that is left open stands in the way of writers.
        shown = {held.owner_digest: held for held in settled(lambda: [*self.held(key)])}
        ended = shown.get(owner_digest)
        if ended is None or not self._end_shown(key, owner_digest):
            return False
        for lease in registry.leases():
            is_here = lease.backend.location == self.location
            if is_here and digest(lease.request.owner) == owner_digest:
                lease.lose("its release was forced by an operator")
        state = (
            "reserved by min_hold or lock_delay" if ended.reserved else f"held by {ended.holder}"
        )
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
        """Return whether *key* has the kind and the prefix of this alias."""
        return key.rpartition("|")[0] == self.key_of("x").rpartition("|")[0]

    def _end_shown(self, key: str, owner_digest: str) -> bool:
        try:
            return self.end_holding(key, owner_digest)
        except LockOutcomeUnknown:
            # It was held a moment ago: if it is not any more, the request whose reply was lost has ended it.
            self.end_holding(key, owner_digest)
            return True

    def abandon(self, request: Request) -> Release:
        """Give back whatever the server has for this owner, granted or waiting."""
        if self.waiting.place is not Place.NONE:
            self.dequeue(request)
        return self.release(request)

    def revoke_all(self, requests: Sequence[Request]) -> Sequence[Release | Exception]:
        """abandon() each of them for good: where the server can, it refuses what of their owners arrives late.

        Raise nothing: an error is the outcome of its own request alone.
        """
        return [self._outcome(request) for request in requests]

    def _outcome(self, request: Request) -> Release | Exception:
        try:
            return self.abandon(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are no worse for it
            return error

    def abandon_later(self, request: Request) -> None:
        """Have it given back for good in the background, until that has worked or the ttl is over."""
        self._threads.after(request, partial(self._leftovers.add, request))

    def dequeue_later(self, request: Request) -> None:
        """Have its place given up in the background."""
        job, ends = partial(self.dequeue, request), clock.lease_time() + request.ttl
        self._threads.after(request, partial(until_done, self.alias, job, ends))

    async def atry_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
    ) -> Grant | Busy:
        waits = queued and self.waiting.way is Way.ON_SERVER
        run = self._threads.run_wait if waits else self._threads.run_try
        return await run(request, lambda: self.try_acquire(request, queued=queued, left=left))

    async def aenqueue(self, request: Request, bell: ThreadBell | TaskBell) -> None:
        await self._threads.run_try(request, lambda: self.enqueue(request, bell))

    async def arelease(self, request: Request) -> Release:
        return await self._threads.run_release(lambda: self.release(request))

    async def aextend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return await self._threads.run_release(lambda: self.extend(requests))

    async def aprobe(self, request: Request) -> Busy | None:
        return await self._threads.run_release(lambda: self.probe(request))

    async def aabandon(self, request: Request) -> None:
        await self._threads.run_release(lambda: self.abandon(request))


#: What drivers and servers write, and what to do about it. The first that fits is given.
ADVICE = {
    r"no master found": (
        "Start the Sentinels, or correct the settings: are they listening on {place}, and is that the master's name?"
    ),
    r"invalid connection option|unexpected keyword|invalid keyword|invalid integer": (
        "Correct the settings: the driver refuses one of them."
    ),
    r"to database|database \S+ does not exist|unknown database|db index": (
        "Create the database, or correct its name in the settings; the user needs the right to use it."
    ),
    r"password|access denied|authent|authfailed|authoriz|invalid username|pg_hba|role \S+ does not exist": (
        "The server refuses the login: correct the user and the password in the settings."
    ),
    r"noperm|no permissions|permission denied|denied to user": (
        "The server refuses the command: give the user the rights that locks need."
    ),
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
        "Start it, or correct the settings: can this machine reach {place}?"
    ),
    "": "Start it, or correct the settings: is it listening on {place}?",
}


def server_error(error: LockBackendError, place: str) -> Error:
    """Return the message for *error*; *place* is where the server should listen."""
    text = str(error)
    advice = next(ADVICE[each] for each in ADVICE if re.search(each, text, re.IGNORECASE))
    return Error(text, hint=advice.format(place=place), id="distlock.E006")


class Run(Protocol):
    """Has steps carried out, and returns their result."""

    def __call__(self, steps: Steps[Any, _T], /) -> _T: ...


class Verbs(Protocol):
    """The verbs of a backend, as steps."""

    def acquire(self, request: Request, *, queued: int) -> Steps[Any, Grant | Busy]: ...
    def release(self, request: Request) -> Steps[Any, Release]: ...
    def extend(self, requests: Sequence[Request]) -> Steps[Any, list[bool]]: ...
    def take_over(self, request: Request, former: str) -> Steps[Any, bool]: ...
    def probe(self, request: Request) -> Steps[Any, Busy | None]: ...


class StepsBackend(BaseLockBackend):
    """A backend whose verbs are written once, as steps, for threads and for asyncio."""

    _verbs: Verbs
    _run: Run

    @abstractmethod
    async def _arun(self, steps: Steps[Any, _T]) -> _T:
        raise NotImplementedError

    def try_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
    ) -> Grant | Busy:
        return self._run(self._verbs.acquire(request, queued=queued))

    async def atry_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
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
