"""Fenced data: rows that refuse a writer whose fencing token is not the newest.

The fence must be raised before the first read. With a fenced write alone, the new holder can
read, the old one can write after that, and the new one then overwrites it.
"""

# ruff: noqa: SLF001 - Django documents _meta, _state and _base_manager

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.db import connections, models, router, transaction
from django.db.models.query import (
    FlatValuesListIterable,
    ModelIterable,
    ValuesIterable,
    ValuesListIterable,
)

from django_distlock.exceptions import StaleFencingToken
from django_distlock.ground.objects import CLAIM

from .values import batches

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from .holding import Holding

_T = TypeVar("_T")
#: Rows in one statement: older SQLite takes at most 999 parameters.
BATCH = 500
_NEWER = "a later holder has claimed this data"
_UNCLAIMED = "this data is not claimed by this lease: call lease.claim() before reading it"
#: The iterables of values() and values_list().
_VALUES = ValuesIterable, ValuesListIterable, FlatValuesListIterable


@dataclass(frozen=True, slots=True)
class Claim:
    """The lock and the token by which an instance was claimed: its save() and delete() compare the fence."""

    #: Whether the instance is being saved now, so that its fence was compared.
    is_passed: ClassVar[bool] = False

    name: str
    token: int

    def kept(self) -> Claim:
        """Return the claim for a copy of the instance."""
        return Claim(self.name, self.token)

    @classmethod
    def of(cls, lease: Holding) -> Claim:
        return cls(lease.name, lease.checked_token())

    def mark(self, row: _T) -> _T:
        """Note this claim on the instance *row*, and return that; StaleFencingToken if the row was not claimed."""
        if _fence(type(row)) is None:
            msg = f"A claimed queryset cannot protect a {type(row).__name__}: it has no fence."
            raise TypeError(msg)
        fence = row.__dict__.get("fence", self.token)
        if fence < self.token:
            raise StaleFencingToken(self.name, self.token, _UNCLAIMED, fence)
        row.__dict__[CLAIM] = self
        return row

    def save(self, instance: models.Model, write: Callable[..., object], **kwargs: Any) -> None:
        """Call *write*, which saves *instance*, if its fence is our token."""
        rows, key = _rows_for(instance, **kwargs), _written_key(instance)
        with transaction.atomic(using=rows.db):
            # The row with the fence stays locked until it is written.
            if key is not None and not _pass_fences(self, rows, [key]):
                kwargs = _with_insert(instance, kwargs)
            instance.fence = self.token  # type: ignore[attr-defined]  # a FencedModel
            setattr(instance, CLAIM, _Passed(self.name, self.token))
            try:
                write(**kwargs)
            finally:
                setattr(instance, CLAIM, self)

    def delete(self, instance: models.Model, delete: Callable[..., _T], **kwargs: Any) -> _T:
        """Call *delete*, which deletes *instance*, if its fence is our token."""
        rows = _rows_for(instance, **kwargs)
        with transaction.atomic(using=rows.db):
            _pass_fences(self, rows, [_written_key(instance)])
            return delete(**kwargs)


class _Passed(Claim):
    is_passed = True


def claim(lease: Holding, target: Any) -> Any:
    """Raise the fences of *target*, an instance or a queryset, and return it reloaded."""
    mine = Claim.of(lease)
    if isinstance(target, models.QuerySet):
        return _claim_rows(mine, target)
    if not isinstance(target, models.Model):
        msg = f"claim() takes a saved instance or a queryset, not {type(target).__name__}."
        raise TypeError(msg)
    with _claimed_row(target, mine) as row:
        return mine.mark(row.get())


def read_again(lease: Holding, instance: models.Model) -> None:
    """Reload all fields of *instance*; if its model has a fence and the lease is exclusive, claim it, too."""
    claims = _fence(instance._meta.model) is not None and not lease.request.shared
    mine = Claim.of(lease) if claims else None
    with _claimed_row(instance, mine) as row:
        _read(instance, row)
    if mine is not None:
        setattr(instance, CLAIM, mine)


@contextmanager
def _claimed_row(instance: models.Model, claim: Claim | None) -> Iterator[models.QuerySet[Any]]:
    """Yield the row of *instance* in a transaction, which has raised the row's fence if there is a *claim*."""
    # Not type(instance): a lazy object, such as request.user, has another type.
    model = instance._meta.model
    # Not by a manager, which may hide the row, or join tables that cannot be locked.
    rows: models.QuerySet[Any] = models.QuerySet(model, using=written_database(instance))
    mine = rows.filter(pk=instance.pk)
    if claim is not None:
        _check_can_protect(model, rows.db)
    with transaction.atomic(using=rows.db):
        if claim is not None:
            keys = [instance.pk] if _shares_key(model) else _keys(mine)
            if not _pass_fences(claim, mine, keys, claims=True):
                raise _deleted(model, instance.pk)
        # FOR UPDATE reads the newest data, even if the transaction has an older snapshot.
        yield mine.select_for_update()


def _read(instance: models.Model, rows: models.QuerySet[Any]) -> None:
    """Reload all columns of *instance* from *rows*, also deferred ones."""
    deferred = instance.get_deferred_fields()
    read: Any = instance.refresh_from_db
    if "from_queryset" not in signature(read).parameters:  # a method from before Django 5.1
        read(using=rows.db)
        read = partial(models.Model.refresh_from_db, instance)
    read(using=rows.db, from_queryset=rows)
    if deferred:
        read(using=rows.db, fields=deferred, from_queryset=rows)


class _Claimed(models.QuerySet[Any]):
    """A claimed queryset: its instances remember the claim, with any iterable class.

    Of ``left & right``, Python first calls the method of *right*, if its class is a subclass of *left*'s.
    """

    #: The class of the original queryset, and the claim.
    _distlock: ClassVar[tuple[type[Any], Claim]]

    def __rand__(self, other: Any) -> Any:
        return _as_claimed(other.__and__(self), self._distlock[1])

    def __ror__(self, other: Any) -> Any:
        return _as_claimed(other.__or__(self), self._distlock[1])

    def __rxor__(self, other: Any) -> Any:
        return _as_claimed(other.__xor__(self), self._distlock[1])

    def __reduce__(self) -> Any:
        return _empty, self._distlock, self.__getstate__()

    def _fetch_all(self) -> None:
        is_new = self._result_cache is None
        super()._fetch_all()
        if is_new:
            rows, self._result_cache = self._result_cache, None
            self._result_cache = [*map(self._marked, rows or ())]

    def _iterator(self, *args: Any) -> Iterator[Any]:
        return map(self._marked, super()._iterator(*args))  # type: ignore[misc]  # not in the stubs

    async def aiterator(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for row in super().aiterator(*args, **kwargs):
            yield self._marked(row)

    def _marked(self, row: Any) -> Any:
        return row if issubclass(self._iterable_class, _VALUES) else self._distlock[1].mark(row)


def _empty(kind: type[Any], claim: Claim) -> Any:
    claimed: Any = type(kind.__name__, (_Claimed, kind), {"_distlock": (kind, claim)})
    return claimed.__new__(claimed)


def _as_claimed(queryset: Any, claim: Claim) -> Any:
    kind = queryset._distlock[0] if isinstance(queryset, _Claimed) else queryset.__class__
    claimed = _empty(kind, claim)
    claimed.__dict__.update(queryset.__dict__)
    return claimed


def _claim_rows(claim: Claim, queryset: models.QuerySet[Any]) -> models.QuerySet[Any]:
    rows = queryset.using(_database(queryset))
    if rows.query.where.contains_over_clause:
        raise ValueError(
            "claim() selects the claimed rows again, and a filter on a window function would then select others: "
            "claim Model.objects.filter(pk__in=[...]), with the keys of these rows."
        )
    _check_can_protect(rows.model, rows.db)
    connection: Any = connections[rows.db]
    is_in_transaction = not connection.get_autocommit()
    with transaction.atomic(using=rows.db):
        keys = _keys(rows)
        for batch in batches(keys, BATCH):
            _pass_fences(claim, rows, batch, claims=True)
    # Select by key: other rows, whose fences were not raised, may match by now.
    rows.query.clear_limits()
    rows.query.clear_deferred_loading()  # a column that is read later may be a later holder's
    # Without a transaction, Django would refuse to read rows with select_for_update().
    rows.query.select_for_update &= is_in_transaction
    claimed: models.QuerySet[Any] = _as_claimed(
        rows.filter(**{f"{_owner(rows.model)._meta.pk.name}__in": keys}), claim
    )
    if (
        is_in_transaction
        and connection.vendor == "mysql"
        and connection.isolation_level != "read committed"
    ):
        # FOR UPDATE, as for an instance. Other servers refuse the claim if the snapshot is older.
        claimed = claimed.select_for_update()
        for row in claimed:  # read now: after the transaction Django would refuse to read
            if rows._iterable_class is not ModelIterable and isinstance(row, models.Model):
                # A custom iterable may have read columns by separate statements.
                _read(row, models.QuerySet(type(row), using=rows.db).select_for_update())
    return claimed


def save(lease: Holding, instance: models.Model, **kwargs: Any) -> None:
    """Save *instance* if its fence is the token of *lease*; see Lease.save()."""
    Claim.of(lease).save(instance, instance.save, **kwargs)


def update(lease: Holding, queryset: models.QuerySet[Any], values: dict[str, Any]) -> int:
    """Update the rows whose fence is the token of *lease*; see Lease.update()."""
    if "fence" in values:
        msg = "update() sets the fence to the token of the lease; do not give it fence=..."
        raise ValueError(msg)
    rows = queryset.using(_database(queryset))
    key, updated = _owner(rows.model)._meta.pk.name, 0
    with transaction.atomic(using=rows.db):
        for keys in batches(_keys(rows), BATCH):
            _pass_fences(Claim.of(lease), rows, keys)
            # Filter again, because other holders could change these rows until now.
            updated += rows.filter(**{f"{key}__in": keys}).update(**values)
    return updated


def fenced(model: type[models.Model], using: str) -> models.QuerySet[Any]:
    """Return the rows with the fences of *model*, except rows that were never claimed."""
    return models.QuerySet(_owner(model), using=using).exclude(fence=0)


def _pass_fences(
    claim: Claim, rows: models.QuerySet[Any], keys: Sequence[Any], *, claims: bool = False
) -> int:
    """Write our token into the fences with these keys, and return how many rows that were.

    Raise StaleFencingToken if a fence has another token or, for a claim, a later token.
    One statement compares and writes, on the table with the fence. Django itself would first
    read the keys, and then update a column of a parent model without comparing.
    """
    token = claim.token
    owned: models.QuerySet[Any] = models.QuerySet(_owner(rows.model), using=rows.db)
    fences = owned.filter(pk__in=keys)
    ours = fences.filter(fence__lte=token) if claims else fences.filter(fence=token)
    passed = ours.update(fence=token)
    if passed < len(keys):  # the other rows have another fence, or were deleted
        others = fences.exclude(fence=token).order_by()
        if connections[rows.db].vendor == "mysql":
            # At REPEATABLE READ a plain read has the transaction's snapshot, in which the fence may still be ours.
            others = others.select_for_update()
        fence = max(others.values_list("fence", flat=True), default=None)
        if fence is not None:
            problem = _NEWER if fence > token else _UNCLAIMED
            raise StaleFencingToken(claim.name, token, problem, fence)
    return passed


def _fence(model: Any) -> Any:
    """Return the FenceField of *model*; None if it has none."""
    fields = model._meta.concrete_fields if hasattr(model, "_meta") else ()
    return next((field for field in fields if getattr(field, "is_fence", False)), None)


def _owner(model: type[models.Model]) -> type[Any]:
    """Return the model whose table has the fence: *model* or one of its parents; TypeError without a fence."""
    if fence := _fence(model):
        owner: type[Any] = fence.model
        return owner
    raise TypeError(f"{model._meta.label} has no fence: let it inherit FencedModel.")


def _check_can_protect(model: type[models.Model], using: str) -> None:
    """Raise an error if a claimed row would not be protected: no fence, or neither our save() nor a transaction."""
    if not hasattr(_owner(model), "must_be_claimed") and connections[using].get_autocommit():
        msg = (
            f"This {model._meta.label} has no save() that compares the fence, as in a migration: "
            "claim it inside transaction.atomic(), in which it stays locked until it is saved."
        )
        raise transaction.TransactionManagementError(msg)


def _shares_key(model: type[models.Model]) -> bool:
    """Return True if the row of *model* and the row with the fence have the same key."""
    path = model._meta.get_path_to_parent(_owner(model))
    return all(step.join_field.primary_key for step in path)


def _keys(rows: models.QuerySet[Any]) -> list[Any]:
    """Return the keys of the rows with the fences of *rows*, without duplicates."""
    keys = rows.values_list(_owner(rows.model)._meta.pk.name, flat=True)
    keys.query.select_for_update = False  # outer joins cannot be locked
    return list(dict.fromkeys(keys))


def _rows_for(
    instance: models.Model, using: str | None = None, **_others: Any
) -> models.QuerySet[Any]:
    """Return all rows of the model in the database to which save() or delete() with these arguments writes."""
    model = instance._meta.model
    return models.QuerySet(model, using=using or written_database(instance))


def _written_key(instance: models.Model) -> Any:
    """Return the key of the row with the fence that save() will write; None if it has no key yet."""
    owner = _owner(instance._meta.model)
    key = getattr(instance, owner._meta.pk.attname)
    meta: Any = instance._meta
    link = meta.concrete_model._meta.parents.get(owner)
    return getattr(instance, link.attname) if key is None and link else key


def _with_insert(instance: models.Model, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return *kwargs* with which save() inserts a row, and does not overwrite a row that somebody else has just made."""
    forced = kwargs.get("force_insert")
    if not (forced or instance._state.adding):
        raise _deleted(instance._meta.model, instance.pk)
    if kwargs.get("force_update") or kwargs.get("update_fields") is not None:
        return kwargs  # save() inserts nothing
    bases = forced if isinstance(forced, tuple) else ()
    return {**kwargs, "force_insert": (*bases, _owner(instance._meta.model))}


def _deleted(model: Any, key: Any) -> Exception:
    problem: Exception = model.DoesNotExist(
        f"No {model.__name__} row with the key {key!r} to protect: it was deleted, or this is a copy "
        "under a new key, whose _state.adding must be True."
    )
    return problem


def written_database(instance: models.Model) -> str:
    """Return the alias of the database to which *instance* is written."""
    return router.db_for_write(instance._meta.model, instance=instance)


def _database(queryset: models.QuerySet[Any]) -> str:
    # A queryset without using() might read from a replica; the hints of a relation name its instance.
    rows: Any = queryset
    return rows._db or router.db_for_write(rows.model, **rows._hints)
