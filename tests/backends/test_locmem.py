"""Locks in memory: what they leave there, and what signal handlers may do meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from django_distlock import locks
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.engine.values import Grant
from django_distlock.ground.holder import Holder

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_django.fixtures import Settings

    from django_distlock.engine.values import Request


@pytest.fixture
def backend(settings: Settings) -> LocMemBackend:
    settings.DISTLOCK = {"default": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}}
    backend = locks["default"]
    assert isinstance(backend, LocMemBackend)
    return backend


def taken(backend: LocMemBackend, name: str, *, min_hold: float = 0.0) -> Request:
    request = backend.request(name, ttl=20.0, holder=Holder.current(), min_hold=min_hold)
    assert isinstance(backend.try_acquire(request, queued=False), Grant)
    return request


class Signal(str):
    """A key that calls *handler* when it is compared with an equal one."""

    __slots__ = ("handler",)
    handler: Callable[[], object]

    def __eq__(self, other: object) -> bool:
        is_equal = str.__eq__(self, other)
        if is_equal:
            self.handler()
        return is_equal

    __hash__ = str.__hash__


def test_a_signal_handler_may_release_in_the_midst_of_a_listing(backend: LocMemBackend) -> None:
    first, second, _ = (taken(backend, name) for name in ("first", "second", "third"))
    key = Signal(second.key)
    key.handler = lambda: backend.release(first)

    assert [held.name for held in backend.held(key)] == ["second"]
    assert backend.probe(first) is None
