"""EtcdBackend: each holder and waiter is a key of its own, and the one that was made first holds the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.checks import CheckMessage, Error

from django_distlock.backends.base import server_error
from django_distlock.backends.queue.backend import QueueBackend
from django_distlock.conf import BackendSettings
from django_distlock.engine.acquisition import LAST
from django_distlock.engine.values import Busy, Grant, Held, Release, Request
from django_distlock.exceptions import LockBackendError

from .gateway import Gateway, Refused
from .options import EtcdOptions
from .recipe import EtcdRecipe
from .session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class EtcdBackend(QueueBackend):
    """First come, first served, with readers and writers; a lock ends with the session of its holder."""

    options_class = EtcdOptions
    options: EtcdOptions

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.location = self.options.servers, self.options.namespace
        self._begin()

    def _begin(self) -> None:
        self._gateway = Gateway(self.alias, self.options)
        self._session = Session(self.alias, self.options, self._gateway, self._session_lost)
        self._recipe = EtcdRecipe(self.alias, self.options, self._gateway, self._session)
        self._standings = self._recipe

    # The verbs.

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        goes_on, owner = queued and _goes_on(left), self._owner_in_line(request)
        try:
            self._session.ready()
            if goes_on and (busy := self._recipe.known_busy(owner)) is not None:
                return busy
            return self._recipe.acquire(request, queued=queued)
        except LockBackendError:
            # A waiter keeps its place while the session lasts; by its timeout etcd may answer again.
            entry = self._recipe.get(owner)
            # Its first try may have put it there, if the answer is late.
            may_be_in_line = entry is not None and (
                entry.is_in_line or entry.is_late or owner != request.owner
            )
            if goes_on and entry is not None and may_be_in_line:
                entry.has_failed = True
                return entry.busy
            raise

    async def atry_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        # Without a thread, because a crowd of tasks asks for this once a second each.
        goes_on = queued and _goes_on(left)
        busy = self._recipe.known_busy(self._owner_in_line(request)) if goes_on else None
        if busy is not None:
            return busy
        return await super().atry_acquire(request, queued=queued, left=left)

    def release(self, request: Request) -> Release:
        return self._recipe.release(request)

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return self._recipe.extend(requests)

    def probe(self, request: Request) -> Busy | None:
        return self._recipe.probe(request)

    # For operators.

    def held(self, key: str | None = None) -> Iterator[Held]:
        return (held for held in self._recipe.held(key) if self.keeps(held.key))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._recipe.end_holding(key, owner_digest)

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        if databases is None:
            return []
        try:
            self._gateway.check()
            next(iter(self.held()), None)
        except LockBackendError as error:
            if not isinstance(error.__cause__, Refused) or error.__cause__.is_login:
                return [server_error(error, self.options.servers)]
            hint = "Correct the OPTIONS of the alias, or what the text names in the cluster."
            return [Error(str(error), hint=hint, id="distlock.E041")]
        return []

    # The session.

    def close(self) -> None:
        """End the session, which frees its locks at once; their leases are lost."""
        super().close()
        self._recipe.watcher.close()
        self._session.end(self.options.io_timeout)
        self._session_lost("its session was closed")
        self._gateway.close()

    def close_at_exit(self, seconds: float) -> None:
        """End the session: otherwise keys that were not deleted in time would last until its timeout."""
        self._recipe.watcher.close()
        self._session.end(seconds)
        self._gateway.close()

    def abandon_after_fork(self) -> None:
        self._gateway.abandon_after_fork()
        self._begin()


def _goes_on(left: float | None) -> bool:
    """Return whether a waiter with so many seconds *left* tries again after this time."""
    return left is None or left > LAST
