"""Ways to a Redis, for threads and for asyncio: one connection for one conversation; nothing is sent twice."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from .cluster import AsyncClusterLink, ClusterLink
from .loops import PerLoop
from .pool import AsyncPoolLink, PoolLink

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from .conversation import Conversation
    from .sources import Source

_T = TypeVar("_T")


class Link(Protocol):
    """One Redis, or a cluster of them, for threads."""

    def converse(self, conversation: Conversation[_T]) -> _T:
        """Send what it yields, each in one go and once, and return its result; an error answered is an answer."""

    def hear(self, bells: Sequence[str], seconds: float) -> str | None:
        """Wait for up to *seconds* until something is pushed to one of the lists *bells*, and return which.

        LockOutcomeUnknown if the connection breaks.
        """

    def keys(self, pattern: str) -> Iterator[str]:
        """Go over the keys that match."""

    def server_of(self, key: str) -> Hashable:
        """Tell apart the servers that keep keys."""

    def close(self) -> None:
        """Let idle connections go."""


class AsyncLink(Protocol):
    """See Link; for the tasks of one event loop."""

    async def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse()."""

    async def hear(self, bells: Sequence[str], seconds: float) -> str | None:
        """See Link.hear()."""

    async def aclose(self) -> None:
        """See Link.close()."""


def open_link(alias: str, source: Source) -> Link:
    """Return the way to *source*; it connects when it is first used."""
    return ClusterLink(alias, source) if source.is_cluster else PoolLink(alias, source)


def open_async_link(alias: str, source: Source) -> AsyncLink:
    """See open_link()."""
    return AsyncClusterLink(alias, source) if source.is_cluster else AsyncPoolLink(alias, source)


class LoopLinks:
    """An AsyncLink for each event loop, closed with it."""

    def __init__(self, alias: str, source: Source) -> None:
        self._links = PerLoop(partial(open_async_link, alias, source))

    async def converse(self, conversation: Conversation[_T]) -> _T:
        """See Link.converse()."""
        return await (await self._links.get()).converse(conversation)

    async def hear(self, bells: Sequence[str], seconds: float) -> str | None:
        """See Link.hear()."""
        return await (await self._links.get()).hear(bells, seconds)
