"""Fencing tokens rise with each new holding, whatever ended the one before."""

from __future__ import annotations

import time
from itertools import pairwise

from django_distlock import Lease, lock
from django_distlock.backends.base import BaseLockBackend

from .profiles import needs
from .rivals import Rivals

pytestmark = needs("fencing")


def _token(lease: Lease) -> int:
    assert lease.fencing_token is not None
    return lease.fencing_token


def _one_holding(using: str, name: str) -> int:
    with lock(name, using=using, timeout=30) as lease:
        return _token(lease)


def _rises(tokens: list[int]) -> bool:
    return all(first < second for first, second in pairwise(tokens))


def test_it_rises_over_releases(using: str, name: str) -> None:
    assert _rises([_one_holding(using, name) for _ in range(20)])


def test_it_begins_at_the_clock_so_that_data_can_change_its_backend(using: str, name: str) -> None:
    assert abs(_one_holding(using, name) / 1_000_000 - time.time()) < 3600


@needs("listing")
def test_it_rises_over_a_forced_release(
    using: str, name: str, backend: BaseLockBackend, rival: Rivals
) -> None:
    before, forced = _one_holding(using, name), rival()
    forced.takes()
    [record] = [held for held in backend.held() if held.key == forced.request.key]
    assert backend.force_release(record.key, record.owner_digest)

    after = _one_holding(using, name)

    assert forced.token is not None
    assert before < forced.token < after


def test_a_reentry_and_an_extension_keep_it(using: str, name: str) -> None:
    with lock(name, using=using) as outer:
        token = outer.fencing_token
        outer.extend()
        with lock(name, using=using) as inner:
            assert inner.fencing_token == outer.fencing_token == token
