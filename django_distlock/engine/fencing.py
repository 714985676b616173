"""Fenced data: rows that refuse a writer whose fencing token is not the newest.

The fence must be raised before the first read. With a fenced write alone, the new holder can
read, the old one can write after that, and the new one then overwrites it.
"""

# ruff: noqa: SLF001 - Django documents _meta, _state and _base_manager

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections, models, router, transaction

from django_distlock.exceptions import StaleFencingToken

from .values import batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .lease import Lease

#: Rows in one statement: older SQLite takes at most 999 parameters.
BATCH = 500
_NEWER = "a later holder has claimed this data"
_UNCLAIMED = "this data is not claimed by this lease: call lease.claim() before reading it"


def claim(lease: Lease, target: Any) -> Any:
    """Raise the fences of *target*, an instance or a queryset, and return it read again."""
    if isinstance(target, models.QuerySet):
        return _claim_rows(lease, target)
    model = type(target)
    # The base manager: a custom manager may hide the row.
    using = router.db_for_write(model, instance=target)
    mine = model._base_manager.using(using).filter(pk=target.pk)
    with transaction.atomic(using=mine.db):
        keys = [target.pk] if _shares_key(model) else _keys(mine)
        if not _pass_fences(lease, mine, keys, claims=True):
            raise _deleted(model)
        # FOR UPDATE reads the newest data, even if the transaction has an older snapshot.
        return mine.select_for_update().get()


def _claim_rows(lease: Lease, queryset: models.QuerySet[Any]) -> models.QuerySet[Any]:
    rows = queryset.using(_database(queryset))
    connection = connections[rows.db]
    is_in_transaction = not connection.get_autocommit()
    with transaction.atomic(using=rows.db):
        keys = _keys(rows)
        for batch in batches(keys, BATCH):
            _pass_fences(lease, rows, batch, claims=True)
    # By key: other rows may match by now, whose fences were not raised.
    rows.query.clear_limits()
    claimed = rows.filter(**{f"{_owner(rows.model)._meta.pk.name}__in": keys})
    if is_in_transaction and connection.vendor == "mysql":
        # As for an instance. The other servers refuse the claim if their snapshot is older.
        claimed = claimed.select_for_update()
        len(claimed)  # read now: after the transaction Django would refuse to
    return claimed


def save(lease: Lease, instance: models.Model, **kwargs: Any) -> None:
    """Save *instance* if its fence is the token of *lease*; see Lease.save()."""
    token = lease.checked_token()
    using = kwargs.get("using") or router.db_for_write(type(instance), instance=instance)
    rows: models.QuerySet[Any] = models.QuerySet(type(instance), using=using)
    key = _written_key(instance)
    with transaction.atomic(using=using):
        # This locks the row that has the fence until save() below has written.
        if key is not None and not _pass_fences(lease, rows, [key]):
            kwargs = _with_insert(instance, kwargs)
        instance.fence = token  # type: ignore[attr-defined]  # a FencedModel
        if kwargs.get("update_fields") is not None:
            kwargs = {**kwargs, "update_fields": {*kwargs["update_fields"], "fence"}}
        instance.save(**kwargs)


def update(lease: Lease, queryset: models.QuerySet[Any], values: dict[str, Any]) -> int:
    """Update the rows whose fence is the token of *lease*; see Lease.update()."""
    if "fence" in values:
        msg = "update() sets the fence to the token of the lease; do not give it fence=..."
        raise ValueError(msg)
    rows = queryset.using(_database(queryset))
    key, updated = _owner(rows.model)._meta.pk.name, 0
    with transaction.atomic(using=rows.db):
        for keys in batches(_keys(rows), BATCH):
            _pass_fences(lease, rows, keys)
            # Filter again: only now can no other holder change these rows.
            updated += rows.filter(**{f"{key}__in": keys}).update(**values)
    return updated


def fenced(model: type[models.Model], using: str) -> models.QuerySet[Any]:
    """Return the rows that have the fences of *model*, except those that were never claimed."""
    return models.QuerySet(_owner(model), using=using).exclude(fence=0)


def _pass_fences(
    lease: Lease, rows: models.QuerySet[Any], keys: Sequence[Any], *, claims: bool = False
) -> int:
    """Write our token into the fences with these keys, and return the number of them.

    Raise StaleFencingToken if one has another token or, for a claim, a later one.
    One statement compares and writes, on the table that has the fence. Django itself would first
    read the keys, and then update a column of a parent model without comparing.
    """
    token = lease.checked_token()
    owned: models.QuerySet[Any] = models.QuerySet(_owner(rows.model), using=rows.db)
    fences = owned.filter(pk__in=keys)
    ours = fences.filter(fence__lte=token) if claims else fences.filter(fence=token)
    passed = ours.update(fence=token)
    if passed < len(keys):  # the others have another fence, or were deleted
        fence = fences.exclude(fence=token).aggregate(highest=models.Max("fence"))["highest"]
        if fence is not None:
            problem = _NEWER if fence > token else _UNCLAIMED
            raise StaleFencingToken(lease.name, token, problem, fence)
    return passed


def _owner(model: type[models.Model]) -> type[Any]:
    """Return the model whose table has the fence: *model* or one of its parents."""
    owner: type[Any] = model._meta.get_field("fence").model
    return owner


def _shares_key(model: type[models.Model]) -> bool:
    """Return whether the row of *model* and the row with the fence have the same key."""
    path = model._meta.get_path_to_parent(_owner(model))
    return all(step.join_field.primary_key for step in path)


def _keys(rows: models.QuerySet[Any]) -> list[Any]:
    """Return the keys of the rows with the fences of *rows*, without duplicates."""
    keys = rows.values_list(_owner(rows.model)._meta.pk.name, flat=True)
    keys.query.select_for_update = False  # outer joins cannot be locked
    return list(dict.fromkeys(keys))


def _written_key(instance: models.Model) -> Any:
    """Return the key by which save() writes the row with the fence; None if it has none yet."""
    owner = _owner(type(instance))
    key = getattr(instance, owner._meta.pk.attname)
    meta: Any = instance._meta
    link = meta.concrete_model._meta.parents.get(owner)
    return getattr(instance, link.attname) if key is None and link else key


def _with_insert(instance: models.Model, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Make save() insert a row, so that it does not overwrite one that somebody else has just made."""
    forced = kwargs.get("force_insert")
    if not (forced or instance._state.adding):
        raise _deleted(type(instance))
    if kwargs.get("force_update") or kwargs.get("update_fields") is not None:
        return kwargs  # it inserts nothing
    bases = forced if isinstance(forced, tuple) else ()
    return {**kwargs, "force_insert": (*bases, _owner(type(instance)))}


def _deleted(model: Any) -> Exception:
    problem: Exception = model.DoesNotExist(f"No {model.__name__} row to protect: it was deleted.")
    return problem


def _database(queryset: models.QuerySet[Any]) -> str:
    # A queryset without using() might read from a replica.
    return queryset._db or router.db_for_write(queryset.model)  # type: ignore[attr-defined]
