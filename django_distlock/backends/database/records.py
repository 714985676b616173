"""Locks as operators see them: rows for the admin, and what the backend tells on a cursor of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.models import (
    Case,
    CharField,
    Count,
    IntegerField,
    OuterRef,
    Subquery,
    TextChoices,
    Value,
    When,
)
from django.db.models.functions import Coalesce, Now
from django.utils.translation import gettext_lazy as _

from django_distlock.engine.holder import Holder
from django_distlock.engine.naming import shown
from django_distlock.engine.values import Held, digest

from .engine import COUNTER, LOCK, WAITER
from .portable import short_transaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.utils import CursorWrapper
    from django.db.models import QuerySet

    from django_distlock.models import LockWaiter, MethodLock

_COLUMNS = (
    "method_name",
    "description",
    "holder",
    "owner",
    "fencing_token",
    "expires_at",
    "server_now",
)
_CLEAR_OWNER = f"""
UPDATE {LOCK} SET owner = NULL, holder = NULL, fencing_token = fencing_token + 1,
    available_at = {{now}}, updated_at = {{now}}
WHERE method_name = %(key)s AND owner = %(owner)s"""
_RING_NEXT = f"""
SELECT pg_notify(channel, ticket::text) FROM {WAITER}
WHERE method_name = %(key)s AND expires_at > clock_timestamp() AND channel <> '' ORDER BY ticket LIMIT 1"""


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
    found = rows(cursor.db.alias).filter(owner__isnull=False, **one).order_by("expires_at")
    values = found.values_list(*_COLUMNS)
    # By its alias, Django would run it on the application's connection.
    compiler = values.query.get_compiler(connection=cursor.db)
    return [_as_held(*row) for row in compiler.results_iter() if is_mine(row[0])]


def as_held(row: MethodLock) -> Held:
    """Return a row of rows() that has an owner, for people."""
    return _as_held(*(getattr(row, column) for column in _COLUMNS))


def _as_held(  # noqa: PLR0917 - as _COLUMNS
    key: str, name: str, holder: str | None, owner: str, token: int, expires: Any, now: Any
) -> Held:
    left = (expires - now).total_seconds()
    return Held(shown(name), key, Holder.from_json(holder), left, token, digest(owner))


def holder_of(row: MethodLock) -> Holder | None:
    """Return who holds the lock, for people; None where the row does not tell in words we know."""
    return Holder.from_json(row.holder)


def is_holding(row: MethodLock, owner_digest: str) -> bool:
    """Return whether *row* is the holding that *owner_digest* names."""
    return row.owner is not None and digest(row.owner) == owner_digest


def force_release(cursor: CursorWrapper, key: str, owner_digest: str) -> bool:
    """Free the lock if it is still the holding that *owner_digest* names; tell whether it was."""
    cursor.execute(f"SELECT owner FROM {LOCK} WHERE method_name = %(key)s", {"key": key})
    row = cursor.fetchone()
    if row is None or row[0] is None or digest(row[0]) != owner_digest:
        return False
    with short_transaction(cursor):
        return free(cursor, key, row[0])


def free(cursor: CursorWrapper, key: str, owner: str | None) -> bool:
    """In a transaction, free the lock if it is still what *owner* holds; tell whether it was.

    The token is raised: what the old holder guards or has claimed refuses it from here on.
    """
    known = {"key": key, "owner": owner}
    # A write comes first: a transaction of SQLite that has read may not be let write any more.
    cursor.execute(_CLEAR_OWNER.format(now=clock(cursor)), known)
    is_freed: bool = cursor.rowcount == 1
    if is_freed:
        raise_counter(cursor, known)
        if cursor.db.vendor == "postgresql":
            # As a release does; waiters on other servers look again by themselves.
            cursor.execute(_RING_NEXT, known)
    return is_freed


def clock(cursor: CursorWrapper) -> str:
    """Return what the server knows its time by, as it is compared with lease rows."""
    from django_distlock.models import MethodLock

    compiler = MethodLock.objects.all().query.get_compiler(connection=cursor.db)
    text: str = compiler.compile(ServerNow())[0]
    return text


def raise_counter(cursor: CursorWrapper, known: dict[str, Any]) -> None:
    """Raise the token where guard() looks for it; if guard() holds it now, the next acquire will."""
    cursor.execute(
        f"SELECT id FROM {COUNTER} WHERE method_name = %(key)s{for_update(cursor)}", known
    )
    if cursor.fetchone() is not None:
        cursor.execute(f"UPDATE {COUNTER} SET value = value + 1 WHERE method_name = %(key)s", known)


def for_update(cursor: CursorWrapper) -> str:
    """Return what locks the selected rows, those that are locked already left out where it can be."""
    features = cursor.db.features
    if not features.has_select_for_update:
        return ""
    skips = features.has_select_for_update_skip_locked
    return f" {cursor.db.ops.for_update_sql(skip_locked=skips)}"


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
