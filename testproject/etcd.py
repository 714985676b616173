"""EtcdBackend: an example of a lock backend, over a fake etcd server in memory."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django_distlock import Holder
from django_distlock.backends import (
    BaseLockBackend,
    Busy,
    Grant,
    Held,
    LockBackendError,
    LockOutcomeUnknown,
    Queueing,
    Release,
    Waiting,
    Way,
    digest,
)

from .fake_etcd import Delete, KeyValue, Put, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from django_distlock.backends import BackendSettings, Bell, Request

LOCKS = "distlock/lock/"
RELEASED = "distlock/released/"
TOKENS = "distlock/tokens"


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """OPTIONS of EtcdBackend. endpoint: the name of the server."""

    endpoint: str = "etcd:2379"

    def __post_init__(self) -> None:
        if not isinstance(self.endpoint, str):
            msg = f"'endpoint' must be a str, not {self.endpoint!r}."
            raise TypeError(msg)


class EtcdBackend(BaseLockBackend):
    """A lock is a key whose value names the owner; a lease of etcd deletes it after the ttl."""

    options_class = EtcdOptions
    supports_fencing = True
    supports_listing = True
    supports_detach = True
    waiting = Waiting(way=Way.LISTEN, queueing=Queueing.ENQUEUE)

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.location = "etcd", self.options.endpoint
        self._etcd = connect(self.options.endpoint)
        self._watches: dict[str, Callable[[], object]] = {}

    # The four verbs that every backend has.

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        key, value = LOCKS + request.key, _value(request)
        lease = self._ask("grant", request.ttl)
        put = Put(key, value, lease)
        is_made, found = self._ask("transaction", key, None, put)
        if not is_made and found is not None and found.value == value:
            # Our own, from a request whose reply was lost: it lives its ttl from now.
            is_made, found = self._ask("transaction", key, value, put)
        if is_made:
            return Grant(self._token(found))
        self._ask("revoke", lease)
        return self._busy(found)

    def release(self, request: Request) -> Release:
        key, value = LOCKS + request.key, _value(request)
        released = RELEASED + request.owner
        found = self._ask("get", key)
        if found is not None and found.value == value:
            # The second key lets a repeated release find out that the first one was successful.
            changes = Delete(key), Put(released, "", found.lease)
            is_made, found = self._ask("transaction", key, value, *changes)
            if is_made:
                return Release.RELEASED
        if self._ask("get", released) is not None:
            return Release.RELEASED
        return Release.GONE if found is None else Release.TAKEN

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return [self._extend(request) for request in requests]

    def probe(self, request: Request) -> Busy | None:
        found = self._ask("get", LOCKS + request.key)
        return None if found is None else self._busy(found)

    # How waiters are woken.

    def enqueue(self, request: Request, bell: Bell) -> None:
        self._watches[request.owner] = self._ask("watch", LOCKS + request.key, bell.ring)

    def dequeue(self, request: Request) -> None:
        self.forget_bell(request)

    def forget_bell(self, request: Request) -> None:
        stop = self._watches.pop(request.owner, None)
        if stop is not None:
            stop()

    # supports_detach: another owner takes the lease over.

    def take_over(self, request: Request, former: str) -> bool:
        found = self._ask("get", LOCKS + request.key)
        if found is not None and _owner(found) == former:
            put = Put(found.key, _value(request), self._ask("grant", request.ttl))
            self._ask("transaction", found.key, found.value, put)
        return self._extend(request)

    # supports_listing: for operators.

    def held(self, key: str | None = None) -> Iterator[Held]:
        for found in self._ask("get_prefix", LOCKS + (key or "")):
            own_key = found.key.removeprefix(LOCKS)
            if key in {None, own_key} and self.keeps(own_key):
                owner, name, holder = json.loads(found.value)
                _, remaining = self._ask("time_to_live", found.lease)
                known, token = Holder.from_json(holder), self._token(found)
                yield Held(name, own_key, known, remaining, token, digest(owner))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        found = self._ask("get", LOCKS + key)
        if found is None or digest(_owner(found)) != owner_digest:
            return False
        is_made, _ = self._ask("transaction", found.key, found.value, Delete(found.key))
        return bool(is_made)

    def abandon_after_fork(self) -> None:
        self._etcd, self._watches = connect(self.options.endpoint), {}

    def _token(self, found: KeyValue) -> int:
        """Return the revision plus an offset, which the first of all processes has written."""
        began = time.time_ns() // 1000 - found.create_revision
        _, offset = self._ask("transaction", TOKENS, None, Put(TOKENS, str(began)))
        return found.create_revision + int(offset.value)

    def _extend(self, request: Request) -> bool:
        key, value = LOCKS + request.key, _value(request)
        found = self._ask("get", key)
        if found is None or found.value != value:
            return False
        ttl, remaining = self._ask("time_to_live", found.lease)
        if ttl == request.ttl:
            return bool(self._ask("keep_alive", found.lease))
        if remaining >= request.ttl:
            return True
        put = Put(key, value, self._ask("grant", request.ttl))
        is_made, _ = self._ask("transaction", key, value, put)
        return bool(is_made)

    def _busy(self, found: KeyValue | None) -> Busy:
        if found is None:
            return Busy()
        _, _, holder = json.loads(found.value)
        _, remaining = self._ask("time_to_live", found.lease)
        return Busy(Holder.from_json(holder), remaining)

    def _ask(self, request: str, *arguments: Any) -> Any:
        """Send one request; the errors of the client become errors of django_distlock."""
        try:
            return getattr(self._etcd, request)(*arguments)
        except ConnectionRefusedError as error:  # nothing was sent
            raise LockBackendError(self.alias, "nobody listens at the endpoint") from error
        except OSError as error:  # the request may have arrived
            problem = f"etcd did not answer: {error}"
            raise LockOutcomeUnknown(self.alias, problem) from error


def _value(request: Request) -> str:
    return json.dumps([request.owner, request.name, request.holder.to_json()])


def _owner(found: KeyValue) -> str:
    owner: str = json.loads(found.value)[0]
    return owner
