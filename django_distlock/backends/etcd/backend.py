"""EtcdBackend: each holder and waiter has its own key, and the key that was made first holds the lock."""

from __future__ import annotations

from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.checks import CheckMessage, Error

from django_distlock.backends.base import BaseLockBackend, server_error
from django_distlock.backends.queue.backend import QueueBackend
from django_distlock.backends.queue.recipe import Recipe
from django_distlock.conf import BackendSettings
from django_distlock.engine.acquisition import LAST
from django_distlock.engine.steps import Steps, run
from django_distlock.engine.values import Busy, Grant, Held, Request
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown
from django_distlock.ground import clock

from .gateway import Gateway, Refused
from .keys import EtcdServer, Key
from .options import EtcdOptions
from .session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_T = TypeVar("_T")


class EtcdBackend(QueueBackend):
    """Locks in etcd, first come, first served, with readers and writers; a lock ends with its holder's session."""

    options_class = EtcdOptions
    options: EtcdOptions
    _verbs: Recipe[Key]

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.location = self.options.servers, self.options.namespace
        self._begin()

    def _begin(self) -> None:
        self._gateway = Gateway(self.alias, self.options)
        self._session = Session(self.alias, self.options, self._gateway, self._session_lost)
        self._server = EtcdServer(self.alias, self.options, self._gateway, self._session)
        self._verbs = Recipe(self.alias, self._server, self._run, self._threads.after)

    def _run(self, steps: Steps[Any, _T]) -> _T:  # type: ignore[override]  # an attribute of the base
        return run(steps, call)

    async def _arun(self, steps: Steps[Any, _T]) -> _T:
        return await self._threads.run_release(partial(self._run, steps))

    # The verbs.

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        try:
            return super().try_acquire(request, queued=queued, left=left)
        except LockBackendError as error:
            # A waiter that stays in the queue tries again, and etcd may answer then.
            node = self._verbs.nodes.get(request.owner)
            if node is None or not queued or not (left is None or left > LAST):
                raise
            return self._still_waiting(node, error)

    def _still_waiting(self, node: Key, error: LockBackendError) -> Busy:
        """Return the holder that has refused a waiter; without one, raise *error* if etcd has been silent for long.

        A position in the queue is kept while the session lasts; a first try may take as long.
        """
        is_early = clock.lease_time() < node.asked_at + self.options.session_timeout
        if node.busy is None and not (is_early and isinstance(error, LockOutcomeUnknown)):
            raise error
        return node.busy or Busy()

    atry_acquire = BaseLockBackend.atry_acquire
    aenqueue = BaseLockBackend.aenqueue

    # For operators.

    def held(self, key: str | None = None) -> Iterator[Held]:
        return (held for held in self._server.held(key) if self.keeps(held.key))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._server.end_holding(key, owner_digest)

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
        self._server.watcher.close()
        self._session.end(self.options.io_timeout)
        self._session_lost("its session was closed")
        self._gateway.close()

    def close_at_exit(self, seconds: float) -> None:
        """End the session: otherwise keys that could not be deleted would last until the session's timeout."""
        self._server.watcher.close()
        self._session.end(seconds)
        self._gateway.close()

    def abandon_after_fork(self) -> None:
        self._gateway.abandon_after_fork()
        self._begin()
