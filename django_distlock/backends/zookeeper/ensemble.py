"""The session of this process with the ensemble: begun at the first request, and again after a loss."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import math
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import Close, Connect, Exists, SetData, Sync
from kazoo.protocol.states import KazooState, KeeperState

from django_distlock.engine import steps
from django_distlock.engine.bells import TaskBell, ThreadBell
from django_distlock.ground import clock
from django_distlock.ground.mutexes import new_mutex

from .options import ZooKeeperOptions

#: Sends a request; returns kazoo's result, which is set when the reply comes.
Ask = Callable[[], Any]
_T = TypeVar("_T")
#: Yields functions that send requests, is sent their outcomes (errors are not raised), and returns a result.
Steps: TypeAlias = "steps.Steps[Sequence[Ask], _T]"

#: kazoo tries to connect without end, with short pauses.
_RETRY = {"max_tries": -1, "delay": 0.05, "max_delay": 1.0}
#: Seconds to wait for the end of a session.
_CLOSE_WITHIN = 2.0
#: Seconds after which unsent requests are handed over again, because their client may have ended.
_SLICE = 1.0
_OVER = (KeeperState.AUTH_FAILED, KeeperState.CLOSED)


class Silence(Exception):
    """No reply came in time."""


def value(outcome: Any) -> Any:
    """Return the reply in *outcome*, or raise the error in it."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _outcome(result: Any) -> Any:
    if result.successful():
        return result.value
    error = result.exception or Silence()
    if isinstance(error, (Silence, KazooException)):
        return error
    # An unexpected error, such as a reply out of order after the session moved, ends kazoo's thread and the session.
    lost = ConnectionLoss(str(error))
    lost.__cause__ = error
    return lost


class _Jobs(SimpleQueue[Any]):
    """The jobs of one of kazoo's threads; an asynchronous exception cannot interrupt put() half-way."""

    def task_done(self) -> None:
        """Do nothing; kazoo's threads call this after each job."""


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Kazoo's threads: one reads replies, and one runs the jobs in `completion_queue`, which send requests."""

    queue_impl = _Jobs

    @property
    def running(self) -> bool:
        """Return False, so that kazoo calls back in the thread that reads the reply, not in another thread."""
        return False

    def dispatch_callback(self, callback: Any) -> None:
        """Call the watchers in the reading thread, too."""
        callback.func(*callback.args)

    def select(
        self, reads: Sequence[Any], writes: Sequence[Any], _: Sequence[Any], timeout: float
    ) -> Any:
        """Wait like select.select(). Kazoo calls this six times for each request; its own method makes a selector each time.

        poll() does not know that a TLS socket is ready after it has read a record with several replies.
        """
        if buffered := [each for each in reads if hasattr(each, "pending") and each.pending()]:
            return buffered, [], []
        if hasattr(select, "poll"):
            poll = select.poll()
            for sockets, event in ((reads, select.POLLIN), (writes, select.POLLOUT)):
                for each in sockets:
                    poll.register(each, event)
            found = dict(poll.poll(math.ceil(max(0.0, timeout) * 1000)))
            return (
                [each for each in reads if each.fileno() in found],
                [each for each in writes if each.fileno() in found],
                [],
            )
        return super().select(reads, writes, [], max(0.0, timeout))


class _Queue(deque[Any]):
    """The unsent requests of kazoo; `setData` and `exists`, which confirm leases, and `sync` requests go first."""

    def append(self, item: Any) -> None:
        if isinstance(item[0], (Exists, SetData, Sync)):
            self.insert(1, item)  # not in front of the first request, which may be on its way
        else:
            super().append(item)


class _Client(KazooClient):  # type: ignore[misc]  # kazoo has no types
    def _reset(self) -> None:
        """Begin with an empty queue, as kazoo does for each session."""
        super()._reset()
        self._queue = _Queue()


class Exchange:
    """Requests that are sent back to back, and their outcomes; *end* is called when all have answers."""

    def __init__(
        self,
        asks: Sequence[Ask],
        end: Callable[[], object],
        heard: Callable[[], object] = bool,
    ) -> None:
        """*heard* is called for each answer."""
        self._asks = asks
        self._end = end
        self._heard = heard
        self._mutex = new_mutex()
        self._results: list[Any] = []
        self._error: Exception | None = None
        self._is_begun = False
        self.is_over = not asks

    def begin(self) -> None:
        """Send the requests, unless they were sent or given up before."""
        with self._mutex:
            if self._is_begun:
                return
            self._is_begun = True
            try:
                self._results = [ask() for ask in self._asks]
            except Exception as error:  # noqa: BLE001 - outcomes() raises it
                self._error, self.is_over = error, True
                self._end()
        for result in self._results:
            result.rawlink(self._note)

    def give_up(self) -> None:
        """Send no request from now on; wait for begin(), so that the requests sent by then have been noted."""
        with self._mutex:
            self._is_begun = True

    def outcomes(self) -> list[Any]:
        if self._error is not None:
            raise self._error
        if not self._results:
            return [Silence() for _ in self._asks]
        return [*map(_outcome, self._results)]

    def _note(self, _: Any) -> None:
        self._heard()
        with self._mutex:
            if self.is_over or not all(result.ready() for result in self._results):
                return
            self.is_over = True
        self._end()


class EnsembleSession:
    """One kazoo client, shared by all threads and tasks, and the id of its present session.

    *began*, *suspended* and *lost* are called in kazoo's threads, and must not block.
    """

    def __init__(
        self,
        options: ZooKeeperOptions,
        began: Callable[[], None],
        suspended: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self._options = options
        self._began, self._suspended, self._lost = began, suspended, lost
        self._forget()

    def _forget(self) -> None:
        self._mutex = new_mutex()
        self._client: Any = None
        self._ready: Any = None
        #: Why the session cannot be used; empty if it can.
        self.problem = ""
        #: Whether the last client ended because its credentials were refused.
        self.is_refused = False
        #: The id of the session; None while there is none.
        self.id: int | None = None
        #: The time (lease time) of the last end of a connection.
        self._cut_at = 0.0
        #: The time (wait time) of the ensemble's last answer.
        self._heard_at = 0.0

    @property
    def client(self) -> Any:
        """The client, if it is connected and its session is known; else None."""
        client = self._client
        # kazoo sets *connected* before it calls _changed().
        is_known = client is not None and client.connected and self.id is not None
        return client if is_known else None

    # Requests.

    def ask(self, asks: Sequence[Ask], ends: float, last: float = 0.0) -> list[Any]:
        """Send requests back to back; return their outcomes by *ends* (wait time). Errors are returned, not raised.

        The ensemble answers in order: while it answers other requests, ask() waits until *last*.
        """
        bell = ThreadBell()
        exchange = Exchange(asks, bell.ring, self._note_heard)
        try:
            while not exchange.is_over and (left := self._left(ends, last)) > 0:
                self.hand_over(exchange.begin)
                bell.wait(min(left, _SLICE))
        finally:
            exchange.give_up()
        return exchange.outcomes()

    async def aask(self, asks: Sequence[Ask], ends: float, last: float = 0.0) -> list[Any]:
        bell = TaskBell()
        exchange = Exchange(asks, bell.ring, self._note_heard)
        try:
            while not exchange.is_over and (left := self._left(ends, last)) > 0:
                self.hand_over(exchange.begin)
                await bell.wait(min(left, _SLICE))
        finally:
            exchange.give_up()
        return exchange.outcomes()

    def _left(self, ends: float, last: float) -> float:
        answering = self._heard_at + self._options.io_timeout
        return max(ends, min(answering, last)) - clock.wait_time()

    def _note_heard(self) -> None:
        self._heard_at = clock.wait_time()

    def hand_over(self, job: Callable[[], None]) -> None:
        """Run *job*, which sends requests, in another thread.

        Kazoo catches everything: an asynchronous exception inside it would be lost, or leave it locked.
        """
        if (client := self._client) is not None:
            client.handler.completion_queue.put(job)
            return
        try:
            _thread.start_new_thread(job, ())
        except RuntimeError:  # no new thread can start while the interpreter ends
            job()

    def ready(self) -> Any:
        """Return a kazoo result that is set when the client is connected."""
        with self._mutex:
            if self._client is None:
                self._start()
            if self._ready is None:
                self._ready = self._client.handler.async_result()
            ready = self._ready
            if (client := self.client) is not None:
                self._ready = None
                ready.set(client)
            return ready

    # Starting and ending.

    def close(self, error: Exception | None = None, seconds: float = _CLOSE_WITHIN) -> None:
        """End the session, which frees its locks at once; wait at most *seconds*."""
        with self._mutex:
            client, ready = self._client, self._ready
            self._client = self._ready = self.id = None
        if ready is not None:
            ready.set_exception(error or ConnectionClosedError("closed"))
        if client is not None:
            _end(client, seconds)

    def close_at_exit(self, seconds: float) -> None:
        """Close the session at the exit of the process; wait at most *seconds* for the answer."""
        client, self._client = self.client, None
        if client is not None:
            # Kazoo's stop() takes ten seconds or more, and at the exit no new thread can start to call it.
            client._stopped.set()  # noqa: SLF001 - as stop() does
            client._queue.append((Close(), None))  # noqa: SLF001 - as above
            client._connection._write_sock.send(b"\0")  # noqa: SLF001 - as above
            if client._connection.connection_stopped.wait(seconds):  # noqa: SLF001 - as above
                client._connection.close()  # noqa: SLF001 - closes the sockets that wake kazoo's thread

    def give_up(self) -> None:
        """Close the client if it has ended by itself, so that the next request starts a new one."""
        if self._client is not None and self._client.client_state in _OVER:
            self.close()

    def abandon(self) -> None:
        """In a forked child, leave the client to the parent: close the copied sockets, but not the session."""
        client = self._client
        self._forget()
        if client is not None:
            atexit.unregister(client.handler.stop)
            connection = client._connection  # noqa: SLF001 - kazoo has nothing for a forked child
            for name in ("_socket", "_read_sock", "_write_sock"):
                if (copy := getattr(connection, name, None)) is not None:
                    copy.close()

    def _start(self) -> None:
        arguments = self._options.client_arguments()
        client = _Client(handler=_Handler(), connection_retry=dict(_RETRY), **arguments)
        client.add_listener(partial(self._changed, client))
        self._watch_connects(client)
        # Before start_async(), as the client may connect before that returns, and _changed() ignores other clients.
        self._client, self.is_refused = client, False
        try:
            client.start_async()
        except BaseException:
            self._client = None
            _end(client, 0)
            raise
        # At the exit, kazoo would end its threads before our locks are released.
        atexit.unregister(client.handler.stop)

    def _watch_connects(self, client: Any) -> None:
        """Check at each connect the session timeout that the ensemble grants, which kazoo does not report.

        Once the session must be over, connect without its last transaction: servers that were restored from a
        backup do not have that transaction, and would refuse this client for ever.
        """
        connection, asked = client._connection, self._options.session_timeout  # noqa: SLF001 - there is no other way
        invoke = connection._invoke  # noqa: SLF001 - as above

        def noting(timeout: float, request: Any, xid: int | None = None) -> Any:
            if isinstance(request, Connect) and clock.lease_time() - self._cut_at > asked:
                request = request._replace(last_zxid_seen=0)
            answer = invoke(timeout, request, xid)
            if isinstance(request, Connect) and (given := answer[0].time_out / 1000) > 0:
                problem = (
                    f"the ensemble ends a session after {given:g} s of silence, before OPTIONS "
                    f"'session_timeout' ({asked:g} s) is over: lower it, or raise maxSessionTimeout"
                )
                self.problem = problem if given < asked else ""
            return answer

        connection._invoke = noting  # noqa: SLF001 - as above

    def _changed(self, client: Any, state: str) -> None:
        if client is not self._client:
            return
        if state == KazooState.CONNECTED:
            with self._mutex:
                self.id = client.client_id[0]
                ready, self._ready = self._ready, None
            if ready is not None:
                ready.set(client)
            self._began()
        elif state == KazooState.SUSPENDED:
            self._cut_at = clock.lease_time()
            self._suspended()
        else:
            self.id = None
            self.is_refused = client.client_state == KeeperState.AUTH_FAILED
            reason = (
                "refused its credentials" if self.is_refused else "ended the session that held it"
            )
            if client.client_state in _OVER:
                # This client does not connect again; the next request starts a new one.
                self.close(AuthFailedError("refused"), seconds=0)
            self._lost(f"the ensemble {reason}")


def _end(client: Any, seconds: float) -> None:
    """End the client's session and threads; wait at most *seconds*."""

    def stop() -> None:
        with contextlib.suppress(KazooException, OSError):
            client.stop()
            client.close()

    # In a separate thread, as kazoo waits for its threads, one of which may be in the middle of a connect.
    closing = threading.Thread(target=stop, name="distlock-close", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and the session with it
        closing.start()
        closing.join(seconds)
