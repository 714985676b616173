"""Locks whose driver's connections come in proxies, as monitoring agents put them there."""

from __future__ import annotations

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections
from django.db.transaction import atomic

from django_distlock import LockNotAcquired, lock, locks, transaction_lock
from django_distlock.backends.database.postgresql import HAS_PSYCOPG3
from testproject.models import Account

from .session_tools import BOTH, KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_django.fixtures import Settings

LEASES = [
    ("default", None),
    *(
        pytest.param((name, None), marks=pytest.mark.server, id=name)
        for name in ("postgres", "mariadb")
    ),
]


class Proxy:
    """As wrapt's: what is set on it goes inside, unless its own class has that name."""

    def __init__(self, inside: Any) -> None:
        object.__setattr__(self, "__wrapped__", inside)

    @property  # type: ignore[misc]  # isinstance() looks at the inside
    def __class__(self) -> Any:
        return self.__wrapped__.__class__

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return self.__wrapped__.__dict__

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "__wrapped__"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.__wrapped__, name, value)

    def commit(self) -> None:
        self.__wrapped__.commit()

    def rollback(self) -> None:
        self.__wrapped__.rollback()


@pytest.fixture
def proxied(using: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the driver of the database open its connections in proxies."""
    driver: Any = connections[using].Database  # type: ignore[attr-defined]
    for module in (driver, *([sqlite3] if using == "default" else [])):
        monkeypatch.setattr(module, "connect", _proxying(module.connect))
    connections[using].close()
    yield
    locks.close()
    connections[using].close()


def _proxying(connect: Any) -> Any:
    def connect_in_proxy(*args: Any, **options: Any) -> Proxy:
        return Proxy(connect(*args, **options))

    return connect_in_proxy


@pytest.fixture
def using(request: pytest.FixtureRequest) -> str:
    """The alias of a database, whose server runs."""
    alias, _ = request.param
    if alias == "postgres" and not HAS_PSYCOPG3:
        pytest.skip("psycopg2's functions refuse a proxy: agents replace them too")
    if alias != "default":
        request.getfixturevalue(alias)
    return str(alias)


@pytest.fixture
def alias(request: pytest.FixtureRequest, proxied: None, settings: Settings) -> str:
    """An alias of locks in that database."""
    using, kind = request.node.callspec.params["using"]
    backend = {"BACKEND": KINDS[kind]} if kind else {}
    settings.DISTLOCK = {"proxied": {**backend, "OPTIONS": {"using": using}}}
    return "proxied"


@pytest.mark.parametrize("using", [*LEASES, *BOTH], indirect=True)
def test_a_lock_is_held_refused_waited_for_and_renewed(alias: str, name: str) -> None:
    with ThreadPoolExecutor() as pool:
        with lock(name, using=alias, ttl=30) as lease:
            with pytest.raises(LockNotAcquired):
                pool.submit(_cycle, name, alias, 0.1).result(20)
            waiting = pool.submit(_cycle, name, alias, 10.0)
            lease.extend(60)
        waiting.result(20)


def _cycle(name: str, using: str, timeout: float) -> None:
    with lock(name, using=using, timeout=timeout):
        pass


@pytest.mark.parametrize("using", LEASES[1:], indirect=True)
def test_a_lock_of_a_transaction_is_waited_for_and_committed(
    using: str, proxied: None, name: str
) -> None:
    with ThreadPoolExecutor() as pool:
        with atomic(using=using):
            transaction_lock(name, using=using, timeout=5)
            began = time.monotonic()
            with pytest.raises(LockNotAcquired):
                pool.submit(_take_in_transaction, name, using, 1.2).result(20)
            assert time.monotonic() - began > 1.1
            account = Account.objects.using(using).create(name=name, opening_balance=1, balance=1)

        pool.submit(_take_in_transaction, name, using, 5.0).result(20)
    assert Account.objects.using(using).filter(pk=account.pk).delete()[0]


def _take_in_transaction(name: str, using: str, timeout: float) -> None:
    try:
        with atomic(using=using):
            transaction_lock(name, using=using, timeout=timeout)
    finally:
        connections[using].close()
