"""What is special to packages whose managers and querysets give instances of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import StaleFencingToken, lock

from .models import Car, Place, Restaurant, Vehicle

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings


@pytest.mark.parametrize(
    ("kind", "rows"),
    [(Car, Vehicle.objects.all), (Restaurant, Place.objects.select_subclasses)],
    ids=["polymorphic", "model_utils"],
)
def test_subclasses_of_a_queryset_are_claimed(name: str, kind: type[Any], rows: Any) -> None:
    kind.objects.create(name=name)
    rows = rows().filter(name=name)
    with lock("rows", reentrant=False) as lease:
        (late,) = lease.claim(rows)
    with lock("rows", reentrant=False) as lease:
        (newest,) = lease.claim(rows)

        assert isinstance(newest, kind)
        with pytest.raises(StaleFencingToken):
            late.save()
        newest.save()


def test_columns_that_polymorphic_defers_are_loaded_where_the_row_was_claimed(
    name: str, settings: Settings
) -> None:
    car = Car.objects.create(name=name)
    settings.DATABASE_ROUTERS = [SimpleNamespace(db_for_read=lambda *_, **__: "no replica")]
    some = Vehicle.objects.using("default").filter(name=name).only("name")

    with lock("cars") as lease:
        claimed: Any
        (claimed,) = lease.claim(some)

        assert (claimed.name, claimed.doors, claimed.fence) == (name, 4, lease.fencing_token)
    settings.DATABASE_ROUTERS = []
    assert claimed == car
