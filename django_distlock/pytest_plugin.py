"""The fixture *distlock*, for ``pytest_plugins = ["django_distlock.pytest_plugin"]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from . import testing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@pytest.fixture
def distlock() -> Iterator[ModuleType]:
    """``django_distlock.testing``, with no lock held before the test nor after it."""
    testing.reset_locks()
    yield testing
    testing.reset_locks()
