"""The Redis servers do what tests of faults and of requests rely on."""

from __future__ import annotations

import pytest
import redis as driver
from django.core.cache import caches

from tests.fixtures.child import say
from tests.fixtures.processes import Spawn
from tests.fixtures.redis import Redis, Replicated

pytestmark = [pytest.mark.server, pytest.mark.caches]

ALIASES = ["django_redis", "redis_cache", "redis_sentinel", "redis_cluster"]


def read(server: Redis, key: str) -> object:
    with server.client() as client:
        return client.get(key)


def write(server: Redis, key: str, value: str) -> None:
    with server.client() as client:
        client.set(key, value)


def use_cache(alias: str, key: str) -> None:
    say("found", value=caches[alias].get(key))


def test_monitor_tells_what_clients_sent_and_what_scripts_called() -> None:
    key = 'a "quoted"\r\nkey é'
    with Redis() as redis, redis.client() as client, redis.monitor() as monitor:
        client.set(key, "v")
        client.eval("return redis.call('get', KEYS[1])", 1, key)
        assert monitor.names == ["SET", "EVAL"]

        client.get(key)

    assert monitor.names == ["SET", "EVAL", "GET"]
    assert monitor.requests[0].words == ("SET", key, "v")
    assert [command.words for command in monitor.in_scripts] == [("get", key)]


def test_calls_are_counted() -> None:
    with Redis() as redis, redis.client() as client:
        before = redis.calls()
        client.get("a")
        client.eval("redis.call('get', 'a'); redis.call('mget', 'a')", 0)
        made = redis.calls() - before

    assert (made["get"], made["mget"], made["eval"]) == (2, 1, 1)


def test_data_outlives_a_restart_only_if_it_is_kept_on_disk() -> None:
    with Redis() as forgetful, Redis(settings={"appendonly": "yes"}) as durable:
        for server in (forgetful, durable):
            write(server, "a", "1")
            server.kill()
            server.start()

        assert read(forgetful, "a") is None
        assert read(durable, "a") == "1"


def test_password_and_unix_socket() -> None:
    with Redis(password="a-secret", unix_socket=True) as server:
        with (
            server.client(password=None) as stranger,
            pytest.raises(driver.AuthenticationError),
        ):
            stranger.ping()
        path = str(server.socket)
        with driver.Redis(unix_socket_path=path, password="a-secret") as client:
            assert client.ping()
            with server.monitor() as monitor:
                client.get("a")
        assert monitor.names == ["GET"]


@pytest.mark.parametrize("alias", ALIASES)
def test_cache_alias_works_here_and_in_a_child(
    alias: str, request: pytest.FixtureRequest, spawn: Spawn
) -> None:
    request.getfixturevalue(alias if alias in {"redis_sentinel", "redis_cluster"} else "redis")

    for number in range(5):
        caches[alias].set(f"key-{number}", number)

    child = spawn(f"{__name__}:use_cache", alias=alias, key="key-3")
    assert child.expect("found")["value"] == 3
    assert [caches[alias].get(f"key-{number}") for number in range(5)] == [0, 1, 2, 3, 4]


def test_cluster_shares_the_keys_out(redis_cluster: list[Redis]) -> None:
    url = f"redis://{redis_cluster[0].host}:{redis_cluster[0].port}"
    with driver.RedisCluster.from_url(url) as client:
        for number in range(30):
            client.set(f"shared out {number}", number)
        client.disconnect_connection_pools()  # which its end leaves open

    for server in redis_cluster:
        with server.client() as client:
            assert client.keys("shared out *")


def test_five_servers_know_nothing_of_each_other(redis_five: list[Redis]) -> None:
    for number, server in enumerate(redis_five):
        write(server, "number", str(number))

    assert [read(server, "number") for server in redis_five] == ["0", "1", "2", "3", "4"]


def test_fail_over_swaps_the_roles_and_keeps_the_data(redis_sentinel: Replicated) -> None:
    before = (redis_sentinel.master, redis_sentinel.replica)
    write(before[0], "a", "1")
    redis_sentinel.wait_for_replica()

    redis_sentinel.fail_over()

    assert (redis_sentinel.replica, redis_sentinel.master) == before
    assert read(redis_sentinel.master, "a") == "1"


def test_replica_that_was_cut_off_is_promoted_without_the_latest_data(
    redis_sentinel: Replicated,
) -> None:
    write(redis_sentinel.master, "a", "old")
    redis_sentinel.wait_for_replica()

    redis_sentinel.cut_off_replica()
    write(redis_sentinel.master, "a", "new")
    redis_sentinel.fail_over()

    assert read(redis_sentinel.master, "a") == "old"


def test_replica_that_was_cut_off_catches_up(redis_sentinel: Replicated) -> None:
    redis_sentinel.cut_off_replica()
    write(redis_sentinel.master, "a", "late")

    redis_sentinel.reconnect_replica()

    assert read(redis_sentinel.replica, "a") == "late"


def test_sentinel_promotes_by_itself_when_the_master_is_dead(redis_sentinel: Replicated) -> None:
    dead, promoted = redis_sentinel.master, redis_sentinel.replica

    dead.kill()
    redis_sentinel.wait_for_promotion(promoted)

    redis_sentinel.heal()
    assert (redis_sentinel.master, redis_sentinel.replica) == (promoted, dead)
