"""How django-redis reaches a cluster: it has no client of its own for one, but lets a project bring it."""

from __future__ import annotations

from typing import Any, ClassVar

from redis.cluster import RedisCluster


class ClusterConnectionFactory:
    """Gives the cluster of each URL one client, which all threads of the process share."""

    _clients: ClassVar[dict[str, RedisCluster]] = {}

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def connect(self, url: str) -> RedisCluster:
        """Return the client of the cluster that this node belongs to."""
        if url not in self._clients:
            self._clients[url] = RedisCluster.from_url(url)
        return self._clients[url]

    def disconnect(self, connection: Any) -> None:
        """Close its connections, which it opens again when asked."""
        connection.disconnect_connection_pools()
