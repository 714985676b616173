"""Model instances: the name of their lock, and the attribute with their claim."""

# ruff: noqa: SLF001 - Django documents _meta and _state

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from django.db.models import Model
from django.utils.timezone import is_aware

#: The attribute with the Claim of a claimed instance.
CLAIM = "_distlock_claim"


def object_name(instance: Model) -> str:
    """Return the name of the lock of *instance*, such as "shop.account:7"; ValueError if it is not saved.

    An instance of a proxy, or of a model that inherits a table, shares the name with the row that it inherits: along
    the primary key, or else along the first link to a parent.
    """
    model: Any = instance._meta.concrete_model
    key = None if instance._state.adding else instance.pk
    while key is not None and (link := _parent_link(model._meta)):
        model, key = link.remote_field.model, getattr(instance, link.attname)
    if key is None:
        msg = f"This {instance._meta.label} is not saved, so it has no lock of its own."
        raise ValueError(msg)
    if not isinstance(key, tuple):
        return f"{model._meta.label_lower}:{_stored(model._meta.pk, key)}"
    key = tuple(map(_stored, model._meta.pk_fields, key))
    return f"{model._meta.label_lower}:{key}"


def _parent_link(meta: Any) -> Any:
    if getattr(meta.pk.remote_field, "parent_link", False):
        return meta.pk
    return next((link for link in meta.parents.values() if link.model is meta.model), None)


def _stored(field: Any, value: Any) -> Any:
    """Return *value*, a primary key, in the type in which every database returns it."""
    value = field.get_prep_value(value)
    while field.remote_field:
        field = field.target_field
    if isinstance(value, str):
        return str.__str__(value)  # str() of a member of an Enum of texts is another text
    if isinstance(value, Decimal) and field.decimal_places is not None:
        # quantize() would refuse more digits than the thread's decimal context allows.
        return Decimal(f"{value:.{field.decimal_places}f}")
    return value.astimezone(UTC) if isinstance(value, datetime) and is_aware(value) else value
