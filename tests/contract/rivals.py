"""Somebody else who wants the lock, as the server sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from django_distlock.engine.values import Busy, Grant, Release, Request, new_owner
from django_distlock.ground.holder import Holder
from tests.fixtures.eventually import eventually
from tests.fixtures.processes import Child

if TYPE_CHECKING:
    from django_distlock.backends.base import BaseLockBackend


class Rival:
    """Asks by the backend's verbs, past the queue that the threads of this process stand in."""

    def __init__(self, backend: BaseLockBackend, request: Request) -> None:
        self._backend = backend
        self.request = request
        self.token: int | None = None
        self.refused = Busy()
        self._has_ended = False

    @classmethod
    def of(
        cls,
        backend: BaseLockBackend,
        name: str,
        *,
        shared: bool = False,
        ttl: float = 20.0,
        limit: int | None = None,
    ) -> Rival:
        """Return a rival for the lock *name*, with a *limit* for one of its places; see Request for the times."""
        holder = dataclasses.replace(Holder.current(), thread="rival")
        request = backend.request(name, ttl=ttl, holder=holder, shared=shared)
        if limit is not None:
            request = request.with_limit(limit)
        return cls(backend, request)

    def tries(self) -> bool:
        """Ask once, and tell whether it is ours; as another owner, if the server has ended the old one."""
        if self._has_ended:
            self.request = dataclasses.replace(self.request, owner=new_owner())
            self._has_ended = False
        for each in self.request.holdings:
            answer = self._backend.try_acquire(each, queued=False)
            if isinstance(answer, Grant):
                self.token, self.request = answer.token, each
                return True
            self.refused = answer
        self._has_ended = self._backend.waiting.new_owners
        return False

    def takes(self, within: float = 5.0) -> None:
        """Have it within so many seconds."""
        eventually(self.tries, within, f"a rival is granted {self.request.name!r}")

    @property
    def holds(self) -> bool:
        """Whether the server says that it is ours; asking lets it live longer."""
        return self._backend.extend([self.request])[0]

    def leaves(self) -> Release:
        """Give it back."""
        answer = self._backend.release(self.request)
        self._has_ended = answer is Release.RELEASED
        return answer


#: The fixture `rival`, and the fixture `child`, which starts processes.
Rivals = Callable[..., Rival]
Children = Callable[..., Child]
