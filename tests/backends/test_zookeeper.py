"""What is special to ZooKeeper: the line of nodes, watches, requests, names, rights, upkeep."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from kazoo.exceptions import NoAuthError
from kazoo.security import make_acl, make_digest_acl

from django_distlock import LockBackendError, lock
from django_distlock.backends.zookeeper.nodes import ZooKeeperNode, ZooKeeperServer
from tests.fixtures.eventually import eventually

from .queue_tools import rival, stands
from .zookeeper_tools import (
    aliases,
    backend,
    line,
    nodes,
    operator,
)

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from tests.fixtures.zookeeper import Ensemble


@pytest.fixture(autouse=True)
def alias(zookeeper: Ensemble, root: str, settings: Settings) -> None:
    """The aliases "locks" and "elsewhere", below a root of their own."""
    settings.DISTLOCK = aliases(zookeeper, root)


@pytest.fixture
def client(zookeeper: Ensemble) -> Iterator[Any]:
    with operator(zookeeper) as found:
        yield found


@pytest.fixture
def sent(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what the session of "locks" has sent and received since it was asked last."""
    caplog.set_level(logging.DEBUG, "kazoo.client")
    seen = 0

    def taken() -> list[str]:
        nonlocal seen
        records = caplog.records[seen:]
        seen += len(records)
        mine = backend()._session._client._connection._connection_routine.ident
        found = [_short(each) for each in records if each.thread == mine]
        return [each for each in found if each]

    return taken


def _short(record: logging.LogRecord) -> str:
    if record.name != "kazoo.client":
        return ""
    text = record.getMessage()
    if text.startswith("Sending request"):
        return text.partition("): ")[2].partition("(")[0]
    return "reply" if text.startswith("Received response") else ""


# Requests.


def test_a_free_lock_costs_three_requests(sent: Callable[[], list[str]]) -> None:
    with lock("warm", using="locks"), lock("x", using="locks"):
        pass
    sent()

    with lock("x", using="locks"):
        taken = sent()

    assert sorted(taken) == ["Create2", "GetChildren", "reply", "reply"]
    assert sent() == ["Delete", "reply"]


def test_a_single_try_that_was_refused_before_makes_no_node_in_the_way_of_others(
    sent: Callable[[], list[str]],
) -> None:
    holder, attempt = rival("x", "elsewhere"), lock("x", using="locks", timeout=0)
    assert stands(holder, "elsewhere")
    assert attempt.acquire() is None
    eventually(lambda: not nodes() and not sent())

    assert attempt.acquire() is None

    asked = [each for each in sent() if each != "reply"]
    assert asked == ["Sync", "GetChildren", "GetData"]
    backend("elsewhere").release(holder)
    with attempt:
        pass
    assert "Create2" in sent()
    with attempt:
        assert sorted(sent()) == ["Create2", "GetChildren", "reply", "reply"]


# Rights.


def test_nodes_of_a_creator_are_closed_to_others(
    zookeeper: Ensemble, client: Any, root: str, settings: Settings
) -> None:
    auth = [("digest", "me:secret")]
    settings.DISTLOCK = aliases(zookeeper, root, auth=auth, acl="creator") | {
        "stranger": aliases(zookeeper, root)["locks"]
    }

    with lock("x", using="locks"):
        assert lock("x", using="elsewhere", timeout=0).acquire() is None

    with pytest.raises(NoAuthError):
        client.get_children(f"{root}/x")
    with pytest.raises(LockBackendError, match="NoAuthError"):
        lock("x", using="stranger", timeout=0).acquire()
    with pytest.raises(LockBackendError, match="NoAuthError"):
        list(backend("stranger").held())


def test_a_user_may_be_confined_to_the_root(
    zookeeper: Ensemble, client: Any, root: str, settings: Settings
) -> None:
    client.create(root)
    client.create(f"{root}/locks", acl=[make_digest_acl("me", "secret", all=True)])
    client.set_acls(root, [make_acl("world", "anyone", read=True)])
    auth = [("digest", "me:secret")]
    settings.DISTLOCK = aliases(zookeeper, f"{root}/locks", auth=auth, acl="creator") | {
        "missing": aliases(zookeeper, f"{root}/missing", auth=auth)["locks"]
    }

    with lock("x", using="locks", timeout=0) as lease:
        lease.check()
    with pytest.raises(LockBackendError, match="NoAuthError"):
        lock("x", using="missing", timeout=0).acquire()


def test_credentials_are_not_logged(
    zookeeper: Ensemble, root: str, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    settings.DISTLOCK = aliases(zookeeper, root, auth=[("digest", "me:tell-nobody")])

    with lock("x", using="locks"):
        pass

    assert "Auth(" in caplog.text
    assert "tell-nobody" not in caplog.text


def test_credentials_that_are_refused_are_an_error_each_time_and_leave_no_threads(
    zookeeper: Ensemble, root: str, settings: Settings
) -> None:
    settings.DISTLOCK = aliases(zookeeper, root, auth=[("no-such-scheme", "x")])
    threads = threading.active_count()

    for _ in range(3):
        with pytest.raises(LockBackendError, match="AuthFailedError") as caught:
            lock("x", using="locks", timeout=0).acquire()
        assert "no-such-scheme" not in str(caught.value)

    eventually(lambda: threading.active_count() <= threads + 1)  # the lane of the background


# Upkeep.


def _purged(**terms: Any) -> tuple[int, int]:
    batches = list(backend("elsewhere").purge(**terms))
    return sum(batch.looked_at for batch in batches), sum(batch.deleted for batch in batches)


def test_purge_deletes_the_nodes_of_locks_that_nobody_needs(client: Any, root: str) -> None:
    for number in range(5):
        with lock(f"x{number}", using="locks"):
            pass
    assert _purged(older_than=0) == (5, 5)
    with lock("held", using="locks"), lock("free", using="locks"):
        pass
    stands(rival("held"))

    assert _purged(older_than=3600) == (2, 0)
    assert _purged(older_than=0, dry_run=True) == (2, 1)
    assert sorted(client.get_children(root)) == ["%tokens", "free", "held"]
    assert _purged(older_than=0, batch_size=1) == (2, 1)
    # The member that this client asks may be a moment behind.
    eventually(lambda: sorted(client.get_children(root)) == ["%tokens", "held"])
    assert backend().extend([rival("held")]) == [False]


def test_an_alias_purges_its_own_prefix_alone(settings: Settings) -> None:
    prefixed = {**settings.DISTLOCK["locks"], "KEY_PREFIX": "other"}
    settings.DISTLOCK = {**settings.DISTLOCK, "prefixed": prefixed}

    with lock("x", using="locks"), lock("y", using="prefixed", timeout=0):
        pass
    assert sum(batch.deleted for batch in backend("prefixed").purge(0)) == 1
    assert sum(batch.deleted for batch in backend("locks").purge(0)) == 1


def test_a_node_that_was_made_while_tokens_were_raised_is_made_again(
    client: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock("x", using="locks"):
        pass
    create, raised = ZooKeeperServer._begin_to_create, list[int]()

    def create_late(server: ZooKeeperServer, session: Any, node: ZooKeeperNode) -> Any:
        if not raised:
            raised.append(int(client.get(f"{root}/%tokens")[0]) + 1_000_000)
            client.set(f"{root}/%tokens", str(raised[0]).encode())
            eventually(lambda: server.tokens.changes > node.offset_changes)
        return create(server, session, node)

    monkeypatch.setattr(ZooKeeperServer, "_begin_to_create", create_late)
    with lock("x", using="locks", timeout=0) as lease:
        [own] = line(client, root, "x")
        _, stat = client.get(f"{root}/x/{own}")
        [listed] = backend().held()

    assert listed.token == lease.fencing_token == stat.czxid + raised[0]


def test_tokens_rise_though_the_node_of_the_lock_was_deleted(client: Any, root: str) -> None:
    tokens, names = list[int](), list[str]()
    for _ in range(3):
        with lock("x", using="locks") as lease:
            tokens.append(lease.fencing_token or 0)
            names += line(client, root, "x")
        assert _purged(older_than=0) == (1, 1)

    assert tokens == sorted(set(tokens))
    # ZooKeeper's own numbers do not.
    assert {name[-10:] for name in names} == {"0000000000"}


def test_tokens_rise_though_the_node_that_says_where_they_begin_was_deleted(
    client: Any, root: str
) -> None:
    tokens, path = list[int](), f"{root}/%tokens"

    def take() -> None:
        with lock("x", using="locks") as lease:
            tokens.append(lease.fencing_token or 0)

    take()
    # An hour ahead of the clock, as after an election, when ZooKeeper's own numbers jump.
    client.set(path, str(int(client.get(path)[0]) + 3_600_000_000).encode())
    take()
    client.delete(path)
    take()

    assert tokens == sorted(set(tokens))


def test_purge_beside_traffic_lets_nobody_in_and_breaks_nothing() -> None:
    over, inside, worst, deleted, holds = threading.Event(), 0, 0, 0, 0

    def work(using: str) -> None:
        nonlocal inside, worst, holds
        # Now and then nobody wants it, and its node can be deleted.
        while not over.wait(0.02):
            with lock("x", using=using, timeout=30):
                inside += 1
                over.wait(0.004)  # the work that it is held for: long enough to meet somebody
                worst, holds = max(worst, inside), holds + 1
                inside -= 1

    with ThreadPoolExecutor() as pool:
        working = [pool.submit(work, using) for using in ("locks", "elsewhere")]
        try:
            ends = time.monotonic() + 30
            while deleted < 50 and time.monotonic() < ends:
                before = holds
                deleted += _purged(older_than=0)[1]
                # A waiter whose node is deleted again and again gives up.
                eventually(lambda: holds > before)  # noqa: B023 - it is called at once
        finally:
            over.set()
        for each in working:
            each.result(10)

    assert deleted >= 50
    assert worst == 1
