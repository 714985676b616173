"""The JSON gateway of etcd, over connections that are kept: requests, replies, and what its errors mean."""

from __future__ import annotations

import base64
import contextlib
import http
import json
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, NamedTuple

from django_distlock.backends.base import KEYS
from django_distlock.backends.idle import IDLE, set_keepalive
from django_distlock.engine.values import Secret, SecretBytes
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, first_line
from django_distlock.ground import clock

from .options import Endpoint, EtcdOptions

#: Seconds for which a watch reads nothing before it asks again.
SILENCE = 5.0
#: Seconds until members that have no leader are asked again.
ELECTION = 0.1
#: How many bytes are read at once.
CHUNK = 65_536
#: How many idle connections are kept.
KEPT = 10
#: How many operations etcd accepts in one transaction, by default; those in a nested one count, too.
OPERATIONS = 128
#: The name of a key that is not written.
NEVER = "%never"
#: Seconds for a last request, for one that is sent although its session is over, and until a watch has begun.
SHORT = 1.0

#: What the gateway says of a token that has expired, or was given by a member that was restarted.
_OLD_TOKEN = ("invalid auth token", "revision of auth store is old")
#: What it says of a login that is missing, wrong, or has too few rights.
_LOGIN = ("authentication failed", "user name is empty", "permission denied")
#: By what etcd says: what is to be done.
_ADVICE = {
    "database space exceeded": (
        "its database is full (the alarm NOSPACE): compact and defragment it, then `etcdctl alarm disarm`"
    ),
    "user name is empty": "it asks for a login: set OPTIONS 'user' and 'password'",
    "authentication failed": "it refuses the login: correct OPTIONS 'user' and 'password'",
    "authentication is not enabled": "it knows no logins: remove OPTIONS 'user' and 'password'",
    "permission denied": "its user needs a role with the rights to read and write below OPTIONS 'namespace'",
    "no gateway": "it has no JSON gateway at /v3/: it must be etcd 3.4 or newer, with --enable-grpc-gateway",
}


class LeaseGone(LockBackendError):
    """The lease of the session does not exist any more."""


class Reply(NamedTuple):
    """A reply; *is_sure* unless an earlier sending of the same request may still be carried out later."""

    body: dict[str, Any]
    is_sure: bool
    date: str

    @property
    def revision(self) -> int:
        return int(self.body["header"]["revision"])

    @property
    def server_time(self) -> float:
        return parsedate_to_datetime(self.date).timestamp()


class Refused(Exception):
    """A member has answered by an error. *is_transient*: another member may answer, or this one later."""

    def __init__(self, text: str, *, is_transient: bool = False) -> None:
        super().__init__(text)
        self.is_transient = is_transient

    @property
    def is_login(self) -> bool:
        return _is_one_of(self, _LOGIN)


class Broken(OSError):
    """The connection ended, or what came is no HTTP."""


class MemberConnection:
    """A connection to one member: one request at a time.

    It speaks HTTP by itself: an asynchronous exception inside http.client would leave a broken object,
    which complains when it is collected, and its replies take a tenth of the time of a lock.
    """

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None) -> None:
        self.endpoint = endpoint
        #: Whether a request may have been sent; the time of its last use.
        self.is_used = False
        self.used_at = 0.0
        #: Whether the member goes on to answer on it.
        self.is_kept = True
        self._host = f"Host: {endpoint}"
        self._tls = tls if endpoint.tls else None
        self._socket: socket.socket | None = None
        self._unread = b""

    def ask(self, path: str, body: bytes, token: str, seconds: float) -> tuple[int, dict[str, str]]:
        """Send a request; return the status and the headers of its reply. Connect if needed."""
        line = self._socket or self._connected(seconds)
        line.settimeout(seconds)
        self.is_used = True
        line.sendall(self._head(path, body, token) + body)
        status, *lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        parts = [each.partition(":") for each in lines]
        headers = {name.lower(): value.strip() for name, _, value in parts}
        self.is_kept = headers.get("connection", "").lower() != "close"
        try:
            return int(status.split()[1]), headers
        except (IndexError, ValueError):
            raise Broken(f"no HTTP: {status[:80]!r}") from None

    def body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            return b"".join(self.chunks())
        return self._exactly(int(headers.get("content-length", 0)))

    def chunks(self) -> Iterator[bytes]:
        """Give the parts of a reply that is sent in parts."""
        while size := int(self._until(b"\r\n"), 16):
            yield self._exactly(size)
            self._until(b"\r\n")
        while self._until(b"\r\n"):
            pass  # headers that follow it

    def _connected(self, seconds: float) -> socket.socket:
        host, port, _ = self.endpoint
        self._socket = socket.create_connection((host, port), seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_keepalive(self._socket)
        if self._tls is not None:
            self._socket = self._tls.wrap_socket(self._socket, server_hostname=host)
        return self._socket

    def _head(self, path: str, body: bytes, token: str) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1",
            self._host,
            *([f"Authorization: {token}"] if token else []),
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join([*lines, "\r\n"]).encode()

    def _until(self, end: bytes) -> bytes:
        while end not in self._unread:
            self._read_more()
        found, _, self._unread = self._unread.partition(end)
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._unread) < size:
            self._read_more()
        found, self._unread = self._unread[:size], self._unread[size:]
        return found

    def _read_more(self) -> None:
        assert self._socket is not None, "ask() has connected"
        if not (more := self._socket.recv(CHUNK)):
            raise Broken("the connection was closed")
        self._unread += more

    def wait_for(self, seconds: float) -> None:
        """Wait so long for each part of the reply from now on."""
        assert self._socket is not None, "ask() has connected"
        self._socket.settimeout(seconds)

    def interrupt(self) -> None:
        """End the request whose reply another thread reads."""
        if (line := self._socket) is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if (line := self._socket) is not None:
            line.close()


class Gateway:
    """Sends requests to one member, and to the next one if it does not answer.

    Every request may be carried out twice, so one whose reply was lost is sent again.
    """

    def __init__(self, alias: str, options: EtcdOptions) -> None:
        self._alias = alias
        self._options = options
        self._tls = options.tls_context()
        #: The first one is asked first.
        self._members = options.members
        self._idle: list[MemberConnection] = []
        self._open: set[MemberConnection] = set()
        # For one that is replaced, and not closed.
        weakref.finalize(self, _close_all, self._open).atexit = False
        self._token = ""
        self._mutex = threading.RLock()

    def post(self, path: str, body: dict[str, Any], seconds: float | None = None) -> Reply:
        """Return the reply; LockBackendError if etcd refuses, or LockOutcomeUnknown without a reply.

        *seconds*: how long to try, by default the ``io_timeout``.
        """
        ends = clock.wait_time() + (self._options.io_timeout if seconds is None else seconds)
        is_new = False
        while True:
            if self._options.user and not self._token:
                self._log_in(ends)
                is_new = True
            try:
                return self._ask(path, json.dumps(body).encode(), ends)
            except Refused as refused:
                if not is_new and self._options.user and _is_one_of(refused, _OLD_TOKEN):
                    self._token = ""
                    continue
                raise self._error(refused) from refused

    def transaction(self, *success: dict[str, Any], **more: Sequence[dict[str, Any]]) -> Reply:
        """Do the operations of *success*, all or none. *more*: ``compare``, the conditions, and else the ``failure``."""
        return self.post("/v3/kv/txn", {"success": success, **more})

    def check(self) -> None:
        """Raise LockBackendError if etcd has no gateway, is full, or lets us write nothing."""
        key = f"{self._options.namespace}/{NEVER}"
        # It is refused as a write would be, and writes nothing.
        self.transaction(put(key, ""), compare=[compare(key, "LESS", 0)])

    def _log_in(self, ends: float) -> None:
        login = SecretBytes(
            json.dumps({"name": self._options.user, "password": self._options.password}).encode()
        )
        try:
            reply = self._ask("/v3/auth/authenticate", login, ends)
        except Refused as refused:
            raise self._error(refused) from refused
        self._token = Secret(reply.body["token"])

    def _ask(self, path: str, body: bytes, ends: float) -> Reply:
        """Ask one member after the other until one answers; again and again while they have no leader."""
        is_sure = True
        while True:
            problems: list[Exception] = []
            for left in range(len(self._members), 0, -1):
                seconds = max(0.01, (ends - clock.wait_time()) / left)
                answer, was_sent = self._ask_first(path, body, seconds)
                if isinstance(answer, Reply):
                    return answer._replace(is_sure=is_sure and not was_sent)
                is_sure &= not was_sent
                problems.append(answer)
            is_alive = any(isinstance(problem, Refused) for problem in problems)
            if not is_alive or clock.wait_time() + ELECTION > ends:
                raise self._silence(problems[-1], is_sure=is_sure) from problems[-1]
            time.sleep(ELECTION)

    def _ask_first(self, path: str, body: bytes, seconds: float) -> tuple[Reply | Exception, bool]:
        """Ask the first member; return its reply, or its error after which another one is the first.

        And whether the request was sent before, or without a reply, and may be carried out later.
        """
        was_sent, ends, is_only = False, clock.wait_time() + seconds, len(self._members) == 1
        while True:
            connection = self._connection()
            was_used = connection.is_used
            # No other member is asked if a router has silently forgotten the connection.
            share = 0.5 if was_used and is_only else 1.0
            patience = max(0.01, (ends - clock.wait_time()) * share)
            try:
                reply = _read(connection, path, body, self._token, patience)
            except Refused as refused:
                self._put_back(connection)
                if not refused.is_transient:
                    raise
                self._turn_from(connection.endpoint)
                return refused, True
            except OSError as error:
                self._drop(connection)
                # Without a connection, nothing was sent.
                was_sent |= connection.is_used
                if was_used:
                    self._drop_idle()  # they are probably broken too
                if was_used and (is_only or not isinstance(error, TimeoutError)):
                    continue  # it broke while it was idle: this member may be well
                self._turn_from(connection.endpoint)
                return error, was_sent
            except BaseException:
                self._drop(connection)
                raise
            self._put_back(connection)
            return reply, was_sent

    def _silence(self, problem: Exception, *, is_sure: bool) -> LockBackendError:
        known = f"no member of {self._options.servers} has answered in time"
        text = known if isinstance(problem, TimeoutError) else f"{known}: {_in_words(problem)}"
        return (LockBackendError if is_sure else LockOutcomeUnknown)(self._alias, text)

    def _error(self, refused: Refused) -> LockBackendError:
        text = str(refused)
        if "requested lease not found" in text:
            return LeaseGone(self._alias, "the lease of the session has ended")
        advice = next((_ADVICE[each] for each in _ADVICE if each in text), None)
        return LockBackendError(self._alias, f"etcd refused: {advice or text}")

    # Connections.

    def _connection(self) -> MemberConnection:
        first = self._members[0]
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was quicker
                found = self._idle.pop()
                if found.endpoint == first and clock.wait_time() - found.used_at < IDLE:
                    return found
                self._drop(found)
        return self._made(first)

    def _made(self, endpoint: Endpoint) -> MemberConnection:
        made = MemberConnection(endpoint, self._tls)
        self._open.add(made)
        return made

    def _put_back(self, connection: MemberConnection) -> None:
        if connection.is_kept and connection in self._open and len(self._idle) < KEPT:
            connection.used_at = clock.wait_time()
            self._idle.append(connection)
        else:
            self._drop(connection)

    def _drop_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._drop(self._idle.pop())

    def _drop(self, connection: MemberConnection) -> None:
        self._open.discard(connection)
        connection.close()

    def _turn_from(self, endpoint: Endpoint) -> None:
        """Ask the next member first, unless another thread has found out that already."""
        with self._mutex:
            if self._members[0] == endpoint:
                self._members = [*self._members[1:], endpoint]

    def close(self) -> None:
        """Close all connections; in a forked child this sends nothing, and the parent keeps its own."""
        self._idle.clear()
        _close_all(self._open)

    # Watches.

    def watch(self, wanted: dict[str, Any]) -> Watch:
        """Return a watch, to be read in a thread of its own; errors as of post()."""
        if self._options.user and not self._token:
            self._log_in(clock.wait_time() + self._options.io_timeout)
        connection = self._made(self._members[0])
        return Watch(connection, wanted, self._token)

    def failed(self, watch: Watch) -> None:
        """Try another member, and with another token, for the next watch."""
        self._turn_from(watch.connection.endpoint)
        if watch.is_refused:
            self._token = ""

    def end(self, watch: Watch) -> None:
        self._drop(watch.connection)


def _close_all(connections: set[MemberConnection]) -> None:
    with contextlib.suppress(KeyError):
        while True:
            connections.pop().close()


class Watch:
    """A request whose reply does not end: one line for each change."""

    def __init__(self, connection: MemberConnection, wanted: dict[str, Any], token: str) -> None:
        self.connection = connection
        self.is_refused = False
        self._body = json.dumps({"create_request": wanted}).encode()
        self._token = token

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Give the results; OSError at the end or if it does not begin, TimeoutError after silence."""
        try:
            self.connection.ask("/v3/watch", self._body, self._token, SHORT)
        except TimeoutError as error:
            raise Broken("it has not begun to watch") from error
        self.connection.wait_for(SILENCE)
        unread = b""
        for chunk in self.connection.chunks():
            *lines, unread = (unread + chunk).split(b"\n")
            for line in filter(None, lines):
                known = json.loads(line)
                result = known.get("result", {"canceled": True, "cancel_reason": known})
                # Of a token that is not valid any more, etcd says no more than that.
                if result.get("canceled") and "compact_revision" not in result:
                    self.is_refused = True
                    raise Broken(str(result.get("cancel_reason"))[:200])
                yield result


def _read(
    connection: MemberConnection, path: str, body: bytes, token: str, seconds: float
) -> Reply:
    status, headers = connection.ask(path, body, token, seconds)
    content = connection.body(headers)
    if status == http.HTTPStatus.NOT_FOUND and not content.startswith(b"{"):
        raise Refused("no gateway")
    try:
        known = json.loads(content)
    except ValueError as error:
        raise Broken(f"status {status}: {content[:80]!r}") from error
    if not isinstance(known, dict):
        raise Refused("no gateway")
    # A stream has its reply in "result", or its error as an object.
    if problem := known.get("error") or known.get("message"):
        text = problem.get("message", "") if isinstance(problem, dict) else problem
        is_transient = status in {503, 504} or _is_one_of(text, _TRANSIENT)
        raise Refused(text, is_transient=is_transient)
    answer = known.get("result", known)
    if "header" not in answer:
        raise Refused("no gateway")
    return Reply(answer, True, headers.get("date", ""))


#: What members say while there is no leader, or another one, or while they start or stop.
_TRANSIENT = (
    "leader", "timed out", "server stopped", "closing", "unhealthy", "too many requests", "learner"
)  # fmt: skip


def _is_one_of(error: object, texts: tuple[str, ...]) -> bool:
    return any(text in str(error) for text in texts)


def _in_words(problem: Exception) -> str:
    is_ours = isinstance(problem, (Refused, Broken))
    return str(problem) if is_ours else f"{type(problem).__name__}: {first_line(problem)}"


# Keys and values.


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def decoded(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")


@lru_cache(KEYS)
def below(folder: str) -> dict[str, str]:
    """Return the range of all keys that begin with *folder* and a slash."""
    return {"key": encoded(f"{folder}/"), "range_end": encoded(f"{folder}0")}


def kvs(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a range in *answer* has found; the gateway leaves out what is empty."""
    found: list[dict[str, Any]] = answer.get("response_range", answer).get("kvs", [])
    return found


# The operations and conditions of a transaction.


def put(key: str, value: str, **lease: str) -> dict[str, Any]:
    """Return the operation that writes *key*, which goes with *lease*, if there is one."""
    return {"request_put": {"key": encoded(key), "value": encoded(value), **lease}}


def delete(key: str) -> dict[str, Any]:
    return {"request_delete_range": {"key": encoded(key)}}


def find(area: dict[str, str], **terms: Any) -> dict[str, Any]:
    """Return the operation that reads the keys of *area*: a key, or a range."""
    return {"request_range": {**area, **terms}}


def nested(act: dict[str, Any], condition: dict[str, Any]) -> dict[str, Any]:
    return {"request_txn": {"compare": [condition], "success": [act]}}


def says(key: str, result: str, value: str) -> dict[str, Any]:
    """Return the condition on the value of *key*, which must exist; values are compared as texts."""
    return {"key": encoded(key), "target": "VALUE", "result": result, "value": encoded(value)}


def compare(key: str, result: str, revision: int) -> dict[str, Any]:
    """Return the condition on the revision that has made *key*, which is 0 while it does not exist."""
    return {
        "key": encoded(key),
        "target": "CREATE",
        "result": result,
        "create_revision": str(revision),
    }
