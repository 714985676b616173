"""The acts run in a stack only: ``python -m tests.stacks`` says in which."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from django.core.management import call_command
from django.db import connections

from django_distlock import locks
from tests.fixtures.environment import server_port
from tests.fixtures.postgres import PostgreSQL

if TYPE_CHECKING:
    from pytest_django import DjangoDbBlocker

    from django_distlock.backends.base import BaseLockBackend

_numbers = itertools.count(1)
if "DISTLOCK_STACK" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def databases(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Let every test use the databases; the default one has the tables of all apps, also of those without migrations."""
    is_postgres = connections["default"].vendor == "postgresql"
    server = PostgreSQL(server_port("DISTLOCK_POSTGRES_PORT")) if is_postgres else nullcontext()
    with server, django_db_blocker.unblock():
        call_command("migrate", verbosity=0)
        call_command("migrate", run_syncdb=True, verbosity=0)
        yield
        locks.close()
        connections.close_all()


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"stack-{next(_numbers)}"


@pytest.fixture
def backend(using: str) -> BaseLockBackend:
    from django_distlock import locks

    return locks[using]
