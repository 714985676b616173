"""What the tests of etcd share: aliases in a namespace of their own, and what an operator sees and does."""

from __future__ import annotations

import base64
import json
import threading
from typing import TYPE_CHECKING, Any

from django_distlock import locks
from django_distlock.backends.etcd import EtcdBackend
from django_distlock.backends.etcd.gateway import MemberConnection
from tests.fixtures.etcd import options

if TYPE_CHECKING:
    import pytest

    from django_distlock.backends.etcd.keys import Key
    from tests.fixtures.etcd import Cluster, EtcdMember

BACKEND = "django_distlock.backends.etcd.EtcdBackend"


def aliases(cluster: Cluster, namespace: str, **more: Any) -> dict[str, Any]:
    """Return a DISTLOCK setting with two aliases that mean the same locks, in two sessions."""
    each = {"BACKEND": BACKEND, "OPTIONS": options(cluster, namespace, **more)}
    return {"locks": each, "elsewhere": each}


def backend(alias: str = "locks") -> EtcdBackend:
    """Return the backend of *alias* as what it is."""
    found = locks[alias]
    assert isinstance(found, EtcdBackend)
    return found


def encoded(text: str) -> str:
    """Return a key or value as the gateway takes it."""
    return base64.b64encode(text.encode()).decode()


def keys(member: EtcdMember, prefix: str, token: str = "") -> dict[str, dict[str, Any]]:
    """Return what etcd has below *prefix*, by key; values are texts."""
    area = {"key": encoded(prefix), "range_end": encoded(prefix[:-1] + chr(ord(prefix[-1]) + 1))}
    found = member.asks("/v3/kv/range", token, **area).get("kvs", [])
    return {
        base64.b64decode(kv["key"]).decode(): {
            **kv,
            "value": base64.b64decode(kv.get("value", "")).decode(),
        }
        for kv in found
    }


def line(cluster: Cluster, namespace: str, name: str) -> list[str]:
    """Return the keys of those who hold or wait for *name*, in no order."""
    return list(keys(cluster.running[0], f"{namespace}/{name}/"))


def numbers(cluster: Cluster, namespace: str, name: str) -> tuple[list[int], int]:
    """Return the revisions that made the keys of those who hold *name* or wait for it, and where tokens begin."""
    member, tokens = cluster.running[0], f"{namespace}/%tokens"
    found = keys(member, f"{namespace}/{name}/").values()
    return [int(kv["create_revision"]) for kv in found], int(keys(member, tokens)[tokens]["value"])


def nodes(alias: str = "locks") -> list[Key]:
    """Return the keys of this process in all lines."""
    return list(backend(alias)._verbs.nodes.values())


def watched(alias: str = "locks") -> set[str]:
    """Return the keys whose going the waiters of this process wait for."""
    waiters = [*nodes(alias), *backend(alias)._verbs.lookouts.values()]
    return {key for waiter in waiters for key in waiter.watched}


def noted(monkeypatch: pytest.MonkeyPatch, only: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return the requests of all sessions, as they will be sent: with the path *only*, or all.

    Without those by which a session learns of its own end.
    """
    seen: list[tuple[str, dict[str, Any]]] = []
    ask = MemberConnection.ask

    def note(connection: MemberConnection, path: str, body: bytes, *rest: Any) -> Any:
        watches_itself = threading.current_thread().name == "distlock-etcd-session"
        if path == (only or path) and not watches_itself:
            seen.append((path, json.loads(body)))
        return ask(connection, path, body, *rest)

    monkeypatch.setattr(MemberConnection, "ask", note)
    return seen


def expire(cluster: Cluster, alias: str = "locks") -> None:
    """Have an operator revoke the session of *alias*."""
    cluster.running[0].asks("/v3/lease/revoke", ID=backend(alias)._session.id)


def log_in(member: EtcdMember, name: str, password: str) -> str:
    """Return a token of etcd."""
    token: str = member.asks("/v3/auth/authenticate", name=name, password=password)["token"]
    return token


def delete(cluster: Cluster, node: Key) -> None:
    """Have an operator delete the key *node*."""
    cluster.running[0].asks("/v3/kv/deleterange", key=encoded(node.path))
