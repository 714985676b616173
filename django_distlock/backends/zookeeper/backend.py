"""ZooKeeperBackend: each holder and waiter is an ephemeral node, and the first node in the queue holds the lock."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from django.core.checks import CheckMessage, Error
from kazoo.exceptions import AuthFailedError, KazooException

from django_distlock.backends.base import server_error
from django_distlock.backends.queue.backend import QueueBackend
from django_distlock.backends.queue.recipe import Recipe
from django_distlock.conf import LONGEST, BackendSettings
from django_distlock.engine.background import background
from django_distlock.engine.registry import registry
from django_distlock.engine.steps import arun, run
from django_distlock.engine.values import (
    Busy,
    Grant,
    Held,
    Purged,
    Release,
    Request,
    State,
    batches,
)
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown
from django_distlock.ground import clock

from .ensemble import EnsembleSession, Silence, Steps
from .nodes import BROKEN, ZooKeeperNode, ZooKeeperServer
from .options import ZooKeeperOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from django_distlock.engine.holding import Holding


_T = TypeVar("_T")
#: How many locks are listed at once.
BATCH = 500


class ZooKeeperBackend(QueueBackend):
    """Locks in ZooKeeper, first come, first served, with readers and writers; a lock ends with its holder's session."""

    options_class = ZooKeeperOptions
    options: ZooKeeperOptions
    _verbs: Recipe[ZooKeeperNode]
    supports_purge = True

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.location = str(self.options.hosts), self.options.root
        self._begin()

    def _begin(self) -> None:
        self._session = EnsembleSession(
            self.options, self._session_began, self._session_suspended, self._session_lost
        )
        self._server = ZooKeeperServer(self.alias, self.options, self._session)
        self._verbs = Recipe(self.alias, self._server, self._run, self._threads.after)

    # The verbs.

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        steps, ends, last = self._acquiring(request, left, queued=queued)
        return self._run(steps, ends, last)

    async def atry_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        steps, ends, last = self._acquiring(request, left, queued=queued)
        return await self._arun(steps, ends, last)

    def _acquiring(
        self, request: Request, left: float | None, *, queued: bool
    ) -> tuple[Steps[Grant | Busy], float, float]:
        """Return the steps of a try, and when it gives up: if the ensemble is silent, and if it answers other requests."""
        # A waiter for any place is not in the queue of a single place.
        queued = queued and request.limit is None
        ends, last = self._limits(request, left if queued else 0.0)
        return _again(partial(self._verbs.acquire, request, queued=queued), ends), ends, last

    def release(self, request: Request) -> Release:
        return self._run(self._releasing(request))

    async def arelease(self, request: Request) -> Release:
        return await self._arun(self._releasing(request))

    def _releasing(self, request: Request) -> Steps[Release]:
        ends = clock.wait_time() + self.options.io_timeout
        return _again(partial(self._verbs.release, request), ends)

    # For operators.

    def held(self, key: str | None = None) -> Iterator[Held]:
        for keys in batches(self._keys(self.keeps) if key is None else [key], BATCH):
            yield from self._run(self._server.holders(keys))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._run(self._server.end_holding(key, owner_digest))

    def purge(
        self, older_than: float, *, batch_size: int = 1000, dry_run: bool = False
    ) -> Iterator[Purged]:
        if not older_than >= 0:
            raise ValueError(f"older_than must be 0 seconds or more, not {older_than!r}.")
        if not batch_size >= 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size!r}.")
        before = self._run(self._server.now()) - older_than
        keys, looked_at = self._keys(self.may_keep), 0
        for batch in batches(keys, batch_size):
            deleted = self._run(self._server.purge(batch, before, dry_run=dry_run))
            looked_at += len(batch)
            yield Purged(len(batch), deleted, looked_at / len(keys))

    def _keys(self, is_ours: Callable[[str], bool]) -> list[str]:
        return list(filter(is_ours, self._run(self._server.keys())))

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        if databases is None:
            return []
        try:
            self._keys(self.keeps)
        except LockBackendError as error:
            if isinstance(error.__cause__, (Silence, AuthFailedError, *BROKEN)):
                return [server_error(error, self.options.servers)]
            hint = "Correct the OPTIONS of the alias, or what the text names on the ensemble."
            return [Error(str(error), hint=hint, id="distlock.E040")]
        return []

    def close(self) -> None:
        """End the session, which frees its locks at once; their leases are lost."""
        super().close()
        self._session.close()
        self._session_lost("its session was closed")

    def close_at_exit(self, seconds: float) -> None:
        """End the session: otherwise nodes that could not be deleted would last until the session's timeout."""
        self._session.close_at_exit(seconds)

    def abandon_after_fork(self) -> None:
        self._session.abandon()
        self._begin()

    # Running steps.

    def _soon(self) -> tuple[float, float]:
        """Return when a request sent now fails: if the ensemble is silent, and if it answers other requests."""
        now = clock.wait_time()
        return now + self.options.io_timeout, now + self.options.session_timeout

    def _limits(self, request: Request, left: float | None) -> tuple[float, float]:
        """Return when a caller with *left* seconds gives up; see _acquiring().

        A waiter waits for silent servers, too, as another server may take over the session. A waiter with a node in
        the queue waits longest: the ensemble may be without a quorum for long.
        """
        node = self._verbs.nodes.get(request.owner)
        longest = LONGEST if node and node.busy else self.options.session_timeout
        patience = LONGEST if left is None else left
        now, soon = clock.wait_time(), self.options.io_timeout
        return now + max(min(patience, longest), soon), now + max(patience, soon)

    def _run(  # type: ignore[override]  # an attribute of the base
        self, steps: Steps[_T], ends: float | None = None, last: float = 0.0, /
    ) -> _T:
        ends, last = (ends, last) if ends is not None else self._soon()
        ask = partial(self._session.ask, ends=ends, last=last)
        try:
            return run(steps, ask)
        except (Silence, KazooException) as error:
            raise self._error(error) from error

    async def _arun(self, steps: Steps[_T], ends: float | None = None, last: float = 0.0) -> _T:
        ends, last = (ends, last) if ends is not None else self._soon()
        ask = partial(self._session.aask, ends=ends, last=last)
        try:
            return await arun(steps, ask)
        except (Silence, KazooException) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> LockBackendError:
        if isinstance(error, Silence):
            return LockOutcomeUnknown(self.alias, "no reply in time")
        kind = type(error).__name__
        if isinstance(error, BROKEN):
            if not self._session.is_refused:
                return LockOutcomeUnknown(self.alias, f"the connection broke: {kind}")
            # The ensemble refuses credentials after the session has begun, and breaks off the requests sent until then.
            kind = AuthFailedError.__name__
        return LockBackendError(self.alias, f"the ensemble refused: {kind}")

    # Changes of the session. Kazoo's threads call these, so they must not block.

    def _session_began(self) -> None:
        """Continue interrupted deletions, ring all waiters, and confirm the leases that are still held."""
        self._verbs.delete_soon()
        self._server.ring_all()  # kazoo has dropped all watches
        if self._verbs.granted():
            # Through the clock thread, so that this runs after its pending jobs for the last session.
            confirm = partial(background.submit, self.alias, self._confirm)
            background.at(clock.lease_time(), confirm)

    def _session_suspended(self) -> None:
        def endanger() -> None:
            for lease in self._leases():
                lease.endanger()

        background.at(clock.lease_time(), endanger)

    def _confirm(self) -> None:
        """Release the locks whose leases have ended by our clock meanwhile, and confirm the other leases."""
        owners = {lease.request.owner for lease in registry.leases() if lease.backend is self}
        for node in self._verbs.granted():
            if node.request.owner not in owners:
                self._verbs.drop(node)
        asked = [(lease, request) for lease in self._leases() if (request := _renewal(lease))]
        start = clock.lease_time()
        try:
            kept = self.extend([request for _, request in asked])
        except LockBackendError:
            return  # the renewals try again
        for (lease, request), is_kept in zip(asked, kept, strict=True):
            if is_kept:
                lease.confirm(start, request.ttl)
            elif lease.is_entered:  # False while the lease is being released
                lease.end(State.LOST, "its node is gone")


def _again(steps: Callable[[], Steps[_T]], ends: float) -> Steps[_T]:
    """Run *steps*; if the connection breaks, run them again, until *ends* (wait time)."""
    while True:
        try:
            return (yield from steps())
        except BROKEN:
            if clock.wait_time() >= ends:
                raise


def _renewal(lease: Holding) -> Request | None:
    """Return the request that confirms *lease*; the request of a lease without renewal does not prolong it."""
    return lease.renewal() if lease.renews else replace(lease.request, ttl=lease.remaining)
