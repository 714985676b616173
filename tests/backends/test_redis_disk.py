"""Locks that count once the server's disk has them: `wait_disk`. The disk stands still, and the server is killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import Lease, LockBackendError, lock, locks
from django_distlock.engine.values import Grant, Request
from django_distlock.ground.holder import Holder
from tests.fixtures.eventually import eventually
from tests.fixtures.frozen_disk import frozen_disk
from tests.fixtures.redis import Redis

from .redis_tools import LONG, alias, backend, holders, rival, take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_django.fixtures import Settings

pytestmark = [pytest.mark.server, pytest.mark.caches]

EACH_SECOND = {"appendonly": "yes", "appendfsync": "everysec"}
NOT_ON_DISK = "did not write the lock to its disk"

scripted = pytest.mark.parametrize("scripting", [True, False], ids=["scripts", "transactions"])


@pytest.fixture
def server() -> Iterator[Redis]:
    """A server that writes to its disk once a second."""
    with Redis(settings=EACH_SECOND) as server:
        if not is_sure(server):
            pytest.skip("its WAITAOF answers before the disk, or not: see tools/test-on-debian")
        yield server
        locks.reset()


def is_sure(server: Redis) -> bool:
    facts = server.info("server")
    return "valkey_version" not in facts and int(facts["redis_version"].split(".")[0]) >= 8


@pytest.fixture
def use(server: Redis, settings: Settings) -> Callable[..., None]:
    """Has "default" wait for the disk, and "direct" not."""

    def use(**options: Any) -> None:
        settings.DISTLOCK = {
            "default": alias(server.port, wait_disk=True, io_timeout=4.0, **options),
            "direct": alias(server.port, io_timeout=10.0),
        }

    use()
    return use


def ask(name: str, ttl: float = LONG) -> Request:
    return backend().request(name, ttl=ttl, holder=Holder.current())


def test_without_it_a_crash_loses_a_lock(server: Redis, use: object, name: str) -> None:
    def is_lost() -> bool:
        with frozen_disk(server) as kill:
            lease = take(name, using="direct", ttl=LONG, renew=False)
            kill()
        server.start()
        other = rival(name).tries()
        assert lease.held
        return other

    # On a machine that is busy, the server may have written it nevertheless.
    eventually(is_lost, 30)


@scripted
def test_a_lock_that_is_granted_outlives_a_crash(
    server: Redis, use: Callable[..., None], name: str, *, scripting: bool
) -> None:
    use(scripting=scripting)
    lease = take(name, ttl=LONG)

    with frozen_disk(server) as kill:
        kill()
    server.start()

    assert not rival(name).tries()
    lease.extend()
    lease.release()


@scripted
def test_a_lock_that_the_disk_has_not_is_refused_and_not_held(
    server: Redis, use: Callable[..., None], name: str, *, scripting: bool
) -> None:
    use(scripting=scripting)
    with frozen_disk(server):
        with pytest.raises(LockBackendError, match=NOT_ON_DISK):
            lock(name, timeout=0).acquire()

        assert not holders(name)
        assert rival(name).tries()


def test_a_crash_before_the_disk_has_it_is_an_error_and_nobody_holds_the_lock(
    server: Redis, use: object, name: str
) -> None:
    with ThreadPoolExecutor(1) as threads:
        with frozen_disk(server) as kill:
            acquiring = threads.submit(take, name, ttl=LONG)
            eventually(lambda: holders(name) == 1, what="the server has granted it")
            kill()

        assert isinstance(acquiring.exception(10), LockBackendError)
    server.start()
    assert rival(name).tries()


@scripted
def test_an_extension_that_the_disk_has_not_does_not_count(
    server: Redis, use: Callable[..., None], name: str, *, scripting: bool
) -> None:
    use(scripting=scripting)
    lease = take(name, ttl=LONG, renew=False)
    deadline = lease.deadline

    with frozen_disk(server):
        with pytest.raises(LockBackendError, match=NOT_ON_DISK):
            lease.extend(ttl=10 * LONG)

    assert lease.deadline == deadline
    lease.extend(ttl=10 * LONG)
    assert lease.deadline > deadline
    lease.release()


def test_a_crash_before_the_disk_has_an_extension_is_an_error_and_the_lock_ends_as_before(
    server: Redis, use: object, name: str
) -> None:
    lease = take(name, ttl=LONG, renew=False)
    deadline = lease.deadline

    def left() -> float:
        (held,) = backend("direct").held()
        return held.remaining or 0.0

    with ThreadPoolExecutor(1) as threads:
        with frozen_disk(server) as kill:
            extending = threads.submit(lease.extend, ttl=10 * LONG)
            eventually(lambda: left() > LONG, what="the server has extended it")
            kill()

        assert isinstance(extending.exception(10), LockBackendError)
    server.start()
    assert lease.deadline == deadline
    assert left() <= LONG
    lease.release()


def test_many_extensions_wait_for_the_disk_once(server: Redis, use: object, name: str) -> None:
    requests = [ask(f"{name}:{number}") for number in range(600)]
    for request in requests:
        backend("direct").try_acquire(request, queued=False)
    before = server.calls()

    assert all(backend().extend(requests))

    assert server.calls()["waitaof"] - before["waitaof"] == 1


def test_a_lease_that_the_disk_has_not_cannot_be_attached(
    server: Redis, use: object, name: str
) -> None:
    text = take(name, ttl=LONG).detach()

    with frozen_disk(server):
        with pytest.raises(LockBackendError, match=NOT_ON_DISK):
            Lease.attach(text)


def test_who_asks_again_after_a_lost_reply_waits_for_what_was_written_the_first_time(
    server: Redis, use: object, name: str
) -> None:
    with frozen_disk(server):
        first, second, third = ask(name), ask(name), ask(name)
        assert isinstance(backend("direct").try_acquire(first, queued=False), Grant)
        with pytest.raises(LockBackendError, match=NOT_ON_DISK):
            backend().try_acquire(first, queued=False)

        assert isinstance(backend("direct").try_acquire(second, queued=False), Grant)
        assert backend("direct").take_over(third, second.owner)
        with pytest.raises(LockBackendError, match=NOT_ON_DISK):
            backend().take_over(third, second.owner)


def test_a_server_that_keeps_no_log_is_an_error(settings: Settings, name: str) -> None:
    with Redis() as server:
        settings.DISTLOCK = {"default": alias(server.port, wait_disk=True)}

        assert [each.id for each in backend().check(["default"])] == ["distlock.E022"]
        with pytest.raises(LockBackendError, match=r"'wait_disk' needs Redis 7\.2"):
            lock(name).acquire()
        assert not [*backend().held()]
        locks.reset()


def test_a_server_whose_word_comes_before_the_disk_is_told_of(settings: Settings) -> None:
    with Redis(settings=EACH_SECOND) as server:
        facts = server.info("server")
        if is_sure(server):
            pytest.skip("its word comes after the disk")
        settings.DISTLOCK = {"default": alias(server.port, wait_disk=True)}

        knows_waitaof = tuple(map(int, facts["redis_version"].split(".")[:2])) >= (7, 2)
        expected = "distlock.W022" if knows_waitaof else "distlock.E022"
        assert [each.id for each in backend().check(["default"])] == [expected]
        locks.reset()
