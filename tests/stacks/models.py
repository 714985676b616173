"""Fenced rows as the packages of a stack make models."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.db import models

from django_distlock.models import FencedModel


class Plain(FencedModel):
    """A fenced row without any package."""

    name = models.CharField(max_length=100)
    amount = models.IntegerField(default=100)


#: The fenced models of this stack, each with `name` and `amount`.
FENCED: list[type[Any]] = [Plain]

if apps.is_installed("polymorphic"):
    from model_utils import FieldTracker
    from model_utils.managers import InheritanceManager
    from model_utils.models import TimeStampedModel
    from parler.models import TranslatableModel, TranslatedFields
    from polymorphic.models import PolymorphicModel
    from simple_history.models import HistoricalRecords

    class Vehicle(PolymorphicModel, FencedModel):
        name = models.CharField(max_length=100)
        amount = models.IntegerField(default=100)

    class Car(Vehicle):
        doors = models.IntegerField(default=4)

    class Place(FencedModel):
        name = models.CharField(max_length=100)
        amount = models.IntegerField(default=100)
        objects = InheritanceManager()

    class Restaurant(Place):
        tables = models.IntegerField(default=4)

    class Tracked(TimeStampedModel, FencedModel):
        name = models.CharField(max_length=100)
        amount = models.IntegerField(default=100)
        tracker = FieldTracker()

    class Translated(TranslatableModel, FencedModel):
        name = models.CharField(max_length=100)
        amount = models.IntegerField(default=100)
        translations = TranslatedFields(title=models.CharField(max_length=100, default="title"))

    class Recorded(FencedModel):
        name = models.CharField(max_length=100)
        amount = models.IntegerField(default=100)
        history = HistoricalRecords()

    FENCED += [Car, Restaurant, Tracked, Translated, Recorded]
