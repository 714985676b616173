"""Sessions that are suspended, expire, freeze or die: holders are told the truth, others go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kazoo.protocol.serialization import Exists, SetData

from django_distlock import LockBackendError, LockLost, lock, locks
from django_distlock.backends.zookeeper import ZooKeeperBackend
from django_distlock.ground import clock
from tests.fixtures.certificate import tls_server
from tests.fixtures.eventually import eventually, never
from tests.fixtures.garbage import collect_garbage
from tests.fixtures.proxy import Proxy
from tests.fixtures.zookeeper import Ensemble

from .conftest import paused
from .queue_tools import held, proxied, rival, set_options, stands, take, waited_for
from .zookeeper_tools import (
    aliases,
    backend,
    line,
    nodes,
    operator,
    watched,
)

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from tests.fixtures.zookeeper import Member

#: Seconds of the sessions here; a second later at the latest the ensemble has freed what they held.
SESSION = 4.0


@pytest.fixture
def alias(zookeeper: Ensemble, root: str, settings: Settings) -> None:
    """The aliases "locks" and "elsewhere", below a root of their own."""
    settings.DISTLOCK = aliases(zookeeper, root, session_timeout=SESSION)


@pytest.fixture
def proxy(alias: None, zookeeper: Ensemble, settings: Settings) -> Iterator[Proxy]:
    """Stands between "locks" and one of the servers."""
    with proxied(settings, zookeeper.members[0].port, "hosts") as found:
        yield found


# The session begins, and goes on.


# Kazoo leaves sockets whose handshake failed to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("asks_clients", [False, True])
def test_tls(
    zookeeper: Ensemble,
    root: str,
    settings: Settings,
    certificate: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    asks_clients: bool,
) -> None:
    caplog.set_level(logging.CRITICAL, "kazoo.client")  # what is logged would keep those sockets
    tls, file = tls_server(certificate, asks_clients=asks_clients), str(certificate)
    own = {"certfile": file, "keyfile": file} if asks_clients else {}
    with Proxy(zookeeper.members[0].port, tls=tls) as proxy:
        options = {"hosts": f"127.0.0.1:{proxy.port}", "tls": True, "io_timeout": 2.0}
        trusting = aliases(zookeeper, root, **options, ca=file, **own)
        settings.DISTLOCK = {**trusting, "elsewhere": aliases(zookeeper, root, **options)["locks"]}

        take()
        assert proxy.bytes_sent
        with pytest.raises(LockBackendError):
            take(using="elsewhere", timeout=0)
        locks.close()
        eventually(lambda: "zk_loop" not in str(threading.enumerate()), 10, "kazoo has ended")
    collect_garbage()  # here, where it is expected to complain


def test_a_suspended_lease_is_in_jeopardy_and_held_again_after_the_reconnect(
    proxy: Proxy, settings: Settings
) -> None:
    # Its next renewal comes too late for this test.
    set_options(settings, session_timeout=30.0)
    lease, told = held()
    assert not lease.in_jeopardy

    proxy.cut()

    eventually(lambda: lease.in_jeopardy, 2)
    lease.check()
    proxy.pass_through()
    eventually(lambda: not lease.in_jeopardy and lease.held, 5)
    assert stands(rival("x", "elsewhere"), "elsewhere") is None
    assert not told
    lease.release()


def test_a_renewal_is_sent_before_requests_that_were_made_earlier(alias: None) -> None:
    lease, _ = held()
    client, may_go = backend()._session.client, threading.Event()

    class Slow(Exists):  # type: ignore[misc]
        def serialize(self) -> Any:
            may_go.wait(10)
            return super().serialize()

    client._call(Slow("/", None), client.handler.async_result())
    others = [client.get_async("/") for _ in range(3)]
    renewal = threading.Thread(target=lease.extend)
    renewal.start()

    eventually(lambda: isinstance(client._queue[1][0], SetData), 5, "the renewal is next")

    may_go.set()
    renewal.join()
    for other in others:
        other.get(10)
    lease.release()


def test_a_node_that_went_while_its_session_was_suspended_is_a_lost_lock(
    proxy: Proxy, zookeeper: Ensemble, root: str, settings: Settings
) -> None:
    set_options(settings, session_timeout=30.0)
    lease, told = held()
    proxy.cut()
    # By the server that will be asked: another one may hear of it later.
    with operator(zookeeper, f"127.0.0.1:{zookeeper.members[0].port}") as client:
        [node] = line(client, root, "x")
        client.delete(f"{root}/x/{node}")

    proxy.pass_through()

    # Long before its next renewal.
    eventually(lambda: told, 5)
    with pytest.raises(LockLost):
        lease.check()


def test_who_waits_looks_again_after_a_reconnect_as_its_watch_is_lost(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = replace(ZooKeeperBackend.waiting, look_again=3600.0)
    monkeypatch.setattr(ZooKeeperBackend, "waiting", patient)
    with waited_for(lambda: any(node.busy for node in nodes())) as (waiting, release):
        proxy.cut()
        eventually(lambda: not watched())
        proxy.pass_through()
        eventually(watched)
        release()

        waiting.result(10)


# A server that is cut off from the others.


@pytest.fixture
def links(root: str, settings: Settings) -> Iterator[list[Proxy]]:
    """What the server of "locks" follows the others through; "elsewhere" asks the others."""
    ensemble = Ensemble()
    mine, *others = ensemble.members
    with ExitStack() as stack:
        found = []
        for other in others:
            name = f"server.{other.number}"
            host, port, rest = mine.settings[name].split(":")
            found.append(stack.enter_context(Proxy(int(port))))
            mine.settings[name] = f"{host}:{found[-1].port}:{rest}"
        stack.callback(ensemble.close)
        # The leader must listen before the proxies stand for it: its refusal is waited for, theirs takes an election.
        for other in others:
            other.start()
        ensemble.wait_until_serving()
        ensemble.start()
        assert not mine.is_leader
        settings.DISTLOCK = {
            alias: aliases(ensemble, root, session_timeout=SESSION, hosts=hosts)["locks"]
            for alias, hosts in {
                "locks": f"127.0.0.1:{mine.port}",
                "elsewhere": [f"127.0.0.1:{other.port}" for other in others],
            }.items()
        }
        yield found
        for link in found:
            link.pass_through()
        locks.close()


@pytest.mark.server
@pytest.mark.zookeeper
def test_a_lease_is_lost_before_anybody_else_has_it_though_its_server_answers(
    links: list[Proxy],
) -> None:
    lease, _ = held()
    renewed = lease.deadline
    eventually(lambda: lease.deadline > renewed)
    # Until the leader has heard that the session is alive.
    never(lambda: lease.lost, 0.5)

    for link in links:
        link.black_hole()

    with lock("x", using="elsewhere", timeout=20) as other:
        granted_at = clock.lease_time()
        assert lease.lost
        assert lease.deadline < granted_at
        other.check()


# Servers that are stopped.


@pytest.fixture
def frail(own_ensemble: Ensemble, root: str, settings: Settings) -> Iterator[Ensemble]:
    """An ensemble whose servers may be stopped, behind the aliases; afterwards all run."""
    settings.DISTLOCK = aliases(own_ensemble, root, session_timeout=4.0, io_timeout=1.5)
    yield own_ensemble
    locks.close()
    own_ensemble.start()


def test_a_leader_that_nobody_follows_any_more_confirms_no_lease(
    frail: Ensemble, settings: Settings
) -> None:
    """It may have been paused for so long that the others have elected another one."""
    leader = frail.leader
    set_options(settings, hosts=f"127.0.0.1:{leader.port}")
    lease, _ = held()
    with paused(*(each for each in frail.members if each is not leader)):
        with pytest.raises(LockBackendError):
            lease.extend()
        assert leader.is_leader


def _server_of(alias: str, ensemble: Ensemble) -> Member:
    port = backend(alias)._session.client._connection._socket.getpeername()[1]
    return next(member for member in ensemble.members if member.port == port)


def test_one_server_of_three_can_die_while_locks_are_taken(
    frail: Ensemble, settings: Settings
) -> None:
    # An election takes a while on a machine that is busy.
    set_options(settings, session_timeout=20.0, io_timeout=15.0)
    leases = [held(f"before:{number}") for number in range(20)]
    over, taken = threading.Event(), list[str]()

    def take(worker: int) -> None:
        number = 0
        while not over.is_set():
            with lock(f"worker:{worker}:{number % 10}", using="locks", timeout=30) as lease:
                taken.append(lease.name)
            number += 1

    with ThreadPoolExecutor() as pool:
        working = [pool.submit(take, worker) for worker in range(4)]
        try:
            eventually(lambda: len(taken) > 40)
            _server_of("locks", frail).kill()
            frail.wait_until_serving()
            seen = len(taken)
            eventually(lambda: len(taken) > seen + 100, 40)
        finally:
            over.set()
        for each in working:
            each.result(20)

    assert all(not told and lease.held for lease, told in leases)
    for lease, _ in leases:
        lease.release()
