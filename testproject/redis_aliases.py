"""Cache aliases that reach Redis by a sentinel and as a cluster: for the settings, and for tests."""

from __future__ import annotations

from typing import Any

HOST = "127.0.0.1"
#: What the sentinel calls the master that it watches.
MASTER_NAME = "distlock"


def sentinel_cache(port: int | str) -> dict[str, Any]:
    """Return the cache alias of the master that the sentinel on *port* names."""
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": f"redis://{MASTER_NAME}/1",
        "OPTIONS": {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": [(HOST, int(port))],
        },
    }


def cluster_cache(ports: str) -> dict[str, Any]:
    """Return the cache alias of the cluster that has nodes on *ports*, separated by commas."""
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        # Any node will do: it tells of the others.
        "LOCATION": f"redis://{HOST}:{ports.split(',', maxsplit=1)[0]}",
        "OPTIONS": {
            "REDIS_CLIENT_CLASS": "redis.cluster.RedisCluster",
            "CONNECTION_FACTORY": "testproject.redis_cluster.ClusterConnectionFactory",
        },
    }


def five_caches(ports: str) -> dict[str, dict[str, Any]]:
    """Return cache aliases of servers that know nothing of each other: redis_one, redis_two ..."""
    names = ("redis_one", "redis_two", "redis_three", "redis_four", "redis_five")
    backend = "django.core.cache.backends.redis.RedisCache"
    return {
        name: {"BACKEND": backend, "LOCATION": f"redis://{HOST}:{port}"}
        for name, port in zip(names, ports.split(","), strict=True)
    }
