"""Admins that edit one object at a time, as the packages of a stack make them."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin

from django_distlock.contrib.editing.admin import EditLockMixin

from .models import Plain

bases: tuple[type[Any], ...] = (admin.ModelAdmin,)
if apps.is_installed("unfold"):
    from unfold.admin import ModelAdmin as UnfoldAdmin

    bases = (UnfoldAdmin,)


def _admin(*packages: type[Any]) -> type[Any]:
    return type("StackAdmin", (EditLockMixin, *packages), {"list_display": ("pk", "name")})


admin.site.register(Plain, _admin(*bases))

if apps.is_installed("polymorphic"):
    from guardian.admin import GuardedModelAdmin
    from import_export.admin import ImportExportModelAdmin
    from parler.admin import TranslatableAdmin
    from polymorphic.admin import PolymorphicChildModelAdmin, PolymorphicParentModelAdmin
    from reversion.admin import VersionAdmin
    from simple_history.admin import SimpleHistoryAdmin

    from .models import Car, Place, Recorded, Restaurant, Tracked, Translated, Vehicle

    admin.site.register(Restaurant, _admin(GuardedModelAdmin))
    admin.site.register(Tracked, _admin(ImportExportModelAdmin))
    admin.site.register(Translated, _admin(TranslatableAdmin))
    admin.site.register(Recorded, _admin(SimpleHistoryAdmin))
    admin.site.register(Place, _admin(VersionAdmin))

    @admin.register(Car)
    class CarAdmin(EditLockMixin, PolymorphicChildModelAdmin):
        base_model = Vehicle

    @admin.register(Vehicle)
    class VehicleAdmin(PolymorphicParentModelAdmin):
        base_model = Vehicle
        child_models = (Car,)
