"""Client by pylibmc."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pylibmc

from .client import Disconnected, Failure, NotCarriedOut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .options import MemcachedOptions

#: Identifies nothing: a server counts up from 1. (With 0 the driver sends a request that is none.)
NOTHING = 1 << 62
#: How often a value is looked for that comes and goes.
LOOKS = 5
#: What the server has refused for want of memory has no class of its own, but libmemcached's number.
_OUT_OF_MEMORY = "error 48 "

_UNREACHED = (pylibmc.HostLookupError, pylibmc.SocketCreateError, pylibmc.UnixSocketError)
_REFUSED = (pylibmc.ClientError, pylibmc.ServerError, pylibmc.TooBig)
_LOST = (
    pylibmc.ConnectionError,
    pylibmc.Failure,
    pylibmc.ReadError,
    pylibmc.ServerDown,
    pylibmc.WriteError,
)


class _Driver(pylibmc.Client):  # type: ignore[misc]  # it ships no types
    def deserialize(self, value: bytes, flags: int) -> bytes:
        """Return what is stored as it is: what is not ours is not unpickled either."""
        return value


class PyLibMCClient:
    """See Client. Only in text: in binary the driver deletes nothing by ``cas``."""

    def __init__(self, server: Any, given: dict[str, Any], options: MemcachedOptions) -> None:
        behaviors = {
            "cas": True,
            "tcp_nodelay": True,
            "tcp_keepalive": True,
            "connect_timeout": max(1, int(options.connect_timeout * 1_000)),
            "_poll_timeout": max(1, int(options.io_timeout * 1_000)),
            "send_timeout": max(1, int(options.io_timeout * 1_000_000)),
            "receive_timeout": max(1, int(options.io_timeout * 1_000_000)),
        }
        self._driver = _Driver([server], behaviors=behaviors)

    def add(self, key: str, value: bytes, seconds: int) -> bool:
        """See Client."""
        with _translated():
            return bool(self._driver.add(key, value, time=seconds))

    def gets(self, key: str) -> tuple[bytes, Any] | None:
        """See Client."""
        with _translated():
            return self._gets(key)

    def cas(self, key: str, value: bytes, unique: Any, seconds: int) -> bool:
        """See Client."""
        with _translated():
            try:
                return bool(self._driver.cas(key, value, unique, time=seconds))
            except pylibmc.NotFound:
                return False

    def close(self) -> None:
        """See Client."""
        self._driver.disconnect_all()

    def abandon(self) -> None:
        """See Client. When it is freed it says goodbye, for the parent as well: it never is."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._driver))

    def _gets(self, key: str) -> tuple[bytes, Any] | None:
        # As bytes: of a text, the driver frees the copy that it sends, and sends what another thread
        # has put into its place.
        sent = key.encode()
        for _ in range(LOOKS):
            value, unique = self._driver.gets(sent)
            if unique is not None:
                return value, unique
            # It says the same of a server that hangs or is gone.
            if self._is_missing(key):
                return None
        raise Failure("it has a value, and does not show it")

    def _is_missing(self, key: str) -> bool:
        """Ask by a verb that raises if there is no answer."""
        try:
            self._driver.cas(key, b"", NOTHING, time=-1)
        except pylibmc.NotFound:
            return True
        return False


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _UNREACHED as error:
        raise NotCarriedOut(f"it cannot be reached: {error}") from error
    except _LOST as error:
        raise Disconnected(f"the connection was lost: {error}") from error
    except pylibmc.Error as error:
        is_refusal = isinstance(error, _REFUSED) or str(error).startswith(_OUT_OF_MEMORY)
        raise (NotCarriedOut if is_refusal else Failure)(str(error)) from error
