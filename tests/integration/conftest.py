"""What tests of several pages, commands and tasks share."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.backends.conftest import database, server_database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.celery_tasks import Diary

__all__ = ["database", "server_database"]


@pytest.fixture
def name() -> str:
    """A name that no other test has locked."""
    return f"integration:{uuid.uuid4().hex[:12]}"


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


@pytest.fixture
def eager() -> Iterator[None]:
    """Tasks of Celery run where they are sent."""
    from testproject.celery import app

    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = False
