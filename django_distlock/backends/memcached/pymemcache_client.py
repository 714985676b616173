"""Client by pymemcache."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pymemcache.client.base import Client as Driver
from pymemcache.exceptions import (
    MemcacheClientError,
    MemcacheError,
    MemcacheServerError,
    MemcacheUnexpectedCloseError,
)

from .client import Disconnected, Failure, NotCarriedOut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .options import MemcachedOptions

#: OPTIONS of the alias that a connection is made with; all else is about values and several servers.
CONNECTION = ("socket_keepalive", "tls_context", "socket_module")


class _Driver(Driver):  # type: ignore[misc]  # it ships no types
    def _connect(self) -> None:
        """See the driver; tell that nothing was sent yet."""
        try:
            super()._connect()
        except OSError as error:
            raise NotCarriedOut(f"it cannot be reached: {error}") from error


class PyMemcacheClient:
    """See Client."""

    def __init__(self, server: Any, given: dict[str, Any], options: MemcachedOptions) -> None:
        self._driver = _Driver(
            server,
            connect_timeout=options.connect_timeout,
            timeout=options.io_timeout,
            no_delay=True,
            default_noreply=False,
            **{name: given[name] for name in CONNECTION if name in given},
        )

    def add(self, key: str, value: bytes, seconds: int) -> bool:
        """See Client."""
        with _translated():
            return bool(self._driver.add(key, value, expire=seconds))

    def gets(self, key: str) -> tuple[bytes, Any] | None:
        """See Client."""
        with _translated():
            value, unique = self._driver.gets(key)
        return None if unique is None else (value, unique)

    def cas(self, key: str, value: bytes, unique: Any, seconds: int) -> bool:
        """See Client."""
        with _translated():
            return bool(self._driver.cas(key, value, unique, expire=seconds))

    def close(self) -> None:
        """See Client."""
        self._driver.close()

    def abandon(self) -> None:
        """See Client: the driver says no goodbye, and the parent's end stays open."""
        self._driver.close()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (MemcacheUnexpectedCloseError, ConnectionError) as error:
        raise Disconnected(f"the connection was lost: {error}") from error
    except (MemcacheClientError, MemcacheServerError) as error:
        raise NotCarriedOut(f"it answered with an error: {error}") from error
    # What cannot be parsed is a ValueError.
    except (MemcacheError, OSError, ValueError) as error:
        raise Failure(str(error) or type(error).__name__) from error
