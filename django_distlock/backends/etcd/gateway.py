"""The JSON gateway of etcd, over connections that are kept: requests, replies, and what its errors mean."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from typing import Any, NamedTuple

from django_distlock.backends.base import KEYS
from django_distlock.backends.idle import IdleStack, set_keepalive
from django_distlock.engine.values import Secret, SecretBytes
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, first_line
from django_distlock.ground import clock
from django_distlock.ground.mutexes import Taken, new_mutex, run_in

from .options import Endpoint, EtcdOptions

#: Seconds for which a watch reads nothing before it asks again.
SILENCE = 5.0
#: Seconds until members without a leader are asked again.
ELECTION = 0.1
#: Seconds that each member has at least for its answer.
LEAST = 0.01
#: How many idle connections are kept.
KEPT = 10
#: How many operations etcd accepts in one transaction, by default; nested operations count, too.
OPERATIONS = 128
#: The name of a key that is not written.
NEVER = "%never"
#: Seconds for a last request, for a request about an ended session, and until a watch has begun.
SHORT = 1.0
#: The errors of a request without a reply: no connection, silence, or bytes that are not HTTP or JSON.
FAULTS = (OSError, http.client.HTTPException, ValueError)

_AUTHENTICATE = "/v3/auth/authenticate"
#: The gateway's texts for a token that has expired, or came from a member before its restart.
_OLD_TOKEN = ("invalid auth token", "revision of auth store is old")
#: The gateway's texts for a login that is missing, wrong, or has too few rights.
_LOGIN = ("authentication failed", "user name is empty", "permission denied")
#: The members' texts during an election, a change of the leader, a start or a stop.
_TRANSIENT = (
    "leader", "timed out", "server stopped", "closing", "unhealthy", "too many requests", "learner",
    "proposal dropped",
)  # fmt: skip
#: Advice, by the texts of etcd.
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
    """A reply; *is_sure* unless an earlier sending of the request is without a reply, and may yet be carried out."""

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
    """A member has answered by an error. *status* is that of HTTP."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        #: Whether another member may answer without an error, or this member later.
        self.is_transient = status in {503, 504} or _is_one_of(text, _TRANSIENT)
        self.is_login = _is_one_of(text, _LOGIN)
        self.is_old_token = _is_one_of(text, _OLD_TOKEN)


class Broken(OSError):
    """The reply does not come from etcd."""


class _Response(http.client.HTTPResponse):
    # Needed by the garbage collector to close a response whose __init__() was interrupted by an exception.
    fp: Any = None


class _Bytes(io.RawIOBase):
    """The bytes received on a connection, as a file for http.client."""

    def __init__(self, connection: MemberConnection) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        return self._connection.read_into(into)


class MemberConnection:
    """A connection to one member: one request at a time.

    http.client reads the replies, but does not send the requests: that would add 5 % to the time of a lock.
    """

    def __init__(self, endpoint: Endpoint, options: EtcdOptions) -> None:
        self.endpoint = endpoint
        #: Whether a request may have been sent; the time of the last use.
        self.is_used = False
        self.used_at = 0.0
        #: When the last byte of the reply must have come (wait_time()).
        self.ends = 0.0
        #: Whether the connection may be used again: the reply has been read, and the member keeps it open.
        self.is_kept = False
        self._options = options
        self._socket: socket.socket | None = None

    def ask(self, path: str, body: bytes, token: str, ends: float) -> http.client.HTTPResponse:
        """Connect if needed, send a request, and return the reply, read up to its body."""
        self.ends, self.is_kept = ends, False
        sock = self._socket or self._connected()
        login = f"Authorization: {token}\r\n" if token else ""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.endpoint}\r\n{login}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sock.settimeout(self._left())
        self.is_used = True
        sock.sendall(head.encode() + body)
        response = _Response(self, method="POST")  # type: ignore[arg-type]  # of the socket, it uses makefile() alone
        response.begin()
        return response

    def reply(self, path: str, body: bytes, token: str, ends: float) -> Reply:
        """Send a request and return the reply; Refused if etcd refuses, one of FAULTS without a reply."""
        # Closed here, because the finalizer of a response swallows the exception of a signal that comes in its close().
        with self.ask(path, body, token, ends) as response:
            content, status = response.read(), response.status
        try:
            known = json.loads(content)
        except ValueError as error:
            if status == http.HTTPStatus.NOT_FOUND:
                raise Refused("no gateway") from error
            raise Broken(f"status {status}: {content[:80]!r}") from error
        self.is_kept = not response.will_close
        if not isinstance(known, dict):
            raise Refused("no gateway")
        # A stream has its reply in "result", or its error as an object.
        if problem := known.get("error") or known.get("message"):
            text = problem.get("message", "") if isinstance(problem, dict) else problem
            raise Refused(text, status)
        answer = known.get("result", known)
        if "header" not in answer:
            raise Refused("no gateway")
        return Reply(answer, True, response.getheader("date", ""))

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Bytes(self))

    def read_into(self, into: Any) -> int:
        assert self._socket is not None, "ask() has connected"
        self._socket.settimeout(self._left())
        return self._socket.recv_into(into)

    def _connected(self) -> socket.socket:
        host, port, tls = self.endpoint
        self._socket = socket.create_connection((host, port), self._left())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_keepalive(self._socket)
        if tls:
            self._socket.settimeout(self._left())
            context = self._options.tls_context()
            self._socket = context.wrap_socket(self._socket, server_hostname=host)
        return self._socket

    def _left(self) -> float:
        """Return the seconds left for the reply; TimeoutError if none are left."""
        if (left := self.ends - clock.wait_time()) <= 0:
            raise TimeoutError
        return left

    def has_news(self) -> bool:
        return False  # the next request finds out that the member has closed the connection

    def interrupt(self) -> None:
        """End the request whose reply another thread reads."""
        if (sock := self._socket) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if (sock := self._socket) is not None:
            sock.close()


@dataclass(slots=True)
class _Post:
    """A request that is sent until a member answers; it may be carried out several times."""

    path: str
    body: bytes
    ends: float
    #: False if a sending had no reply, and may yet be carried out.
    is_sure: bool = True


class Gateway:
    """Sends requests to one member, and to the next one if it does not answer."""

    def __init__(self, alias: str, options: EtcdOptions) -> None:
        self._alias = alias
        self._options = options
        #: The members in the order in which they are asked.
        self._members = options.members
        self._idle = IdleStack()
        #: All open connections, also those in use: a forked child must close them.
        self._connections: weakref.WeakSet[MemberConnection] = weakref.WeakSet()
        # Closes the idle connections of a gateway that is replaced without close().
        weakref.finalize(self, self._idle.close_all, MemberConnection.close).atexit = False
        self._token = ""
        self._mutex = new_mutex()
        #: The cluster that has answered, and its highest known revision.
        self._cluster, self._revision = "", 0
        #: Called when etcd has gone back to an earlier revision; must not block.
        self.went_back: Callable[[], object] = bool
        # Held during a login.
        self._login = new_mutex()

    def post(self, path: str, body: dict[str, Any], seconds: float | None = None) -> Reply:
        """Send *body* and return the reply; LockBackendError if etcd refuses, LockOutcomeUnknown without a reply.

        *seconds*: how long to try, by default the ``io_timeout``.
        """
        seconds, known = self._options.io_timeout if seconds is None else seconds, self._revision
        post = _Post(path, json.dumps(body).encode(), clock.wait_time() + seconds)
        try:
            reply = self._ask(post)
        except LockBackendError as error:
            # The error may be that of a later login. LeaseGone is certain: without the lease, no sending makes a key.
            if post.is_sure or isinstance(error, LeaseGone):
                raise
            raise LockOutcomeUnknown(*error.args) from error.__cause__
        if path.startswith("/v3/kv/"):  # other replies may have an old revision
            self._compare(reply, known)
        return reply._replace(is_sure=post.is_sure)

    def transaction(self, *success: dict[str, Any], **more: Sequence[dict[str, Any]]) -> Reply:
        """Do all operations of *success*, or none. *more*: the conditions ``compare``, and what to do otherwise, ``failure``."""
        return self.post("/v3/kv/txn", {"success": success, **more})

    def check(self) -> None:
        """Raise LockBackendError if etcd has no gateway, is full, or refuses writes."""
        key = f"{self._options.namespace}/{NEVER}"
        # The comparison is never true: this needs the permission to write, but writes nothing.
        self.transaction(put(key, ""), compare=[compare(key, "LESS", 0)])

    def _ask(self, post: _Post) -> Reply:
        """Ask one member after the other until one answers; repeat that while they have no leader."""
        while True:
            is_alive, problem = False, Exception()
            for left in range(len(self._members), 0, -1):
                try:
                    return self._ask_first(post, (post.ends - clock.wait_time()) / left)
                except Refused as refused:
                    if not (refused.is_transient or refused.is_old_token):
                        raise self._error(refused) from refused
                    is_alive, problem = True, refused
                except FAULTS as error:
                    problem = error
            if not is_alive or clock.wait_time() + ELECTION > post.ends:
                raise self._silence(problem) from problem
            time.sleep(ELECTION)

    def _ask_first(self, post: _Post, seconds: float) -> Reply:
        """Ask the first member; if it does not know the token, log in and ask again."""
        token = "" if post.path == _AUTHENTICATE else self._login_token(post.ends)
        try:
            return self._send(post, token, seconds)
        except Refused as refused:
            if not (token and refused.is_old_token):
                raise
        return self._send(post, self._login_token(post.ends, old=token), seconds)

    def _send(self, post: _Post, token: str, seconds: float) -> Reply:
        """Send *post* to the first member; without a reply, make another member the first, and raise."""
        ends, is_only = clock.wait_time() + max(seconds, LEAST), len(self._members) == 1
        while True:
            connection = self._connection()
            was_used, until = connection.is_used, ends
            if was_used and is_only:
                # Keep half of the time for a new connection: a router may have silently forgotten this one.
                until -= (ends - clock.wait_time()) / 2
            try:
                return connection.reply(post.path, post.body, token, until)
            except Refused as refused:
                if refused.is_transient:
                    post.is_sure = False
                    self._pass_over(connection.endpoint)
                raise
            except FAULTS as error:
                # If the connection failed before its first use, nothing was sent.
                post.is_sure &= not connection.is_used
                self.close()  # the idle connections are probably broken, too
                may_be_well = is_only or not isinstance(error, TimeoutError)
                if not (was_used and may_be_well):
                    self._pass_over(connection.endpoint)
                    raise
            finally:
                self._put_back(connection)

    def _login_token(self, ends: float, old: str = "") -> str:
        """Return the login token that all threads share; log in again if it is still the *old* one."""
        if not self._options.user or self._token != old:
            return self._token
        try:
            left = max(0.0, ends - clock.wait_time())
            run_in(self._login, partial(self._log_in, ends, old), left)
        except Taken:
            raise LockBackendError(self._alias, "no login has ended in time") from None
        return self._token

    def _log_in(self, ends: float, old: str) -> None:
        if self._token == old:
            login = {"name": self._options.user, "password": self._options.password}
            post = _Post(_AUTHENTICATE, SecretBytes(json.dumps(login).encode()), ends)
            self._token = Secret(self._ask(post).body["token"])

    def _compare(self, reply: Reply, known: int) -> None:
        """Call went_back() if the reply's revision is below *known*, that before the request, or of another cluster."""
        with self._mutex:
            cluster, before = reply.body["header"].get("cluster_id", ""), self._cluster
            # Only the first of several threads calls went_back().
            has_gone_back = reply.revision < known <= self._revision or before not in {"", cluster}
            revision = reply.revision if has_gone_back else max(reply.revision, self._revision)
            self._cluster, self._revision = cluster, revision
        if has_gone_back:
            self.went_back()

    def _silence(self, problem: Exception) -> LockBackendError:
        known = f"no member of {self._options.servers} has answered in time"
        text = known if isinstance(problem, TimeoutError) else f"{known}: {_in_words(problem)}"
        return LockBackendError(self._alias, text)

    def _error(self, refused: Refused) -> LockBackendError:
        text = str(refused)
        if "requested lease not found" in text:
            return LeaseGone(self._alias, "the lease of the session has ended")
        advice = next((_ADVICE[each] for each in _ADVICE if each in text), None)
        return LockBackendError(self._alias, f"etcd refused: {advice or text}")

    # Connections.

    def _connection(self) -> MemberConnection:
        first = self._members[0]
        while (found := self._idle.fit_one()) is not None:
            if found.endpoint == first:
                return found  # type: ignore[no-any-return]
            found.close()
        return self._made(first)

    def _made(self, endpoint: Endpoint) -> MemberConnection:
        made = MemberConnection(endpoint, self._options)
        self._connections.add(made)
        return made

    def _put_back(self, connection: MemberConnection) -> None:
        if connection.is_kept and len(self._idle) < KEPT:
            self._idle.keep(connection)
        else:
            connection.close()

    def _pass_over(self, endpoint: Endpoint) -> None:
        """Make the next member the first, unless another thread has already done so."""
        with self._mutex:
            if self._members[0] == endpoint:
                self._members = [*self._members[1:], endpoint]

    def close(self) -> None:
        """Close the idle connections; callers close those that they use."""
        self._idle.close_all(MemberConnection.close)

    def abandon_after_fork(self) -> None:
        """Close all connections in a forked child; this sends nothing, and the parent keeps its own."""
        for connection in list(self._connections):
            connection.close()

    # Watches.

    def watch(self, wanted: dict[str, Any]) -> Watch:
        """Return a watch, to be read in a separate thread; errors as of post()."""
        token = self._login_token(clock.wait_time() + self._options.io_timeout)
        return Watch(self._made(self._members[0]), wanted, token)

    def failed(self, watch: Watch) -> None:
        """Use another member and another login token for the next watch."""
        self._pass_over(watch.connection.endpoint)
        if watch.is_refused and self._token == watch.token:
            self._token = ""


class Watch:
    """A request whose reply does not end: it has one line of JSON for each change."""

    def __init__(self, connection: MemberConnection, wanted: dict[str, Any], token: str) -> None:
        self.connection = connection
        self.token = token
        #: Whether the watch has not begun, or has broken; whether etcd refuses it.
        self.has_failed = self.is_refused = False
        self._body = json.dumps({"create_request": wanted}).encode()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the results until etcd is silent for SILENCE seconds or the watch fails."""
        has_begun = False
        try:
            begins = clock.wait_time() + SHORT
            for line in self.connection.ask("/v3/watch", self._body, self.token, begins):
                yield self._result(line)
                has_begun, self.connection.ends = True, clock.wait_time() + SILENCE
            self.has_failed = True
        except FAULTS as error:
            self.has_failed = not (has_begun and isinstance(error, TimeoutError))

    def _result(self, line: bytes) -> dict[str, Any]:
        known = json.loads(line)
        result: dict[str, Any] = known.get("result", {"canceled": True})
        # For an expired token, etcd only cancels the watch.
        if result.get("canceled") and "compact_revision" not in result:
            self.is_refused = True
            raise Broken("refused")
        return result


def _is_one_of(text: str, texts: tuple[str, ...]) -> bool:
    return any(each in text for each in texts)


def _in_words(problem: Exception) -> str:
    is_drivers = isinstance(problem, FAULTS[:2]) and not isinstance(problem, Broken)
    return f"{type(problem).__name__}: {first_line(problem)}" if is_drivers else str(problem)


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
    """Return the keys and values in *answer*, that of a range; the gateway leaves out empty lists."""
    found: list[dict[str, Any]] = answer.get("response_range", answer).get("kvs", [])
    return found


# The operations and conditions of a transaction.


def put(key: str, value: str, **lease: str) -> dict[str, Any]:
    """Return the operation that writes *key*; with a *lease*, etcd deletes the key when the lease ends."""
    return {"request_put": {"key": encoded(key), "value": encoded(value), **lease}}


def delete(key: str) -> dict[str, Any]:
    return {"request_delete_range": {"key": encoded(key)}}


def find(area: dict[str, str], **terms: Any) -> dict[str, Any]:
    """Return the operation that reads the keys of *area*: a key, or a range."""
    return {"request_range": {**area, **terms}}


def nested(act: dict[str, Any], condition: dict[str, Any]) -> dict[str, Any]:
    return {"request_txn": {"compare": [condition], "success": [act]}}


def says(key: str, result: str, value: str) -> dict[str, Any]:
    """Return a condition on the value of *key*, which must exist; values are compared as texts."""
    return {"key": encoded(key), "target": "VALUE", "result": result, "value": encoded(value)}


def compare(key: str, result: str, revision: int) -> dict[str, Any]:
    """Return a condition on the create revision of *key*, which is 0 for a key that does not exist."""
    return {
        "key": encoded(key),
        "target": "CREATE",
        "result": result,
        "create_revision": str(revision),
    }
