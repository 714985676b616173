"""Sessions that are suspended, expire, freeze or die: holders are told the truth, others go on."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kazoo.client import KazooClient

from django_distlock import Lease, LockBackendError, LockLost, LockNotHeld, lock, locks
from django_distlock.engine.background import background
from django_distlock.ground import clock
from tests.fixtures.certificate import tls_server
from tests.fixtures.eventually import eventually, never
from tests.fixtures.processes import Child, Spawn
from tests.fixtures.proxy import Proxy

from .session_acts import WAITERS
from .zookeeper_tools import (
    BACKEND,
    aliases,
    backend,
    expire,
    line,
    nodes,
    operator,
    rival,
    stands,
    watched,
)

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from tests.fixtures.zookeeper import Ensemble, Member

Start = Callable[..., Child]
#: Seconds of the sessions here; a second later at the latest the ensemble has freed what they held.
SESSION = 4.0


@pytest.fixture
def alias(zookeeper: Ensemble, root: str, settings: Settings) -> Iterator[None]:
    """The aliases "locks" and "elsewhere", below a root of their own."""
    settings.DISTLOCK = aliases(zookeeper, root, session_timeout=SESSION)
    yield
    locks.close()


@pytest.fixture
def proxy(alias: None, zookeeper: Ensemble, settings: Settings) -> Iterator[Proxy]:
    """Stands between "locks" and one of the servers."""
    with Proxy(zookeeper.members[0].port) as found:
        options = settings.DISTLOCK["locks"]["OPTIONS"] | {"hosts": f"127.0.0.1:{found.port}"}
        settings.DISTLOCK = {
            **settings.DISTLOCK,
            "locks": {"BACKEND": BACKEND, "OPTIONS": options},
        }
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


def take(using: str = "locks", timeout: float = 20) -> None:
    """Wait for "x", hold it for a moment, and give it back."""
    with lock("x", using=using, timeout=timeout) as lease:
        lease.check()


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
            take("elsewhere", timeout=0)
        locks.close()
        eventually(lambda: "zk_loop" not in str(threading.enumerate()), 10, "kazoo has ended")
    gc.collect()  # here, where it is expected to complain


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_replies_that_share_a_tls_record_are_all_read(
    zookeeper: Ensemble, root: str, settings: Settings, certificate: Path
) -> None:
    with Proxy(zookeeper.members[0].port, tls=tls_server(certificate)) as proxy:
        # So long that no ping, whose answer brings the rest, is sent in time.
        long = {"session_timeout": 40.0, "tls": True, "ca": str(certificate)}
        settings.DISTLOCK = aliases(zookeeper, root, hosts=f"127.0.0.1:{proxy.port}", **long)
        names = [f"x{number}" for number in range(8)]
        take()
        proxy.gather_replies(0.05)

        with ThreadPoolExecutor(len(names)) as pool:
            leases = [pool.submit(lock(name, using="locks", timeout=0).acquire) for name in names]
            assert all(lease.result(30) for lease in leases)
        locks.close()
    gc.collect()


def test_a_session_that_is_there_at_once_is_known(
    alias: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = KazooClient.start_async

    def start_and_see_it_begin(client: KazooClient) -> Any:
        began = threading.Event()
        client.add_listener(lambda state: began.set())
        connected = start(client)
        began.wait(1)
        return connected

    monkeypatch.setattr(KazooClient, "start_async", start_and_see_it_begin)

    take()
    take()  # what was given back is free

    assert backend()._session.id is not None


def test_a_suspended_lease_is_in_jeopardy_and_held_again_after_the_reconnect(
    proxy: Proxy, settings: Settings
) -> None:
    # Its next renewal comes too late for this test.
    _set_options(settings, session_timeout=30.0)
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


def test_a_node_that_went_while_its_session_was_suspended_is_a_lost_lock(
    proxy: Proxy, zookeeper: Ensemble, root: str, settings: Settings
) -> None:
    _set_options(settings, session_timeout=30.0)
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


def test_a_reconnect_does_not_extend_what_is_not_renewed(proxy: Proxy) -> None:
    lease, told = held(ttl=8, renew=False)
    deadline = lease.deadline
    proxy.cut()
    eventually(lambda: lease.in_jeopardy, 2)

    proxy.pass_through()

    eventually(lambda: not lease.in_jeopardy, 5)
    assert lease.deadline == deadline
    assert not told
    lease.release()


def _set_options(settings: Settings, **seconds: float) -> None:
    options = settings.DISTLOCK["locks"]["OPTIONS"] | seconds
    settings.DISTLOCK = settings.DISTLOCK | {"locks": {"BACKEND": BACKEND, "OPTIONS": options}}


def test_what_was_asked_for_while_suspended_is_answered_after_the_reconnect(
    proxy: Proxy,
) -> None:
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, timeout=20)
        eventually(watched)

        proxy.cut()
        never(waiting.done, 0.3)
        proxy.pass_through()
        backend("elsewhere").release(holder)

        waiting.result(10)


def test_who_waits_looks_again_after_a_reconnect_as_its_watch_is_lost(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_distlock.backends.zookeeper.recipe.LOOK_AGAIN", 3600.0)
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, timeout=20)
        eventually(lambda: any(node.looked_at for node in nodes()))
        proxy.cut()
        eventually(lambda: not watched())
        proxy.pass_through()
        eventually(watched)
        backend("elsewhere").release(holder)

        waiting.result(10)


# The session ends.


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


def test_an_expired_session_is_told_at_once_and_the_next_lock_has_a_new_one(
    alias: None, settings: Settings
) -> None:
    _set_options(settings, session_timeout=9.0)
    lease, told = held()
    before = backend()._session.id

    expire()

    [reason] = eventually(lambda: told, 6)
    assert "session" in reason
    with pytest.raises(LockLost):
        lease.check()
    with pytest.raises(LockLost):
        lease.release()
    again, _ = held(timeout=5)
    assert backend()._session.id != before
    assert (again.fencing_token or 0) > (lease.fencing_token or 0)
    again.release()
    assert not backend()._nodes.by_owner


def test_an_expired_session_is_told_as_such_however_late_that_is(alias: None) -> None:
    _, told = held()
    before = backend()._session.id
    go_on = threading.Event()
    try:
        # Nobody is told until then: an exception in a test before may have left one thread too many.
        names = [each.name for each in threading.enumerate()]
        for _ in range(max(1, names.count("distlock-clock"))):
            background.at(clock.lease_time(), go_on.wait)
        expire()
        eventually(lambda: backend()._session.id not in {before, None}, 6)
        never(lambda: told, 0.3)
    finally:
        go_on.set()

    [reason] = eventually(lambda: told, 6)
    assert "ended the session" in reason


def test_a_waiter_whose_session_expires_stands_in_line_again(alias: None) -> None:
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, timeout=20)
        eventually(watched)

        expire()
        never(waiting.done, 0.3)
        backend("elsewhere").release(holder)

        waiting.result(10)


def test_a_node_that_was_deleted_by_hand_is_a_lost_lock(
    alias: None, zookeeper: Ensemble, root: str
) -> None:
    with operator(zookeeper) as client:
        lease, told = held(ttl=3)
        [node] = line(client, root, "x")
        client.delete(f"{root}/x/{node}")

    with lock("x", using="elsewhere", timeout=0) as other:
        eventually(lambda: told, 5)

        with pytest.raises(LockLost):
            lease.check()
        with pytest.raises(LockNotHeld):
            lease.release()
        other.check()


def test_a_waiter_whose_node_was_deleted_by_hand_is_served_all_the_same(
    alias: None, zookeeper: Ensemble, root: str
) -> None:
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    with ThreadPoolExecutor() as pool, operator(zookeeper) as client:
        waiting = pool.submit(take, timeout=20)
        eventually(lambda: len(line(client, root, "x")) == 2)
        eventually(watched)
        [node] = backend()._nodes.by_owner.values()
        client.delete(node.path)

        backend("elsewhere").release(holder)

        waiting.result(10)


def test_a_node_of_another_session_is_not_ours(alias: None) -> None:
    lease, told = held(ttl=3)
    [node] = backend()._nodes.granted()

    node.session_id = -1

    assert backend().extend([lease.request]) == [False]
    eventually(lambda: told, 5)
    assert lease.lost


# Processes.


def test_a_killed_holder_is_followed_once_its_session_is_over(act: Start) -> None:
    holder = act("hold", name="x")
    holder.expect("held")
    began = time.monotonic()

    holder.kill()

    with lock("x", using="elsewhere", timeout=20):
        assert time.monotonic() - began < 8  # it would be 10 by default


def test_a_holder_that_ends_well_is_followed_at_once(act: Start) -> None:
    holder = act("hold", name="x")
    holder.expect("held")

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, using="elsewhere", timeout=20)
        eventually(lambda: watched("elsewhere"))
        told = time.monotonic()
        holder.tell("leave")
        waiting.result(20)

    assert time.monotonic() - told < SESSION
    assert holder.wait() == 0


@pytest.mark.parametrize("way", ["end", "sys.exit", "child of multiprocessing", "end in a hurry"])
def test_a_process_that_ends_well_leaves_no_waiters_behind(
    act: Start, zookeeper: Ensemble, root: str, settings: Settings, way: str
) -> None:
    # Much longer than is looked for here: what is gone by then has not gone with a dead session.
    settings.DISTLOCK = aliases(zookeeper, root, session_timeout=50.0)
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    with operator(zookeeper) as client:
        waiting = act("cancel_waiters", name="x", way=way)
        waiting.expect("waits")
        eventually(lambda: len(line(client, root, "x")) == 1 + WAITERS, 20)

        waiting.tell("cancel")

        assert waiting.wait() == 0
        eventually(lambda: len(line(client, root, "x")) == 1, 10)
    backend("elsewhere").release(holder)


def test_a_process_whose_ensemble_hangs_ends_all_the_same(
    proxy: Proxy, act: Start, settings: Settings
) -> None:
    _set_options(settings, session_timeout=50.0)
    holder = act("end_inside", name="x", timeout=30)
    holder.expect("held")
    proxy.hold()

    holder.tell("leave")

    # Kazoo's own close would wait for as long as the session.
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
    act: Start, zookeeper: Ensemble, root: str, settings: Settings
) -> None:
    settings.DISTLOCK = aliases(zookeeper, root, session_timeout=8.0)
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


# Servers that are stopped.


@pytest.fixture
def frail(own_ensemble: Ensemble, root: str, settings: Settings) -> Iterator[Ensemble]:
    """An ensemble whose servers may be stopped, behind the aliases; afterwards all run."""
    settings.DISTLOCK = aliases(own_ensemble, root, session_timeout=4.0, io_timeout=1.5)
    yield own_ensemble
    locks.close()
    own_ensemble.start()


def _server_of(alias: str, ensemble: Ensemble) -> Member:
    port = backend(alias)._session.client._connection._socket.getpeername()[1]
    return next(member for member in ensemble.members if member.port == port)


def test_one_server_of_three_can_die_while_hundreds_of_locks_are_taken(
    frail: Ensemble, settings: Settings
) -> None:
    # An election takes a while on a machine that is busy.
    _set_options(settings, session_timeout=20.0, io_timeout=15.0)
    leases = [held(f"before:{number}") for number in range(100)]
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
            eventually(lambda: len(taken) > 100)
            _server_of("locks", frail).kill()
            seen = len(taken)
            eventually(lambda: len(taken) > seen + 300, 40)
        finally:
            over.set()
        for each in working:
            each.result(20)

    assert all(not told and lease.held for lease, told in leases)
    for lease, _ in leases:
        lease.release()


def test_a_process_that_holds_a_lock_at_its_end_leaves_no_socket_open(
    zookeeper: Ensemble, root: str
) -> None:
    text = (
        "import django; from django.conf import settings; django.setup();"
        f"settings.DISTLOCK = {aliases(zookeeper, root)!r};"
        "from django_distlock import lock; lease = lock('x', using='locks').acquire()"
    )
    command = [sys.executable, "-X", "dev", "-c", text]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert "ResourceWarning: unclosed <socket" not in ended.stderr


def test_without_a_quorum_leases_are_lost_and_with_one_locks_work_again(frail: Ensemble) -> None:
    lease, told = held()
    released, _ = held("released")
    tokens = [lease.fencing_token or 0]
    known = backend()
    leader = frail.leader
    follower = next(member for member in frail.members if member is not leader)

    leader.kill()
    follower.kill()

    eventually(lambda: lease.in_jeopardy, 4)
    lease.check()
    eventually(lambda: told, 10)
    with pytest.raises(LockLost):
        lease.check()
    with pytest.raises(LockBackendError):
        lock("y", using="locks", timeout=0).acquire()
    with pytest.raises(LockBackendError):
        released.release()

    frail.start()
    # What was lost is given back, whether or not its holder was told of that.
    with (
        lock("released", using="elsewhere", timeout=20),
        lock("x", using="elsewhere", timeout=20) as again,
    ):
        tokens.append(again.fencing_token or 0)
    with lock("x", using="locks", timeout=10) as third:
        tokens.append(third.fencing_token or 0)
    assert backend() is known
    assert tokens == sorted(set(tokens))


def test_waiters_go_on_waiting_without_a_quorum_and_are_served_once_there_is_one(
    frail: Ensemble, settings: Settings
) -> None:
    _set_options(settings, session_timeout=2.0)
    holders = [rival(name, "elsewhere") for name in ("thread", "task")]
    assert all(stands(holder, "elsewhere") for holder in holders)

    async def take_as_task() -> bool:
        async with lock("task", using="locks", timeout=50) as lease:
            return lease.held

    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(_is_taken, "thread"), pool.submit(asyncio.run, take_as_task())]
        eventually(lambda: sum(node.looked_at > 0 for node in nodes()) == 2)
        leader = frail.leader
        for member in [leader, *(each for each in frail.members if each is not leader)][:2]:
            member.kill()

        # Several sessions long, and longer than a waiter goes without looking.
        never(lambda: any(each.done() for each in waiting), 10)

        frail.start()
        for holder in holders:
            backend("elsewhere").release(holder)
        assert [each.result(30) for each in waiting] == [True, True]


def _is_taken(name: str) -> bool:
    with lock(name, using="locks", timeout=50) as lease:
        return lease.held


def test_a_waiter_whose_timeout_ends_without_a_quorum_is_told_of_that(
    frail: Ensemble, settings: Settings
) -> None:
    _set_options(settings, session_timeout=2.0)
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, timeout=9)
        eventually(lambda: any(node.looked_at for node in nodes()))
        for member in frail.members[:2]:
            member.kill()

        # Not that the lock is held: nobody can know that now.
        with pytest.raises(LockBackendError, match="no server of"):
            waiting.result(30)


def test_tokens_rise_across_a_restart_of_all_servers(frail: Ensemble) -> None:
    tokens = []
    for _ in range(2):
        with lock("x", using="locks", timeout=20) as lease:
            tokens.append(lease.fencing_token or 0)
        for member in frail.members:
            member.kill()
        frail.start()
        eventually(lambda: backend()._session.client, 20)
    with lock("x", using="locks", timeout=20) as lease:
        tokens.append(lease.fencing_token or 0)

    assert tokens == sorted(set(tokens))
