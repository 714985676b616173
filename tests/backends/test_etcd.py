"""What is special to etcd: the line of keys, the watch, requests, names, rights, upkeep."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import LockBackendError, LockLost, lock, locks
from django_distlock.backends.etcd.gateway import SILENCE, Reply, below
from django_distlock.engine.background import background
from tests.contract.crew import waiting_for
from tests.fixtures.etcd import Cluster, EtcdMember
from tests.fixtures.eventually import aeventually, eventually, never
from tests.fixtures.proxy import Proxy

from .etcd_tools import (
    aliases,
    backend,
    expire,
    keys,
    line,
    log_in,
    nodes,
    noted,
    watched,
)
from .queue_tools import Counter, proxied, rival, set_options, stands, take, waited_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_django.fixtures import Settings

pytestmark = pytest.mark.usefixtures("etcd_aliases")


@pytest.fixture
def member(etcd: Cluster) -> EtcdMember:
    """The member that an operator asks."""
    return etcd.members[0]


@pytest.fixture
def proxy(etcd: Cluster, settings: Settings) -> Iterator[Proxy]:
    """Stands between "locks" and one of the members."""
    with proxied(settings, etcd.members[0].port, "endpoints") as found:
        yield found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The requests of all sessions, as they are sent."""
    return noted(monkeypatch)


# Requests.


def test_a_free_lock_costs_two_requests(sent: list[Any]) -> None:
    with lock("warm", using="locks"):
        pass
    sent.clear()

    with lock("x", using="locks"):
        assert [path for path, _ in sent] == ["/v3/kv/txn"]

    assert [path for path, _ in sent] == ["/v3/kv/txn"] * 2


def test_one_look_tells_which_places_are_free(sent: list[Any]) -> None:
    taken = [lock("x", using="elsewhere", limit=4, reentrant=False).acquire() for _ in range(3)]
    with lock("warm", using="locks"):
        pass

    for _ in range(8):
        sent.clear()
        with lock("x", using="locks", limit=4) as lease:
            assert lease.place not in {each.place for each in taken if each}
            # The first one may have been asked for at once.
            assert len(sent) in {1, 3}

    for each in taken:
        assert each
        each.release()


# The line.


def test_an_earlier_key_of_the_same_name_is_not_taken_for_the_one_that_is_awaited() -> None:
    assert stands(rival("y"))
    assert stands(rival("y")) is None  # so that the watch runs
    holder, waiter = rival("x"), rival("x")
    assert stands(holder)
    assert stands(waiter) is None
    [node] = [each for each in nodes() if each.request is waiter]
    awaited, own = node.watched

    # Told late, of the one that had this key before.
    backend()._server.watcher._note([(awaited, node.number - 1)])

    assert node.watched == (awaited, own)
    assert stands(waiter) is None


def test_a_deletion_between_the_look_and_the_watch_is_not_missed_nor_forgotten_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("django_distlock.backends.etcd.watcher.REMEMBERED", 2)
    holder, waiter = rival("x"), rival("x")
    assert stands(rival("y"))
    assert stands(rival("y")) is None  # so that the watch runs
    for name in ("x", "a"):  # a key of the same name was deleted before
        _give_back(name)
    assert stands(holder)
    assert stands(waiter) is None
    [node] = [each for each in nodes() if each.request is waiter]
    awaited, seen = list(node.watched), node.number
    backend().release(holder)
    eventually(lambda: not node.watched)

    backend()._server.watcher.add(node, awaited, seen)
    assert not node.watched
    assert not backend()._verbs.may_sleep(waiter, Counter())

    for name in ("b", "c"):
        _give_back(name)
    backend()._server.watcher.add(node, awaited, seen)
    assert not node.watched


def _give_back(name: str) -> None:
    """Have the watch see that somebody had the lock *name*."""
    known, request = backend()._server.watcher._deleted, rival(name)
    assert stands(request)
    [key] = [each.path for each in nodes() if each.request is request]
    backend().release(request)
    eventually(lambda: key in known)


# Nothing is left.


async def test_200_tasks_that_wait_share_the_threads_of_the_backend() -> None:
    holder, served = rival("x"), 0
    await asyncio.to_thread(stands, holder)
    threads = threading.active_count()

    async def read() -> None:
        nonlocal served
        async with lock("x", using="locks", shared=True, timeout=30):
            served += 1

    tasks = [asyncio.create_task(read()) for _ in range(200)]
    await aeventually(lambda: waiting_for(backend(), "x") == 200, 20)
    assert len(nodes()) == 2  # one of them waits for all
    # Four that try, one that watches, the clock and the background.
    assert threading.active_count() <= threads + 7

    await backend().arelease(holder)
    await asyncio.gather(*tasks)

    assert served == 200


# Replies that are lost, and requests that are late.


@pytest.mark.parametrize("is_late", [False, True])
def test_however_many_are_given_up_at_once_all_are_deleted(
    etcd: Cluster, namespace: str, settings: Settings, *, is_late: bool
) -> None:
    settings.DISTLOCK = aliases(etcd, namespace, session_timeout=60.0)
    requests = [rival(f"x{number}") for number in range(150)]
    for request in requests:
        assert stands(request)
    for node in nodes():
        node.is_late = is_late  # as after a lost reply

    all_are = threading.Event()
    background.submit(("locks", "etcd"), all_are.wait)
    for request in requests:
        backend().abandon_later(request)
    all_are.set()

    # Long before the session is over, with which they would go.
    eventually(lambda: not keys(etcd.members[0], f"{namespace}/x"), 20)


def test_a_request_that_arrives_after_its_lock_was_given_back_makes_no_key(
    proxy: Proxy,
    sent: list[tuple[str, dict[str, Any]]],
    member: EtcdMember,
    etcd: Cluster,
    namespace: str,
) -> None:
    with lock("x", using="locks"):
        pass
    for _ in range(5):
        sent.clear()
        proxy.drop_reply()
        with lock("x", using="locks", timeout=0):
            pass
        if len(sent) == 3:
            break  # else another reply was lost: that of the session's own watch
    assert len(sent) == 3

    for path, body in sent:
        member.asks(path, **body)

    assert line(etcd, namespace, "x") == []
    # Nor has a later one its key, which might be refused.
    with lock("x", using="locks", timeout=0):
        assert len(line(etcd, namespace, "x")) == 1


def test_a_late_deletion_does_not_free_who_has_the_key_now(
    sent: list[tuple[str, dict[str, Any]]], member: EtcdMember
) -> None:
    with lock("x", using="locks"):
        pass
    assert stands(rival("x", "elsewhere"), "elsewhere")
    waiter = rival("x")
    assert stands(waiter) is None
    backend().dequeue(waiter)
    eventually(lambda: not backend()._verbs.to_delete)
    deletions = [(path, body) for path, body in sent if "delete_range" in json.dumps(body)]
    assert len(deletions) == 2
    locks["elsewhere"].close()
    with lock("x", using="locks") as lease:
        for path, body in deletions:
            member.asks(path, **body)

        lease.extend()
        lease.check()


# The session.


def test_a_waiter_whose_session_was_revoked_together_with_the_holder_before_it_is_not_served(
    etcd: Cluster,
) -> None:
    holder, next_one = rival("x"), rival("x", "elsewhere")
    assert stands(holder)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, "x")
        eventually(watched)
        assert stands(next_one, "elsewhere") is None

        expire(etcd)

        assert eventually(lambda: stands(next_one, "elsewhere"))
        never(waiting.done, 0.5)
        backend("elsewhere").release(next_one)
        waiting.result(20)


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_waiter_is_served_though_what_it_watches_was_compacted(
    proxy: Proxy, member: EtcdMember, monkeypatch: pytest.MonkeyPatch, *, is_quiet: bool
) -> None:
    """Where nothing has changed since, etcd before 3.4.31 and 3.5.13 does not say that the deletion is forgotten."""
    monkeypatch.setattr("django_distlock.backends.etcd.gateway.SILENCE", 0.3)
    monkeypatch.setattr("django_distlock.backends.etcd.watcher.SHORT", 0.3)
    with waited_for(watched, timeout=60) as (waiting, release):
        eventually(lambda: backend()._server.watcher._watch)
        proxy.cut()
        release()
        _compact(member, is_quiet=is_quiet)

        proxy.pass_through()

        waiting.result(15)


def _compact(member: EtcdMember, *, is_quiet: bool = False) -> int:
    """Have etcd forget what has happened to locks until now, and *is_quiet* right after it; return the revision."""
    if not is_quiet:
        with lock("other", using="elsewhere"):
            pass
    revision = int(member.status["header"]["revision"])
    member.asks("/v3/kv/compaction", revision=revision, physical=True)
    return revision


def test_a_waiter_whose_watch_was_compacted_is_served_soon_after_it(
    proxy: Proxy, member: EtcdMember
) -> None:
    with waited_for(watched) as (waiting, release):
        proxy.cut()
        revision = _compact(member)
        proxy.pass_through()
        eventually(lambda: backend()._server.watcher._position == revision)
        never(waiting.done, 0.5)  # it has looked again by then

        release()

        waiting.result(SILENCE / 2)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_new_leader_that_does_not_know_a_session_is_believed_only_if_a_majority_agrees(
    etcd: Cluster, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    """A leader that was just elected answers for a while as if the lease had ended."""
    gateway, session = backend()._gateway, backend()._session
    post, answered = gateway.post, list[str]()

    def answer(path: str, *args: Any, **kwargs: Any) -> Reply:
        answered.append(path)
        reply = post(path, *args, **kwargs)
        is_first = answered.count("/v3/lease/keepalive") == 1
        if path == "/v3/lease/keepalive" and is_first:
            reply.body.pop("TTL", None)
        return reply

    monkeypatch.setattr(session, "_watch", lambda _: None)  # else it might hear of the end before
    lease = lock("x", using="locks").acquire()
    assert lease
    monkeypatch.setattr(gateway, "post", answer)
    if is_gone:
        post("/v3/lease/revoke", {"ID": session.id})

    assert session.prolong() is not is_gone

    assert answered[:2] == ["/v3/lease/keepalive", "/v3/kv/txn"]
    with suppress(LockLost):
        lease.release()
    assert [each.name for each in backend().held()] == []


def test_a_lease_ends_with_its_session_that_was_prolonged_before() -> None:
    with lock("x", using="locks"):
        pass
    # As if that had been a while ago.
    backend()._session._prolonged_at -= 2
    ends = backend()._session.ends

    with lock("x", using="locks", ttl=60) as lease:
        assert lease.deadline < ends


# Rights.


def test_a_user_needs_the_rights_of_the_namespace_alone(closed: Cluster) -> None:
    with lock("x", using="locks", timeout=0):
        holder = rival("x", "elsewhere")
        assert stands(holder, "elsewhere") is None
        eventually(lambda: backend("elsewhere")._server.watcher._watch)
    eventually(lambda: stands(holder, "elsewhere"))
    assert backend().check(["default"]) == []


def test_a_token_that_members_have_forgotten_is_replaced(closed: Cluster) -> None:
    with lock("x", using="locks", timeout=0):
        pass
    before = backend()._gateway._token

    for member in closed.members:
        member.restart()
    closed.wait_until_serving()

    with lock("x", using="locks", timeout=10) as lease:
        lease.check()
    assert backend()._gateway._token != before


@pytest.mark.parametrize(
    ("login", "text"),
    [
        ({"user": None, "password": None}, "set OPTIONS 'user' and 'password'"),
        ({"user": "shop", "password": "wrong"}, "refuses the login"),
        ({"user": "guest", "password": "hush"}, "needs a role"),
    ],
    ids=["nobody", "wrong password", "no rights"],
)
def test_a_login_that_is_refused_is_an_error_each_time(
    closed: Cluster, settings: Settings, login: dict[str, Any], text: str
) -> None:
    set_options(settings, **login)

    for _ in range(2):
        with pytest.raises(LockBackendError, match=text) as caught:
            lock("x", using="locks", timeout=0).acquire()
        assert "wrong" not in str(caught.value)
    [error] = backend().check(["default"])
    assert text in error.msg
    assert error.id == "distlock.E006"


def test_the_check_tells_that_a_user_may_only_read(closed: Cluster, namespace: str) -> None:
    member, area = closed.members[0], below(namespace)
    token = log_in(member, "root", "hush")
    member.asks("/v3/auth/role/revoke", token, role="locks", **area)
    member.asks("/v3/auth/role/grant", token, name="locks", perm={"permType": "READ", **area})

    [error] = backend().check(["default"])

    assert "needs a role with the rights to read and write" in error.msg


# Upkeep.


def test_a_full_database_is_told_with_what_is_to_be_done(
    own_cluster: Cluster, settings: Settings, namespace: str
) -> None:
    settings.DISTLOCK = aliases(own_cluster, namespace)
    member = own_cluster.members[0]
    alarm = {"memberID": member.status["header"]["member_id"], "alarm": "NOSPACE"}
    held = lock("held", using="locks").acquire()
    assert held
    member.asks("/v3/maintenance/alarm", action="ACTIVATE", **alarm)
    try:
        with pytest.raises(LockBackendError, match=r"alarm NOSPACE.*disarm"):
            lock("x", using="locks", timeout=0).acquire()
        [error] = backend().check(["default"])
        assert error.id == "distlock.E041"
        assert "NOSPACE" in error.msg
        # What is held goes on, and can be given back.
        held.extend()
        held.release()
    finally:
        member.asks("/v3/maintenance/alarm", action="DEACTIVATE", **alarm)
    with lock("x", using="locks", timeout=0):
        pass


def test_a_deletion_that_is_refused_holds_up_no_other_one(
    own_cluster: Cluster, settings: Settings, namespace: str
) -> None:
    settings.DISTLOCK = aliases(own_cluster, namespace, session_timeout=60.0)
    member, requests = own_cluster.members[0], [rival(f"x{number}") for number in range(5)]
    alarm = {"memberID": member.status["header"]["member_id"], "alarm": "NOSPACE"}
    for request in requests:
        assert stands(request)
    nodes()[0].is_late = True  # a full database refuses what refuses its late request
    member.asks("/v3/maintenance/alarm", action="ACTIVATE", **alarm)
    try:
        for request in requests:
            backend().abandon_later(request)

        eventually(lambda: len(keys(member, f"{namespace}/x")) == 1, 20)
    finally:
        member.asks("/v3/maintenance/alarm", action="DEACTIVATE", **alarm)
    eventually(lambda: not keys(member, f"{namespace}/x"), 20)
