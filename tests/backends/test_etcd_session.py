"""Sessions that expire, freeze or die, members that are stopped: holders are told the truth, others go on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from django_distlock import (
    Lease,
    LockBackendError,
    LockNotAcquired,
    LockNotHeld,
    lock,
    locks,
)
from tests.fixtures.certificate import tls_server
from tests.fixtures.etcd import Cluster
from tests.fixtures.eventually import eventually, never
from tests.fixtures.proxy import Proxy

from .etcd_tools import aliases, backend, expire, line, watched
from .queue_tools import held, proxied, set_options, take, waited_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pytest_django.fixtures import Settings

    from tests.fixtures.etcd import EtcdMember
    from tests.fixtures.processes import Child

    Start = Callable[..., Child]

#: Seconds of the sessions here; a second later at the latest etcd has freed what they held.
SESSION = 4.0


@pytest.fixture
def alias(etcd: Cluster, namespace: str, settings: Settings) -> None:
    """The aliases "locks" and "elsewhere", in a namespace of their own."""
    settings.DISTLOCK = aliases(etcd, namespace, session_timeout=SESSION)


@pytest.fixture
def proxy(alias: None, etcd: Cluster, settings: Settings) -> Iterator[Proxy]:
    """Stands between "locks" and one of the members."""
    with proxied(settings, etcd.members[0].port, "endpoints") as found:
        yield found


# The line to a member.


@pytest.mark.parametrize("asks_clients", [False, True])
def test_tls(
    etcd: Cluster, namespace: str, settings: Settings, certificate: Path, *, asks_clients: bool
) -> None:
    tls, file = tls_server(certificate, asks_clients=asks_clients), str(certificate)
    own = {"cert": file, "key": file} if asks_clients else {}
    with Proxy(etcd.members[0].port, tls=tls) as proxy:
        endpoint = {"endpoints": f"https://127.0.0.1:{proxy.port}"}
        trusting = aliases(etcd, namespace, **endpoint, ca_cert=file, **own)
        settings.DISTLOCK = {**trusting, "doubting": aliases(etcd, namespace, **endpoint)["locks"]}

        with waited_for(watched) as (waiting, release):
            release()
            waiting.result(20)
        with pytest.raises(LockBackendError, match="SSLCertVerificationError"):
            take(using="doubting", timeout=0)
        locks.close()


def test_a_waiter_is_woken_though_its_watch_is_a_black_hole(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("gateway", "watcher"):
        monkeypatch.setattr(f"django_distlock.backends.etcd.{module}.SILENCE", 0.5)
    with waited_for(watched) as (waiting, release):
        proxy.black_hole()
        release()
        never(waiting.done, 0.3)

        proxy.pass_through()

        waiting.result(20)


def test_a_session_that_ended_before_its_watch_began_is_noticed_soon(
    proxy: Proxy, etcd: Cluster, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    monkeypatch.setattr("django_distlock.backends.etcd.gateway.SILENCE", 0.5)
    set_options(settings, session_timeout=60.0)
    lease, _ = held(ttl=60)
    proxy.cut()
    expire(etcd)
    assert lease.held

    proxy.pass_through()

    eventually(lambda: not lease.held, 10)


def test_what_a_session_held_that_ended_by_our_clock_does_not_come_back(
    proxy: Proxy, etcd: Cluster, namespace: str
) -> None:
    held()
    before = backend()._session.id
    backend()._session._prolonged_at -= SESSION  # as after a pause of the machine

    take("y")

    assert backend()._session.id != before
    assert line(etcd, namespace, "x") == []


# Members that are stopped.


@pytest.fixture
def frail(own_cluster: Cluster, namespace: str, settings: Settings) -> Iterator[Cluster]:
    """A cluster whose members may be stopped, behind the aliases; afterwards all run."""
    settings.DISTLOCK = aliases(own_cluster, namespace, session_timeout=SESSION, io_timeout=1.5)
    yield own_cluster
    locks.close()
    own_cluster.start()


def _by_rank(cluster: Cluster) -> list[EtcdMember]:
    """Return the members, the leader first."""
    leader = cluster.leader
    return [leader, *(member for member in cluster.members if member is not leader)]


@pytest.mark.parametrize(("way", "rank"), [("kill", 0), ("pause", 0), ("stop", 1)])
def test_one_member_of_three_can_fail_while_locks_are_taken(
    frail: Cluster, settings: Settings, way: str, rank: int
) -> None:
    # An election takes a while on a machine that is busy.
    set_options(settings, session_timeout=20.0, io_timeout=15.0)
    leases = [held(f"before:{number}") for number in range(20)]
    member = _by_rank(frail)[rank]
    # The one that fails is asked first.
    while backend()._gateway._members[0].port != member.port:
        backend()._gateway._pass_over(backend()._gateway._members[0])
    taken = list[str]()

    def work(worker: int) -> None:
        for number in range(40):
            with lock(f"worker:{worker}:{number % 10}", using="locks", timeout=30) as lease:
                taken.append(lease.name)

    with ThreadPoolExecutor() as pool:
        working = [pool.submit(work, worker) for worker in range(4)]
        eventually(lambda: len(taken) > 20)
        getattr(member, way)()
        try:
            for each in working:
                each.result(50)
        finally:
            if way == "pause":
                member.resume()

    assert len(taken) == 160
    assert all(not told and lease.held for lease, told in leases)
    for lease, _ in leases:
        lease.release()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_leader_that_was_paused_takes_no_lock_from_a_holder_that_is_not_told(
    frail: Cluster, settings: Settings, namespace: str
) -> None:
    """It ends sessions that another leader has prolonged meanwhile: 16 at once, others some seconds later."""
    # Renewals are so rare that they would be late.
    [alias, _] = aliases(frail, namespace, session_timeout=2 * SESSION).values()
    names = [f"session{number}" for number in range(30)]
    settings.DISTLOCK = {**settings.DISTLOCK, **dict.fromkeys(names, alias)}
    leases = [lock(name, using=name).acquire() for name in names]
    late = dict[str, float]()
    over = threading.Event()

    def take_over(name: str, lease: Lease | None) -> None:
        assert lease
        while not over.is_set():
            # Without a leader, nobody is answered.
            again = suppress(LockNotAcquired, LockBackendError)
            with again, lock(name, using="elsewhere", timeout=1):
                granted = time.monotonic()
                while lease.held and time.monotonic() - granted < 3:
                    time.sleep(0.01)
                late[name] = time.monotonic() - granted
                return

    def pause_the_leader() -> bool:
        """Tell whether it then ended sessions: it ends none if it hears of the other leader first."""
        leader, before = frail.leader, len(late)
        leader.pause()
        never(lambda: len(late) > before, 2 * SESSION + 2)
        leader.resume()
        with suppress(AssertionError):
            eventually(lambda: late, 12)
        never(over.is_set, 5)
        return len(late) > 8

    with ThreadPoolExecutor(len(names)) as pool:
        waiting = [pool.submit(take_over, *each) for each in zip(names, leases, strict=True)]
        try:
            assert any(pause_the_leader() for _ in range(4))
        finally:
            over.set()
        for each in waiting:
            each.result(20)

    assert max(late.values()) < 1.0
    for lease in leases:
        with suppress(LockNotHeld, LockBackendError):
            assert lease
            lease.release()
