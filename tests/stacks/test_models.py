"""What is special to packages whose managers and querysets give instances of their own."""

from __future__ import annotations

import pytest

from django_distlock import StaleFencingToken, lock

from .models import Car, Place, Restaurant, Vehicle


def test_subclasses_of_a_polymorphic_queryset_are_claimed(name: str) -> None:
    Car.objects.create(name=name)
    rows = Vehicle.objects.filter(name=name)
    with lock("cars", reentrant=False) as lease:
        (late,) = lease.claim(rows)
    with lock("cars", reentrant=False) as lease:
        (newest,) = lease.claim(rows)

        assert isinstance(newest, Car)
        with pytest.raises(StaleFencingToken):
            late.save()
        newest.save()


def test_subclasses_of_model_utils_are_claimed(name: str) -> None:
    Restaurant.objects.create(name=name)
    rows = Place.objects.filter(name=name).select_subclasses()
    with lock("places", reentrant=False) as lease:
        (late,) = lease.claim(rows)
    with lock("places", reentrant=False) as lease:
        (newest,) = lease.claim(rows)

        assert isinstance(newest, Restaurant)
        with pytest.raises(StaleFencingToken):
            late.save()
        newest.save()
