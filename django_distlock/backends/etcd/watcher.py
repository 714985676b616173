"""One watch for all waiters of this process, in one thread, while there are waiters."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from django_distlock.backends.queue.nodes import Sleeper
from django_distlock.engine.background import NoThreadError, start_daemon
from django_distlock.engine.values import batches
from django_distlock.exceptions import LockBackendError
from django_distlock.ground import clock
from django_distlock.ground.mutexes import section

from .gateway import OPERATIONS, SHORT, SILENCE, Gateway, Watch, below, decoded, encoded, find, kvs

#: Seconds until another member is asked for the watch.
PAUSE = 0.25
#: How many deleted keys are remembered, for waiters whose look was under way.
REMEMBERED = 1000


class Follower:
    """Follows watches, one after the other, in the thread of its caller."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._watch: Watch | None = None
        self._ended = threading.Event()

    def follow(self, wanted: dict[str, Any], take: Callable[[dict[str, Any]], bool]) -> None:
        """Watch the keys *wanted* for deletions until silence, an error, or until *take* returns False for a result."""
        try:
            self._watch = watch = self._gateway.watch({**wanted, "filters": ["NOPUT"]})
        except LockBackendError:
            self._ended.wait(PAUSE)
            return
        try:
            for result in watch:
                if not take(result):
                    return
            if watch.has_failed:
                self._gateway.failed(watch)
                self._ended.wait(PAUSE)
        finally:
            self._watch = None
            watch.connection.close()

    def interrupt(self) -> None:
        """End the watch that another thread follows."""
        self._ended.set()
        if (watch := self._watch) is not None:
            watch.connection.interrupt()


class KeyWatcher(Follower):
    """Rings waiters when one of the keys that they watch is deleted."""

    def __init__(
        self, gateway: Gateway, namespace: str, ring: Callable[[list[Sleeper]], None]
    ) -> None:
        super().__init__(gateway)
        self._range = below(namespace)
        self._ring = ring
        self._mutex = section()
        #: All waiters; and by key its waiters, each with the revision in which it has seen the key.
        self._waiters: dict[Sleeper, None] = {}
        self._waiting: dict[str, dict[Sleeper, int]] = {}
        #: The last deleted keys, and the revisions of their deletions.
        self._deleted: OrderedDict[str, int] = OrderedDict()
        #: All deletions from the revision *_since* on are in *_deleted*; the next watch begins at *_position*.
        self._since = self._position = 0
        self._is_running = False
        self._wanted_at = self._looked_at = 0.0

    def add(self, waiter: Sleeper, keys: Sequence[str], revision: int) -> None:
        """Ring *waiter* when one of *keys*, which existed in *revision*, is deleted; at once if one may be gone."""
        with self._mutex:
            self.remove(waiter)
            self._wanted_at = clock.wait_time()
            if not self._is_running:
                self._start(revision + 1)
            is_deleted = any(self._deleted.get(key, 0) > revision for key in keys)
            if is_deleted or self._since > revision + 1:
                waiter.is_rung = True
                return
            self._waiters[waiter] = None
            waiter.watched = tuple(keys)
            for key in keys:
                self._waiting.setdefault(key, {})[waiter] = revision

    def remove(self, waiter: Sleeper) -> None:
        with self._mutex:
            # Keep an empty dict until its key is deleted: remove() may have interrupted add() between two steps.
            for key in waiter.watched:
                self._waiting.get(key, {}).pop(waiter, None)
            self._waiters.pop(waiter, None)
            waiter.watched = ()

    def close(self) -> None:
        """End the thread; from now on waiters only look again after pauses."""
        self.interrupt()
        self._wake_all()

    def _start(self, revision: int) -> None:
        self._since = self._position = revision
        self._deleted.clear()
        self._waiting.clear()
        self._ended.clear()
        self._looked_at = clock.wait_time()
        try:
            start_daemon(self._run, "distlock-etcd")
            self._is_running = True
        except NoThreadError:
            pass  # waiters look again after pauses

    def _run(self) -> None:
        try:
            while self._goes_on():
                self.follow({**self._range, "start_revision": str(self._position)}, self._hear)
        except BaseException:
            self._is_running = False
            raise
        finally:
            self._wake_all()

    def _goes_on(self) -> bool:
        """Return whether this thread is still wanted; otherwise the next waiter starts another one."""
        with self._mutex:
            self._is_running = self._is_wanted
            return self._is_running

    @property
    def _is_wanted(self) -> bool:
        is_waited_for = bool(self._waiters) or clock.wait_time() - self._wanted_at < SILENCE
        return is_waited_for and not self._ended.is_set()

    def _hear(self, result: dict[str, Any]) -> bool:
        now = clock.wait_time()
        goes_on = self._take(result) and self._is_wanted
        # Look sooner at the begin of a watch, for example after a broken connection.
        if goes_on and now - self._looked_at >= (SHORT if result.get("created") else SILENCE):
            self._look()
        return goes_on

    def _look(self) -> None:
        """Ask etcd for all awaited keys: before 3.4.31 and 3.5.13, a watch loses a deletion to a compaction."""
        self._looked_at = clock.wait_time()
        with self._mutex:
            awaited = list(self._waiting)
        with contextlib.suppress(LockBackendError):
            for some in batches(awaited, OPERATIONS):
                reply = self._gateway.transaction(
                    *(find({"key": encoded(key)}, keys_only=True) for key in some)
                )
                for key, found in zip(some, map(kvs, reply.body["responses"]), strict=True):
                    # A key that was made again was deleted before that.
                    gone = int(found[0]["create_revision"]) if found else reply.revision
                    with self._mutex:
                        rung = self._told(key, gone)
                    self._ring(rung)

    def _take(self, result: dict[str, Any]) -> bool:
        """Process *result* of the watch; return False if the watch must begin again."""
        if "compact_revision" in result:
            # A compaction has removed deletions that the watch has not reported.
            self._begin_again(int(result["compact_revision"]))
            return False
        if result.get("created"):
            latest = int(result["header"]["revision"])
            if latest + 1 < self._position:
                # The member was restored from a snapshot, or is behind: it would report nothing before *_position*.
                self._begin_again(latest + 1)
                return False
        deletions = (e["kv"] for e in result.get("events", ()) if e.get("type") == "DELETE")
        self._note([(decoded(kv["key"]), int(kv["mod_revision"])) for kv in deletions])
        return True

    def _begin_again(self, revision: int) -> None:
        """Let the next watch begin at *revision*, and wake the waiters, which look again."""
        with self._mutex:
            self._since = self._position = revision
            self._deleted.clear()
        self._wake_all()

    def _note(self, deleted: Sequence[tuple[str, int]]) -> None:
        """Ring the waiters for *deleted*: keys, with the revisions of their deletions."""
        with self._mutex:
            # Note all keys first: the end of a session deletes the keys of a holder and of its waiters together.
            for key, revision in deleted:
                self._position = revision + 1
                self._deleted[key] = revision
                self._deleted.move_to_end(key)  # the key may have been deleted before
            rung = [each for key, revision in deleted for each in self._told(key, revision)]
            while len(self._deleted) > REMEMBERED:
                # Waiters whose look is older than the forgotten deletion look again.
                self._since = self._deleted.popitem(last=False)[1] + 1
        self._ring(rung)

    def _told(self, key: str, revision: int) -> list[Sleeper]:
        """Return the waiters to ring for *key*, which was deleted in *revision*."""
        waiting = self._waiting.get(key, {})
        # Keys are used again: the deletion may be older than the waiter's look.
        told = [waiter for waiter, seen in waiting.items() if seen < revision]
        for waiter in told:
            self.remove(waiter)
        if not waiting:
            self._waiting.pop(key, None)
        return told

    def _wake_all(self) -> None:
        with self._mutex:
            rung = list(self._waiters)
            for waiter in rung:
                self.remove(waiter)
        self._ring(rung)
