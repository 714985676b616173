"""locked() and claim() of models whose managers and methods are not Django's own."""

# ruff: noqa: DJ008 - nobody reads these rows

from __future__ import annotations

import enum
from datetime import datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from django.db import connections, models
from django.test.utils import isolate_apps

from django_distlock import lock, locked
from django_distlock.models import FencedModel

if TYPE_CHECKING:
    from collections.abc import Iterator


class Joining(models.Manager[Any]):
    """As many projects have it: it brings what pages show."""

    def get_queryset(self) -> Any:
        rows = super().get_queryset().select_related("owner")
        return rows.annotate(others=models.Count("owner__name")).distinct()


class Hiding(models.Manager[Any]):
    """As of a soft deletion."""

    def get_queryset(self) -> Any:
        return super().get_queryset().filter(is_hidden=False)


with isolate_apps("testproject"):

    class Owner(models.Model):
        name = models.CharField(max_length=20)

        class Meta:
            app_label = "testproject"

    class Owned(FencedModel):
        owner = models.ForeignKey(Owner, models.CASCADE, null=True)
        balance = models.IntegerField(default=100)
        objects = Joining()

        class Meta:
            app_label = "testproject"
            base_manager_name = "objects"

    class Soft(FencedModel):
        is_hidden = models.BooleanField(default=True)
        balance = models.IntegerField(default=100)
        objects = Hiding()

        class Meta:
            app_label = "testproject"
            base_manager_name = "objects"

    class OldRefresh(models.Model):
        """With a method as of before Django 5.1."""

        balance = models.IntegerField(default=100)

        class Meta:
            app_label = "testproject"

        def refresh_from_db(self, using: Any = None, fields: Any = None) -> None:  # type: ignore[override]
            super().refresh_from_db(using=using, fields=fields)
            self.seen = self.balance

    class Tracked(models.Model):
        """With a method as Django documents it, which takes all but two arguments by name."""

        class Meta:
            abstract = True

        def refresh_from_db(self, using: Any = None, fields: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
            super().refresh_from_db(using=using, fields=fields, **kwargs)

    class Mixed(FencedModel, Tracked):
        balance = models.IntegerField(default=100)

        class Meta:
            app_label = "testproject"

    class Price(models.Model):
        """A key that each database stores in its own way."""

        pk = models.CompositePrimaryKey("rate", "colour", "at")
        rate = models.DecimalField(max_digits=8, decimal_places=2)
        colour = models.CharField(max_length=3)
        at = models.DateTimeField()

        class Meta:
            app_label = "testproject"


class Colour(str, enum.Enum):  # noqa: UP042 - its str() is another text
    RED = "r"


SHAPES: list[Any] = [Owned, Soft, OldRefresh, Mixed]


@pytest.fixture
def tables(database: str) -> Iterator[str]:
    with connections[database].schema_editor() as editor:
        for model in (Owner, Price, *SHAPES):
            editor.create_model(model)
    yield database
    with connections[database].schema_editor() as editor:
        for model in (*SHAPES, Price, Owner):
            editor.delete_model(model)


def test_rows_of_any_manager_are_locked_and_claimed(tables: str) -> None:
    for shape in SHAPES:
        row = shape(balance=100)
        row.save(using=tables)
        models.QuerySet(shape, using=tables).filter(pk=row.pk).update(balance=50)

        with locked(row, using=tables):
            assert row.balance == 50
        if issubclass(shape, FencedModel):
            with lock(row, using=tables) as lease:
                assert lease.claim(row).balance == 50
        else:
            assert row.seen == 50


def test_a_row_has_one_name_before_and_after_it_is_read(tables: str) -> None:
    noon = datetime(2026, 11, 27, 12, 0, 0, 123456, tzinfo=ZoneInfo("Europe/Berlin"))
    made = Price(rate="1.5", colour=Colour.RED, at=noon)
    made.save(using=tables)

    read = Price._base_manager.using(tables).get()

    assert lock(made).name == lock(read).name
