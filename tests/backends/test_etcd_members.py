"""Members that stop, forget logins, hang, or go back in time, and what stands before them."""

from __future__ import annotations

import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import lock, locks
from tests.fixtures.etcd import Cluster
from tests.fixtures.eventually import eventually, never
from tests.fixtures.http_gateway import Balancer, canceled, error, page, silent
from tests.fixtures.proxy import Proxy

from .etcd_tools import aliases, backend, encoded, keys, log_in, noted
from .queue_tools import held, proxied, set_options, take, waited_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_django.fixtures import Settings

    from tests.fixtures.etcd import EtcdMember


pytestmark = pytest.mark.usefixtures("etcd_aliases")


@pytest.fixture
def proxy(etcd: Cluster, settings: Settings) -> Iterator[Proxy]:
    """Stands between "locks" and one of the members."""
    with proxied(settings, etcd.members[0].port, "endpoints") as found:
        yield found


# Logins.


def test_a_request_is_not_forgotten_over_a_login(
    closed: Cluster, settings: Settings, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is under way to one member when another one, which has forgotten the token, asks for a login."""
    with Proxy(closed.members[0].port) as proxy:
        members = [f"127.0.0.1:{proxy.port}", *closed.endpoints[1:]]
        # So long that no prolonging of the session meets a member without the others, which would be passed over.
        set_options(settings, endpoints=members, session_timeout=60.0)
        take("warm")
        for member in closed.members[1:]:
            member.restart()
        closed.wait_until_serving()
        sent = noted(monkeypatch, "/v3/kv/txn")
        proxy.hold()

        with lock("x", using="locks", timeout=20) as lease:
            lease.check()

        root = log_in(closed.members[1], "root", "hush")
        for path, body in sent:
            closed.members[1].asks(path, root, **body)
        assert not keys(closed.members[1], f"{namespace}/x/", root)
        locks.close()


def test_threads_share_a_login(
    closed: Cluster, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(settings, session_timeout=60.0)
    take("warm")
    logins = noted(monkeypatch, "/v3/auth/authenticate")
    backend()._gateway._token = "forgotten.1"

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(take, [f"x{number}" for number in range(20)]))

    # None, if a login that had begun before brought the new token.
    assert len(logins) <= 1


def test_members_that_are_restarted_one_by_one_are_not_noticed(
    closed: Cluster, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them forgets the token."""
    set_options(settings, io_timeout=15.0, session_timeout=30.0)
    lease, told = held("kept")
    is_over, taken = threading.Event(), list[int]()
    logins = noted(monkeypatch, "/v3/auth/authenticate")

    def work(worker: int) -> None:
        while not is_over.is_set():
            take(f"x{worker}", timeout=40)
            taken.append(worker)

    with ThreadPoolExecutor() as pool:
        working = [pool.submit(work, worker) for worker in range(8)]
        for member in closed.members:
            before = len(taken)
            member.stop()
            member.start()
            closed.wait_until_serving()
            eventually(lambda before=before: len(taken) > before + 16, 30)  # type: ignore[misc]  # a default
        is_over.set()
        for each in working:
            each.result(50)

    assert lease.held
    assert not told
    assert len(logins) < 10
    lease.release()


# One member.


def test_connections_that_a_router_has_forgotten_fail_no_call(
    proxy: Proxy, settings: Settings
) -> None:
    set_options(settings, io_timeout=4.0)
    lease, told = held("kept")
    for _ in range(2):
        gate = threading.Barrier(10)

        def warm(number: int, gate: threading.Barrier = gate) -> None:
            with lock(f"warm{number}", using="locks", timeout=20):
                gate.wait(20)

        with ThreadPoolExecutor(10) as pool:
            list(pool.map(warm, range(10)))
        proxy.swallow()

        for number in range(5):
            take(f"x{number}", timeout=0)

    with lock("x", using="locks", timeout=0) as again:
        proxy.swallow()
        again.extend()
        proxy.swallow()
    assert lease.held
    assert not told
    lease.extend()
    lease.release()


@pytest.mark.parametrize(
    "text",
    [
        "raft proposal dropped",
        "etcdserver: server stopped",
        "grpc: the client connection is closing",
        "transport is closing",
        "etcdserver: leader changed",
    ],
)
def test_another_member_is_asked_if_one_stops_or_has_lost_its_leader(
    etcd: Cluster, settings: Settings, text: str
) -> None:
    answers = {"kv/txn": error(text), "lease/grant": error(text)}
    with Balancer(etcd.members[0].port, **answers) as balancer:
        set_options(settings, endpoints=[balancer.endpoint, *etcd.endpoints])

        take(timeout=0)

        assert balancer.asked
        locks.close()


# The watch.


@pytest.mark.parametrize(
    "answer",
    [page(502), page(200), error("closing"), canceled, silent],
    ids=["page", "page without an error", "error", "canceled", "silent"],
)
def test_a_watch_that_fails_makes_no_storm_and_its_waiters_look_themselves(
    etcd: Cluster, settings: Settings, answer: Any
) -> None:
    with Balancer(etcd.members[0].port, watch=answer) as balancer:
        set_options(settings, endpoints=[balancer.endpoint])
        with waited_for(lambda: balancer.asked, timeout=60) as (waiting, release):
            eventually(lambda: balancer.asked.count("/v3/watch") > 4, 30)

            # Two watches, each four times a second.
            never(lambda: balancer.asked.count("/v3/watch") > 40, 1.5)

            release()
            waiting.result(40)
        locks.close()


def test_a_watch_that_does_not_begin_is_asked_of_another_member(
    etcd: Cluster, settings: Settings
) -> None:
    with Balancer(etcd.members[0].port, watch=silent) as balancer:
        set_options(settings, endpoints=[balancer.endpoint, *etcd.endpoints])
        watch = backend()._gateway.watch({"key": encoded("x")})

        assert list(watch) == []

        assert watch.has_failed
        watch.connection.close()
        locks.close()


# Data.


def test_nested_namespaces_are_apart(etcd: Cluster, settings: Settings, namespace: str) -> None:
    settings.DISTLOCK = {
        "locks": aliases(etcd, namespace)["locks"],
        "elsewhere": aliases(etcd, f"{namespace}/b")["locks"],
    }

    with lock("x", using="elsewhere", timeout=0), lock("b", using="locks", timeout=0):
        assert [held.name for held in backend("locks").held()] == ["b"]
        assert [held.name for held in backend("elsewhere").held()] == ["x"]
    with lock("b", using="locks", timeout=0), lock("x", using="elsewhere", timeout=0):
        pass


@pytest.mark.slow
def test_after_a_restore_a_running_process_gives_no_lower_tokens(
    settings: Settings, namespace: str
) -> None:
    with Cluster() as cluster:
        settings.DISTLOCK = aliases(cluster, namespace, session_timeout=60.0)
        take()
        _with_all_stopped(cluster, _save)
        for _ in range(20):
            take()
        with lock("x", using="locks", timeout=20) as lease:
            last = lease.fencing_token or 0
        _, told = held("kept")
        _with_all_stopped(cluster, _restore)

        with lock("x", using="locks", timeout=40) as lease:
            assert (lease.fencing_token or 0) > last

        eventually(lambda: told)
        assert "earlier data" in told[0]
        locks.close()


def _save(folder: Path) -> None:
    # With its owner.
    subprocess.run(["cp", "-a", str(folder / "data"), str(folder / "snapshot")], check=True)


def _restore(folder: Path) -> None:
    shutil.rmtree(folder / "data")
    (folder / "snapshot").rename(folder / "data")


def _with_all_stopped(cluster: Cluster, act: Any) -> None:
    for member in cluster.members:
        member.kill()
    for member in cluster.members:
        act(member.folder)
    cluster.start()
    cluster.wait_until_serving()


def test_the_session_ends_where_another_cluster_answers(
    etcd: Cluster, own_cluster: Cluster, settings: Settings
) -> None:
    first, other = own_cluster.members[0], etcd.members[0]
    for _ in range(_revision(first) - _revision(other) + 50):
        other.asks("/v3/kv/put", key=encoded("test-revisions"), value="")
    with proxied(settings, first.port, "endpoints") as proxy:
        _, told = held()
        proxy.aim_at(other.port)
        _cut(proxy)

        assert list(backend().held()) == []

        eventually(lambda: told)
        assert "another cluster" in told[0]


def _revision(member: EtcdMember) -> int:
    return int(member.status["header"]["revision"])


# TLS.


def _cut(proxy: Proxy) -> None:
    proxy.cut()
    proxy.pass_through()
