"""Locks in Redis: what they cost, how tokens rise, who is next, and what the settings mean."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis as driver

from django_distlock import LockBackendError, LockNotHeld, lock, locks
from django_distlock.backends.redis import RedisBackend, connections
from django_distlock.backends.redis.verbs import PROBE, keys_of, label_of
from django_distlock.engine.bells import ThreadBell
from django_distlock.engine.values import Busy, Grant, Release
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import with_label
from tests.fixtures.environment import free_port
from tests.fixtures.eventually import eventually
from tests.fixtures.garbage import collect_garbage
from tests.fixtures.redis import Redis
from tests.fixtures.redis_servers import cluster_node, make_cluster

from .redis_tools import connections_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_django.fixtures import Settings

    from django_distlock.engine.values import Request
    from tests.fixtures.redis import Replicated

    Configure = Callable[..., RedisBackend]

# Some start servers of their own.
pytestmark = [pytest.mark.server, pytest.mark.caches]

BACKEND = "django_distlock.backends.redis.RedisBackend"
CACHE = "django_distlock.backends.cache.CacheBackend"
DJANGO = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"
DATABASE = 7


@pytest.fixture
def configure(settings: Settings) -> Configure:
    """Makes the alias "default" a Redis at a URL, with OPTIONS."""

    def make(server: Redis | str, **options: Any) -> RedisBackend:
        url = server if isinstance(server, str) else f"redis://127.0.0.1:{server.port}/{DATABASE}"
        patience = {"connect_timeout": 5.0, "io_timeout": 5.0}  # a stall is no failure
        alias = {"BACKEND": BACKEND, "OPTIONS": {"location": url, **patience, **options}}
        settings.DISTLOCK = {"default": alias, "other": alias}
        backend = locks["default"]
        assert isinstance(backend, RedisBackend)
        return backend

    return make


@pytest.fixture
def backend(redis: Redis, configure: Configure) -> RedisBackend:
    with redis.client(DATABASE) as client:
        client.flushdb()
    return configure(redis)


@pytest.fixture
def fair(backend: RedisBackend, redis: Redis, configure: Configure) -> RedisBackend:
    return configure(redis, fair=True)


@pytest.fixture(scope="module")
def own() -> Iterator[Redis]:
    """A server that tests may treat as they like."""
    with Redis() as server:
        yield server


def ask(backend: RedisBackend, name: str, **wishes: Any) -> Request:
    """Return a request of somebody else."""
    return backend.request(name, **{"ttl": 20.0, "holder": Holder.current(), **wishes})


def wait_in_line(backend: RedisBackend, redis: Redis, *waiters: Request) -> None:
    """Have them wait, each for an hour without a look: a stall of this machine is longer than a real patience."""
    for each in waiters:
        assert isinstance(backend.try_acquire(each, queued=True), Busy)
        be_patient(redis, each, 3600)


def be_patient(redis: Redis, waiter: Request, seconds: float) -> None:
    mode = "s" if waiter.shared else "x"
    with redis.client(DATABASE) as client:
        patience = {f"{mode}{waiter.owner}": (time.time() + seconds) * 1e6}
        assert client.zadd(f"distlock:{{{waiter.key}}}:a", patience, xx=True, ch=True)


def in_line(
    backend: RedisBackend, redis: Redis, name: str, waiters: int = 2
) -> tuple[Request, ...]:
    """Return who holds *name*, and so many that wait for it."""
    holder, *others = (ask(backend, name) for _ in range(waiters + 1))
    assert isinstance(backend.try_acquire(holder, queued=False), Grant)
    wait_in_line(backend, redis, *others)
    return holder, *others


# What it costs.


def test_a_lock_costs_one_request_to_take_and_one_to_give_back(
    backend: RedisBackend, redis: Redis, name: str
) -> None:
    with lock("warm"):
        pass

    with redis.monitor() as monitor:
        with lock(name):
            pass

    assert monitor.about(f"{{{name}}}") == ["EVALSHA", "EVALSHA"]


def test_a_waiter_costs_a_try_a_wait_and_a_try(
    backend: RedisBackend, redis: Redis, name: str
) -> None:
    holder = ask(backend, name)
    assert isinstance(backend.try_acquire(holder, queued=False), Grant)

    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool, redis.monitor() as monitor:
        waiter = pool.submit(lambda: lock(name, timeout=10).acquire())
        eventually(lambda: "BLPOP" in monitor.about(f"{{{name}}}"))
        backend.release(holder)
        lease = waiter.result(10)

    elapsed = time.monotonic() - began
    assert lease
    lease.release()
    others = monitor.about(f"{{{name}}}")
    others.remove("EVALSHA")  # the holder's release
    listens = others.count("BLPOP")
    assert listens <= 2 + elapsed / 0.2  # on a slow machine a look more
    assert others.count("EVALSHA") == listens + 1


# Tokens.


def token(name: str) -> int:
    with lock(name, timeout=5) as lease:
        assert lease.fencing_token is not None
        return lease.fencing_token


def test_tokens_rise_whatever_happens_to_the_server(
    own: Redis, configure: Configure, name: str
) -> None:
    backend = configure(own)
    tokens = [token(name), token(name)]
    with own.client() as client:
        client.script_flush()
        tokens.append(token(name))
        client.flushall()
        tokens.append(token(name))
    short = ask(backend, name, ttl=0.05)
    answer = backend.try_acquire(short, queued=False)
    assert isinstance(answer, Grant)
    assert answer.token
    tokens.append(answer.token)
    eventually(lambda: backend.probe(short) is None)
    tokens.append(token(name))
    own.restart()  # it keeps nothing on disk
    tokens.append(token(name))

    assert tokens == sorted(set(tokens))
    assert len(tokens) == 7


def test_tokens_rise_over_a_clock_that_stepped_back_and_a_forced_release(
    backend: RedisBackend, redis: Redis, name: str
) -> None:
    ahead = int((time.time() + 3600) * 1e6)
    first = token(name)
    with redis.client(DATABASE) as client:
        client.hset(f"distlock:{{{name}}}", "token", str(ahead))  # as given out before the step

    assert first < ahead < token(name) == ahead + 1
    with pytest.raises(LockNotHeld), lock(name) as lease:
        (shown,) = (each for each in backend.held() if each.name == name)
        assert backend.force_release(shown.key, shown.owner_digest)

    assert lease.fencing_token == ahead + 2
    assert token(name) == ahead + 4, "those with the token of the forced one are refused before"


def _fail_over(servers: Replicated) -> None:
    """Have the replica promoted, and return once the former master takes no locks any more."""
    former = servers.master
    servers.fail_over()
    eventually(lambda: _is_replica(former), 20, "the former one obeys")


def _is_replica(server: Redis) -> bool:
    try:
        return bool(server.info("replication")["role"] == "slave")
    except driver.RedisError:  # who becomes one closes all connections
        return False


# What is told.


@pytest.mark.parametrize("shared", [True, False])
def test_a_holder_whose_lease_ended_has_nothing_of_the_next_ones(
    backend: RedisBackend, name: str, *, shared: bool
) -> None:
    """The first is alone and the next one shares it, or the other way round."""
    first, then = ask(backend, name, ttl=0.02, shared=shared), ask(backend, name, shared=not shared)
    backend.try_acquire(first, queued=False)
    eventually(lambda: backend.probe(first) is None)
    backend.try_acquire(then, queued=False)

    assert backend.extend([first, then]) == [False, True]
    assert not backend.take_over(ask(backend, name, shared=shared), first.owner)
    assert backend.release(first) is Release.TAKEN
    assert [held.shared for held in backend.held()] == [not shared]
    assert backend.release(then) is Release.RELEASED


def test_readers_that_give_back_at_once_may_all_ask_again(backend: RedisBackend, name: str) -> None:
    readers = [ask(backend, name, shared=True) for _ in range(8)]
    for reader in readers:
        assert isinstance(backend.try_acquire(reader, queued=False), Grant)

    first = [backend.release(reader) for reader in readers]

    assert first == [backend.release(reader) for reader in readers] == [Release.RELEASED] * 8


# Who is next.


def test_a_waiter_that_comes_back_in_time_has_its_old_place(
    fair: RedisBackend, redis: Redis, name: str
) -> None:
    holder, first, second = in_line(fair, redis, name)
    be_patient(redis, first, -1)  # no longer
    wait_in_line(fair, redis, second, first)
    fair.release(holder)

    assert isinstance(fair.try_acquire(second, queued=True), Busy)


def rung(redis: Redis) -> set[str]:
    """Return the owners whose bell has rung."""
    with redis.client(DATABASE) as client:
        return {key.rpartition(":")[2] for key in client.keys("distlock:*:b:*")}


def test_a_release_rings_the_first_waiter_alone_which_passes_its_ring_on_when_it_leaves(
    backend: RedisBackend, redis: Redis, name: str
) -> None:
    holder, first, second = in_line(backend, redis, name)

    backend.release(holder)
    assert rung(redis) == {first.owner}

    backend.dequeue(first)
    assert rung(redis) == {second.owner}


def test_who_gets_one_of_several_free_places_rings_the_next_waiter(
    backend: RedisBackend, redis: Redis, name: str
) -> None:
    one, another, first, second = (ask(backend, name).with_limit(2) for _ in range(4))
    places = [one.at(0), another.at(1)]
    for each in places:
        assert isinstance(backend.try_acquire(each, queued=False), Grant)
    for each in (first, second):
        backend.enqueue(each, ThreadBell())
        be_patient(redis, each, 3600)
    for each in places:
        backend.release(each)

    assert isinstance(backend.try_acquire(first.at(0), queued=True), Grant)

    assert rung(redis) == {second.owner}


def test_a_ring_before_the_wait_is_heard(backend: RedisBackend, redis: Redis, name: str) -> None:
    holder, waiter = in_line(backend, redis, name, waiters=1)
    backend.release(holder)
    began = time.monotonic()

    backend.sleep(waiter, ThreadBell(), 20)

    assert time.monotonic() - began < 10


def test_all_readers_before_the_first_writer_are_woken_together(
    backend: RedisBackend, redis: Redis, name: str
) -> None:
    holder, writer = ask(backend, name), ask(backend, name)
    readers = [ask(backend, name, shared=True) for _ in range(3)]
    late = ask(backend, name, shared=True)
    backend.try_acquire(holder, queued=False)
    wait_in_line(backend, redis, *readers, writer, late)

    backend.release(holder)

    assert rung(redis) == {reader.owner for reader in readers}
    assert [isinstance(backend.try_acquire(each, queued=True), Grant) for each in readers] == [
        True
    ] * 3
    assert isinstance(backend.try_acquire(late, queued=True), Busy)


def test_nothing_is_left_for_ever(backend: RedisBackend, redis: Redis, name: str) -> None:
    holder, _waiter = in_line(backend, redis, name, waiters=1)
    backend.release(holder)

    with redis.client(DATABASE) as client:
        keys = client.keys("*")
        assert len(keys) == 4
        assert all(client.pttl(key) > 0 for key in keys)


# What the settings mean.


def test_keys_have_the_prefix_and_the_version_of_the_cache(
    redis: Redis, settings: Settings, name: str
) -> None:
    settings.CACHES = {
        **settings.CACHES,
        "redis_cache": {
            **settings.CACHES["redis_cache"], "KEY_PREFIX": "shop[1]", "VERSION": 7
        },
    }  # fmt: skip
    settings.DISTLOCK = {"default": {"BACKEND": CACHE, "OPTIONS": {"cache": "redis_cache"}}}
    with lock(name), redis.client(2) as client:
        assert client.exists(f"shop[1]:7:distlock:{{{name}}}")
        assert [each.name for each in locks["default"].held()] == [name]


WITHOUT_HIREDIS = """
import asyncio, sys
sys.modules["hiredis"] = None
import django
from django.conf import settings
backend = "django_distlock.backends.redis.RedisBackend"
redlock = {"BACKEND": "django_distlock.backends.redlock.RedlockBackend", "OPTIONS": {"servers": ["redis://a", "redis://b", "redis://c"]}}
settings.configure(DISTLOCK={"default": {"BACKEND": backend, "OPTIONS": {"location": sys.argv[1]}}, "redlock": redlock})
django.setup()
from django_distlock import InvalidLockBackend, lock, locks
with lock("here") as lease:
    lease.extend()
async def hold():
    async with lock("here") as lease:
        await lease.aextend()
asyncio.run(hold())
try:
    locks["redlock"]
except InvalidLockBackend as error:
    print(error)
"""


def test_it_works_without_hiredis_which_redlock_needs(redis: Redis) -> None:
    run = [sys.executable, "-c", WITHOUT_HIREDIS, f"redis://127.0.0.1:{redis.port}/9"]

    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("pip install 'django-distlock[redis]'.\n")


@pytest.mark.parametrize("user", ["", "someone"])
def test_a_password_and_a_unix_socket(configure: Configure, user: str, name: str) -> None:
    with Redis(password="s3cret/?", unix_socket=True) as server:
        if user:
            with server.client() as client:
                client.acl_setuser(
                    user, enabled=True, passwords=["+s3cret/?"], commands=["+@all"], keys=["*"]
                )
        for url in (
            f"redis://{user}:s3cret%2F%3F@127.0.0.1:{server.port}",
            f"unix://{user}:s3cret%2F%3F@{server.socket}",
        ):
            backend = configure(url)
            with lock(name) as lease:
                assert lease.held
            assert "s3cret" not in repr(backend.options) + repr(backend.source)
        locks.reset()


def test_a_host_that_can_have_no_address_cannot_be_reached(
    configure: Callable[..., RedisBackend], name: str
) -> None:
    backend = configure(
        "redis://.cluster.local:6379"
    )  # the variable with the rest of the name was empty

    with pytest.raises(LockBackendError, match=r"cannot be reached: .*label empty"):
        lock(name).acquire()
    (error,) = backend.check(["default"])
    assert error.id == "distlock.E006"


class Tokens(driver.CredentialProvider):
    """Gives a new password each time, as services do whose passwords live for minutes."""

    def __init__(self, server: Redis | None = None) -> None:
        self._server = server
        self.given = 0

    def get_credentials(self) -> tuple[str, str]:
        assert self._server, "the service of tokens does not answer"
        self.given += 1
        token = f"token-{self.given}"
        with self._server.client() as client:
            client.acl_setuser(
                "app", enabled=True, reset_passwords=True, passwords=[f"+{token}"],
                categories=["+@all"], keys=["*"], channels=["*"],
            )  # fmt: skip
        return "app", token

    async def get_credentials_async(self) -> tuple[str, str]:
        return self.get_credentials()

    def expire(self) -> None:
        """Let the server end the connections of those who have logged in."""
        assert self._server
        with self._server.client() as client:
            client.client_kill_filter(user="app")


@pytest.mark.parametrize("cluster", [False, True])
async def test_each_connection_has_a_password_of_the_credential_provider(
    configure: Configure, name: str, *, cluster: bool
) -> None:
    with cluster_node() if cluster else Redis() as server:
        if cluster:
            make_cluster([server])
        tokens = Tokens(server)
        configure(
            f"redis://127.0.0.1:{server.port}",
            cluster=cluster,
            options={"credential_provider": tokens},
        )
        for number in (1, 2):
            with lock(name, timeout=0) as lease:
                tokens.expire()
                lease.extend()
            async with lock(name, timeout=0) as lease:
                tokens.expire()
                await lease.aextend()
            assert tokens.given >= 4 * number
        locks.reset()


# The driver leaves a socket whose handshake failed to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_tls(certificate: Path, configure: Configure, name: str) -> None:
    port, file = free_port(), str(certificate)
    tls = {
        "tls-port": str(port),
        "tls-cert-file": file,
        "tls-key-file": file,
        "tls-ca-cert-file": file,
    }
    with Redis(settings={**tls, "tls-auth-clients": "no"}):
        configure(f"rediss://127.0.0.1:{port}?ssl_ca_certs={file}")
        with lock(name) as lease:
            assert lease.held
        async with lock(name) as lease:
            assert lease.held

        configure(f"rediss://127.0.0.1:{port}")
        with pytest.raises(LockBackendError, match="certificate"):
            lock(name).acquire()
        locks.reset()
    collect_garbage()  # here, where it is expected to complain


def test_locks_follow_the_master(redis_sentinel: Replicated, settings: Settings, name: str) -> None:
    settings.DISTLOCK = {"default": {"BACKEND": CACHE, "OPTIONS": {"cache": "redis_sentinel"}}}
    lease = lock(name, ttl=30).acquire()
    assert lease
    redis_sentinel.wait_for_replica()

    _fail_over(redis_sentinel)

    eventually(lambda: _is_busy(name), 10)
    lease.extend()
    lease.release()


def _is_busy(name: str) -> bool:
    try:
        return lock(name, timeout=0, reentrant=False).locked()
    except LockBackendError:
        return False


@pytest.mark.parametrize("prefix", ["prefix", "{shop}", "}shop{"])
def test_all_keys_of_a_lock_are_in_one_slot(redis_cluster: list[Redis], prefix: str) -> None:
    label = label_of(f"{prefix}:1:{PROBE}")
    keys = keys_of(with_label(label, "fee|x#00ff"))
    with redis_cluster[0].client() as client:
        slots = {client.cluster("KEYSLOT", key) for key in [*keys.all, keys.bell("someone")]}
    assert len(slots) == 1


def test_a_key_function_that_hides_the_key_is_refused() -> None:
    for make_key in (lambda _: "same", lambda key: "{}" + key, lambda key: key.strip("}")):
        with pytest.raises(ValueError, match=r"key function, .* may be added"):
            label_of(make_key(PROBE))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"location": "http://x"}, r"redis://, rediss://, valkey://, valkeys:// or unix://\.?$"),
        ({"location": "valkey://x:port"}, "Port could not be cast"),
        ({"location": "redis://:a#b@x"}, r"quoted \(%23 for #\)"),
        ({"cluster": True, "location": "redis://x/3"}, "database 0 only"),
        ({"cluster": True, "scripting": False}, "'scripting'"),
        ({"fair": True, "scripting": False}, "'fair' needs scripts"),
        ({"cluster": True, "wait_replicas": 1}, "'wait_replicas'"),
        ({"wait_replicas": -1}, "'wait_replicas'"),
        ({"options": ["ssl_ca_certs"]}, "'options' must be a dict"),
        ({"options": {"socket_timeout": 3}}, "'socket_timeout': locks have their own"),
        ({"options": {"ssl_ca_certs": "x"}}, "'ssl_ca_certs'"),  # without TLS
        ({"options": {"ssl_ca_crets": "x"}, "location": "rediss://x"}, "'ssl_ca_crets'"),
        ({"options": {"credential_provider": "hush"}}, "get_credentials"),
        ({"options": {"credential_provider": Tokens(), "username": "x"}}, "'credential_provider'"),
        (
            {"options": {"ssl_min_version": 1}, "location": "rediss://x", "cluster": True},
            "clusters have no 'ssl_min_version'",
        ),
        ({"connect_timeout": float("nan")}, "'connect_timeout'"),
        ({"fiar": True}, "unknown OPTIONS 'fiar'"),
    ],
)
def test_wrong_options_are_errors_that_name_them(
    settings: Settings, options: dict[str, Any], problem: str
) -> None:
    settings.DISTLOCK = {"default": {"BACKEND": BACKEND, "OPTIONS": options}}

    with pytest.raises(InvalidLockBackend, match=problem) as caught:
        locks["default"]

    assert "DISTLOCK['default']" in str(caught.value)


def use_cache(settings: Settings, kind: str, location: str = "redis://x", **options: Any) -> None:
    """Keep locks in a cache of this class, with these OPTIONS."""
    settings.CACHES = {
        **settings.CACHES,
        "own": {"BACKEND": kind, "LOCATION": location, "OPTIONS": options},
    }
    settings.DISTLOCK = {"default": {"BACKEND": CACHE, "OPTIONS": {"cache": "own"}}}


@pytest.mark.parametrize("kind", [DJANGO, DJANGO_REDIS])
def test_options_of_a_cache_that_no_connection_takes_are_named(
    settings: Settings, kind: str
) -> None:
    use_cache(settings, kind, ssl_ca_crets="x")

    with pytest.raises(InvalidLockBackend, match=r"DISTLOCK\['default'\].*'ssl_ca_crets'"):
        locks["default"]


def test_a_min_hold_is_remembered_for_as_long_as_it_lasts(
    redis: Redis, configure: Configure, name: str
) -> None:
    configure(redis)
    with lock(name, min_hold=timedelta(hours=6)):
        pass

    with redis.client(DATABASE) as client:
        (key,) = client.keys(f"*{name}*")
        assert round(client.pttl(key) / 3_600_000) == 8


# What the server is asked by `manage.py check --database`.


def ids(backend: RedisBackend) -> list[str]:
    return [str(message.id) for message in backend.check(["default"])]


def test_a_server_that_drops_keys_is_an_error_unless_it_is_allowed(
    own: Redis, configure: Configure
) -> None:
    with own.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert ids(configure(own)) == ["distlock.E021"]
            assert ids(configure(own, allow_eviction=True)) == ["distlock.W021"]
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_connections_that_a_crowd_needed_are_closed_once_nobody_needs_them(
    own: Redis, configure: Configure, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = connections_to([own])
    backend = configure(own)
    with ThreadPoolExecutor(8) as threads:
        for number in range(8):  # each of them listens for a while, all at once
            verb = backend._verbs.listen(f"{name}:{number}", 0.5)
            threads.submit(backend._link.converse, verb, 5.0)
    crowd = connections_to([own]) - before
    assert len(crowd) == 8

    take_and_give_back(name)
    assert connections_to([own]) - before == crowd
    monkeypatch.setattr("django_distlock.backends.idle.IDLE", 0.0)
    take_and_give_back(name)

    assert len(connections_to([own]) - before) == 1


def test_a_connection_that_still_owes_an_answer_is_not_used_again(
    own: Redis, configure: Configure, name: str
) -> None:
    backend = configure(own)

    assert backend._link.converse(backend._verbs.listen(name, 20), 0.05) is None
    assert backend._link.converse(connections.ask(("PING",))) == b"PONG"


def take_and_give_back(name: str) -> None:
    with lock(name, reentrant=False):
        pass


@pytest.fixture(params=["one", "sentinel", "cluster"])
def servers(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Sequence[Redis]]:
    """The servers that the alias "default" connects to: one, a master and its sentinel, or a cluster."""
    if request.param == "one":
        found: Sequence[Redis] = request.getfixturevalue("redis_five")[:1]
    elif request.param == "sentinel":
        pair: Replicated = request.getfixturevalue("redis_sentinel")
        found = [*pair.servers, pair.sentinel]
    else:
        found = request.getfixturevalue("redis_cluster")
    alias = {"BACKEND": CACHE, "OPTIONS": {"cache": f"redis_{request.param}"}}
    settings.DISTLOCK = {"default": alias}
    gc.collect()
    gc.disable()  # what nobody closes stays open
    yield found
    gc.enable()
    locks.reset()


def test_a_connection_that_is_in_use_when_all_are_closed_is_closed_after_it(
    servers: Sequence[Redis], name: str
) -> None:
    before, backend = connections_to(servers), locks["default"]
    holder = backend.request(name, ttl=20, holder=Holder.current())
    assert isinstance(backend.try_acquire(holder, queued=False), Grant)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(lambda: lock(name, timeout=10).acquire())
        eventually(lambda: any(each.info("clients")["blocked_clients"] for each in servers))
        in_use = connections_to(servers) - before

        locks.close()
        backend.release(holder)
        lease = waiter.result(10)

    assert lease
    assert not in_use & connections_to(servers)
    lease.release()


def test_a_backend_that_is_used_after_it_was_replaced_leaves_no_connection(
    servers: Sequence[Redis], name: str
) -> None:
    before, backend = connections_to(servers), locks["default"]
    locks.reset()
    assert backend.extend([backend.request(name, ttl=20, holder=Holder.current())]) == [False]
    assert connections_to(servers) - before

    del backend
    gc.collect()  # pytest tells what it complains of

    assert not connections_to(servers) - before
