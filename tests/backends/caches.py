"""Cache classes as projects write them: one that is sound, and some that are not."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache


class SoundCache(BaseCache):
    """A cache for all threads of the process whose add() has one winner."""

    stored: ClassVar[dict[str, tuple[Any, float]]] = {}
    mutex: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(params)

    def add(
        self,
        key: str,
        value: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
    ) -> bool:
        key = self.make_and_validate_key(key, version=version)
        with self.mutex:
            if self._live(key) is not None:
                return False
            # Whole seconds, as most servers take them.
            self.stored[key] = (value, time.monotonic() + int(timeout or 0))
            return True

    def get(self, key: str, default: Any = None, version: int | None = None) -> Any:
        key = self.make_and_validate_key(key, version=version)
        with self.mutex:
            found = self._live(key)
        return default if found is None else found

    def delete(self, key: str, version: int | None = None) -> bool:
        key = self.make_and_validate_key(key, version=version)
        with self.mutex:
            return self.stored.pop(key, None) is not None

    def clear(self) -> None:
        self.stored.clear()

    def _live(self, key: str) -> Any:
        value, ends = self.stored.get(key, (None, 0.0))
        return value if ends > time.monotonic() else None


class SilentCache(SoundCache):
    """Its server is down, which it hides: it answers None to everything."""

    def add(self, *args: Any, **kwargs: Any) -> bool:
        return None  # type: ignore[return-value]  # that is the bug

    def get(self, *args: Any, **kwargs: Any) -> Any:
        return None


class LoudCache(SoundCache):
    """Its server is down, and it says so."""

    def add(self, *args: Any, **kwargs: Any) -> bool:
        raise OSError("nobody there")

    def get(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("nobody there")
