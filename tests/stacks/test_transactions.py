"""Locks of a caller's transaction, on the caller's own connection, which packages watch and pool."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections
from django.db.transaction import atomic

from django_distlock import LockNotAcquired, lock, transaction_lock

from .profiles import ALIASES
from .settings import DATABASES, STACK

#: The databases of this stack that have locks of transactions.
DATABASE = [each for each in ("postgres", "mariadb") if each in STACK.aliases and each in DATABASES]


@pytest.fixture(params=DATABASE)
def using(request: pytest.FixtureRequest) -> str:
    """A database whose server runs."""
    request.getfixturevalue(ALIASES[request.param])
    return str(request.param)


def test_a_transaction_keeps_its_lock_to_its_end(using: str, name: str) -> None:
    with ThreadPoolExecutor() as pool:
        with atomic(using=using):
            transaction_lock(name, using=using, timeout=5)
            with pytest.raises(LockNotAcquired):
                pool.submit(_take, name, using, 1.2).result(30)

        pool.submit(_take, name, using, 5.0).result(30)


def _take(name: str, using: str, timeout: float) -> None:
    try:
        with atomic(using=using):
            transaction_lock(name, using=using, timeout=timeout)
    finally:
        connections[using].close()


def test_a_lease_guards_a_transaction(using: str, name: str) -> None:
    with lock(name, using=using) as lease, atomic(using=using):
        lease.guard(using=using)
