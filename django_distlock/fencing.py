"""Fenced data: rows that refuse a writer whose fencing token is not the newest.

Raising the fence before the first read is what makes this sound: with a fenced write alone,
a new holder can read, the old one write, and the new one overwrite it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models, router, transaction

from .exceptions import StaleFencingToken

if TYPE_CHECKING:
    from .lease import Lease

_NEWER = "a later holder has claimed this data"
_UNCLAIMED = "this data is not claimed by this lease: call lease.claim() before reading it"


def claim(lease: Lease, target: models.Model | models.QuerySet[Any]) -> Any:
    """See Lease.claim()."""
    if isinstance(target, models.QuerySet):
        return _claim_rows(lease, target)
    manager, using = _manager(target)
    mine = manager.using(using).filter(pk=target.pk)
    with transaction.atomic(using=using):
        _claim_rows(lease, mine)
        # FOR UPDATE reads past a snapshot that is older than the claim.
        return mine.select_for_update().get()


def save(lease: Lease, instance: models.Model, **kwargs: Any) -> None:
    """See Lease.save()."""
    token = lease.checked_token()
    manager, using = _manager(instance, kwargs.get("using"))
    with transaction.atomic(using=using):
        if not instance._state.adding:  # noqa: SLF001 - documented by Django for this question
            rows = manager.using(using).filter(pk=instance.pk)
            # This update locks the row: what save() writes below is inside the fence.
            if not rows.filter(fence=token).update(fence=token):
                _refuse(lease, rows)
        instance.fence = token  # type: ignore[attr-defined]  # a FencedModel
        instance.save(**_with_fence(kwargs))


def update(lease: Lease, queryset: models.QuerySet[Any], values: dict[str, Any]) -> int:
    """See Lease.update()."""
    token = lease.checked_token()
    with transaction.atomic(using=_database(queryset)):
        queryset = queryset.using(_database(queryset))
        fences = queryset.select_for_update().values_list("fence", flat=True)
        if any(fence != token for fence in fences):
            _refuse(lease, queryset)
        return queryset.filter(fence=token).update(**values, fence=token)


def _claim_rows(lease: Lease, rows: models.QuerySet[Any]) -> models.QuerySet[Any]:
    token = lease.checked_token()
    rows = rows.using(_database(rows))
    with transaction.atomic(using=rows.db):
        wanted = rows.count()
        if rows.filter(fence__lte=token).update(fence=token) != wanted or not wanted:
            _refuse(lease, rows)
    return rows.all()


def _refuse(lease: Lease, rows: models.QuerySet[Any]) -> None:
    token = lease.checked_token()
    fence = rows.order_by().aggregate(highest=models.Max("fence"))["highest"]
    if fence is None:
        raise rows.model.DoesNotExist(f"No {rows.model.__name__} row to protect: it was deleted.")
    raise StaleFencingToken(lease.name, token, _NEWER if fence > token else _UNCLAIMED, fence)


def _manager(instance: models.Model, using: str | None = None) -> tuple[models.Manager[Any], str]:
    model = type(instance)
    # The base manager: a custom one may hide the very row that is to be protected.
    return model._base_manager, using or router.db_for_write(model, instance=instance)  # noqa: SLF001 - documented by Django


def _database(queryset: models.QuerySet[Any]) -> str:
    # A queryset without using() would be read from a replica.
    return queryset._db or router.db_for_write(queryset.model)  # type: ignore[attr-defined]  # noqa: SLF001


def _with_fence(kwargs: dict[str, Any]) -> dict[str, Any]:
    fields = kwargs.get("update_fields")
    return kwargs if fields is None else {**kwargs, "update_fields": {*fields, "fence"}}
