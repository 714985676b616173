"""Model instances: the name of their lock, and what they remember of a claim."""

# ruff: noqa: SLF001 - Django documents _meta and _state

from __future__ import annotations

from typing import Any

from django.db.models import Model

#: The attribute of a claimed instance: its Claim; None while that saves it.
CLAIM = "_distlock_claim"


def object_name(instance: Model) -> str:
    """Return the name of the lock of *instance*, such as "shop.account:7"; ValueError if it is not saved.

    An instance of a proxy, or of a model that inherits tables, has the name of the row on top: they are one.
    """
    model: Any = instance._meta.concrete_model
    while getattr(link := model._meta.pk.remote_field, "parent_link", False):
        model = link.model
    if instance.pk is None or instance._state.adding:
        msg = f"This {instance._meta.label} is not saved, so it has no lock of its own."
        raise ValueError(msg)
    if not isinstance(instance.pk, tuple):
        return f"{model._meta.label_lower}:{model._meta.pk.to_python(instance.pk)}"
    # to_python() of a key of several columns leaves their values as they are.
    columns = zip(model._meta.pk_fields, instance.pk, strict=True)
    key = tuple(column.to_python(value) for column, value in columns)
    return f"{model._meta.label_lower}:{key}"
