"""What the unit tests share: an alias whose locks are in the memory of this process, and the lease of the caller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_django.fixtures import Settings

from django_distlock import Lease, current_lease, locks
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.engine.registry import registry
from tests.fixtures.eventually import eventually
from tests.integration.aliases import MEMORY


@pytest.fixture
def memory(settings: Settings) -> Iterator[LocMemBackend]:
    """The default alias, in memory. Afterwards nothing may be left of what a test took."""
    settings.DISTLOCK = {"default": MEMORY}
    before = registry.leases()
    backend = locks["default"]
    assert isinstance(backend, LocMemBackend)
    yield backend
    try:
        eventually(
            lambda: not [each for each in registry.leases() if each not in before],
            what="all leases of the test have ended",
        )
    finally:
        registry.release_all()


def own_lease(name: str | None = None) -> Lease:
    """Return the current lease of the caller, who has one."""
    lease = current_lease(name)
    assert lease
    return lease
