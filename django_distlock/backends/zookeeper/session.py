"""The session of this process with the ensemble: begun when first asked for, and anew when it is lost."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import math
import select
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import AuthFailedError, ConnectionClosedError, KazooException
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import Close, Connect
from kazoo.protocol.states import KazooState, KeeperState

from django_distlock.engine import clock
from django_distlock.engine.bells import TaskBell, ThreadBell
from django_distlock.engine.steps import Steps

from .options import ZooKeeperOptions

#: Sends a request; returns kazoo's result, which is set when the reply comes.
Ask = Callable[[], Any]

#: How kazoo tries to connect: without end, and again soon.
_RETRY = {"max_tries": -1, "delay": 0.05, "max_delay": 1.0}
#: Seconds that the end of a session is waited for.
_GOODBYE = 2.0
#: Seconds after which requests that were not sent are handed over again: their client may have ended.
_SLICE = 1.0
_OVER = (KeeperState.AUTH_FAILED, KeeperState.CLOSED)


class Silence(Exception):
    """No reply within the time that was given."""


class _Jobs(SimpleQueue[Any]):
    """What a thread of kazoo's is to do; an exception from outside cannot stop put() half-way."""

    def task_done(self) -> None:
        """Count nothing: kazoo's threads call this after each job."""


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Kazoo's threads: one reads replies, and one does what is put into `completion_queue`: it sends."""

    queue_impl = _Jobs

    @property
    def running(self) -> bool:
        """Have kazoo call back in the thread that reads the reply: it would hand that to another one."""
        return False

    def dispatch_callback(self, callback: Any) -> None:
        """Call whoever watches in that thread, too."""
        callback.func(*callback.args)

    def select(
        self, reads: Sequence[Any], writes: Sequence[Any], _: Sequence[Any], timeout: float
    ) -> Any:
        """Wait as select.select() does. Kazoo asks six times for each request, and would make a selector each time."""
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
        ends = clock.wait_time() + timeout
        while True:
            left = max(0.0, ends - clock.wait_time())
            # That of eventlet comes back early and with nothing, for sockets of the call before:
            # kazoo takes this for a server that is silent, and connects anew.
            ready = super().select(reads, writes, [], left)
            if any(ready) or left == 0:
                return ready


class Exchange:
    """Requests that are sent back to back, and what each came to; *end* is called once all are answered."""

    def __init__(self, asks: Sequence[Ask], end: Callable[[], object]) -> None:
        self._asks = asks
        self._end = end
        self._mutex = threading.Lock()
        self._results: list[Any] = []
        self._error: Exception | None = None
        self._is_begun = False
        self.is_over = not asks

    def begin(self) -> None:
        """Send them, unless they were sent or given up before."""
        with self._mutex:
            if self._is_begun:
                return
            self._is_begun = True
            try:
                self._results = [ask() for ask in self._asks]
            except Exception as error:  # noqa: BLE001 - it is raised where the replies are waited for
                self._error, self.is_over = error, True
                self._end()
        for result in self._results:
            result.rawlink(self._note)

    def give_up(self) -> None:
        """Send none from here on. Whoever is to know of those that were sent knows of them by now."""
        with self._mutex:
            self._is_begun = True

    def outcomes(self) -> list[Any]:
        if self._error is not None:
            raise self._error
        if not self._results:
            return [Silence() for _ in self._asks]
        return [
            result.value if result.successful() else result.exception or Silence()
            for result in self._results
        ]

    def _note(self, _: Any) -> None:
        with self._mutex:
            if self.is_over or not all(result.ready() for result in self._results):
                return
            self.is_over = True
        self._end()


class Session:
    """One kazoo client, shared by all threads and tasks, and the id of its session of now.

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
        self._mutex = threading.Lock()
        self._client: Any = None
        self._ready: Any = None
        #: Why the session will not do; empty if it does.
        self.problem = ""
        #: Whether the last client has ended because its credentials were refused.
        self.is_refused = False
        #: The number of the session that holds; None while there is none.
        self.id: int | None = None

    @property
    def client(self) -> Any:
        """The client, if it is connected and its session known; else None."""
        client = self._client
        # It says that it is connected before it tells _changed().
        is_known = client is not None and client.connected and self.id is not None
        return client if is_known else None

    # Asking.

    def ask(self, asks: Sequence[Ask], ends: float) -> list[Any]:
        """Send requests back to back; return what each came to by *ends* (wait time), errors as they are."""
        bell = ThreadBell()
        exchange = Exchange(asks, bell.ring)
        try:
            while not exchange.is_over and (left := ends - clock.wait_time()) > 0:
                self.hand_over(exchange.begin)
                bell.wait(min(left, _SLICE))
        finally:
            exchange.give_up()
        return exchange.outcomes()

    async def aask(self, asks: Sequence[Ask], ends: float) -> list[Any]:
        bell = TaskBell()
        exchange = Exchange(asks, bell.ring)
        try:
            while not exchange.is_over and (left := ends - clock.wait_time()) > 0:
                self.hand_over(exchange.begin)
                await bell.wait(min(left, _SLICE))
        finally:
            exchange.give_up()
        return exchange.outcomes()

    def start(self, steps: Steps[Sequence[Ask], Any], last: Exchange | None = None) -> None:
        """Carry *steps* out in kazoo's threads, with nobody who waits for them; an error ends them."""
        try:
            asks = steps.send(last.outcomes() if last else None)
        except Exception:  # noqa: BLE001 - also StopIteration: there is no more to do now
            return
        exchange = Exchange(asks, lambda: self.start(steps, exchange))
        self.hand_over(exchange.begin)

    def hand_over(self, job: Callable[[], None]) -> None:
        """Have *job* send what it has to, in another thread than this one.

        An exception that a signal handler raises, or that is set on this thread, would be lost where
        it meets kazoo at work, which catches all, or leave it locked.
        """
        if (client := self._client) is not None:
            client.handler.completion_queue.put(job)
            return
        try:
            _thread.start_new_thread(job, ())
        except RuntimeError:  # there are no new threads while the interpreter ends
            job()

    def ready(self) -> Any:
        """Return a kazoo result that is set once there is a client that is connected."""
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

    # Its beginning and its end.

    def close(self, error: Exception | None = None, seconds: float = _GOODBYE) -> None:
        """End it, and wait for that so long at most: the ensemble frees at once all that it held."""
        with self._mutex:
            client, ready = self._client, self._ready
            self._client = self._ready = self.id = None
        if ready is not None:
            ready.set_exception(error or ConnectionClosedError("closed"))
        if client is not None:
            _end(client, seconds)

    def say_goodbye(self, seconds: float) -> None:
        """End it at the exit of the process, if the ensemble answers within so many seconds."""
        client, self._client = self.client, None
        if client is not None:
            # Kazoo's stop() waits for ten seconds or more; and there are no new threads now to wait in.
            client._stopped.set()  # noqa: SLF001 - as stop() does
            client._queue.append((Close(), None))  # noqa: SLF001 - as above
            client._connection._write_sock.send(b"\0")  # noqa: SLF001 - as above
            client._connection.connection_stopped.wait(seconds)  # noqa: SLF001 - as above

    def give_up(self) -> None:
        """Begin with a new client, if the one there is has ended by itself."""
        if self._client is not None and self._client.client_state in _OVER:
            self.close()

    def abandon(self) -> None:
        """In a forked child: leave the client to the parent, with no goodbye."""
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
        client = KazooClient(handler=_Handler(), connection_retry=dict(_RETRY), **arguments)
        client.add_listener(partial(self._changed, client))
        self._check_timeout(client)
        # First, since it may be connected before start_async() returns, and nobody else is listened to.
        self._client, self.is_refused = client, False
        try:
            client.start_async()
        except BaseException:
            self._client = None
            _end(client, 0)
            raise
        # Kazoo would end its threads at the exit before what is held is given back.
        atexit.unregister(client.handler.stop)

    def _check_timeout(self, client: Any) -> None:
        """Look with each connect which session timeout the ensemble grants: kazoo keeps that for itself."""
        connection, asked = client._connection, self._options.session_timeout  # noqa: SLF001 - there is no other way
        invoke = connection._invoke  # noqa: SLF001 - as above

        def noting(timeout: float, request: Any, xid: int | None = None) -> Any:
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
            self._suspended()
        else:
            self.id = None
            self.is_refused = client.client_state == KeeperState.AUTH_FAILED
            reason = (
                "refused its credentials" if self.is_refused else "ended the session that held it"
            )
            if client.client_state in _OVER:
                # It will not try again; the next request begins with another one.
                self.close(AuthFailedError("refused"), seconds=0)
            self._lost(f"the ensemble {reason}")


def _end(client: Any, seconds: float) -> None:
    """Have the client end its session and its threads, and wait for that so long at most."""

    def stop() -> None:
        with contextlib.suppress(KazooException, OSError):
            client.stop()
            client.close()

    # Kazoo waits for its threads, one of which may be in the middle of a connect.
    goodbye = threading.Thread(target=stop, name="distlock-goodbye", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and the session with it
        goodbye.start()
        goodbye.join(seconds)
