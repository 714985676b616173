"""The way to a Redis Cluster, for threads and for asyncio: the keys of one lock share a slot, and so one server."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.cluster import RedisCluster
from redis.exceptions import ResponseError

from django_distlock.engine.bells import timeout

from .conversation import ask, atalk, talk
from .opened import Opened
from .wire import heard, listening, unanswered, unreachable

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from .conversation import Command, Conversation
    from .sources import Source

_T = TypeVar("_T")


class ClusterLink:
    """A Redis Cluster, for threads."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._clients = Opened(partial(_connected, source), _close_idle)

    def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse(); one command after the other: each goes to the server of its keys."""
        with self._lent() as client:
            return talk(conversation, lambda commands: self._exchange(client, commands))

    def hear(self, bells: Sequence[str], seconds: float) -> str | None:
        """See Link.hear(); it may take a little longer."""
        answer = self.converse(ask(listening(bells, seconds)))
        return heard(self._alias, self._source.where, answer)

    def keys(self, pattern: str) -> Iterator[str]:
        """See Link.keys(); on every primary."""
        with self._lent() as client, unanswered(self._alias, self._source.where):
            for key in client.scan_iter(match=pattern, count=1000):
                yield key.decode(errors="backslashreplace")

    def server_of(self, key: str) -> Hashable:
        """See Link.server_of(); by what the client knows of the cluster."""
        with unreachable(self._alias, self._source.where):
            node = self._client().get_node_from_key(key)
            return str(node.name) if node else None

    def close(self) -> None:
        """See Link.close()."""
        self._clients.close()

    @contextmanager
    def _lent(self) -> Iterator[Any]:
        client = self._client()
        try:
            yield client
        finally:
            self._clients.give_back(client)

    def _client(self) -> Any:
        with unreachable(self._alias, self._source.where):
            return self._clients.take()

    def _exchange(self, client: Any, commands: Sequence[Command]) -> list[Any]:
        with unanswered(self._alias, self._source.where):
            return [_execute(client, command) for command in commands]


class AsyncClusterLink:
    """See ClusterLink."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._client = AsyncRedisCluster.from_url(source.url, **source.async_cluster_settings)

    async def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse()."""
        with unreachable(self._alias, self._source.where):
            async with timeout(self._source.connect_timeout + self._source.io_timeout):
                await self._client.initialize()
        return await atalk(conversation, self._exchange)

    async def hear(self, bells: Sequence[str], seconds: float) -> str | None:
        """See ClusterLink.hear()."""
        answer = await self.converse(ask(listening(bells, seconds)))
        return heard(self._alias, self._source.where, answer)

    async def aclose(self) -> None:
        """See Link.close()."""
        await self._client.aclose()

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        with unanswered(self._alias, self._source.where):
            async with timeout(self._source.io_timeout):
                return [await _aexecute(self._client, command) for command in commands]


def _connected(source: Source) -> Any:
    # Asks a server for the others, at once.
    return RedisCluster.from_url(source.url, **source.cluster_settings)


def _close_idle(client: Any) -> None:
    # Its own close() leaves the connections of the pools open that it makes for a URL.
    for node in client.get_nodes():
        if node.redis_connection:
            node.redis_connection.connection_pool.disconnect(inuse_connections=False)


def _execute(client: Any, command: Command) -> Any:
    try:
        return client.execute_command(*command)
    except ResponseError as error:
        return error


async def _aexecute(client: Any, command: Command) -> Any:
    try:
        return await client.execute_command(*command)
    except ResponseError as error:
        return error
