"""What ZooKeeper and etcd share: the line; sessions that end, processes that freeze or die, servers that are stopped."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import call_command

from django_distlock import LockBackendError, LockLost, lock, locks
from django_distlock.backends.queue.backend import QueueBackend
from django_distlock.engine.values import Release
from testproject.models import Account
from tests.contract.crew import waiting_for
from tests.fixtures.etcd import Cluster
from tests.fixtures.eventually import eventually, never
from tests.fixtures.interruption import StopAt, TimeLimit
from tests.fixtures.processes import Child, Spawn
from tests.fixtures.proxy import Proxy
from tests.fixtures.zookeeper import Ensemble

from . import etcd_tools, zookeeper_tools
from .queue_tools import Counter, held, proxied, rival, set_options, stands, take, waited_for

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

Start = Callable[..., Child]
#: Seconds of the sessions here; a second later at the latest the servers have freed what they held.
SESSION = 4.0
#: How many wait at once, where many do.
WAITERS = 50


@dataclass(frozen=True)
class Side:
    """Three servers of one kind, and the aliases "locks" and "elsewhere" in a place of their own."""

    servers: Ensemble | Cluster
    settings: Settings
    #: etcd_tools, or zookeeper_tools, which has functions of the same names.
    tools: Any
    #: The root or namespace of the locks.
    place: str
    #: The option with the addresses of the servers.
    addresses: str

    @classmethod
    def of(cls, servers: Ensemble | Cluster, request: pytest.FixtureRequest) -> Side:
        """Return that of *servers*."""
        fixture = request.getfixturevalue
        if isinstance(servers, Ensemble):
            return cls(servers, fixture("settings"), zookeeper_tools, fixture("root"), "hosts")
        return cls(servers, fixture("settings"), etcd_tools, fixture("namespace"), "endpoints")

    def aliases(self, **options: Any) -> dict[str, Any]:
        """Return the setting DISTLOCK for these OPTIONS."""
        aliases: dict[str, Any] = self.tools.aliases(self.servers, self.place, **options)
        return aliases

    def configure(self, **options: Any) -> None:
        """Make the aliases, which have not been used, with these OPTIONS."""
        self.settings.DISTLOCK = self.aliases(**{"session_timeout": SESSION, **options})

    def numbers(self, name: str) -> tuple[list[int], int]:
        """Return the server's own numbers of those who hold a lock or wait for it, and where tokens begin."""
        found: tuple[list[int], int] = self.tools.numbers(self.servers, self.place, name)
        return found

    def length(self, name: str) -> int:
        """Return how many hold the lock *name* or wait for it."""
        return len(self.numbers(name)[0])


@pytest.fixture(params=["zookeeper", "etcd"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    """Each kind of servers, which keep running."""
    found = Side.of(request.getfixturevalue(request.param), request)
    found.configure()
    yield found
    locks.close()


@pytest.fixture
def proxy(side: Side) -> Iterator[Proxy]:
    """Stands between "locks" and one of the servers."""
    port = side.servers.members[0].port
    with proxied(side.settings, port, side.addresses) as found:
        yield found


@pytest.fixture
def act(side: Side, spawn: Spawn) -> Start:
    """Start another process that runs one of session_acts.py."""

    def start(verb: str, /, **arguments: Any) -> Child:
        known = {"aliases": side.settings.DISTLOCK, "using": "locks", **arguments}
        return spawn(f"tests.backends.session_acts:{verb}", **known)

    return start


# The line.


@pytest.fixture
def line(side: Side) -> Side:
    """Sessions of the usual length: nobody renews those of rivals."""
    side.settings.DISTLOCK = side.aliases()
    return side


def _verbs() -> Any:
    backend = locks["locks"]
    assert isinstance(backend, QueueBackend)
    return backend._verbs


def test_each_waiter_is_rung_by_the_one_before_it_alone(line: Side) -> None:
    holder, waiters = rival("x"), [rival("x") for _ in range(WAITERS)]
    bells = [Counter() for _ in waiters]
    assert stands(holder)
    for waiter, bell in zip(waiters, bells, strict=True):
        assert stands(waiter) is None
        assert _verbs().may_sleep(waiter, bell)
    assert WAITERS <= len(line.tools.watched()) <= WAITERS + 1  # etcd's watch their own keys, too

    tokens = []
    for waiter, bell in zip(waiters, bells, strict=True):
        assert locks["locks"].release(holder) is Release.RELEASED
        eventually(partial(getattr, bell, "rung"))
        tokens.append(stands(waiter) or 0)
        holder = waiter

    assert [bell.rung for bell in bells] == [1] * WAITERS
    assert 0 not in tokens
    assert tokens == sorted(set(tokens))


@pytest.mark.usefixtures("line")
def test_readers_hold_together_and_the_order_of_arrival_is_respected() -> None:
    backend = locks["locks"]
    first, second = rival("x", shared=True), rival("x", shared=True)
    writer, late = rival("x"), rival("x", shared=True)
    bells = {id(each): Counter() for each in (writer, late)}

    assert stands(first)
    assert stands(second)
    for each in (writer, late):
        assert stands(each) is None
        _verbs().may_sleep(each, bells[id(each)])

    backend.release(first)
    assert stands(writer) is None
    # It waits for the second one, who has not gone.
    assert [bell.rung for bell in bells.values()] == [0, 0]
    backend.release(second)
    eventually(lambda: bells[id(writer)].rung)
    assert stands(writer)
    assert stands(late) is None
    backend.release(writer)
    eventually(lambda: bells[id(late)].rung)
    assert stands(late)


@pytest.mark.usefixtures("line")
def test_who_leaves_the_middle_of_the_line_wakes_the_next_one_alone() -> None:
    people = [rival("x") for _ in range(4)]
    bells = [Counter() for _ in people]
    for person, bell in zip(people, bells, strict=True):
        stands(person)
        _verbs().may_sleep(person, bell)

    locks["locks"].dequeue(people[1])

    eventually(lambda: bells[2].rung)
    assert stands(people[2]) is None
    assert [bell.rung for bell in bells] == [0, 0, 1, 0]
    locks["locks"].release(people[0])
    eventually(lambda: bells[2].rung == 2)
    assert stands(people[2])


def test_a_renewal_beside_a_release_takes_no_lock_for_lost(line: Side) -> None:
    holder = rival("x")
    assert stands(holder)
    [node] = line.tools.nodes()
    line.tools.delete(line.servers, node)

    node.is_ending = True
    assert locks["locks"].extend([holder]) == [True]
    node.is_ending = False
    assert locks["locks"].extend([holder]) == [False]


def test_a_waiter_whose_session_has_ended_stands_in_line_again(line: Side) -> None:
    with waited_for(line.tools.watched) as (waiting, release):
        line.tools.expire(line.servers)
        never(waiting.done, 0.3)
        eventually(lambda: [each.waiters for each in locks["elsewhere"].held()] == [1], 20)
        release()

        waiting.result(10)


def test_a_waiter_that_an_operator_has_deleted_is_served_all_the_same(line: Side) -> None:
    with waited_for(line.tools.watched) as (waiting, release):
        [node] = line.tools.nodes()
        line.tools.delete(line.servers, node)

        release()

        waiting.result(10)


def test_the_end_of_a_session_is_told_before_a_renewal_and_the_next_lock_has_a_new_one(
    side: Side,
) -> None:
    side.configure(session_timeout=50.0)
    lease, told = held(ttl=60)
    if isinstance(side.servers, Cluster):
        eventually(lambda: etcd_tools.backend()._session._follower._watch)

    side.tools.expire(side.servers)

    [reason] = eventually(lambda: told)
    assert "session" in reason
    for verb in (lease.check, lease.release):
        with pytest.raises(LockLost):
            verb()
    with lock("x", using="locks", timeout=5) as again:
        assert (again.fencing_token or 0) > (lease.fencing_token or 0)


@pytest.mark.usefixtures("line")
def test_a_row_that_another_backend_claims_until_the_change_is_claimed_after_it(
    settings: Settings,
) -> None:
    """As in the guide: the new backend was checked long before the change."""
    settings.DISTLOCK = {**settings.DISTLOCK, "rows": {}}
    account = Account.objects.create(name="x", balance=100, opening_balance=100)

    for _ in range(2):  # and back, and here again
        call_command("check_locks", using=["locks"], verbosity=0)
        for using in ("rows", "locks"):
            with lock("fee", using=using) as lease:
                lease.claim(account)
        locks.close()

    account.delete()


@pytest.mark.usefixtures("line")
def test_tokens_rise_while_other_sessions_begin() -> None:
    tokens, listed = list[int | None](), list[int | None]()
    for _ in range(3):
        for using in ("locks", "elsewhere"):
            with lock("x", using=using) as lease:
                tokens.append(lease.fencing_token)
                listed += [each.token for each in locks["locks"].held()]
        locks["elsewhere"].close()

    assert tokens == listed == sorted(set(tokens), key=lambda token: token or 0)


def test_where_tokens_begin_is_raised_to_the_clock_by_each_session(line: Side) -> None:
    written = list[int]()
    for _ in range(2):
        began = time.time()
        with lock("x", using="locks") as lease:
            token = lease.fencing_token or 0
            [number], offset = line.numbers("x")
            written.append(offset)

        assert token == number + offset
        assert began - 1 < token / 1_000_000 < time.time() + 1
        locks.close()

    assert written[0] < written[1]


def test_a_waiter_that_no_watch_tells_looks_for_itself(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("zookeeper.nodes.ZooKeeperServer.changed", "etcd.watcher.KeyWatcher._note"):
        monkeypatch.setattr(f"django_distlock.backends.{path}", lambda *_: None)
    with waited_for(side.tools.watched, timeout=40) as (waiting, release):
        release()

        waiting.result(20)


def test_an_exception_at_any_step_of_a_waiter_leaves_nothing(
    line: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", id)  # one may hit a generator that is closed
    number, is_over = 0, False
    while not is_over:
        number += random.randrange(1, 4)  # each third one, and another one in the next run
        # What a waiter has left, the next one for the same lock would find.
        name = f"x{number}"
        assert stands(rival(name, "elsewhere"), "elsewhere")
        waiter = rival(name)
        with suppress(TimeLimit), StopAt(number) as stop:
            stands(waiter)
        is_over = stop.calls < number
        locks["locks"].abandon_later(waiter)

    assert number > 20
    eventually(lambda: {each.waiters for each in locks["elsewhere"].held()} == {0})


# Connections that are cut.


def test_a_request_whose_reply_is_lost_has_been_carried_out_once(side: Side, proxy: Proxy) -> None:
    take()
    proxy.drop_reply()

    with lock("x", using="locks", timeout=0) as lease:
        lease.check()
        [number], offset = side.numbers("x")

        assert proxy.connections >= 2
        assert lease.fencing_token == number + offset
    assert side.length("x") == 0


@pytest.mark.parametrize("way", ["hold", "black_hole"])
def test_a_server_that_hangs_is_an_error_and_soon(side: Side, proxy: Proxy, way: str) -> None:
    set_options(side.settings, io_timeout=2.0)
    take()
    getattr(proxy, way)()
    began = time.monotonic()

    with pytest.raises(LockBackendError):
        lock("x", using="locks", timeout=0).acquire()

    assert time.monotonic() - began < 4.5
    proxy.pass_through()
    # The request may arrive all the same: what it made is deleted.
    eventually(lambda: not _verbs().to_delete and not side.length("x"), 10)


def test_a_waiter_goes_on_after_the_line_was_cut(side: Side, proxy: Proxy) -> None:
    with waited_for(side.tools.watched) as (waiting, release):
        proxy.cut()
        never(waiting.done, 0.3)
        proxy.pass_through()
        release()

        waiting.result(20)


# Processes.


def test_a_holder_that_ends_well_is_followed_at_once(side: Side, act: Start) -> None:
    side.configure(session_timeout=50.0)
    holder = act("end_inside", name="x")
    holder.expect("held")

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, using="elsewhere")
        eventually(lambda: side.tools.watched("elsewhere"))
        holder.tell("leave")
        waiting.result(20)

    assert holder.wait() == 0


@pytest.mark.parametrize("way", ["end", "sys.exit", "child of multiprocessing", "end in a hurry"])
def test_a_process_that_ends_well_leaves_no_waiters_behind(
    side: Side, act: Start, way: str
) -> None:
    # Much longer than is looked for here: what is gone by then has not gone with a dead session.
    side.configure(session_timeout=50.0)
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    waiting = act("cancel_waiters", name="x", way=way)
    waiting.expect("waits")
    eventually(lambda: side.length("x") == 2, 20)  # one of them waits for all

    waiting.tell("cancel")

    assert waiting.wait() == 0
    eventually(lambda: side.length("x") == 1, 10)
    locks["elsewhere"].release(holder)


def test_a_process_whose_server_hangs_ends_all_the_same(
    side: Side, proxy: Proxy, act: Start
) -> None:
    side.configure(session_timeout=50.0, **{side.addresses: f"127.0.0.1:{proxy.port}"})
    holder = act("end_inside", name="x", timeout=30)
    holder.expect("held")
    proxy.hold()

    holder.tell("leave")

    # A client's own end would wait for as long as the session.
    assert holder.wait(20) == 0


# Places.


def test_all_places_of_a_killed_process_go_to_the_waiters_of_others(act: Start) -> None:
    holder = act("hold_places", name="x", limit=8)
    holder.expect("held")
    waiters = [act("wait_patiently", name="x", limit=8) for _ in range(8)]
    for waiter in waiters:
        waiter.expect("sleeps")

    holder.kill()

    places = [waiter.expect("held", 30)["place"] for waiter in waiters]
    assert sorted(places) == list(range(8))


# Servers that are stopped.


@pytest.fixture(params=["own_ensemble", "own_cluster"])
def frail(request: pytest.FixtureRequest) -> Iterator[Side]:
    """Each kind of servers, which may be stopped; afterwards all run."""
    found = Side.of(request.getfixturevalue(request.param), request)
    found.configure(io_timeout=1.5)
    yield found
    locks.close()
    found.servers.start()


def _kill_two(side: Side) -> None:
    """Kill the leader, and one more."""
    leader = side.servers.leader
    leader.kill()
    next(member for member in side.servers.members if member is not leader).kill()


def _answers(alias: str = "locks") -> bool:
    with suppress(LockBackendError):
        locks[alias].probe(rival("x", alias))
        return True
    return False


def test_without_a_majority_leases_are_lost_and_with_one_locks_work_again(frail: Side) -> None:
    lease, told = held()
    released, _ = held("released")
    tokens = [lease.fencing_token or 0]
    known = locks["locks"]

    _kill_two(frail)

    eventually(lambda: lease.in_jeopardy, 6)
    lease.check()
    eventually(lambda: told, 10)
    with pytest.raises(LockLost):
        lease.check()
    with pytest.raises(LockBackendError):
        lock("y", using="locks", timeout=0).acquire()
    with pytest.raises(LockBackendError):
        released.release()

    frail.servers.start()
    # What was lost is given back, whether or not its holder was told of that.
    with (
        lock("released", using="elsewhere", timeout=20),
        lock("x", using="elsewhere", timeout=20) as again,
    ):
        tokens.append(again.fencing_token or 0)
    with lock("x", using="locks", timeout=10) as third:
        tokens.append(third.fencing_token or 0)
    assert locks["locks"] is known
    assert tokens == sorted(set(tokens))


def test_waiters_go_on_waiting_without_a_majority_and_are_served_once_there_is_one(
    frail: Side,
) -> None:
    lasting = frail.aliases(session_timeout=50.0)["elsewhere"]
    frail.settings.DISTLOCK = {**frail.settings.DISTLOCK, "elsewhere": lasting}
    holders = [rival(name, "elsewhere") for name in ("thread", "task")]
    assert all(stands(holder, "elsewhere") for holder in holders)

    async def take_as_task() -> None:
        async with lock("task", using="locks", timeout=50) as lease:
            lease.check()

    with ThreadPoolExecutor() as pool:
        waiting: list[Future[None]] = [
            pool.submit(take, "thread", timeout=50),
            pool.submit(asyncio.run, take_as_task()),
        ]
        # One that was not answered yet gives up after a session timeout.
        eventually(lambda: all(waiting_for(locks["locks"], name) for name in ("thread", "task")))
        _kill_two(frail)

        # Longer than their session.
        never(lambda: any(each.done() for each in waiting), SESSION + 2)

        frail.servers.start()
        for holder in holders:
            locks["elsewhere"].release(holder)
        for each in waiting:
            each.result(30)


def test_tokens_rise_across_a_restart_of_all_servers(frail: Side) -> None:
    tokens = []
    for _ in range(2):
        with lock("x", using="locks", timeout=20) as lease:
            tokens.append(lease.fencing_token or 0)
        for member in frail.servers.members:
            member.kill()
        frail.servers.start()
        eventually(_answers, 20)
    with lock("x", using="locks", timeout=20) as lease:
        tokens.append(lease.fencing_token or 0)

    assert tokens == sorted(set(tokens))
    assert len(frail.tools.nodes()) <= 1


def test_a_lock_is_free_when_max_hold_is_over_however_long_its_ttl_is(side: Side) -> None:
    """Though its process lives on, and with it the session."""
    lease, _ = held("x", ttl=120, max_hold=3 * SESSION)
    eventually(lambda: lease.lost, 30)

    # Not another max_hold after the last renewal.
    eventually(partial(stands, rival("x", "elsewhere"), "elsewhere"), SESSION)


def test_a_lease_that_is_extended_to_the_session_timeout_is_held_for_so_long(side: Side) -> None:
    lease, _ = held("x", ttl=SESSION / 2, renew=False)
    lease.extend(SESSION)

    with lock("x", using="elsewhere", timeout=20):
        assert lease.lost
