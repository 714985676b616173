"""The session of this process: an etcd lease, at whose end etcd deletes the keys of this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from django_distlock.backends.queue.labels import TOKENS
from django_distlock.engine.background import NoThreadError, background, start_daemon
from django_distlock.exceptions import LockBackendError, NotSent
from django_distlock.ground import clock
from django_distlock.ground.mutexes import Taken, new_mutex, run_in

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

#: The folder with one key for each session; no lock's folder has this name.
SESSIONS = "%sessions"


class Session:
    """The first lock begins the session, requests that need it prolong it, and after its end it begins again.

    By our clock the session ends a ``session_timeout`` after the start of the last request that has prolonged it.
    It has a key, which it watches: a leader that was paused for longer than the ``session_timeout`` revokes the
    lease when it wakes, even if another leader has prolonged it. Then *lost* is called, which must not block.
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
        # Held during requests, because other threads need the session, too.
        self._mutex = new_mutex()
        #: The id of the etcd lease; empty while there is none.
        self.id = ""
        self._prolonged_at = 0.0
        self._tokens = f"{options.namespace}/{TOKENS}"
        #: A fencing token minus a revision of etcd; and the operation that reads this offset.
        self.offset = 0
        self.find_offset = find({"key": encoded(self._tokens)})

    @property
    def ends(self) -> float:
        """When the session ends by our clock (lease time), unless it is prolonged."""
        return self._prolonged_at + self._options.session_timeout

    def is_over(self, lease_id: str) -> bool:
        """Return True if the session with this lease has ended."""
        is_present = lease_id == self.id != ""
        return not is_present or clock.lease_time() >= self.ends

    def ready(self) -> str:
        """Begin or prolong the session if needed, and return the id of its lease, with most of its time left.

        The id is empty if the session has just ended.
        """
        if not self.is_fresh:
            try:
                run_in(self._mutex, self._prolong_or_begin, self._options.io_timeout)
            except Taken:
                raise NotSent(self._alias, "no session has begun in time") from None
        return self.id

    def _prolong_or_begin(self) -> None:
        if not self.is_fresh and not self.prolong():
            self._begin()

    @property
    def is_fresh(self) -> bool:
        """Whether there is a session, with more than two thirds of its time left."""
        third = self._options.session_timeout / 3
        return self.id != "" and clock.lease_time() < self._prolonged_at + third

    def prolong(self) -> bool:
        """Prolong the session to a ``session_timeout`` from now; return False if it has ended."""
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
            # By our clock the session ended before the answer came: its locks are lost, and their keys may be reused.
            return False
        self._prolonged_at = max(began, self._prolonged_at)
        return True

    def _keep_alive(self, lease_id: str) -> bool:
        """Return False if the leader does not know the lease: it has ended, or a new leader has not read of it yet."""
        reply = self._gateway.post("/v3/lease/keepalive", {"ID": lease_id})
        return int(reply.body.get("TTL", 0)) > 0

    def _exists(self, lease_id: str) -> bool:
        """Return whether the session exists on a majority: write its key."""
        try:
            self._gateway.transaction(put(self._key(lease_id), "", lease=lease_id))
        except LeaseGone:
            return False
        return True

    def forget(
        self, lease_id: str, reason: str = "etcd has ended the session that held it"
    ) -> None:
        """Note that the lease does not exist any more, and call lost()."""
        if self.id == lease_id != "":
            self.id = ""
            self._follower.interrupt()
            self._lost(reason)

    def _end_of_data(self) -> None:
        """End the session: after a restore from a snapshot, its offset would give lower tokens than before."""
        if ended := self.id:
            self.forget(ended, "etcd has gone back to earlier data, or is another cluster")
            # The restored data may have the lease, with the keys of its locks.
            background.submit((self._alias, "etcd"), partial(self._revoke, ended, SHORT))

    def _begin(self) -> None:
        # The old session is over by our clock: its locks must not come back.
        self.end(SHORT)
        began = clock.lease_time()
        granted = self._gateway.post("/v3/lease/grant", {"TTL": self._options.lease_ttl})
        lease_id = granted.body["ID"]
        self._raise_offset(granted, lease_id)
        # A signal handler may have begun a session meanwhile; then this lease is not used, and expires.
        if not self.id:
            self._prolonged_at, self.id = began, lease_id
            with contextlib.suppress(NoThreadError):  # then the next renewal notices the end
                start_daemon(partial(self._watch, lease_id), "distlock-etcd-session")

    def end(self, seconds: float) -> None:
        """End the session, which frees its locks at once; try for at most *seconds*."""
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
        """Forget the session as soon as its key is deleted; while the watch is silent, look every few seconds."""
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
        """Return False if the session's key does not exist: it may have been deleted before the watch began."""
        try:
            return bool(kvs(self._gateway.post("/v3/kv/range", wanted).body))
        except LockBackendError:
            return True  # not known

    # Fencing tokens.

    def _raise_offset(self, granted: Reply, lease_id: str) -> None:
        """Raise the offset of tokens to the clock, unless it is higher, and make the key of the session.

        So tokens begin at the clock, as on other backends, also after a change of the backend. The gateway returns
        the time in whole seconds; our clock adds the fraction.
        """
        now = min(max(time.time(), granted.server_time), granted.server_time + 1)
        # etcd compares texts, so all offsets have the same length.
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
        """Take over the offset in etcd; return True if another session has raised it above the *used* one.

        LeaseGone if the offset has fallen: etcd does not have the data in which the session began.
        """
        offset = _number(found)
        if offset < used:
            raise LeaseGone(self._alias, "its tokens begin at an earlier time than before")
        self.offset = max(offset, self.offset)
        return offset > used


def _number(found: list[dict[str, Any]]) -> int:
    return int(decoded(found[0]["value"])) if found else 0
