"""The way to a Redis Cluster, for threads and for asyncio: the keys of one lock share a slot, and so one server."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeVar

from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.asyncio.retry import Retry as AsyncRetry
from redis.cluster import RedisCluster
from redis.exceptions import ResponseError
from redis.retry import Retry

from django_distlock.engine.bells import timeout
from django_distlock.engine.steps import Steps, arun, run

from .connections import BROKEN, Command, Conversation, problem, unreachable
from .scripts import Call
from .sources import Source

_T = TypeVar("_T")


class ClusterLink:
    """See PoolLink; commands go one after the other, each to the server of its keys."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._mutex = threading.Lock()
        self._client: Any = None

    def converse(self, conversation: Conversation[_T], within: float | None = None) -> _T:
        client = self._connected()

        def exchange(commands: Sequence[Command]) -> list[Any]:
            return run(_one_by_one(commands), lambda words: client.execute_command(*words))

        try:
            return run(conversation, exchange)
        except BROKEN as error:
            raise problem(self._alias, self._source.where, error) from error
        finally:
            self._give_back(client)

    def keys(self, pattern: str) -> Iterator[str]:
        client = self._connected()
        try:
            for key in client.scan_iter(match=pattern, count=1000):
                yield key.decode(errors="backslashreplace")
        except BROKEN as error:
            raise problem(self._alias, self._source.where, error) from error
        finally:
            self._give_back(client)

    def server_of(self, key: str) -> Hashable:
        """See PoolLink.server_of(); by what the client knows of the cluster."""
        try:
            node = self._connected().get_node_from_key(key)
        except BROKEN as error:
            raise unreachable(self._alias, self._source.where, error) from error
        return str(node.name) if node else None

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            _close_idle(client)

    def _connected(self) -> Any:
        with self._mutex:
            if (client := self._client) is None:
                try:
                    # Asks a server for the others, at once.
                    client = RedisCluster.from_url(
                        self._source.url, **self._source.cluster_settings(Retry)
                    )
                except BROKEN as error:
                    raise unreachable(self._alias, self._source.where, error) from error
                # What is used once more after close() would be left to the garbage collector, which complains.
                weakref.finalize(self, _close_idle, client).atexit = False
                self._client = client
            return client

    def _give_back(self, client: Any) -> None:
        if client is not self._client:  # all were closed meanwhile
            _close_idle(client)


class AsyncClusterLink:
    """See ClusterLink."""

    def __init__(self, alias: str, source: Source) -> None:
        self._alias = alias
        self._source = source
        self._client = AsyncRedisCluster.from_url(source.url, **source.cluster_settings(AsyncRetry))

    async def converse(self, conversation: Conversation[_T], within: float | None = None) -> _T:
        try:
            async with timeout(self._source.connect_timeout + self._source.io_timeout):
                await self._client.initialize()
        except BROKEN as error:
            raise unreachable(self._alias, self._source.where, error) from error
        try:
            return await arun(conversation, self._exchange)
        except BROKEN as error:
            raise problem(self._alias, self._source.where, error) from error

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        async with timeout(self._source.io_timeout):
            return await arun(
                _one_by_one(commands), lambda words: self._client.execute_command(*words)
            )


def _close_idle(client: Any) -> None:
    # Its own close() leaves the connections of the pools open that it makes for a URL.
    for node in client.get_nodes():
        if node.redis_connection:
            node.redis_connection.connection_pool.disconnect(inuse_connections=False)


def _one_by_one(commands: Sequence[Command]) -> Steps[Any, list[Any]]:
    answers = list[Any]()
    for command in commands:
        try:
            answers.append((yield command.by_sha if isinstance(command, Call) else command))
        except ResponseError as error:
            answers.append(error)
    return answers
