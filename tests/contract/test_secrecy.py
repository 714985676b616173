"""The owner of a lease is a secret: whoever knows it can give the lock back."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable

import pytest

from django_distlock import LockNotAcquired, lock
from django_distlock.backends.base import BaseLockBackend
from tests.fixtures.eventually import eventually

from .faults import Faulty
from .profiles import lacks, needs
from .rivals import Rival

Rivals = Callable[..., Rival]


def test_every_holding_has_an_owner_of_its_own(using: str, name: str) -> None:
    owners = set()
    for _ in range(5):
        with lock(name, using=using) as lease:
            owners.add(lease.request.owner)

    assert len(owners) == 5
    # 128 random bits, as hex.
    assert {len(owner) for owner in owners} == {32}


def test_it_is_shown_nowhere(using: str, name: str) -> None:
    with lock(name, using=using) as lease:
        shown = (
            f"{lease} {lease!r} {lease.request} {lease.request!r} {lease.holder} {lease.holder!r}"
        )

    assert lease.request.owner not in shown
    assert name in shown


def test_it_is_not_told_to_who_finds_the_lock_busy(using: str, name: str, rival: Rivals) -> None:
    holder = rival()
    holder.takes()

    with pytest.raises(LockNotAcquired) as caught, lock(name, using=using, timeout=0):
        pass

    told = f"{caught.value} {caught.value!r} {vars(caught.value)}".encode()
    assert holder.request.owner.encode() not in told + pickle.dumps(caught.value)


@needs("listing")
def test_it_is_not_told_to_operators(rival: Rivals, backend: BaseLockBackend) -> None:
    holder = rival()
    holder.takes()

    listed = list(backend.held())

    assert listed
    assert holder.request.owner not in repr(listed)


@lacks("whole_seconds")
@needs("leased")
def test_it_is_not_logged(
    faulty: Faulty, using: str, name: str, tick: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    faulty.fail("extend")
    lost = lock(name, using=using, ttl=4 * tick).acquire()
    assert lost
    eventually(lambda: lost.lost)
    with lock(name, using=using) as lease:
        assert not lock(name, using=using, timeout=0, reentrant=False).acquire()

    # Statements of the database drivers are theirs to log or not: Django's only with DEBUG.
    logged = [r.getMessage() for r in caplog.records if r.name.startswith("django_distlock")]

    assert logged
    assert not any(
        owner in text for text in logged for owner in (lost.request.owner, lease.request.owner)
    )
