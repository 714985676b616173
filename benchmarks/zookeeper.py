"""An ensemble of three ZooKeeper servers."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from kazoo.client import KazooClient

from benchmarks.contenders import Contender, ours, peer
from tests.fixtures.environment import ZOOKEEPER_PORTS
from tests.fixtures.zookeeper import Ensemble

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.contenders import Field


@contextmanager
def zookeeper() -> Iterator[None]:
    """Start the ensemble."""
    with Ensemble([int(os.environ[port]) for port in ZOOKEEPER_PORTS]):
        yield
        _client().stop()
        _client().close()


@cache
def zookeeper_field() -> Field:
    """Return who is measured there."""
    client = _client()
    kazoo = peer("kazoo Lock", lambda: client.Lock("/kazoo"))
    return {"ZooKeeper": [_raw(client), kazoo, ours("zookeeper"), ours("zookeeper", limit=1)]}


@cache
def _client() -> KazooClient:
    client = KazooClient(",".join(f"127.0.0.1:{os.environ[port]}" for port in ZOOKEEPER_PORTS))
    client.start()
    return client


def _raw(client: KazooClient) -> Contender:
    client.ensure_path("/raw")
    path = ""

    def take() -> None:
        nonlocal path
        path = client.create("/raw/lock-", b"", ephemeral=True, sequence=True)
        client.get_children("/raw")

    def wait() -> None:
        nonlocal path
        path = client.create("/raw/lock-", b"", ephemeral=True, sequence=True)
        line = sorted(client.get_children("/raw"))
        place = line.index(path.rpartition("/")[2])
        gone = threading.Event()
        if place and client.exists(f"/raw/{line[place - 1]}", watch=lambda _: gone.set()):
            gone.wait()

    def free() -> None:
        client.delete(path)

    return Contender("raw create, children, delete", take, free, wait)
