"""Faults between a lock and its Redis, and in both: nobody is locked out, nothing is stranded, the holder is told."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import (
    Lease,
    LockBackendError,
    LockLost,
    LockNotOwned,
    LockOutcomeUnknown,
    lock,
    locks,
)
from django_distlock.backends.redis.verbs import keys_of
from django_distlock.engine.values import Grant, Release
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from tests.contract.crew import start
from tests.fixtures.eventually import eventually, in_time, never
from tests.fixtures.garbage import collect_garbage
from tests.fixtures.interruption import interrupted_by_signals
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import Redis
from tests.fixtures.redis_servers import cluster_node, make_cluster

from .conftest import paused
from .redis_tools import (
    BACKEND,
    DATABASE,
    LONG,
    alias,
    backend,
    configure,
    holders,
    left_behind,
    rival,
    take,
    waiters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from concurrent.futures import Future

    from pytest_django.fixtures import Settings

    from tests.fixtures.processes import Spawn
    from tests.fixtures.redis import Replicated

# Some start servers of their own.
pytestmark = [pytest.mark.server, pytest.mark.caches]

#: Seconds until a waiter is served that does not have to wait for the end of any ttl.
SOON = 5.0


@pytest.fixture
def server() -> Iterator[Redis]:
    """A server of the test's own, to do harm to."""
    with Redis() as server:
        yield server


@pytest.fixture
def direct(server: Redis, settings: Settings) -> Redis:
    """The server behind the alias "default"."""
    configure(settings, server)
    return server


@pytest.fixture
def proxy(server: Redis, settings: Settings) -> Iterator[Proxy]:
    """The way to the server for the alias "default", connected, with its scripts known."""
    with Proxy(server.port) as proxy:
        configure(settings, server, proxy.port)
        warm_up()
        yield proxy
        proxy.pass_through()
        locks.reset()


def warm_up() -> None:
    with lock("warm") as lease:
        lease.extend()


def wait_for(server: Redis, name: str, *, timeout: float | None = 10) -> Future[int]:
    """Begin to wait for the lock in a thread, which gives its token once it had it."""

    def hold() -> int:
        with lock(name, timeout=timeout) as lease:
            return lease.fencing_token or 0

    before = waiters(server, name)
    waiter = start(hold)
    eventually(lambda: waiters(server, name) > before, what="it stands in line")
    eventually(lambda: server.info("clients")["blocked_clients"], what="it listens")
    return waiter


def break_connections(server: Redis) -> None:
    """Have the server close the connections of all its clients."""
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)


# Lost replies.


@pytest.mark.usefixtures("is_never_hung")
@pytest.mark.parametrize("caller", ["thread", "task", "unscripted"])
def test_whichever_reply_is_lost_nobody_is_locked_out(
    server: Redis, proxy: Proxy, settings: Settings, name: str, caller: str
) -> None:
    configure(settings, server, proxy.port, scripting=caller != "unscripted")
    for number in itertools.count():
        locks.close()  # to connect again: greetings are answered as well
        proxy.drop_reply(after=number)

        outcome = live_with_a_lost_reply(f"{name}:{number}", is_task=caller == "task")

        assert outcome in {"held", "not asked"}
        rival(f"{name}:{number}").takes(within=SOON)
        if proxy.replies_to_drop:
            break
    assert number >= 4


def live_with_a_lost_reply(name: str, *, is_task: bool) -> str:
    """Take, extend and release; whatever gets lost, the lock was held, or had not been asked for."""
    recipe, leases = lock(name, ttl=LONG, timeout=0), list[Lease]()

    def hold() -> None:
        with recipe as lease:
            leases.append(lease)
            try:
                lease.extend()
            except LockOutcomeUnknown:
                lease.check()
                lease.extend()

    async def ahold() -> None:
        async with recipe as lease:
            leases.append(lease)
            try:
                await lease.aextend()
            except LockOutcomeUnknown:
                lease.check()
                await lease.aextend()

    try:
        asyncio.run(ahold()) if is_task else hold()
    except LockOutcomeUnknown:
        return "held" if leases else "unknown"
    except LockBackendError as error:
        return "not asked" if "cannot be reached" in str(error) else str(error)
    return "held"


# Waits that end otherwise.


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError])
def test_an_alarm_ends_the_wait_with_whatever_its_handler_raises(
    name: str, error: type[OSError]
) -> None:
    def ring(*_: object) -> None:
        raise error("the alarm")

    other = rival(name)
    other.takes()

    with signal_at(0.5, ring), pytest.raises(error, match="the alarm"):
        lock(name, timeout=SOON).acquire()

    other.leaves()
    rival(name).takes(within=SOON)


@contextmanager
def signal_at(seconds: float, handler: Callable[..., object]) -> Iterator[None]:
    """Let *handler* interrupt this, the main thread, after so many *seconds*, and every 2 seconds from then on.

    Once is not enough: redis-py swallows what comes in the midst of a request, between two waits.
    """
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, 2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Partitions.


@pytest.mark.parametrize("verb", ["acquire", "attach"])
def test_what_arrives_after_it_was_given_up_is_refused(
    server: Redis, proxy: Proxy, settings: Settings, name: str, verb: str
) -> None:
    configure(settings, server, proxy.port, io_timeout=0.8)
    Lease.attach(take("warm").detach()).release()
    text = take(name, ttl=LONG).detach() if verb == "attach" else ""
    asked = server.calls()["evalsha"]
    proxy.delay(4.0)
    with pytest.raises(LockOutcomeUnknown):
        Lease.attach(text) if text else lock(name, ttl=LONG, timeout=0).acquire()
    proxy.delay(0)

    eventually(lambda: server.calls()["evalsha"] >= asked + 1, 2.2, "it was given up")
    eventually(lambda: server.calls()["evalsha"] >= asked + 2, 5, "it arrives late")
    if text:
        Lease.attach(text).release()
    never(lambda: holders(name), 0.3)


@pytest.mark.usefixtures("is_never_hung")
@pytest.mark.parametrize("limit", [None, 2])
def test_a_try_that_arrives_after_its_lock_was_given_back_is_refused(
    server: Redis, proxy: Proxy, settings: Settings, name: str, limit: int | None
) -> None:
    configure(settings, server, proxy.port, io_timeout=0.8)
    take("warm", limit=limit).release()
    asked = server.calls()["evalsha"]
    proxy.delay_next(2.0)
    with lock(name, ttl=LONG, timeout=5, limit=limit):
        assert server.calls()["evalsha"] == asked + 1, "the second one, as the first is late"

    eventually(lambda: server.calls()["evalsha"] >= asked + 3, 5, "it arrives late")
    assert not holders(name)


@pytest.mark.parametrize("options", [{}, {"limit": 2}, {"scripting": False}])
def test_who_has_given_it_back_and_asks_again_is_told_so_and_does_not_wait(
    server: Redis, settings: Settings, name: str, options: dict[str, Any]
) -> None:
    limit = options.pop("limit", None)
    configure(settings, server, **options)
    request = backend().request(name, ttl=LONG, holder=Holder.current())
    request = request if limit is None else request.with_limit(limit)
    for _ in range(limit or 1):
        grant = backend().try_acquire(request, queued=True)
        assert isinstance(grant, Grant)
    assert backend().release(request) is Release.RELEASED

    with pytest.raises(LockBackendError, match="given back"):
        backend().try_acquire(request, queued=True)

    assert not waiters(server, name)


@pytest.mark.usefixtures("is_never_hung")
def test_what_no_replica_has_and_whose_release_has_no_answer_is_no_busy_lock(
    server: Redis, proxy: Proxy, settings: Settings, name: str
) -> None:
    """The try is sent again for an owner that has given it back: the lock is free, and is not waited for."""
    configure(settings, server, proxy.port, wait_replicas=1, io_timeout=0.6)
    assert not lock(name).locked()  # connects
    # Those to the try and to WAIT.
    proxy.drop_reply(after=2)

    with pytest.raises(LockBackendError, match="given back"):
        lock(name, timeout=None).acquire()

    assert not holders(name)


def test_an_attach_that_is_answered_after_its_deadline_leaves_the_lock_to_others(
    server: Redis, proxy: Proxy, settings: Settings, name: str
) -> None:
    configure(settings, server, proxy.port, io_timeout=10.0)
    Lease.attach(take("warm").detach()).release()
    text = take(name, ttl=2).detach(LONG)
    asked = server.calls()["evalsha"]
    proxy.delay_next(2.1)

    with pytest.raises(LockLost):
        Lease.attach(text)

    eventually(lambda: server.calls()["evalsha"] >= asked + 2, what="it is given back")
    assert rival(name).tries()


# Broken connections.


def test_connections_that_broke_while_idle_are_replaced_unseen(direct: Redis, name: str) -> None:
    warm_up()
    break_connections(direct)

    with lock(name, timeout=0) as lease:
        break_connections(direct)
        lease.extend()
        break_connections(direct)


def test_connections_that_a_router_forgot_fail_once_for_all(proxy: Proxy, name: str) -> None:
    with ThreadPoolExecutor(3) as crowd:
        for number in range(3):
            verb = backend()._verbs.listen(f"{name}:{number}", 0.3)
            crowd.submit(backend()._link.converse, verb, 5.0)
    assert proxy.open_connections >= 3
    proxy.forget()

    with lock(name, timeout=0) as lease:
        lease.extend()


@pytest.mark.parametrize("timeout", [0, 10])
def test_connections_that_a_router_swallows_are_replaced_unseen(
    proxy: Proxy, name: str, timeout: float
) -> None:
    proxy.swallow()
    with lock(name, timeout=timeout) as lease:
        proxy.swallow()
        lease.extend()
        proxy.swallow()


def test_a_waiter_whose_connection_breaks_goes_on_waiting(direct: Redis, name: str) -> None:
    with lock(name, using="direct", ttl=LONG) as lease:
        waiter = wait_for(direct, name)

        for _ in range(3):
            break_connections(direct)
            eventually(lambda: direct.info("clients")["blocked_clients"], what="it listens again")

        assert not waiter.done()
    assert waiter.result(SOON) > (lease.fencing_token or 0)


def test_a_waiter_that_may_not_listen_is_told(server: Redis, settings: Settings, name: str) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "deaf", "on", ">x", "~*", "+@all", "-blpop")
    location = f"redis://deaf:x@127.0.0.1:{server.port}/{DATABASE}"
    deaf = {**alias(server.port), "OPTIONS": {"location": location}}
    settings.DISTLOCK = {"default": deaf, "direct": alias(server.port)}
    rival(name).takes()

    with pytest.raises(LockBackendError, match="BLPOP"):
        lock(name, timeout=5).acquire()


# Servers that end, or forget.


def test_a_server_that_comes_back_without_data_tells_the_holder(direct: Redis, name: str) -> None:
    reasons: list[str] = []
    lease = take(name, ttl=9)
    lease.on_lost(reasons.append)

    direct.kill()
    direct.start()

    eventually(lambda: reasons, 8, "the next renewal tells")
    assert "not ours" in reasons[0]
    with lock(name, using="direct", timeout=0) as second:
        assert (second.fencing_token or 0) > (lease.fencing_token or 0)
        with pytest.raises(LockNotOwned):
            lease.release()
        second.extend()


def test_a_server_that_restarts_while_a_lock_is_waited_for_leaves_nobody_in_doubt(
    direct: Redis, name: str
) -> None:
    rival(name, ttl=LONG).takes()
    waiter = wait_for(direct, name, timeout=20)

    direct.kill()

    assert isinstance(waiter.exception(5), LockBackendError)
    direct.start()
    with lock(name, timeout=0):
        pass


def test_an_answer_that_is_an_error_keeps_no_lease_alive(direct: Redis, name: str) -> None:
    warm_up()
    with direct.client() as client:
        client.script_flush()
    gc.disable()
    try:
        lease = lock(name).acquire()
        assert lease
        lease.release()
        kept = weakref.ref(lease)
        del lease
        assert kept() is None
    finally:
        gc.enable()


def test_scripts_that_the_server_forgot_are_told_again(direct: Redis, name: str) -> None:
    def forget() -> None:
        with direct.client() as client:
            client.script_flush()

    warm_up()
    forget()
    with lock(name, ttl=LONG) as lease:
        forget()
        lease.extend()
        forget()
        assert lock(name).locked()
        forget()
        other = rival(f"{name}:2", ttl=LONG)
        assert other.tries()
        waiter = wait_for(direct, f"{name}:2")
        forget()
        other.leaves()
        assert waiter.result(5)
        forget()
    assert not lock(name).locked()


# A frozen server.


def test_a_frozen_server_is_an_error_in_time_and_nothing_is_left(direct: Redis, name: str) -> None:
    def ask() -> None:
        warm_up()
        with paused(direct), pytest.raises(LockBackendError):
            lock(name, ttl=LONG, timeout=0).acquire()

    # Its connection had been idle, and might have died: it is asked twice.
    in_time(ask, 1.9, 2.5)

    eventually(lambda: not holders(name) and not left_behind(direct), 5)
    never(lambda: holders(name), 0.3)


def test_a_frozen_server_is_an_error_in_time_though_signals_interrupt_the_wait(
    direct: Redis, name: str
) -> None:
    """As those of a profiler do."""
    warm_up()
    with paused(direct):
        began = time.monotonic()
        with interrupted_by_signals(0.1, longest=6.0), pytest.raises(LockBackendError):
            lock(name, timeout=0).acquire()
        assert time.monotonic() - began < 4


def test_to_wait_at_a_frozen_server_ends_with_its_error(direct: Redis, name: str) -> None:
    holder = rival(name, ttl=LONG)
    holder.takes()
    waiter = wait_for(direct, name, timeout=3)
    with paused(direct):
        assert isinstance(waiter.exception(10), LockBackendError)

    eventually(lambda: not waiters(direct, name), 5)
    holder.leaves()
    eventually(lambda: not left_behind(direct), 5)


# Servers that refuse.


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("redis://:guess@127.0.0.1:{port}/0", "invalid username-password pair"),
        ("redis://127.0.0.1:{port}/0", "it wants a password"),
        ("redis://127.0.0.1:{port}/1", "Authentication required"),
        ("redis://:sesame@127.0.0.1:{port}/99", "DB index is out of range"),
    ],
)
def test_wrong_settings_are_told_and_passwords_are_not(
    closed_server: Redis, settings: Settings, name: str, location: str, words: str
) -> None:
    url = location.format(port=closed_server.port)
    settings.DISTLOCK = {"default": {**alias(1), "OPTIONS": {"location": url}}}

    with pytest.raises(LockBackendError, match=words) as wrong:
        lock(name, timeout=0).acquire()

    assert not isinstance(wrong.value, LockOutcomeUnknown)
    for secret in ("guess", "sesame"):
        assert secret not in f"{wrong.value!s}{wrong.value!r}{locks['default'].source!r}"  # type: ignore[attr-defined]  # a Redis has one


@pytest.fixture(scope="module")
def closed_server() -> Iterator[Redis]:
    """A server with a password."""
    with Redis(password="sesame") as server:
        yield server


def test_a_password_that_was_set_meanwhile_is_no_silence(
    direct: Redis, settings: Settings, name: str
) -> None:
    # Database 0: there is no greeting that would be refused before.
    location = f"redis://127.0.0.1:{direct.port}/0"
    settings.DISTLOCK = {"default": {**alias(1), "OPTIONS": {"location": location}}}
    lease = take(name)
    with direct.client() as client:
        client.config_set("requirepass", "sesame")
    break_connections(Redis(direct.port, password="sesame"))

    with pytest.raises(LockBackendError, match="Authentication required") as refused:
        lease.extend()
    assert not isinstance(refused.value, LockOutcomeUnknown)

    with Redis(direct.port, password="sesame").client() as client:
        client.config_set("requirepass", "")
    lease.release()


def test_a_server_that_loads_its_data_is_not_ready(settings: Settings, name: str) -> None:
    slow = {"enable-debug-command": "yes", "loading-process-events-interval-bytes": "1024"}
    with Redis(settings=slow) as server:
        configure(settings, server, io_timeout=10)
        lease = take(name, ttl=LONG)
        with server.client() as client:
            client.mset({f"filler:{number}": os.urandom(2048) for number in range(60)})
            client.config_set("key-load-delay", "30000")
            ends = time.monotonic() + 10
            loading = start(lambda: client.execute_command("DEBUG", "RELOAD"))

            with pytest.raises(LockBackendError, match="not ready") as refused:
                while time.monotonic() < ends:  # until it has begun
                    assert rival(name, using="default").tries() is False
            loading.result(10)

        assert not isinstance(refused.value, LockOutcomeUnknown)
        lease.check()
        lease.release()
        locks.reset()


def test_a_replica_is_refused_with_a_hint(settings: Settings, name: str) -> None:
    with Redis(settings={"replicaof": "127.0.0.1 1"}) as replica:
        configure(settings, replica)

        with pytest.raises(LockBackendError, match="it is a replica: name the master"):
            lock(name, timeout=0).acquire()
        locks.reset()


@pytest.mark.parametrize("caller", ["threads", "tasks"])
def test_a_fail_over_behind_one_address_costs_no_request(
    settings: Settings, name: str, caller: str
) -> None:
    """As of a managed Redis, whose former master keeps its connections and refuses all writes."""
    with Redis() as master, Redis() as replica, Proxy(master.port) as proxy:
        location = f"redis://127.0.0.1:{proxy.port}/0"
        settings.DISTLOCK = {"default": {**alias(1), "OPTIONS": {"location": location}}}

        def fail_over() -> None:
            with master.client() as client:
                client.execute_command("REPLICAOF", replica.host, str(replica.port))
            proxy.aim_at(replica.port)

        if caller == "threads":
            _hold_before_and_after(name, fail_over)
        else:
            asyncio.run(_ahold_before_and_after(name, fail_over))
        locks.reset()


def _hold_before_and_after(name: str, fail_over: Callable[[], None]) -> None:
    all_hold = threading.Barrier(4)

    def hold(number: int) -> None:
        with lock(f"{name}:{number}"):
            all_hold.wait(20)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(hold, range(4)))
    fail_over()
    for number in range(8):
        with lock(f"{name}:{number}", timeout=0):
            pass


async def _ahold_before_and_after(name: str, fail_over: Callable[[], None]) -> None:
    all_hold = asyncio.Barrier(4)

    async def hold(number: int) -> None:
        async with lock(f"{name}:{number}"):
            await all_hold.wait()

    await asyncio.gather(*map(hold, range(4)))
    fail_over()
    for number in range(8):
        async with lock(f"{name}:{number}", timeout=0):
            pass


def test_a_node_of_a_cluster_is_refused_with_a_hint(
    redis_cluster: list[Redis], settings: Settings, name: str
) -> None:
    location = f"redis://127.0.0.1:{redis_cluster[0].port}/0"
    settings.DISTLOCK = {"default": {**alias(1), "OPTIONS": {"location": location}}}

    with pytest.raises(LockBackendError, match="'cluster': True"):
        for number in range(50):  # some of them belong to the other nodes
            with lock(f"{name}:{number}", timeout=0):
                pass


# Replicas.


def test_a_lock_that_no_replica_confirms_is_neither_acquired_nor_attached(
    redis_sentinel: Replicated, settings: Settings, name: str
) -> None:
    configure(settings, redis_sentinel.master, wait_replicas=1, io_timeout=4.0)
    detached = f"{name}:detached"
    text = take(detached, ttl=LONG).detach()
    redis_sentinel.cut_off_replica()

    with pytest.raises(LockBackendError, match="0 of 1 replicas"):
        lock(name, ttl=LONG, timeout=0).acquire()
    with pytest.raises(LockBackendError, match="0 of 1 replicas"):
        Lease.attach(text)

    assert not holders(name)
    assert rival(name).tries()
    eventually(lambda: not holders(detached), SOON, "it is given back")


def test_a_lock_that_no_replica_confirms_is_not_reserved(
    server: Redis, settings: Settings, name: str
) -> None:
    configure(settings, server, wait_replicas=1, io_timeout=0.4)

    with pytest.raises(LockBackendError, match="0 of 1 replicas"):
        lock(name, min_hold=LONG, timeout=0).acquire()

    assert rival(name).tries()


@pytest.mark.parametrize("scripting", [True, False])
def test_a_holder_at_a_master_that_no_replica_follows_any_more_loses_its_lock(
    redis_sentinel: Replicated, settings: Settings, name: str, scripting: bool
) -> None:
    master = redis_sentinel.master
    configure(settings, master, wait_replicas=1, scripting=scripting, io_timeout=2.0)
    lease = take(name, ttl=3)
    redis_sentinel.cut_off_replica()

    with pytest.raises(LockBackendError, match="0 of 1 replicas"):
        lease.extend()

    eventually(lambda: lease.lost, 10, "no renewal counts")


# Clusters.


@pytest.fixture
def cluster(settings: Settings) -> Iterator[list[Redis]]:
    """A cluster of the test's own, behind the alias "default", which knows the first of its masters."""
    with ExitStack() as stack:
        servers = [stack.enter_context(cluster_node()) for _ in range(3)]
        make_cluster(servers)
        location = f"redis://{servers[0].host}:{servers[0].port}/0"
        options = {"location": location, "cluster": True, "io_timeout": 0.5}
        settings.DISTLOCK = {"default": {"BACKEND": BACKEND, "OPTIONS": options}}
        yield servers
        locks.reset()
        collect_garbage()  # here, where it is expected to complain


# The driver leaves sockets to the garbage collector when it asks again who is in the cluster.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_frozen_master_endangers_only_the_leases_that_it_keeps(
    cluster: list[Redis], name: str
) -> None:
    kept: defaultdict[Hashable, list[Lease]] = defaultdict(list)
    for number in range(30):
        lease = take(f"{name}:{number}", ttl=9)
        kept[backend().server_of(lease.request)].append(lease)
    endangered = kept.pop(f"{cluster[0].host}:{cluster[0].port}")
    safe = [lease for leases in kept.values() for lease in leases]
    assert len(kept) == 2
    before = [lease.deadline for lease in safe]

    cluster[0].pause()

    eventually(lambda: all(lease.lost for lease in endangered), 20)
    for lease, deadline in zip(safe, before, strict=True):
        lease.check()
        assert lease.deadline > deadline
        lease.release()


# As above.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_to_be_given_back_to_a_frozen_master_delays_no_renewal_at_the_others(
    cluster: list[Redis], name: str
) -> None:
    at_servers: defaultdict[Hashable, list[str]] = defaultdict(list)
    for each in (f"{name}:{number}" for number in range(60)):
        at_servers[backend().server_of(backend().request(each, ttl=1, holder=None))].append(each)
    gone = at_servers.pop(f"{cluster[0].host}:{cluster[0].port}")
    lease = take(at_servers.popitem()[1][0], ttl=3)
    cluster[0].pause()

    with ThreadPoolExecutor(len(gone)) as crowd:
        for failed in [crowd.submit(take, each) for each in gone]:
            assert isinstance(failed.exception(20), LockBackendError)
    later = clock.lease_time() + 6
    eventually(lambda: lease.lost or lease.deadline > later, 20)

    lease.check()
    lease.release()


# As above.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_given_back_together_waits_for_a_frozen_master_once(
    cluster: list[Redis], name: str
) -> None:
    frozen = f"{cluster[0].host}:{cluster[0].port}"
    requests = [
        backend().request(f"{name}:{number}", ttl=LONG, holder=Holder.current())
        for number in range(90)
    ]
    safe = next(each for each in requests if backend().server_of(each) != frozen)
    gone = [each for each in requests if backend().server_of(each) == frozen]
    assert isinstance(backend().try_acquire(safe, queued=False), Grant)
    cluster[0].pause()

    began = clock.lease_time()
    outcomes = backend().revoke_all([*gone, safe])

    assert all(isinstance(each, LockBackendError) for each in outcomes[:-1])
    assert outcomes[-1] is Release.RELEASED
    assert clock.lease_time() - began < 5 < len(gone) * 0.5


class Slot:
    """The slot of a lock in a cluster, which can be moved from one server to another."""

    def __init__(self, servers: list[Redis], name: str) -> None:
        self.servers = servers
        key = keys_of(backend().request(name, ttl=1, holder=None).key).record
        self.number = self._ask(servers[0], "CLUSTER", "KEYSLOT", key)
        owner = backend().server_of(backend().request(name, ttl=1, holder=None))
        self.source = next(each for each in servers if f"{each.host}:{each.port}" == owner)
        self.target = next(each for each in servers if each is not self.source)

    def begin_to_move(self) -> None:
        """Have the servers ready for it, as resharding does; the keys are where they were."""
        for server, state, other in (
            (self.target, "IMPORTING", self.source),
            (self.source, "MIGRATING", self.target),
        ):
            self._ask(server, "CLUSTER", "SETSLOT", self.number, state, self._id(other))

    def end_to_move(self) -> None:
        while keys := self._ask(self.source, "CLUSTER", "GETKEYSINSLOT", self.number, 100):
            to = self.target.host, self.target.port
            self._ask(self.source, "MIGRATE", *to, "", 0, 5000, "KEYS", *keys)
        for server in (self.target, self.source):
            self._ask(server, "CLUSTER", "SETSLOT", self.number, "NODE", self._id(self.target))

    def makes_wait(self, act: Callable[[], Any]) -> Future[Any]:
        """Begin *act*, and move the slot once the servers have refused its requests again and again."""
        before = self._refusals()
        doing = start(act)
        eventually(lambda: self._refusals() > before + 20 or doing.done(), 20, "it is refused")
        assert not doing.done()
        self.end_to_move()
        return doing

    def _refusals(self) -> int:
        """Return how often a server refused a request for the state of the slot."""
        return sum(
            found["count"]
            for server in (self.source, self.target)
            for error, found in server.info("errorstats").items()
            if error.removeprefix("errorstat_") in {"TRYAGAIN", "ASK", "MOVED"}
        )

    def _id(self, server: Redis) -> str:
        return str(self._ask(server, "CLUSTER", "MYID"))

    def _ask(self, server: Redis, *words: str | int) -> Any:
        with server.client() as client:
            return client.execute_command(*words)


async def _hold(name: str) -> None:
    async with lock(name, ttl=LONG, timeout=30):
        pass


@pytest.mark.parametrize("caller", ["thread", "task"])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_lock_whose_slot_of_the_cluster_is_being_moved_is_waited_for(
    cluster: list[Redis], settings: Settings, name: str, caller: str, is_known: bool
) -> None:
    settings.DISTLOCK["default"]["OPTIONS"] |= {"io_timeout": 10.0, "connect_timeout": 5.0}
    slot = Slot(cluster, name)
    if is_known:
        take(name).release()
    slot.begin_to_move()
    with pytest.raises(LockBackendError, match="is moving the lock"):
        lock(name, timeout=0).acquire()

    acts: dict[str, Callable[[], object]] = {
        "thread": lambda: take(name, ttl=LONG, timeout=30).release(),
        "task": lambda: asyncio.run(_hold(name)),
    }

    slot.makes_wait(acts[caller]).result(20)


@pytest.mark.parametrize("verb", ["release", "locked", "listing", "detach and attach"])
def test_a_lock_whose_slot_of_the_cluster_is_being_moved_can_be_used(
    cluster: list[Redis], name: str, verb: str
) -> None:
    slot, lease = Slot(cluster, name), take(name, ttl=LONG)
    acts: dict[str, Callable[[], object]] = {
        "release": lease.release,
        "locked": lock(name).locked,
        "listing": lambda: [held.name for held in backend().held()],
        "detach and attach": lambda: Lease.attach(lease.detach()),
    }
    slot.begin_to_move()
    lease.extend()

    outcome = slot.makes_wait(acts[verb]).result(20)

    assert verb != "locked" or outcome is True
    assert verb != "listing" or outcome == [name]


def ask(name: str, **terms: Any) -> None:
    """Have somebody ask for the lock, and wait for it."""
    asked = backend().request(name, holder=Holder.current(), **terms)
    backend().try_acquire(asked, queued=True)


def test_a_release_that_reserves_a_lock_whose_slot_is_being_moved_does_all_or_nothing(
    cluster: list[Redis], name: str
) -> None:
    slot = Slot(cluster, name)
    lease = lock(name, ttl=LONG, min_hold=LONG, free_on_error=True).acquire()
    assert lease
    # Somebody waits: only the key of the readers is not there.
    ask(name, ttl=LONG)
    slot.begin_to_move()

    slot.makes_wait(lease.release).result(20)

    [held] = backend().held()
    assert held.reserved


def test_a_release_that_empties_a_key_of_a_slot_that_is_being_moved_is_carried_out(
    cluster: list[Redis], name: str
) -> None:
    slot = Slot(cluster, name)
    lease = lock(name, ttl=LONG, shared=True).acquire()
    assert lease
    # Somebody waits: each key of the lock is there, so the server carries scripts out.
    ask(name, ttl=LONG)
    slot.begin_to_move()

    lease.release()

    slot.end_to_move()
    assert [*backend().held()] == []


def test_an_acquire_that_empties_one_tries_again(cluster: list[Redis], name: str) -> None:
    slot = Slot(cluster, name)
    ask(name, ttl=0.3, min_hold=LONG)
    ask(name, ttl=LONG)
    slot.begin_to_move()

    # Only once a key is gone does a server refuse a request for its keys.
    acquiring = slot.makes_wait(lock(name, timeout=LONG + 10).acquire)
    [found] = backend().held()
    assert found.reserved
    backend().force_release(found.key, found.owner_digest, by="a test")

    assert acquiring.result(20)


# Waiters that die, and many of them.


@pytest.mark.parametrize("fate", ["killed", "frozen"])
@pytest.mark.parametrize("fair", [False, True])
def test_the_next_waiter_is_served_soon_whatever_became_of_the_first(
    direct: Redis, settings: Settings, spawn: Spawn, name: str, fate: str, *, fair: bool
) -> None:
    """A frozen one gets its ring, and does nothing about it."""
    configure(settings, direct, fair=fair)
    holder = rival(name)
    holder.takes()
    first = spawn("tests.backends.redis_tools:wait", aliases=settings.DISTLOCK, name=name)
    eventually(lambda: waiters(direct, name) == 1, 20)
    second = wait_for(direct, name)

    if fate == "killed":
        first.kill()
    else:
        first.stop()
    holder.leaves()

    assert second.result(SOON)
    if fate == "frozen":
        first.cont()
        first.expect("held")
