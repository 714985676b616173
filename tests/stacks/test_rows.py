"""Locked and claimed rows, of plain models and of those that packages make."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from django_distlock import StaleFencingToken, lock, locked

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


def test_a_late_holder_of_a_row_is_refused(row: Any) -> None:
    with lock("rows", reentrant=False) as lease:
        late = lease.claim(row)
    with lock("rows", reentrant=False) as lease:
        newest = lease.claim(row)

        with pytest.raises(StaleFencingToken):
            late.save()
        newest.amount = 7
        newest.save()

    assert type(row).objects.get(pk=row.pk).amount == 7


def test_a_late_holder_of_a_queryset_is_refused(row: Any) -> None:
    rows = type(row).objects.filter(pk=row.pk)
    with lock("rows", reentrant=False) as lease:
        (late,) = lease.claim(rows)
    with lock("rows", reentrant=False) as lease:
        (newest,) = lease.claim(rows)

        with pytest.raises(StaleFencingToken):
            late.save()
        newest.amount = 7
        newest.save()

    assert type(row).objects.get(pk=row.pk).amount == 7


def test_a_row_is_locked_in_a_transaction(row: Any) -> None:
    with transaction.atomic(), locked(row) as mine:
        mine.amount -= 1
        mine.save()

    assert type(row).objects.get(pk=row.pk).amount == 99
