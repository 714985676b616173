"""The lock of a model instance: what it is called, and who else has the same one."""

# ruff: noqa: DJ008 - nobody reads these rows

from __future__ import annotations

import enum
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from typing import TypeVar
from zoneinfo import ZoneInfo

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.db import models
from django.test.utils import isolate_apps
from django.utils.functional import SimpleLazyObject

from django_distlock import (
    LockLost,
    current_lease,
    distributed_lock,
    force_release,
    lock,
    lock_all,
    locked,
)
from django_distlock.models import FencedModel
from testproject.models import Account
from tests.unit.conftest import own_lease

_M = TypeVar("_M", bound=models.Model)
pytestmark = pytest.mark.usefixtures("memory")

with isolate_apps("testproject"):

    class InTestproject(models.Model):
        class Meta:
            abstract = True
            app_label = "testproject"

    class Purse(InTestproject, FencedModel): ...

    class Savings(Purse): ...

    class Treasure(Purse):
        class Meta:
            app_label = "testproject"
            proxy = True

    class Beside(Purse):
        """With a key of its own beside that of the row of its parent."""

        key = models.UUIDField(primary_key=True)
        purse = models.OneToOneField(Purse, models.CASCADE, parent_link=True)

    class Parcel(InTestproject):
        key = models.UUIDField(primary_key=True)

    class Second(Parcel, Purse):
        """Its key is the link to its second parent."""

        purse = models.OneToOneField(Purse, models.CASCADE, parent_link=True, primary_key=True)

    class Rate(InTestproject):
        rate = models.DecimalField(primary_key=True, max_digits=8, decimal_places=2)

    class Amount(InTestproject):
        amount = models.DecimalField(primary_key=True, max_digits=78, decimal_places=0)

    class Reading(InTestproject):
        at = models.DateTimeField(primary_key=True)

    class Paint(InTestproject):
        colour = models.CharField(primary_key=True, max_length=3)

    class Coat(InTestproject):
        paint = models.OneToOneField(Paint, models.CASCADE, primary_key=True)

    class Price(InTestproject):
        """A key of columns that can be given in several ways."""

        pk = models.CompositePrimaryKey("rate", "colour", "at")
        rate = models.ForeignKey(Rate, models.CASCADE)
        colour = models.CharField(max_length=3)
        at = models.DateTimeField()

    class Line(InTestproject, FencedModel):
        """A key of two columns."""

        pk = models.CompositePrimaryKey("purse", "number")
        purse = models.ForeignKey(Purse, models.CASCADE)
        number = models.IntegerField()


def saved(instance: _M) -> _M:
    instance._state.adding = False
    return instance


def test_locked_shows_its_lock() -> None:
    assert locked(saved(Account(pk=7))).__repr__() == (
        "<LockedObject <Lock 'testproject.account:7' using='default'>>"
    )


def test_a_lazy_user_is_the_user() -> None:
    lazy = SimpleLazyObject(lambda: saved(User(pk=3)))
    assert lock(lazy).name == "auth.user:3"  # type: ignore[arg-type]  # as request.user is typed


class Currency(models.TextChoices):
    EUR = "EUR"


class Colour(str, enum.Enum):  # noqa: UP042 - its str() is another text
    RED = "r"


NOON = datetime(2026, 11, 27, 12, tzinfo=ZoneInfo("Europe/Berlin"))
READ = datetime(2026, 11, 27, 11, tzinfo=UTC)
KEY = uuid.UUID(int=7)


@pytest.mark.parametrize(
    ("given", "read", "name"),
    [
        (Account(pk="7"), Account(pk=7), "account:7"),
        (Savings(pk=7), Purse(pk=7), "purse:7"),
        (Treasure(pk=7), Savings(pk=7), "purse:7"),
        (Beside(key=KEY, purse_id="7"), Purse(pk=7), "purse:7"),
        (Second(key=KEY, purse_id=7), Purse(pk=7), "purse:7"),
        (Parcel(key=KEY.hex), Parcel(key=KEY), f"parcel:{KEY}"),
        (Line(purse_id="7", number=2), Line(purse_id=7, number=2), "line:(7, 2)"),
        (Rate(rate="1.5"), Rate(rate=Decimal("1.50")), "rate:1.50"),
        (Rate(rate=Decimal("1.5")), Rate(rate=Decimal("1.50")), "rate:1.50"),
        (Amount(amount=10**77), Amount(amount=Decimal("1E77")), f"amount:{10**77}"),
        (Reading(at=NOON), Reading(at=READ), "reading:2026-11-27 11:00:00+00:00"),
        (Paint(colour=Currency.EUR), Paint(colour="EUR"), "paint:EUR"),
        (Paint(colour=Colour.RED), Paint(colour="r"), "paint:r"),
        (Coat(paint_id=Colour.RED), Coat(paint_id="r"), "coat:r"),
        (
            Price(rate_id="1.5", colour=Colour.RED, at=NOON),
            Price(rate_id=Decimal("1.50"), colour="r", at=READ),
            f"price:(Decimal('1.50'), 'r', {READ!r})",
        ),
    ],
)
def test_a_row_has_one_name_by_its_model_and_key_made_or_read_through_any_of_its_models(
    given: models.Model, read: models.Model, name: str
) -> None:
    @distributed_lock("paint:{row}")
    def paint(row: models.Model) -> str:
        return own_lease().name

    for row in (given, read):
        assert lock(saved(row)).name == f"testproject.{name}"
        assert paint(row) == f"paint:testproject.{name}"
    with pytest.raises(LockLost), lock(read):
        assert force_release(given) == 1


def test_a_row_without_its_inherited_row_has_none() -> None:
    with pytest.raises(ValueError, match=r"testproject\.Beside is not saved"):
        lock(saved(Beside(key=KEY)))


@pytest.mark.parametrize("instance", [Account(), Account(pk=7), saved(Account())])
def test_what_is_not_saved_has_none(instance: Account) -> None:
    with pytest.raises(ValueError, match=r"testproject\.Account is not saved"):
        lock(instance)
    with pytest.raises(ValueError, match="not saved"):
        locked(instance)
    with pytest.raises(TypeError, match="not AnonymousUser"):
        lock(AnonymousUser())  # type: ignore[arg-type]


def test_all_that_takes_a_name_takes_an_instance() -> None:
    ada, bob = saved(Account(pk=1)), saved(Account(pk=2))
    with lock_all(ada, bob) as (first, second):
        assert [first.name, second.name] == ["testproject.account:1", "testproject.account:2"]
        assert current_lease(ada) is first
    with pytest.raises(LockLost), lock(ada):
        assert lock("testproject.account:1").locked()
        assert force_release(ada) == 1


def test_a_field_of_a_decorators_name_may_be_an_instance() -> None:
    def charge(account: Account, year: int) -> str:
        return own_lease().name

    by_key = distributed_lock("fee:{account}:{year}")(charge)
    by_name = distributed_lock("fee:{account!s}")(charge)
    ada = saved(Account(pk=7, name="Ada"))

    assert by_key(ada, 2026) == "fee:testproject.account:7:2026"
    assert by_name(ada, 2026) == "fee:Ada"


def test_locked_says_what_to_write_for_a_name() -> None:
    with pytest.raises(TypeError, match=r"instance, not str\. .* write lock\(\.\.\.\)"):
        locked("shop.purse:7")  # type: ignore[type-var]  # the point of this test
