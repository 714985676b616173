"""Locked and claimed rows, of plain models and of those that packages make."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from django_distlock import Lease, StaleFencingToken, lock, locked

from .models import FENCED


@pytest.fixture(params=FENCED, ids=lambda model: model.__name__)
def row(request: pytest.FixtureRequest, name: str) -> Any:
    """A saved row."""
    return request.param.objects.create(name=name)


def test_a_locked_row_is_read_again_and_saved(row: Any) -> None:
    type(row).objects.filter(pk=row.pk).update(amount=50)

    with locked(row) as mine:
        mine.amount -= 1
        mine.save()

    assert type(row).objects.get(pk=row.pk).amount == 49


@pytest.mark.parametrize("is_queryset", [False, True])
def test_a_late_holder_is_refused(row: Any, is_queryset: bool) -> None:
    rows = type(row).objects.filter(pk=row.pk)

    def claimed(lease: Lease) -> Any:
        return next(iter(lease.claim(rows))) if is_queryset else lease.claim(row)

    with lock("rows", reentrant=False) as lease:
        late = claimed(lease)
    with lock("rows", reentrant=False) as lease:
        newest = claimed(lease)

        with pytest.raises(StaleFencingToken):
            late.save()
        newest.amount = 7
        newest.save()

    assert rows.get().amount == 7


def test_a_row_is_locked_in_a_transaction(row: Any) -> None:
    with transaction.atomic(), locked(row) as mine:
        mine.amount -= 1
        mine.save()

    assert type(row).objects.get(pk=row.pk).amount == 99
