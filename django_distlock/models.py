"""The tables of the database backend, and the model that fenced data inherits."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils import timezone
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _

from .engine.naming import printable, shown

#: Characters of a name where there is little place.
LONGEST_SHOWN = 60


class MethodLock(models.Model):
    """A lock that somebody holds or has held; the row stays at release, with no owner."""

    method_name = models.CharField(
        _("method name"),
        max_length=255,
        unique=True,
        help_text=_(
            "What the server knows the lock by: kind, prefix and name, or a digest of them."
        ),
    )
    description = models.TextField(_("name"), blank=True)
    owner = models.CharField(max_length=64, null=True, editable=False)  # noqa: DJ001 - null: free
    # Text and no JSONField: with a blob, MariaDB's UPDATE of two tables goes over the disk.
    holder = models.CharField(_("holder"), max_length=1000, null=True, editable=False)  # noqa: DJ001 - as owner
    fencing_token = models.BigIntegerField(_("fencing token"), default=0, editable=False)
    acquired_at = models.DateTimeField(_("acquired at"), null=True, editable=False)
    expires_at = models.DateTimeField(_("expires at"), null=True, editable=False)
    available_at = models.DateTimeField(
        _("available at"),
        default=timezone.now,
        editable=False,
        help_text=_("From when on somebody else may have it."),
    )
    last_owner = models.CharField(max_length=64, null=True, editable=False)  # noqa: DJ001 - as owner
    updated_at = models.DateTimeField(_("updated at"), default=timezone.now, editable=False)

    class Meta:
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        default_permissions = ("view", "delete")
        permissions: ClassVar = [("force_release_methodlock", "Can force the release of a lock")]

    def __str__(self) -> str:
        return Truncator(printable(self.name or self.method_name)).chars(LONGEST_SHOWN)

    @property
    def name(self) -> str:
        """The name of the lock, which the column keeps in ASCII."""
        return shown(self.description)


class FencingCounter(models.Model):
    """The last fencing token of a lock. Acquire alone writes it, so guard() can hold it still.

    Of locks that several readers hold by sessions, each reader has one of its own meanwhile.
    """

    method_name = models.CharField(max_length=255, unique=True)
    value = models.BigIntegerField(default=0)
    holder = models.CharField(max_length=1000, null=True)  # noqa: DJ001 - null: not held yet

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{printable(self.method_name)}: {self.value}"


class LockWaiter(models.Model):
    """A place in the queue for a lock; it counts until *expires_at*, each look renews it."""

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


class FencedModel(models.Model):
    """Inherit this in a model whose rows must refuse late writers.

    Use ``lease.claim(row)``, which gives the row read fresh, then ``lease.save(row)``.
    """

    fence = models.BigIntegerField(default=0, editable=False)

    class Meta:
        abstract = True
