"""What tests of several kinds of tasks share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.celery_tasks import Diary


@pytest.fixture
def diary(request: pytest.FixtureRequest, redis: object) -> Iterator[Diary]:
    """A diary that the tasks of one test write, and that lets go the tasks that wait in it."""
    # Here: the module makes tasks of Celery, which most tests do not need.
    from tests.integration.celery_tasks import Diary

    diary = Diary(f"{request.node.name}:{os.getpid()}")
    yield diary
    # A test that failed must not keep the worker busy.
    diary.let_go(9)
    diary.close()
