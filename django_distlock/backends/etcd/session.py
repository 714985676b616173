"""The session of this process: the lease of etcd that its keys go with."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from django_distlock.backends.queue.labels import TOKENS
from django_distlock.engine.background import NoThreadError, background, start_daemon
from django_distlock.exceptions import LockBackendError, NotSent
from django_distlock.ground import clock

from .gateway import (
    SHORT,
    Gateway,
    LeaseGone,
    Reply,
    compare,
    decoded,
    encoded,
    find,
    kvs,
    nested,
    put,
    says,
)
from .options import EtcdOptions
from .watcher import Follower

#: The folder of the keys that go with the sessions; no lock's folder has this name.
SESSIONS = "%sessions"


class Session:
    """Begun by the first lock, prolonged by whatever needs it, and begun again once it has ended.

    By our clock it ends a ``session_timeout`` after the start of the last request that has prolonged it.
    A key of its own goes with it, which it watches: a leader that was paused for longer than the ``session_timeout``
    revokes it when it wakes, however often another leader has prolonged it. *lost* is told of that, and must not block.
    """

    def __init__(
        self, alias: str, options: EtcdOptions, gateway: Gateway, lost: Callable[[str], None]
    ) -> None:
        self._alias = alias
        self._lost = lost
        self._follower = Follower(gateway)
        self._options = options
        self._gateway = gateway
        gateway.went_back = self._end_of_data
        # Held during requests: others need the session, too.
        self._mutex = threading.RLock()
        #: The id of its lease; empty while there is none.
        self.id = ""
        self._prolonged_at = 0.0
        self._tokens = f"{options.namespace}/{TOKENS}"
        #: The difference between a fencing token and a revision of etcd; and the operation that reads it.
        self.offset = 0
        self.find_offset = find({"key": encoded(self._tokens)})

    @property
    def ends(self) -> float:
        """When it ends by our clock (lease time), unless it is prolonged."""
        return self._prolonged_at + self._options.session_timeout

    def is_over(self, lease_id: str) -> bool:
        """Return True if the session with this lease has ended."""
        is_present = lease_id == self.id != ""
        return not is_present or clock.lease_time() >= self.ends

    def ready(self) -> str:
        """Return the id of its lease, which has most of its time left."""
        if not self.is_fresh(self.id):
            if not self._mutex.acquire(timeout=self._options.io_timeout):
                raise NotSent(self._alias, "no session has begun in time")
            try:
                if not self.is_fresh(self.id) and not self.prolong():
                    self._begin()
            finally:
                self._mutex.release()
        return self.id

    def is_fresh(self, lease_id: str) -> bool:
        """Return True if the session has this lease, and was prolonged in the last third of its time."""
        third = self._options.session_timeout / 3
        is_same = lease_id == self.id != ""
        return is_same and clock.lease_time() < self._prolonged_at + third

    def prolong(self) -> bool:
        """Return whether it still exists, and lasts for a ``session_timeout`` from now on."""
        began, mine = clock.lease_time(), self.id
        if self.is_over(mine):
            return False
        if not self._keep_alive(mine):
            if not self._exists(mine):
                self.forget(mine)
                return False
            if not self._keep_alive(mine):
                raise LockBackendError(self._alias, "its leader does not know the session yet")
        if self.is_over(mine):
            # By our clock, before the answer came: its locks are lost, and their keys' names may be given to others.
            return False
        self._prolonged_at = max(began, self._prolonged_at)
        return True

    def _keep_alive(self, lease_id: str) -> bool:
        """Return False if the leader does not know the lease: it has ended, or the leader is so new that it has not read of it."""
        reply = self._gateway.post("/v3/lease/keepalive", {"ID": lease_id})
        return int(reply.body.get("TTL", 0)) > 0

    def _exists(self, lease_id: str) -> bool:
        """Return whether it exists, as a majority knows: by a key that goes with it."""
        try:
            self._gateway.transaction(put(self._key(lease_id), "", lease=lease_id))
        except LeaseGone:
            return False
        return True

    def forget(
        self, lease_id: str, reason: str = "etcd has ended the session that held it"
    ) -> None:
        """Note that its lease does not exist any more."""
        if self.id == lease_id != "":
            self.id = ""
            self._follower.interrupt()
            self._lost(reason)

    def _end_of_data(self) -> None:
        """End the session: after a restore from a snapshot, tokens that begin where they did would be lower than before."""
        if ended := self.id:
            self.forget(ended, "etcd has gone back to earlier data, or is another cluster")
            # It may be in that data, with the keys of its locks.
            background.submit((self._alias, "etcd"), partial(self._revoke, ended, SHORT))

    def _begin(self) -> None:
        # It is over by our clock: what it held must not come back.
        self.end(SHORT)
        began = clock.lease_time()
        granted = self._gateway.post("/v3/lease/grant", {"TTL": self._options.lease_ttl})
        lease_id = granted.body["ID"]
        self._raise_offset(granted, lease_id)
        # A signal handler may have begun another one meanwhile; then this one is not used, and expires.
        if not self.id:
            self._prolonged_at, self.id = began, lease_id
            with contextlib.suppress(NoThreadError):  # then the next renewal tells
                start_daemon(partial(self._watch, lease_id), "distlock-etcd-session")

    def end(self, seconds: float) -> None:
        """End the session, which frees its locks at once; try for at most so many *seconds*."""
        ended, self.id = self.id, ""
        if ended:
            self._follower.interrupt()
            self._revoke(ended, seconds)

    def _revoke(self, lease_id: str, seconds: float) -> None:
        with contextlib.suppress(LockBackendError):
            self._gateway.post("/v3/lease/revoke", {"ID": lease_id}, seconds)

    def _key(self, lease_id: str) -> str:
        return f"{self._options.namespace}/{SESSIONS}/{lease_id}"

    def _watch(self, lease_id: str) -> None:
        """Forget the session as soon as its key is deleted; while all is silent, look every few seconds."""
        follower = self._follower = Follower(self._gateway)
        wanted = {"key": encoded(self._key(lease_id))}

        def take(result: dict[str, Any]) -> bool:
            is_there = not result.get("events") and self._has_key(wanted)
            if not is_there:
                self.forget(lease_id)
            return is_there

        while not self.is_over(lease_id):
            follower.follow(wanted, take)

    def _has_key(self, wanted: dict[str, str]) -> bool:
        """Return False if its key does not exist: it may have been deleted before the watch began."""
        try:
            return bool(kvs(self._gateway.post("/v3/kv/range", wanted).body))
        except LockBackendError:
            return True  # nobody knows

    # Fencing tokens.

    def _raise_offset(self, granted: Reply, lease_id: str) -> None:
        """Raise the offset of tokens to the clock, unless it is higher, and make the key of the session.

        So tokens begin at the clock, as on other backends, also after a while on another one. The gateway tells
        the time in whole seconds; the rest is our clock's.
        """
        now = min(max(time.time(), granted.server_time), granted.server_time + 1)
        # etcd compares texts: they have the same length.
        wanted = f"{int(now * 1_000_000) - granted.revision:016}"
        write, own = put(self._tokens, wanted), put(self._key(lease_id), "", lease=lease_id)
        reply = self._gateway.transaction(
            own,
            write,
            self.find_offset,
            compare=[says(self._tokens, "LESS", wanted)],
            failure=[own, nested(write, compare(self._tokens, "EQUAL", 0)), self.find_offset],
        )
        self.offset = _number(kvs(reply.body["responses"][-1]))

    def has_offset(self, offset: int) -> dict[str, Any]:
        """Return the condition that tokens still have this *offset*."""
        return says(self._tokens, "EQUAL", f"{offset:016}")

    def learn(self, found: list[dict[str, Any]], used: int) -> bool:
        """Take the offset that etcd has; return whether another session has raised it above the *used* one.

        LeaseGone if it has fallen: the data of etcd is not that in which the session began.
        """
        offset = _number(found)
        if offset < used:
            raise LeaseGone(self._alias, "its tokens begin at an earlier time than before")
        self.offset = max(offset, self.offset)
        return offset > used


def _number(found: list[dict[str, Any]]) -> int:
    return int(decoded(found[0]["value"])) if found else 0
