"""A cluster of three etcd members."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import Contender, ours
from tests.fixtures.environment import ETCD_PORTS
from tests.fixtures.etcd import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.contenders import Field


@contextmanager
def etcd() -> Iterator[None]:
    """Start the cluster."""
    with Cluster([int(os.environ[port]) for port in ETCD_PORTS]):
        yield


@cache
def etcd_field() -> Field:
    """Return who is measured there."""
    return {"etcd": [_raw(), ours("etcd"), ours("etcd", limit=1)]}


class _Line:
    """A connection to the gateway: the shortest that asks it for something."""

    def __init__(self) -> None:
        at = "127.0.0.1", int(os.environ[ETCD_PORTS[0]])
        self._socket = socket.create_connection(at)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, path: str, **wanted: Any) -> http.client.HTTPResponse:
        body = json.dumps(wanted).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: etcd\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        reply = http.client.HTTPResponse(self._socket)
        reply.begin()
        return reply

    def txn(self, *acts: Any, **more: Any) -> Any:
        with self.ask("/v3/kv/txn", success=acts, **more) as reply:
            return json.load(reply)


def _raw() -> Contender:
    """As etcd's own recipe does: make a key, watch the one before it, look again; and delete it."""
    line = _Line()
    with line.ask("/v3/lease/grant", TTL=3600) as reply:
        lease = json.load(reply)["ID"]
    own = base64.b64encode(f"raw/{os.getpid()}".encode()).decode()
    area = {
        "key": base64.b64encode(b"raw/").decode(),
        "range_end": base64.b64encode(b"raw0").decode(),
    }
    last = {"limit": 1, "sort_target": "CREATE", "sort_order": "DESCEND"}
    put = {"request_put": {"key": own, "value": own, "lease": lease}}

    def look(until: int | None) -> Any:
        before = {"max_create_revision": str(until)} if until else {}
        return {"request_range": {**area, **last, **before}}

    def take() -> Any:
        return line.txn(put, look(None))

    def wait() -> None:
        mine = int(line.txn(put)["header"]["revision"])
        while True:
            found = line.txn(look(mine - 1))
            if not (ahead := found["responses"][0]["response_range"].get("kvs")):
                return
            after = str(int(found["header"]["revision"]) + 1)
            wanted = {"key": ahead[0]["key"], "start_revision": after, "filters": ["NOPUT"]}
            with _Line().ask("/v3/watch", create_request=wanted) as changes:
                while b"DELETE" not in changes.readline():
                    pass

    def free() -> None:
        line.txn({"request_delete_range": {"key": own}})

    return Contender("raw put and range, delete", take, free, wait)
