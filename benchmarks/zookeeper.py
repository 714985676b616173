"""An ensemble of three ZooKeeper servers."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kazoo.client import KazooClient

from benchmarks.contenders import Contender, ours
from tests.fixtures.environment import ZOOKEEPER_PORTS
from tests.fixtures.zookeeper import Ensemble

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def zookeeper() -> Iterator[dict[str, list[Contender]]]:
    """Start the ensemble."""
    with Ensemble([int(os.environ[port]) for port in ZOOKEEPER_PORTS]) as ensemble:
        client = KazooClient(ensemble.hosts)
        client.start()
        yield {"ZooKeeper": [_raw(client), _by_kazoo(client), ours("zookeeper")]}
        client.stop()
        client.close()


def _raw(client: KazooClient) -> Contender:
    client.ensure_path("/raw")

    def cycle() -> None:
        path = client.create("/raw/lock-", b"", ephemeral=True, sequence=True)
        client.get_children("/raw")
        client.delete(path)

    return Contender("raw create, children, delete", cycle)


def _by_kazoo(client: KazooClient) -> Contender:
    def cycle() -> None:
        with client.Lock("/kazoo"):
            pass

    return Contender("kazoo Lock", cycle)
