"""What the tests of ZooKeeper share: aliases below a root of their own, and what the ensemble says."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kazoo.client import KazooClient

from django_distlock import locks
from django_distlock.backends.zookeeper import ZooKeeperBackend
from django_distlock.backends.zookeeper.nodes import ZooKeeperNode
from tests.fixtures.eventually import eventually
from tests.fixtures.zookeeper import Ensemble, options

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKEND = "django_distlock.backends.zookeeper.ZooKeeperBackend"


def aliases(ensemble: Ensemble, root: str, **more: Any) -> dict[str, Any]:
    """Return a DISTLOCK setting with two aliases that mean the same locks, in two sessions."""
    each = {"BACKEND": BACKEND, "OPTIONS": options(ensemble, root, **more)}
    return {"locks": each, "elsewhere": each}


def backend(alias: str = "locks") -> ZooKeeperBackend:
    """Return the backend of *alias* as what it is."""
    found = locks[alias]
    assert isinstance(found, ZooKeeperBackend)
    return found


@contextmanager
def operator(ensemble: Ensemble, hosts: str = "") -> Iterator[Any]:
    """Give a client of its own, by which an operator looks and deletes: of any server, or of *hosts*."""
    client = KazooClient(hosts or ensemble.hosts)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


def line(client: Any, root: str, name: str) -> list[str]:
    """Return the nodes of those who hold or wait for *name*, in no order."""
    folder = f"{root}/{name}"
    client.sync(folder)
    return list(client.get_children(folder)) if client.exists(folder) else []


def numbers(ensemble: Ensemble, root: str, name: str) -> tuple[list[int], int]:
    """Return the changes that made the nodes of those who hold *name* or wait for it, and where tokens begin."""
    with operator(ensemble) as client:
        found = [client.get(f"{root}/{name}/{node}") for node in line(client, root, name)]
        return [stat.czxid for _, stat in found], int(client.get(f"{root}/%tokens")[0])


def watched(alias: str = "locks") -> set[str]:
    """Return the nodes whose going the waiters of this process wait for."""
    return {path for waiter in backend(alias)._server._waiters for path in waiter.watched}


def nodes(alias: str = "locks") -> list[ZooKeeperNode]:
    """Return the nodes of this process in all lines."""
    return list(backend(alias)._verbs.nodes.values())


def expire(ensemble: Ensemble, alias: str = "locks") -> None:
    """Have the ensemble end the session of *alias*: whoever knows its secret may close it."""
    mine = eventually(lambda: backend(alias)._session.client)
    known = mine.client_id

    def has_ended() -> bool:
        """Close the session, unless it has ended: a twin then gets another one."""
        twin = KazooClient(ensemble.hosts, client_id=known)
        twin.start()
        is_same = twin.client_id[0] == known[0]
        twin.stop()
        twin.close()
        return not is_same

    # If *mine* connects again before the twin closes the session, ZooKeeper refuses the twin.
    eventually(has_ended)


def delete(ensemble: Ensemble, node: ZooKeeperNode) -> None:
    """Have an operator delete *node*."""
    with operator(ensemble) as client:
        client.delete(node.path)
