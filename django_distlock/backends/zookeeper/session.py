"""The session of this process with the ensemble: begun when first asked for, and anew when it is lost."""

from __future__ import annotations

import atexit
import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kazoo.client import KazooClient
from kazoo.exceptions import AuthFailedError, ConnectionClosedError, KazooException
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import Close, Connect
from kazoo.protocol.states import KazooState, KeeperState

from django_distlock.engine import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from .options import ZooKeeperOptions

#: How kazoo tries to connect: without end, and again soon.
_RETRY = {"max_tries": -1, "delay": 0.05, "max_delay": 1.0}
#: Seconds that the end of a session is waited for.
_GOODBYE = 2.0
#: What select() is asked for: to be read, to be written, to have failed.
_LISTS = 3
_OVER = (KeeperState.AUTH_FAILED, KeeperState.CLOSED)


class Listener(Protocol):
    """Who is told of what becomes of the session; called in kazoo's threads, and must not block."""

    def session_began(self) -> None:
        """It is connected, for the first time or again."""

    def session_suspended(self) -> None:
        """Its server is gone; another may take it on."""

    def session_lost(self, reason: str) -> None:
        """It is over, and with it all that it held."""


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """What runs kazoo: its own threads, whose select() ends for what is ready or for the time alone."""

    def select(self, *lists: Any) -> Any:
        """Wait as select.select() does.

        That of eventlet comes back early and with nothing, for sockets of the call before: kazoo
        takes this for a server that is silent, and connects anew.
        """
        *sockets, timeout = lists if len(lists) > _LISTS else (*lists, None)
        ends = None if timeout is None else clock.wait_time() + timeout
        while True:
            ready = super().select(*sockets, timeout)
            if ends is not None:
                timeout = max(0.0, ends - clock.wait_time())
            if any(ready) or timeout == 0:
                return ready


class Session:
    """One kazoo client, shared by all threads and tasks, and the id of its session of now."""

    def __init__(self, options: ZooKeeperOptions, listener: Listener) -> None:
        self._options = options
        self._listener = listener
        self._forget()

    def _forget(self) -> None:
        self._mutex = threading.Lock()
        self._client: Any = None
        self._ready: Any = None
        self._negotiated: float | None = None
        #: The number of the session that holds; None while there is none.
        self.id: int | None = None

    @property
    def client(self) -> Any:
        """The client, if it is connected and its session known; else None."""
        client = self._client
        # It says that it is connected before it tells the listener.
        is_known = client is not None and client.connected and self.id is not None
        return client if is_known else None

    @property
    def problem(self) -> str:
        """Why the session will not do; empty if it does."""
        asked, given = self._options.session_timeout, self._negotiated
        if given is None or given >= asked:
            return ""
        return (
            f"the ensemble ends a session after {given:g} s of silence, before OPTIONS 'session_timeout' "
            f"({asked:g} s) is over: lower it, or raise maxSessionTimeout"
        )

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

    def close(self) -> None:
        """End it: the ensemble frees at once all that it held."""
        with self._mutex:
            client, ready = self._client, self._ready
            self._client = self._ready = self.id = None
        if ready is not None:
            ready.set_exception(ConnectionClosedError("closed"))
        if client is not None:
            _end(client, _GOODBYE)

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
            _close_sockets(client)

    def _start(self) -> None:
        arguments = self._options.client_arguments()
        client = KazooClient(handler=_Handler(), connection_retry=dict(_RETRY), **arguments)
        client.add_listener(partial(self._changed, client))
        _note_connects(client, self._note_negotiated)
        # First, since it may be connected before start_async() returns, and nobody else is listened to.
        self._client = client
        try:
            client.start_async()
        except BaseException:
            self._client = None
            _end(client)
            raise
        # Kazoo would end its threads at the exit before what is held is given back.
        atexit.unregister(client.handler.stop)

    def _note_negotiated(self, seconds: float) -> None:
        self._negotiated = seconds

    def _changed(self, client: Any, state: str) -> None:
        if client is not self._client:
            return
        if state == KazooState.CONNECTED:
            self._connected(client)
        elif state == KazooState.SUSPENDED:
            self._listener.session_suspended()
        else:
            self._lost(client)

    def _connected(self, client: Any) -> None:
        with self._mutex:
            self.id = client.client_id[0]
            ready, self._ready = self._ready, None
        if ready is not None:
            ready.set(client)
        self._listener.session_began()

    def _lost(self, client: Any) -> None:
        is_refused, ready = client.client_state == KeeperState.AUTH_FAILED, None
        with self._mutex:
            self.id = None
            if client.client_state in _OVER:
                # It will not try again; the next request begins with another one.
                ready, self._ready, self._client = self._ready, None, None
                _end(client)
        if ready is not None:
            ready.set_exception(AuthFailedError("refused"))
        reason = "refused its credentials" if is_refused else "ended the session that held it"
        self._listener.session_lost(f"the ensemble {reason}")


def _note_connects(client: Any, note: Callable[[float], None]) -> None:
    """Have *note* told which session timeout the ensemble grants: kazoo keeps that for itself."""
    connection = client._connection  # noqa: SLF001 - there is no other way to learn it
    invoke = connection._invoke  # noqa: SLF001 - as above

    def noting(timeout: float, request: Any, xid: int | None = None) -> Any:
        answer = invoke(timeout, request, xid)
        if isinstance(request, Connect) and answer[0].time_out > 0:
            note(answer[0].time_out / 1000)
        return answer

    connection._invoke = noting  # noqa: SLF001 - as above


def _end(client: Any, seconds: float = 0.0) -> None:
    """Have the client end its session and its threads, and wait for that so long at most."""
    # Kazoo waits for its threads, one of which may be in the middle of a connect.
    goodbye = threading.Thread(target=_stop, args=(client,), name="distlock-goodbye", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and the session with it
        goodbye.start()
        goodbye.join(seconds)


def _stop(client: Any) -> None:
    with contextlib.suppress(KazooException, OSError):
        client.stop()
        client.close()


def _close_sockets(client: Any) -> None:
    """Close this process's copies of the sockets, with no word to the server."""
    connection = client._connection  # noqa: SLF001 - kazoo has nothing for a forked child
    for name in ("_socket", "_read_sock", "_write_sock"):
        if (copy := getattr(connection, name, None)) is not None:
            copy.close()
