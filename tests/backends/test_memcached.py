"""Locks in memcached: what only this server does to them, and what its clients must not do."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.core.cache import caches

from django_distlock import (
    InvalidLockBackend,
    LockBackendError,
    LockLost,
    LockOutcomeUnknown,
    lock,
    locks,
)
from django_distlock.backends.cache_alias import Record
from django_distlock.backends.memcached import MemcachedConnection
from django_distlock.engine.values import Release
from django_distlock.testing import reset_locks
from tests.contract.crew import start
from tests.contract.rivals import Rival
from tests.fixtures.certificate import tls_server
from tests.fixtures.eventually import eventually, never
from tests.fixtures.frozen_thread import frozen_thread
from tests.fixtures.memcached import Memcached
from tests.fixtures.proxy import Proxy

from .memcached_tools import DRIVERS, alias, another, backend, configure, rival

if TYPE_CHECKING:
    from pytest_django import Settings

    from tests.fixtures.processes import Spawn

# Some start servers of their own.
pytestmark = [pytest.mark.server, pytest.mark.caches]

BOTH = ("pymemcache", "pylibmc")
PATIENT = {"io_timeout": 5.0, "connect_timeout": 2.0}


@pytest.fixture
def both(settings: Settings, memcached: Memcached) -> tuple[str, ...]:
    """An alias for each client, on one server: tests that take seconds try them at once."""
    by_cache = "django_distlock.backends.cache.CacheBackend"
    settings.DISTLOCK = {
        using: {"BACKEND": by_cache, "OPTIONS": {"cache": using, **PATIENT}} for using in BOTH
    }
    return BOTH


@pytest.fixture
def using(both: tuple[str, ...]) -> str:
    """An alias on the shared server."""
    return both[0]


@pytest.fixture
def server() -> Iterator[Memcached]:
    """A server of the test's own, to do harm to."""
    with Memcached() as server:
        yield server


@pytest.fixture
def proxy(server: Memcached, settings: Settings) -> Iterator[Proxy]:
    """The way to the test's own server, for the alias "locks"."""
    with Proxy(server.port) as proxy:
        configure(settings, alias(f"127.0.0.1:{proxy.port}"))
        yield proxy
        proxy.pass_through()
        locks.close()


def test_a_url_needs_no_alias_in_caches(
    memcached: Memcached, settings: Settings, name: str
) -> None:
    settings.DISTLOCK = dict.fromkeys(
        ("one", "two"), f"memcached://127.0.0.1:{memcached.port}?ttl=20"
    )

    with lock(name, using="one") as lease:
        assert 15 < (lease.remaining or 0) <= 20
        assert lock(name, using="two", timeout=0, reentrant=False).acquire() is None
    assert locks["one"].check() == []
    assert not lock(name, using="two").locked()


def test_tls(server: Memcached, settings: Settings, certificate: Path, name: str) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate))
    with Proxy(server.port, tls=tls_server(certificate)) as proxy:
        for context in (trusting, ssl.create_default_context()):
            location = f"127.0.0.1:{proxy.port}"
            cache = alias(location, OPTIONS={"tls_context": context})
            configure(settings, cache, connect_timeout=5.0, io_timeout=5.0)
            if context is trusting:
                with lock(name, using="locks"):
                    assert proxy.bytes_sent
            else:
                with pytest.raises(LockBackendError, match="certificate"):
                    lock(name, using="locks").acquire()
            locks.close()


# A server that is stopped.


def test_a_lock_that_a_stopped_server_grants_does_not_expire_early(
    server: Memcached, settings: Settings, name: str
) -> None:
    """Its clock stands still, too, until a tick that may come before the requests or after them."""
    configure(settings, alias(f"127.0.0.1:{server.port}"), ttl=2, **PATIENT)
    wanted = [lock(f"{name} {number}", using="locks", renew=False) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        # The first time, for as many connections: new ones are accepted after the tick.
        for seconds, locks_ in ((0.0, wanted[:4]), (3.2, wanted[4:])):
            server.pause()
            never(bool, seconds)
            granted = [pool.submit(each.acquire) for each in locks_]
            never(bool, 0.2)
            server.resume()
            leases = {each: result.result() for each, result in zip(locks_, granted, strict=True)}
            assert all(leases.values())

    # In this order: on a machine with much to do, a lease may end meanwhile.
    never(
        lambda: any(not each.locked() and lease and lease.held for each, lease in leases.items()),
        1,
        "a lock that is gone before its lease ends",
    )
    reset_locks()


def test_a_lock_does_not_expire_early_if_the_clock_is_read_long_after_the_server_goes_on(
    server: Memcached, proxy: Proxy, settings: Settings, name: str
) -> None:
    """On a busy machine, the threads that answer requests may run long before the one that reads the clock."""
    configure(settings, alias(f"127.0.0.1:{proxy.port}"), ttl=2, **PATIENT)
    wanted = lock(name, using="locks", renew=False)
    assert not wanted.locked()
    connections = proxy.connections
    with ThreadPoolExecutor(1) as pool:
        with frozen_thread(server.pid):
            never(bool, 3.2)
            proxy.delay_next(0.2)
            granted = pool.submit(wanted.acquire)
            eventually(lambda: granted.done() or proxy.connections > connections)
        lease = granted.result()
    assert lease

    never(
        lambda: not wanted.locked() and lease.held, 1, "a lock that is gone before its lease ends"
    )
    reset_locks()


def test_a_lock_does_not_expire_early_if_a_stop_of_the_server_moves_its_ticks(
    server: Memcached, settings: Settings, name: str
) -> None:
    """The server reads its clock at each tick, in whole seconds; the next tick is a second after the one before."""
    configure(settings, alias(f"127.0.0.1:{server.port}"), ttl=2, **PATIENT)
    wanted = lock(name, using="locks", renew=False)
    assert not wanted.locked()
    second = int(time.monotonic()) + 3

    def wait_until(seconds: float) -> None:
        never(bool, second + seconds - time.monotonic())

    server.pause()
    wait_until(-0.1)  # late in a second, for this tick and the next ones
    server.resume()
    wait_until(0.8)  # just before the next tick
    lease = wanted.acquire()
    assert lease
    server.pause()
    wait_until(2.02)  # early in a second
    server.resume()

    never(
        lambda: not wanted.locked() and lease.held, 1, "a lock that is gone before its lease ends"
    )
    reset_locks()


# Whole seconds.


def test_a_lock_lives_for_its_ttl_whatever_the_moment_and_not_much_longer(
    both: tuple[str, ...], name: str, memcached: Memcached
) -> None:
    """Time stands still between the ticks of the server: it lets keys expire up to a second early."""
    holders, ends = [], {}
    for number in range(40):
        holder = rival(f"{name}:{number}", both[number % 2], ttl=2)
        asked = time.monotonic()
        holder.takes()
        holders.append((holder, asked, time.monotonic()))
        assert _server_ttl(memcached, holder.request.key) <= 4
        time.sleep(0.025)  # the next moment of the same second

    def all_have_ended() -> bool:
        for holder, _, _ in holders:
            if holder not in ends and holder._backend.probe(holder.request) is None:
                ends[holder] = time.monotonic()
        return len(ends) == len(holders)

    eventually(all_have_ended, 10)

    assert min(ends[holder] - asked for holder, asked, _ in holders) >= 2
    assert max(ends[holder] - answered for holder, _, answered in holders) < 8


@pytest.mark.parametrize("ttl", [0.5, 1.9, 29 * 86_400 + 1, 31 * 86_400])
def test_a_ttl_that_the_server_would_not_keep_is_refused(
    both: tuple[str, ...], name: str, ttl: float
) -> None:
    wrong = lock(name, using=both[0], ttl=ttl)

    with pytest.raises(ValueError, match="2 seconds to 29 days"):
        wrong.acquire()
    with lock(name, using=both[0], ttl=5) as lease:
        before = lease.ttl, lease.deadline
        with pytest.raises(ValueError, match="2 seconds to 29 days"):
            lease.extend(ttl)
        assert (lease.ttl, lease.deadline) == before


def test_an_extension_never_shortens_what_the_server_keeps(
    using: str, name: str, memcached: Memcached
) -> None:
    with lock(name, using=using, ttl=3, renew=False) as lease:
        lease.extend(60)
        lease.extend(3)

        assert lease.remaining > 50
        assert _server_ttl(memcached, lease.request.key) >= 58


def _server_ttl(server: Memcached, key: str) -> int:
    answer = server.tell(f"mg {key} t\r\n".encode() + b"mn\r\nversion\r\nget x\r\n")
    return int(answer.split()[1].removeprefix("t"))


# Holding on, and losing.


def test_a_flush_is_told_at_the_next_renewal(
    server: Memcached, settings: Settings, name: str
) -> None:
    configure(settings, server.alias())
    reasons: list[str] = []
    lease = lock(name, using="locks", ttl=6).acquire()
    assert lease
    lease.on_lost(reasons.append)

    server.flush()

    eventually(lambda: reasons, 5)
    assert "not ours any more" in reasons[0]
    with pytest.raises(LockLost):
        lease.release()


def test_a_full_server_that_may_evict_nothing_refuses_locks_and_renewals_in_words(
    settings: Settings, name: str
) -> None:
    with Memcached(settings={"m": "2", "M": ""}) as full:
        configure(settings, full.alias())
        with lock(name, using="locks") as lease:
            size = len(full.tell(f"get {lease.request.key}\r\n".encode()).splitlines()[1])
            _fill(full, size, 0)

            for ask in (lock(f"{name}:other", using="locks").acquire, lease.extend):
                with pytest.raises(LockBackendError) as caught:
                    ask()
                assert not isinstance(caught.value, LockOutcomeUnknown)
            assert lease.held
            full.flush()
            with pytest.raises(LockLost):
                lease.release()
        locks.close()


def _is_there(server: Memcached, key: str) -> bool:
    # A look by `mg` without flags does not count as a use.
    return server.tell(f"mg {key}\r\nget x\r\n".encode()).startswith("HD")


def _fill(server: Memcached, size: int, number: int) -> int:
    """Store another 20,000 values."""
    ours = range(number, number + 20_000)
    sets = "".join(f"set fill{n} 0 60 {size} noreply\r\n{'x' * size}\r\n" for n in ours)
    server.tell(f"{sets}get x\r\n".encode())
    return len(ours)


# Compare and delete, compare and extend.


@pytest.fixture
def pause(using: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have something happen, once, between the look whose the lock is and the change that follows."""

    def pause(happens: Callable[[], object]) -> None:
        pool = backend(using)._pool
        ask = pool.ask

        def pause_and_ask(verb: Callable[..., Any], *args: Any, **more: Any) -> Any:
            if verb in {MemcachedConnection.cas, MemcachedConnection.delete_known}:
                monkeypatch.setattr(pool, "ask", ask)
                happens()
            return ask(verb, *args, **more)

        monkeypatch.setattr(pool, "ask", pause_and_ask)

    return pause


@pytest.mark.parametrize("verb", ["release", "extend"])
def test_the_next_holder_is_not_touched_though_it_came_between_the_look_and_the_change(
    using: str, name: str, memcached: Memcached, pause: Callable[..., None], verb: str
) -> None:
    late, after = rival(name, using), rival(name, using, ttl=300)
    late.takes()

    def expire_and_be_taken() -> None:
        memcached.tell(f"delete {late.request.key}\r\nget x\r\n".encode())
        after.takes()

    pause(expire_and_be_taken)
    answer = late.leaves() if verb == "release" else late.holds

    assert answer is (Release.TAKEN if verb == "release" else False)
    assert _server_ttl(memcached, after.request.key) > 200
    assert after.holds


def test_an_extension_takes_nothing_that_expired_between_the_look_and_the_change(
    using: str, name: str, memcached: Memcached, pause: Callable[..., None]
) -> None:
    late = rival(name, using)
    late.takes()
    pause(lambda: memcached.tell(f"delete {late.request.key}\r\nget x\r\n".encode()))

    assert not late.holds
    assert rival(name, using).tries()


def test_a_value_that_is_no_record_of_a_lock_is_not_ours(
    using: str, name: str, memcached: Memcached
) -> None:
    late, other = rival(name, using), rival(name, using)
    key = late.request.key
    for value in ("", "5", "null", '{"owner": 1}', "[" * 50, "\x80"):
        stored = value.encode("latin-1")
        for flags in (0, 1, 2):  # by which clients tell pickles and numbers
            head = b"set %b %d 60 %d\r\n" % (key.encode(), flags, len(stored))
            memcached.tell(head + stored + b"\r\n")

            assert not other.tries()
            assert not late.holds
            assert late.leaves() is Release.TAKEN


@pytest.fixture
def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no reply be late: more requests would follow it."""
    for limit in ("LATE", "FRESH"):
        monkeypatch.setattr(f"django_distlock.backends.memcached.{limit}", 10.0)


@pytest.mark.usefixtures("never_late")
def test_an_uncontended_holding_takes_three_requests_on_one_connection(
    server: Memcached, settings: Settings, name: str
) -> None:
    configure(settings, server.alias(), **PATIENT)
    with lock(name, using="locks"):
        pass
    before = server.stats()

    for _ in range(10):
        with lock(name, using="locks"):
            pass

    after = server.stats()
    counted = {
        each: int(after[each]) - int(before[each])
        for each in ("cmd_get", "cmd_set", "total_connections")
    }
    # An add and a cas are sets; the last connection is that of the stats.
    assert counted == {"cmd_get": 10, "cmd_set": 20, "total_connections": 1}


@pytest.fixture
def asked(using: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The verbs that connections are asked for, each a round trip at most."""
    pool, asked = backend(using)._pool, list[object]()
    ask = pool.ask

    def note_and_ask(verb: Callable[..., Any], *args: Any, **more: Any) -> Any:
        asked.append(verb)
        return ask(verb, *args, **more)

    monkeypatch.setattr(pool, "ask", note_and_ask)
    return asked


@pytest.mark.parametrize("limit", [None, 1])
def test_who_releases_a_lock_that_others_wait_for_lets_them_go_first(
    both: tuple[str, ...], name: str, limit: int | None
) -> None:
    here, there = both

    def take() -> None:
        with lock(name, using=there, limit=limit, timeout=20):
            pass

    with lock(name, using=here, limit=limit) as lease:
        waiting = start(take)
        known = backend(here)
        eventually(lambda: known._look(lease.request)[2], what="the waiter leaves a mark")

    assert lease.request.line in known.queue.contested.wanted
    waiting.result(20)


def test_who_releases_a_place_beside_a_free_one_lets_nobody_go_first(
    both: tuple[str, ...], name: str
) -> None:
    here, there = both
    with lock(name, using=here, limit=2) as lease:
        for _ in range(20):  # some of them ask for the place that is taken first, by chance
            with lock(name, using=there, limit=2, timeout=20):
                pass

    assert lease.request.line not in backend(here).queue.contested.wanted


@pytest.mark.usefixtures("never_late")
@pytest.mark.parametrize("why", ["late", "by another connection"])
def test_who_cannot_know_the_number_looks_first(
    using: str, name: str, asked: list[object], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The server behind a proxy may be another one by then, which gives out the same numbers again."""
    holder = rival(name, using)
    holder.takes()
    if why == "late":
        monkeypatch.setattr("django_distlock.backends.memcached.FRESH", -1.0)
    else:
        backend(using)._pool.close()

    assert holder.leaves() is Release.RELEASED

    assert asked[1:] == [
        MemcachedConnection.delete_known,
        MemcachedConnection.gets,
        MemcachedConnection.cas,
    ]
    assert rival(name, using).tries()


def test_a_number_of_before_a_restart_frees_nobody(
    server: Memcached, settings: Settings, name: str
) -> None:
    """Each run of a server counts its values from 1."""
    configure(settings, server.alias())
    late = rival(name)
    late.takes()
    server.kill()
    server.start()
    other = another("locks")
    after = Rival.of(other, name)
    after.takes()

    assert late.leaves() is Release.TAKEN

    assert after.holds
    other.close()


# The wire.


def test_a_lost_reply_of_an_acquire_is_settled(proxy: Proxy, name: str) -> None:
    locked = lock(name, using="locks")
    proxy.drop_reply()

    with locked as lease:
        assert lease.held
        assert not rival(name).tries()

    assert rival(name).tries()


def test_replies_may_come_byte_by_byte(
    proxy: Proxy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fixtures.proxy.CHUNK", 1)
    other = rival(name)

    with lock(name, using="locks") as lease:
        lease.extend()
        assert not other.tries()
        assert other.refused.holder == lease.holder

    assert other.tries()


@pytest.mark.parametrize("timeout", [0, 10])
def test_connections_that_a_router_swallows_are_replaced_unseen(
    proxy: Proxy, name: str, timeout: float
) -> None:
    with lock(name, using="locks"):
        pass
    proxy.swallow()

    with lock(name, using="locks", timeout=timeout) as lease:
        proxy.swallow()
        lease.extend()
        proxy.swallow()


def test_a_server_that_hangs_is_an_error_and_never_busy_held_or_free(
    server: Memcached, settings: Settings, name: str
) -> None:
    configure(settings, server.alias(), io_timeout=0.25)
    patient = another("locks", io_timeout=5.0, connect_timeout=5.0)
    holder = Rival.of(patient, name)
    holder.takes()
    hurried = Rival(backend(), holder.request)
    server.pause()
    began = time.monotonic()

    with pytest.raises(LockBackendError):
        lock(f"{name}:other", using="locks").acquire(blocking=False)
    assert time.monotonic() - began < 5
    for ask in (lock(name, using="locks").locked, hurried.leaves, lambda: hurried.holds):
        with pytest.raises(LockOutcomeUnknown):
            ask()

    server.resume()
    Rival.of(patient, f"{name}:other").takes(within=8)
    assert holder.holds
    patient.close()


def test_ctrl_c_in_the_middle_of_a_reply_leaves_no_rest_of_it_to_the_next(
    using: str, name: str, memcached: Memcached
) -> None:
    pool, asked = backend(using)._pool, list[object]()

    def ask(client: object) -> None:
        asked.append(client)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        pool.ask(ask)

    # Error reports show the variables of frames; those of pymemcache contain owners.
    assert "ask" not in {entry.name for entry in caught.traceback}
    with lock(name, using=using):
        assert not set(pool._idle) & set(asked)


def test_a_forked_child_that_ends_leaves_its_parents_connection_open(
    server: Memcached, name: str, spawn: Spawn
) -> None:
    tools = "tests.backends.memcached_tools"
    parent = spawn(f"{tools}:fork_and_say_nothing", cache=server.alias(), name=name)
    parent.expect("held")
    before = int(server.stats()["total_connections"])

    parent.tell("fork")
    parent.expect("forked")
    parent.tell("release")
    parent.expect("released")

    # The one that the statistics are asked on is new.
    assert int(server.stats()["total_connections"]) == before + 1
    parent.tell("leave")
    parent.result()


# One server.


@pytest.mark.parametrize("several", [["127.0.0.1:1", "127.0.0.1:2"], "127.0.0.1:1;127.0.0.1:2"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_several_servers_are_refused_unless_one_is_chosen(
    settings: Settings, driver: str, several: Any, server: Memcached, name: str
) -> None:
    configure(settings, alias(several, driver))

    with pytest.raises(InvalidLockBackend, match=r"has 2 servers.*OPTIONS 'server'"):
        locks["locks"]

    configure(settings, alias(several, driver), server=f"127.0.0.1:{server.port}")
    with lock(name, using="locks") as lease:
        assert _is_there(server, lease.request.key)
    locks.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cache": None}, "'server' is needed with 'cache' None"),
        ({"cache": None, "server": "one:1;two:2"}, "'server' names several servers of memcached"),
        ({"server": "one:1,two:2"}, "'server' names several servers of memcached"),
        ({"server": 5}, "'server' must"),
        ({"io_timeout": 0}, "'io_timeout' must"),
        ({"connect_timeout": "1"}, "'connect_timeout' must"),
    ],
)
def test_a_wrong_option_is_named(settings: Settings, options: dict[str, Any], text: str) -> None:
    path = "django_distlock.backends.memcached.CacheMemcachedBackend"
    settings.DISTLOCK = {"locks": {"BACKEND": path, "OPTIONS": options}}

    with pytest.raises(InvalidLockBackend, match=rf"^DISTLOCK\['locks'\]: OPTIONS: {text}"):
        locks["locks"]


def test_a_server_that_cannot_be_reached_has_its_locks_looked_for_on_no_other(
    settings: Settings, name: str, server: Memcached, memcached: Memcached
) -> None:
    with Proxy(server.port) as proxy:
        near, far = f"127.0.0.1:{memcached.port}", f"127.0.0.1:{proxy.port}"
        configure(settings, alias([near, far]), server=far)
        holder = another("locks", server=f"127.0.0.1:{server.port}")
        key = holder.request(name, ttl=20, holder=None)
        holder.try_acquire(key, queued=False)
        assert not rival(name).tries()

        proxy.cut()

        for _ in range(5):
            with pytest.raises(LockBackendError):
                rival(name).tries()
        holder.release(key)
        holder.close()
        locks.close()


# Its settings.


def test_the_value_tells_people_whose_it_is_and_no_key_of_the_cache_is_touched(
    using: str, name: str, memcached: Memcached
) -> None:
    caches[using].set(name, "a value of the cache")

    with lock(name, using=using, purpose="the yearly report") as lease:
        value = memcached.tell(f"get {lease.request.key}\r\n".encode()).splitlines()[1]
        found = Record.unpack(value.encode())
        assert found.holder == lease.holder
        assert (found.name, found.owner) == (name, lease.request.owner)

    assert caches[using].get(name) == "a value of the cache"
    caches[using].close()
