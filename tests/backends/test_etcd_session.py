"""Sessions that expire, freeze or die, members that are stopped: holders are told the truth, others go on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import Lease, LockBackendError, LockLost, LockNotHeld, lock, locks
from django_distlock.ground import clock
from tests.fixtures.certificate import tls_server
from tests.fixtures.eventually import eventually, never
from tests.fixtures.proxy import Proxy

from .etcd_tools import BACKEND, aliases, backend, entries, keys, line, rival, stands, watched
from .session_acts import WAITERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pytest_django.fixtures import Settings

    from tests.fixtures.etcd import Cluster, EtcdMember
    from tests.fixtures.processes import Child, Spawn

    Start = Callable[..., Child]

#: Seconds of the sessions here; a second later at the latest etcd has freed what they held.
SESSION = 4.0


@pytest.fixture
def alias(etcd: Cluster, namespace: str, settings: Settings) -> Iterator[None]:
    """The aliases "locks" and "elsewhere", in a namespace of their own."""
    settings.DISTLOCK = aliases(etcd, namespace, session_timeout=SESSION)
    yield
    locks.close()


@pytest.fixture
def proxy(alias: None, etcd: Cluster, settings: Settings) -> Iterator[Proxy]:
    """Stands between "locks" and one of the members."""
    with Proxy(etcd.members[0].port) as found:
        _set(settings, endpoints=f"127.0.0.1:{found.port}")
        yield found
        locks.close()


@pytest.fixture
def act(alias: None, spawn: Spawn, settings: Settings) -> Start:
    """Start another process that runs one of session_acts.py."""

    def start(verb: str, /, **arguments: Any) -> Child:
        known = {"aliases": settings.DISTLOCK, "using": "locks", **arguments}
        return spawn(f"tests.backends.session_acts:{verb}", **known)

    return start


def held(name: str = "x", **terms: Any) -> tuple[Lease, list[str]]:
    """Return a lease on *name*, and a list that will tell how it was lost."""
    lease = lock(name, **{"using": "locks", **terms}).acquire()
    assert lease
    told: list[str] = []
    lease.on_lost(told.append)
    return lease, told


def take(name: str = "x", using: str = "locks", timeout: float = 20) -> None:
    """Wait for the lock, hold it for a moment, and give it back."""
    with lock(name, using=using, timeout=timeout) as lease:
        lease.check()


def _set(settings: Settings, **options: Any) -> None:
    known = settings.DISTLOCK["locks"]["OPTIONS"] | options
    settings.DISTLOCK = settings.DISTLOCK | {"locks": {"BACKEND": BACKEND, "OPTIONS": known}}


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
        settings.DISTLOCK = {
            **trusting,
            "elsewhere": aliases(etcd, namespace, **endpoint)["locks"],
        }

        holder = rival("x")
        assert stands(holder)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(take)
            eventually(watched)
            backend().release(holder)
            waiting.result(20)
        with pytest.raises(LockBackendError, match="SSLCertVerificationError"):
            take(using="elsewhere", timeout=0)
        locks.close()


def test_a_waiter_goes_on_after_the_line_was_cut(proxy: Proxy) -> None:
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take)
        eventually(watched)

        proxy.cut()
        never(waiting.done, 0.3)
        proxy.pass_through()
        backend("elsewhere").release(holder)

        waiting.result(20)


def test_a_waiter_is_woken_though_its_watch_is_a_black_hole(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("gateway", "watcher"):
        monkeypatch.setattr(f"django_distlock.backends.etcd.{module}.SILENCE", 0.5)
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take)
        eventually(watched)
        proxy.black_hole()
        backend("elsewhere").release(holder)
        never(waiting.done, 0.3)

        proxy.pass_through()

        waiting.result(20)


def test_a_lease_is_lost_by_our_own_clock_before_anybody_else_has_it(proxy: Proxy) -> None:
    lost_at: list[float] = []
    lease, _ = held()
    lease.on_lost(lambda _: lost_at.append(clock.lease_time()))

    proxy.cut()
    with lock("x", using="elsewhere", timeout=20) as other:
        granted_at = clock.lease_time()

        assert lease.lost
        with pytest.raises(LockLost):
            lease.check()
        assert lease.deadline < granted_at
        eventually(lambda: lost_at, 5)
        proxy.pass_through()
        with pytest.raises(LockNotHeld):
            lease.release()
        other.check()
        assert (other.fencing_token or 0) > (lease.fencing_token or 0)


def test_what_a_session_held_that_ended_by_our_clock_does_not_come_back(
    proxy: Proxy, etcd: Cluster, namespace: str
) -> None:
    held()
    before = backend()._session.id
    backend()._session._prolonged_at -= SESSION  # as after a pause of the machine

    take("y")

    assert backend()._session.id != before
    assert line(etcd, namespace, "x") == []


# Processes.


def test_a_killed_holder_is_followed_once_its_session_is_over(act: Start) -> None:
    holder = act("hold", name="x")
    holder.expect("held")
    began = time.monotonic()

    holder.kill()

    with lock("x", using="elsewhere", timeout=20):
        assert time.monotonic() - began < 9  # it would be 10 by default


def test_a_holder_that_ends_well_is_followed_at_once(act: Start, settings: Settings) -> None:
    _set(settings, session_timeout=50.0)
    holder = act("end_inside", name="x")
    holder.expect("held")

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, using="elsewhere", timeout=20)
        eventually(lambda: watched("elsewhere"))
        holder.tell("leave")
        waiting.result(20)

    assert holder.wait() == 0


@pytest.mark.parametrize("way", ["end", "sys.exit", "child of multiprocessing", "end in a hurry"])
def test_a_process_that_ends_well_leaves_no_waiters_behind(
    act: Start, etcd: Cluster, namespace: str, settings: Settings, way: str
) -> None:
    # Much longer than is looked for here: what is gone by then has not gone with a dead session.
    settings.DISTLOCK = aliases(etcd, namespace, session_timeout=50.0)
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    waiting = act("cancel_waiters", name="x", way=way)
    waiting.expect("waits")
    eventually(lambda: len(line(etcd, namespace, "x")) == 1 + WAITERS, 20)

    waiting.tell("cancel")

    assert waiting.wait() == 0
    eventually(lambda: len(line(etcd, namespace, "x")) == 1, 10)
    backend("elsewhere").release(holder)


def test_a_process_whose_cluster_hangs_ends_all_the_same(
    proxy: Proxy, act: Start, settings: Settings
) -> None:
    _set(settings, session_timeout=50.0)
    holder = act("end_inside", name="x", timeout=30)
    holder.expect("held")
    proxy.hold()

    holder.tell("leave")

    assert holder.wait(20) == 0


def test_a_frozen_holder_learns_first_thing_that_it_was_superseded(act: Start) -> None:
    frozen = act("wake_up_late", name="x")
    frozen.expect("held")
    frozen.stop()

    with lock("x", using="elsewhere", timeout=20) as lease:
        # It finds this word, not the time, when it goes on.
        frozen.tell("go on")
        frozen.cont()

        check, release = frozen.result()
        assert check == "LockLost"
        assert release in {"LockLost", "LockNotOwned"}
        lease.check()


def test_a_holder_frozen_for_a_moment_keeps_the_lock(
    act: Start, etcd: Cluster, namespace: str, settings: Settings
) -> None:
    settings.DISTLOCK = aliases(etcd, namespace, session_timeout=8.0)
    frozen = act("wake_up_late", name="x")
    frozen.expect("held")
    other = rival("x", "elsewhere")
    assert stands(other, "elsewhere") is None
    frozen.stop()
    never(lambda: stands(other, "elsewhere"), 0.3)
    frozen.tell("go on")

    frozen.cont()

    assert frozen.result() == ["done", "done"]
    assert eventually(lambda: stands(other, "elsewhere"))


def test_a_forked_process_has_a_session_of_its_own(act: Start) -> None:
    parent = act("fork_and_lock", name="x")

    assert parent.result(20) == {"child": True, "parent": True, "sessions": 2}


def test_a_process_that_holds_a_lock_at_its_end_leaves_no_socket_open(
    etcd: Cluster, namespace: str
) -> None:
    text = (
        "import django; from django.conf import settings; django.setup();"
        f"settings.DISTLOCK = {aliases(etcd, namespace)!r};"
        "from django_distlock import lock; lease = lock('x', using='locks').acquire()"
    )
    command = [sys.executable, "-X", "dev", "-c", text]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert "ResourceWarning: unclosed <socket" not in ended.stderr
    assert keys(etcd.members[0], f"{namespace}/x/") == {}


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


@pytest.mark.parametrize("way", ["kill", "pause"])
@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
def test_one_member_of_three_can_fail_while_locks_are_taken(
    frail: Cluster, settings: Settings, way: str, rank: int
) -> None:
    # An election takes a while on a machine that is busy.
    _set(settings, session_timeout=20.0, io_timeout=15.0)
    leases = [held(f"before:{number}") for number in range(20)]
    member = _by_rank(frail)[rank]
    # The one that fails is asked first.
    while backend()._gateway._members[0].port != member.port:
        backend()._gateway._turn_from(backend()._gateway._members[0])
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


async def test_tasks_go_on_whichever_member_hangs(frail: Cluster, settings: Settings) -> None:
    _set(settings, session_timeout=20.0, io_timeout=6.0)

    for member in frail.members:
        async with lock("x", using="locks", timeout=20) as lease:
            member.pause()
            try:
                async with lock(f"y:{member.number}", using="locks", timeout=20) as other:
                    other.check()
                lease.check()
            finally:
                member.resume()


def test_without_a_majority_leases_are_lost_and_with_one_locks_work_again(frail: Cluster) -> None:
    lease, told = held()
    tokens = [lease.fencing_token or 0]
    known = backend()

    for member in _by_rank(frail)[:2]:
        member.kill()

    eventually(lambda: lease.in_jeopardy, 6)
    lease.check()
    eventually(lambda: told, 10)
    with pytest.raises(LockLost):
        lease.check()
    with pytest.raises(LockBackendError):
        lock("y", using="locks", timeout=0).acquire()

    frail.start()
    # What was lost is given back, whether or not its holder was told of that.
    with lock("x", using="elsewhere", timeout=20) as again:
        tokens.append(again.fencing_token or 0)
    with lock("x", using="locks", timeout=10) as third:
        tokens.append(third.fencing_token or 0)
    assert backend() is known
    assert tokens == sorted(set(tokens))


def test_waiters_go_on_waiting_without_a_majority_and_are_served_once_there_is_one(
    frail: Cluster, settings: Settings
) -> None:
    settings.DISTLOCK = {
        **settings.DISTLOCK,
        "elsewhere": aliases(frail, backend().options.namespace, session_timeout=50.0)["locks"],
    }
    holders = [rival(name, "elsewhere") for name in ("thread", "task")]
    assert all(stands(holder, "elsewhere") for holder in holders)

    async def take_as_task() -> bool:
        async with lock("task", using="locks", timeout=50) as lease:
            return lease.held

    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(_is_taken, "thread"), pool.submit(asyncio.run, take_as_task())]
        eventually(lambda: len(watched()) == 2)
        for member in _by_rank(frail)[:2]:
            member.kill()

        # Longer than their session.
        never(lambda: any(each.done() for each in waiting), SESSION + 2)

        frail.start()
        for holder in holders:
            backend("elsewhere").release(holder)
        assert [each.result(30) for each in waiting] == [True, True]


def _is_taken(name: str) -> bool:
    with lock(name, using="locks", timeout=50) as lease:
        return lease.held


def test_a_waiter_whose_timeout_ends_without_a_majority_is_told_of_that(frail: Cluster) -> None:
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, timeout=8)
        eventually(watched)
        for member in _by_rank(frail)[:2]:
            member.kill()

        # Not that the lock is held: nobody can know that now.
        with pytest.raises(LockBackendError, match="no member of"):
            waiting.result(30)


def test_tokens_rise_across_a_restart_of_all_members(frail: Cluster) -> None:
    tokens = []
    for _ in range(2):
        with lock("x", using="locks", timeout=20) as lease:
            tokens.append(lease.fencing_token or 0)
        for member in frail.members:
            member.kill()
        frail.start()
    with lock("x", using="locks", timeout=20) as lease:
        tokens.append(lease.fencing_token or 0)

    assert tokens == sorted(set(tokens))
    assert not entries()[1:]
