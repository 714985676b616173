"""Locks as operators see them: through the ORM and the application's own connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.models import (
    Case,
    CharField,
    Count,
    F,
    IntegerField,
    OuterRef,
    Subquery,
    TextChoices,
    Value,
    When,
)
from django.db.models.functions import Coalesce, Now
from django.utils.translation import gettext_lazy as _

from django_distlock.holder import Holder
from django_distlock.protocol import Held, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.models import QuerySet

    from django_distlock.models import LockWaiter, MethodLock


class State(TextChoices):
    """What a lock row says at this moment of the server's clock."""

    HELD = "held", _("held")
    STALE = "stale", _("stale")
    RESERVED = "reserved", _("held until min_hold")
    FREE = "free", _("free")


class ServerNow(Now):
    """The time of the server when it is read, in the form that lease rows are written in."""

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Not the statement's begin: it may have waited."""
        return self.as_sql(compiler, connection, template="CLOCK_TIMESTAMP()", **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """UTC, whatever the zone of this connection."""
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)


def rows(using: str) -> QuerySet[MethodLock]:
    """Return the lock rows, each with the server's time as *server_now*."""
    from django_distlock.models import MethodLock

    return MethodLock.objects.using(using).annotate(server_now=ServerNow())


def described(using: str) -> QuerySet[MethodLock]:
    """Return rows(), each with its *state* and the number of its live *waiters*."""
    return rows(using).annotate(state=_state(), waiters=_waiters(using))


def held(using: str, is_mine: Callable[[str], bool]) -> Iterator[Held]:
    """Yield the locks that have an owner, those that end first at the front."""
    for row in rows(using).filter(owner__isnull=False).order_by("expires_at").iterator():
        if is_mine(row.method_name):
            yield _as_held(row)


def holder_of(row: MethodLock) -> Holder | None:
    """Return who holds the lock, for people; None where the row does not tell in words we know."""
    return Holder.from_json(row.holder)


def is_holding(row: MethodLock, owner_digest: str) -> bool:
    """Return whether *row* is the holding that *owner_digest* names."""
    return row.owner is not None and digest(row.owner) == owner_digest


def force_release(using: str, key: str, owner_digest: str) -> bool:
    """Free the lock if it is still the holding that *owner_digest* names; tell whether it was."""
    row = rows(using).filter(method_name=key).first()
    return row is not None and is_holding(row, owner_digest) and free(using, row)


def free(using: str, row: MethodLock) -> bool:
    """Free *row* if it is still the holding that was read; tell whether it was.

    The token is raised: what the old holder guards or has claimed refuses it from here on.
    """
    with transaction.atomic(using=using):
        # A write comes first: a transaction of SQLite that has read may not be let write any more.
        is_freed = _clear_owner(using, row)
        if is_freed:
            _raise_counter(using, row.method_name)
            _ring_next(using, row.method_name)
    return is_freed


def _clear_owner(using: str, row: MethodLock) -> bool:
    still = rows(using).filter(pk=row.pk, owner=row.owner, owner__isnull=False)
    return bool(
        still.update(
            owner=None,
            holder=None,
            fencing_token=F("fencing_token") + 1,
            available_at=ServerNow(),
            updated_at=ServerNow(),
        )
    )


def _raise_counter(using: str, key: str) -> None:
    """Raise the token where guard() looks for it; if guard() holds it now, the next acquire will."""
    from django_distlock.models import FencingCounter

    skips = connections[using].features.has_select_for_update_skip_locked
    counters = FencingCounter.objects.using(using).filter(method_name=key)
    for counter in counters.select_for_update(skip_locked=skips):
        counters.filter(pk=counter.pk).update(value=F("value") + 1)


def _ring_next(using: str, key: str) -> None:
    """Wake the first waiter as a release does; those of other servers look again by themselves."""
    if connections[using].vendor != "postgresql":
        return
    line = _live_waiters(using).filter(method_name=key).exclude(channel="").order_by("ticket")
    for waiter in line[:1]:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [waiter.channel, str(waiter.ticket)])


def _state() -> Case:
    return Case(
        When(owner__isnull=False, expires_at__gt=ServerNow(), then=Value(State.HELD)),
        When(owner__isnull=False, then=Value(State.STALE)),
        When(available_at__gt=ServerNow(), then=Value(State.RESERVED)),
        default=Value(State.FREE),
        output_field=CharField(),
    )


def _waiters(using: str) -> Coalesce:
    line = _live_waiters(using).filter(method_name=OuterRef("method_name")).order_by()
    numbers = line.values("method_name").annotate(number=Count("*")).values("number")
    return Coalesce(Subquery(numbers), 0, output_field=IntegerField())


def _live_waiters(using: str) -> QuerySet[LockWaiter]:
    from django_distlock.models import LockWaiter

    return LockWaiter.objects.using(using).filter(expires_at__gt=ServerNow())


def _as_held(row: Any) -> Held:
    return Held(
        name=row.description,
        key=row.method_name,
        holder=holder_of(row),
        remaining=(row.expires_at - row.server_now).total_seconds(),
        token=row.fencing_token,
        owner_digest=digest(row.owner),
    )
