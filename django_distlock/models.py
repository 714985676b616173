"""The tables of the database backend, and the base class for models with fenced data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models
from django.db.models.sql import UpdateQuery
from django.utils import timezone
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _

from .exceptions import LockNotHeld
from .ground.naming import printable, shown
from .ground.objects import CLAIM, object_name

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

#: Characters of a name where there is little space.
LONGEST_SHOWN = 60
#: The positional arguments of Model.save(), which Django 6.0 has no more, and of Model.delete().
_SAVE = "force_insert", "force_update", "using", "update_fields"
_DELETE = "using", "keep_parents"


class MethodLock(models.Model):
    """A lock that is held or was held before; a release only clears the owner of the row."""

    method_name = models.CharField(
        _("method name"),
        max_length=255,
        unique=True,
        help_text=_(
            "The key of the lock on the server: kind, prefix and name, or a digest of them."
        ),
    )
    description = models.TextField(_("name"), blank=True)
    owner = models.CharField(max_length=64, null=True, editable=False)  # noqa: DJ001 - null: free
    # Not a JSONField: with a blob, MariaDB's UPDATE of two tables uses a temporary table on disk.
    holder = models.CharField(_("holder"), max_length=1000, null=True, editable=False)  # noqa: DJ001 - as owner
    fencing_token = models.BigIntegerField(_("fencing token"), default=0, editable=False)
    acquired_at = models.DateTimeField(_("acquired at"), null=True, editable=False)
    expires_at = models.DateTimeField(_("expires at"), null=True, editable=False)
    available_at = models.DateTimeField(
        _("available at"),
        default=timezone.now,
        editable=False,
        help_text=_("The time from which somebody else can acquire it."),
    )
    last_owner = models.CharField(max_length=64, null=True, editable=False)  # noqa: DJ001 - as owner
    updated_at = models.DateTimeField(_("updated at"), default=timezone.now, editable=False)

    class Meta:
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        default_permissions = ("view", "delete")
        permissions: ClassVar = [
            ("force_release_methodlock", "Can force the release of a lock"),
            ("take_over_methodlock", "Can take over what somebody else edits"),
        ]

    def __str__(self) -> str:
        return Truncator(printable(self.name or self.method_name)).chars(LONGEST_SHOWN)

    @property
    def name(self) -> str:
        """The name of the lock; the column stores it in ASCII."""
        return shown(self.description)


class HeldLock(MethodLock):
    """A held lock of any alias, for the admin's page. This proxy has no table."""

    class Meta:
        proxy = True
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        # The permissions of MethodLock apply.
        default_permissions = ()


class FencingCounter(models.Model):
    """The last fencing token of a lock. Renewals and releases do not write it, so guard() can lock it.

    Each reader of a row lock or advisory lock has its own row while it holds the lock.
    """

    method_name = models.CharField(max_length=255, unique=True)
    value = models.BigIntegerField(default=0)
    holder = models.CharField(max_length=1000, null=True)  # noqa: DJ001 - null: not held yet

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{printable(self.method_name)}: {self.value}"


class LockWaiter(models.Model):
    """A position in the queue for a lock, valid until *expires_at*; each try of its waiter renews it."""

    ticket = models.BigAutoField(primary_key=True)
    method_name = models.CharField(max_length=255)
    owner = models.CharField(max_length=64, unique=True)
    channel = models.CharField(max_length=63, blank=True)
    expires_at = models.DateTimeField()

    class Meta:
        default_permissions = ()
        indexes: ClassVar = [
            models.Index(fields=["method_name", "ticket"], name="distlock_waiter_queue")
        ]

    def __str__(self) -> str:
        return f"{printable(self.method_name)}: {self.ticket}"


class FenceField(models.BigIntegerField):  # type: ignore[type-arg]  # generic in the stubs alone
    """The column of a fence: no UPDATE lowers the fence, and save() leaves it unchanged.

    Migrations use the same field, so it protects rows from historical models, too.
    """

    is_fence = True

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        return super().pre_save(model_instance, add) if add else 0

    def get_placeholder(
        self, value: object, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> str:
        query: Any = compiler.query
        if fields := getattr(query, "update_fields", ()):
            # bulk_create() may update existing rows: their fences stay.
            query.update_fields = [field for field in fields if field is not self]
            if not query.update_fields:
                msg = f"bulk_create() would only update {self.name!r}, which keeps its value: use ignore_conflicts=True."
                raise ValueError(msg)
        if not isinstance(query, UpdateQuery) or isinstance(value, Lowered):
            return "%s"
        highest = "MAX" if connection.vendor == "sqlite" else "GREATEST"
        return f"{highest}({connection.ops.quote_name(str(self.column))}, %s)"

    def get_placeholder_sql(
        self, value: Any, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, Any]:
        """Do what get_placeholder() does, for Django 6.1."""
        sql, params = compiler.compile(value) if hasattr(value, "as_sql") else ("%s", [value])
        return self.get_placeholder(value, compiler, connection) % sql, params


class Lowered(models.Value):
    """A value that is written into a FenceField even if it lowers the fence."""


class FencedModel(models.Model):  # noqa: DJ008 - abstract, below
    """Base class for models whose rows must refuse late writers.

    ``lease.claim(row)`` returns the reloaded row; its ``save()`` and ``delete()`` then raise StaleFencingToken
    if a later holder has claimed the row. A row that was not claimed is saved as usual, but its fence stays.
    """

    #: If True, save() of a row that is neither new nor claimed raises LockNotHeld.
    must_be_claimed: ClassVar[bool] = False

    # db_default: servers that still run the release before insert rows without it.
    fence = FenceField(default=0, db_default=0, editable=False)

    # Hidden from type checkers: pyright refuses the Meta of a subclass that does not inherit this one.
    if not TYPE_CHECKING:

        class Meta:
            abstract = True

        def save(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= dict(zip(_SAVE, args, strict=False))
            claim = self.__dict__.get(CLAIM)
            if claim is not None and not claim.is_passed:
                claim.save(self, super().save, **kwargs)
                return
            if self.must_be_claimed and claim is None and not self._state.adding:
                problem = "its row must be claimed before it is saved, by locked() or lease.claim()"
                raise LockNotHeld(object_name(self), problem)
            super().save(**kwargs)

        def __getstate__(self) -> dict[str, Any]:
            """Return what a copy or a pickle has: also during save(), as in a receiver of post_save, the whole claim."""
            state: dict[str, Any] = super().__getstate__()
            if claim := state.get(CLAIM):
                state[CLAIM] = claim.kept()
            return state

        def refresh_from_db(
            self, using: str | None = None, fields: Any = None, from_queryset: Any = None
        ) -> None:
            """Reload a claimed row from the database of its claim: a replica may not have the row yet."""
            if using is None and CLAIM in self.__dict__:
                using = self._state.db
            more = {} if from_queryset is None else {"from_queryset": from_queryset}
            super().refresh_from_db(using=using, fields=fields, **more)

        def delete(self, *args: Any, **kwargs: Any) -> Any:
            kwargs |= dict(zip(_DELETE, args, strict=False))
            claim = self.__dict__.get(CLAIM)
            if claim is not None and not claim.is_passed:
                return claim.delete(self, super().delete, **kwargs)
            return super().delete(**kwargs)
