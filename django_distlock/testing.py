"""Helpers for tests in projects: free or busy locks, a lock that another holder has, and assertions on held locks."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.test.utils import override_settings

from .backends.dummy import DummyBackend
from .conf import DEFAULT_ALIAS, as_dict, checked_limit
from .engine.registry import registry
from .engine.values import Busy, Grant, LockState
from .exceptions import LockNotAcquired
from .ground.holder import Holder
from .ground.naming import LONGEST_LISTED, checked_name, printable
from .handler import locks
from .lock import lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .engine.values import Request

#: The holder that busy locks show.
SOMEBODY_ELSE = Holder("elsewhere", 1, "MainThread", purpose="somebody else")
#: The settings of an alias that do not depend on its backend.
_TERMS = {"TTL", "TIMEOUT", "KEY_PREFIX", "STRICT"}


class BusyBackend(DummyBackend):
    """A backend that refuses every lock at once, to every caller."""

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        raise LockNotAcquired(request.name, 0.0, SOMEBODY_ELSE, limit=request.holder.limit)

    def probe(self, request: Request) -> Busy | None:
        return Busy(SOMEBODY_ELSE)


class override_locks(override_settings):  # noqa: N801 - as Django's override_settings
    """Make all locks *free* or *busy*: a decorator and context manager, like override_settings().

    Free locks exclude nobody and have no fencing tokens. Busy locks are refused at once, with any timeout.
    """

    def __init__(self, *, free: bool = False, busy: bool = False) -> None:
        """Raise TypeError unless exactly one argument is True."""
        if free is busy:
            msg = "override_locks() takes free=True or busy=True."
            raise TypeError(msg)
        kind = DummyBackend if free else BusyBackend
        # TEST overrides an alias that keeps its own backend in tests.
        self._instead = {"BACKEND": f"{kind.__module__}.{kind.__name__}", "TEST": {"BACKEND": None}}
        super().__init__(DISTLOCK=self._aliases())

    def enable(self) -> None:
        """Override the settings of now: those of the class, for the decorator of a method."""
        self.options = {"DISTLOCK": self._aliases()}
        super().enable()

    def save_options(self, test_func: Any) -> None:
        """Override the settings that other decorators, or its base class, give to the class *test_func*."""
        overridden = test_func._overridden_settings  # noqa: SLF001 - of Django
        self.options = {"DISTLOCK": self._aliases(overridden)}
        super().save_options(test_func)

    def _aliases(self, overridden: dict[str, Any] | None = None) -> dict[str, Any]:
        now: dict[str, Any] = getattr(settings, "DISTLOCK", {DEFAULT_ALIAS: {}})
        written: dict[str, Any] = (overridden or {}).get("DISTLOCK", now)
        return {
            alias: {key: terms[key] for key in terms.keys() & _TERMS} | self._instead
            for alias, given in written.items()
            for terms in [as_dict(alias, given)]
        }


@contextmanager
def held_elsewhere(
    name: str,
    using: str = DEFAULT_ALIAS,
    *,
    shared: bool = False,
    ttl: float = 600.0,
    limit: int | None = None,
) -> Iterator[None]:
    """Let another holder hold the lock *name* in the block, with a *limit* all places: it is busy, for this thread too.

    AssertionError if the lock is already held.
    """
    backend = locks[using]
    with ExitStack() as stack:
        for place in range(limit or 1):
            request = backend.request(
                checked_name(name), ttl=ttl, holder=SOMEBODY_ELSE, shared=shared
            )
            if limit is not None:
                request = request.with_limit(checked_limit(limit, "limit")).at(place)
            answer = backend.try_acquire(request, queued=False)
            if not isinstance(answer, Grant):
                msg = f"Lock {name!r} is held already, by {answer.holder}."
                raise AssertionError(msg)  # noqa: TRY004 - the test is wrong, not a type
            stack.callback(backend.release, request)
        yield


def assert_held(name: str, using: str = DEFAULT_ALIAS) -> None:
    """Raise AssertionError unless somebody holds the lock *name*, or one of its places, or min_hold reserves it."""
    if not lock(name, using=using).locked() and _listed(name) not in _held(using):
        msg = f"Nobody holds lock {name!r}. Held: {', '.join(_held(using)) or 'none'}."
        raise AssertionError(msg)


def assert_not_held(name: str | None = None, using: str = DEFAULT_ALIAS) -> None:
    """Raise AssertionError if somebody holds the lock *name*, or any lock of the alias, or min_hold reserves it."""
    found = _held(using)
    if name is not None:
        is_held = lock(name, using=using).locked() or _listed(name) in found
        found = [name] if is_held else []
    if found:
        msg = f"Held: {', '.join(map(repr, found))}."
        raise AssertionError(msg)


def reset_locks() -> None:
    """Release all locks of this process, and drop all locks that are in memory."""
    registry.release_all()
    locks.reset()


def _listed(name: str) -> str:
    """Return *name* as listings have it."""
    return printable(checked_name(name), LONGEST_LISTED)


def _held(using: str) -> list[str]:
    """Return the names of held or reserved locks, without the ended leases that a database lists, too."""
    backend = locks[using]
    found = backend.held() if backend.supports_listing else ()
    return [held.name for held in found if held.state != LockState.STALE]
