"""What the backend asks of a memcached client, whatever library it comes from, and how it fails."""

from __future__ import annotations

from typing import Any, Protocol


class Failure(Exception):
    """No answer, or none to a request: it may have been carried out."""


class Disconnected(Failure):
    """The connection was closed by the other side, perhaps long before the request."""


class NotCarriedOut(Failure):
    """The server was not reached, or has refused the request in words."""


class Client(Protocol):
    """One connection to one server, made by the first request; used by one thread at a time."""

    def add(self, key: str, value: bytes, seconds: int) -> bool:
        """Store *value* unless there is one; tell whether it was stored."""

    def gets(self, key: str) -> tuple[bytes, Any] | None:
        """Return the value and what identifies it, or None if there is none."""

    def cas(self, key: str, value: bytes, unique: Any, seconds: int) -> bool:
        """Replace what *unique* identifies; False if it is not there any more."""

    def close(self) -> None:
        """Close the connection."""

    def abandon(self) -> None:
        """In a forked child: drop what belongs to the parent, and say nothing to the server."""
