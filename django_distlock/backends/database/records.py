"""Locks as operators see them: queries of the ORM, on own connections or on the application's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
from django.db.models.sql import UpdateQuery
from django.db.models.sql.constants import ROW_COUNT
from django.utils.translation import gettext_lazy as _

from django_distlock.holder import Holder
from django_distlock.naming import shown
from django_distlock.protocol import Held, digest

from .portable import short_transaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.utils import CursorWrapper
    from django.db.models import QuerySet
    from django.db.models.sql.compiler import SQLCompiler

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


def held(
    cursor: CursorWrapper, is_mine: Callable[[str], bool], key: str | None = None
) -> list[Held]:
    """Return the locks that have an owner, those that end first at the front; with *key*, that one."""
    one = {} if key is None else {"method_name": key}
    owned = rows(cursor.db.alias).filter(owner__isnull=False, **one).order_by("expires_at")
    return [as_held(row) for row in _read(cursor, owned) if is_mine(row.method_name)]


def holder_of(row: MethodLock | _Row) -> Holder | None:
    """Return who holds the lock, for people; None where the row does not tell in words we know."""
    return Holder.from_json(row.holder)


def is_holding(row: MethodLock | _Row, owner_digest: str) -> bool:
    """Return whether *row* is the holding that *owner_digest* names."""
    return row.owner is not None and digest(row.owner) == owner_digest


def force_release(cursor: CursorWrapper, key: str, owner_digest: str) -> bool:
    """Free the lock if it is still the holding that *owner_digest* names; tell whether it was."""
    for row in _read(cursor, rows(cursor.db.alias).filter(method_name=key)):
        if is_holding(row, owner_digest):
            with short_transaction(cursor):
                return _free(cursor, row)
    return False


def free(using: str, row: MethodLock) -> bool:
    """Free *row*, in the caller's transaction if there is one, if it is still the holding that was read."""
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        return _free(cursor, row)


def _free(cursor: CursorWrapper, row: MethodLock | _Row) -> bool:
    """Free *row* if it is still the holding that was read; tell whether it was.

    The token is raised: what the old holder guards or has claimed refuses it from here on.
    """
    # A write comes first: a transaction of SQLite that has read may not be let write any more.
    is_freed = _clear_owner(cursor, row)
    if is_freed:
        _raise_counter(cursor, row.method_name)
        _ring_next(cursor, row.method_name)
    return is_freed


def _clear_owner(cursor: CursorWrapper, row: MethodLock | _Row) -> bool:
    from django_distlock.models import MethodLock

    still = MethodLock.objects.filter(pk=row.pk, owner=row.owner, owner__isnull=False)
    cleared = {
        "owner": None,
        "holder": None,
        "fencing_token": F("fencing_token") + 1,
        "available_at": ServerNow(),
        "updated_at": ServerNow(),
    }
    return _write(cursor, still, cleared) > 0


def _raise_counter(cursor: CursorWrapper, key: str) -> None:
    """Raise the token where guard() looks for it; if guard() holds it now, the next acquire will."""
    from django_distlock.models import FencingCounter

    skips = cursor.db.features.has_select_for_update_skip_locked
    counters = FencingCounter.objects.filter(method_name=key)
    locked = counters.select_for_update(skip_locked=skips).values_list("pk")
    for (pk,) in _compiled(cursor, locked).results_iter():
        _write(cursor, counters.filter(pk=pk), {"value": F("value") + 1})


def _ring_next(cursor: CursorWrapper, key: str) -> None:
    """Wake the first waiter as a release does; those of other servers look again by themselves."""
    if cursor.db.vendor != "postgresql":
        return
    line = _live_waiters(cursor.db.alias).filter(method_name=key).exclude(channel="")
    first = line.order_by("ticket").values_list("channel", "ticket")[:1]
    for channel, ticket in list(_compiled(cursor, first).results_iter()):
        cursor.execute("SELECT pg_notify(%s, %s)", [channel, str(ticket)])


class _Row(NamedTuple):
    """What is read of a lock row."""

    pk: int
    method_name: str
    description: str
    owner: str | None
    holder: str | None
    fencing_token: int
    expires_at: Any
    server_now: Any


def _read(cursor: CursorWrapper, found: QuerySet[MethodLock]) -> list[_Row]:
    compiled = _compiled(cursor, found.values_list(*_Row._fields))
    return [_Row(*row) for row in compiled.results_iter()]


def _write(cursor: CursorWrapper, found: QuerySet[Any], values: dict[str, Any]) -> int:
    query: Any = found.query.chain(UpdateQuery)
    query.add_update_values(values)
    written: int = query.get_compiler(connection=cursor.db).execute_sql(ROW_COUNT)
    return written


def _compiled(cursor: CursorWrapper, found: QuerySet[Any, Any]) -> SQLCompiler:
    # By its alias, Django would run it on the application's connection.
    compiler: SQLCompiler = found.query.get_compiler(connection=cursor.db)
    return compiler


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


def as_held(row: Any) -> Held:
    """Return a row of rows() that has an owner, for people."""
    return Held(
        name=shown(row.description),
        key=row.method_name,
        holder=holder_of(row),
        remaining=(row.expires_at - row.server_now).total_seconds(),
        token=row.fencing_token,
        owner_digest=digest(row.owner),
    )
