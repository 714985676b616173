"""What tests of several pages, commands and tasks share."""

from __future__ import annotations

import os
import uuid
from contextlib import ExitStack
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from testproject.services import open_account
from tests.backends.conftest import database, server_database
from tests.fixtures.celery_worker import starting
from tests.fixtures.workers import Site

from .staff import client_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.test import Client

    from testproject.models import Account
    from tests.fixtures.celery_worker import CeleryWorker
    from tests.fixtures.redis import Redis
    from tests.integration.celery_tasks import Diary

__all__ = ["database", "server_database"]


@pytest.fixture
def name() -> str:
    """A name that no other test has locked."""
    return f"integration:{uuid.uuid4().hex[:12]}"


@pytest.fixture
def account() -> Account:
    return open_account(f"Ada {uuid.uuid4().hex[:8]}", Decimal("100.00"))


@pytest.fixture
def viewer() -> Client:
    """The browser of somebody who may see locks."""
    return client_of("view_methodlock")


@pytest.fixture
def operator() -> Client:
    """The browser of somebody who may free them, too."""
    return client_of("view_methodlock", "force_release_methodlock")


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


@pytest.fixture(scope="session")
def worker(redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryWorker]:
    """A Celery worker with two processes and the tasks of all modules; tests leave it as it is."""
    modules = (f"{__package__}.{each}_tasks" for each in ("celery", "unique", "debounced"))
    with starting(tmp_path_factory.mktemp("celery")) as start:
        yield start(include=",".join(["testproject.tasks", *modules]))[0]


@pytest.fixture(scope="module")
def open_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Site]]:
    """Starts a Site in a folder of its own, and returns it once it answers."""
    with ExitStack() as stack:

        def start(kind: str, alias: dict[str, Any], **more: Any) -> Site:
            site = Site(kind, alias, tmp_path_factory.mktemp("site"), **more)
            stack.callback(site.close)
            site.wait_until_ready()
            return site

        yield start


@pytest.fixture
def eager() -> Iterator[None]:
    """Tasks of Celery run where they are sent."""
    from testproject.celery import app

    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = False
