"""Locks for operators: listing and forced release on the backend's own cursor."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db.models import (
    Count,
    ExpressionWrapper,
    F,
    Field,
    IntegerField,
    OuterRef,
    Q,
    Subquery,
    Value,
)
from django.db.models.functions import Coalesce, Now

from django_distlock.backends.base import MOST_FREE
from django_distlock.engine.values import Held, digest, digest_of_reservation
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import lock_of, shown

from .dialect import COUNTER, LOCK, short_transaction
from .postgresql import AFTER_FORCED_RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.backends.utils import CursorWrapper
    from django.db.models import QuerySet

    from django_distlock.models import MethodLock

_COLUMNS = ("method_name", "description", "holder", "owner", "fencing_token", "waiters")
_INSTANTS = ("acquired_at", "expires_at", "available_at")
_CLEAR_OWNER = f"""
UPDATE {LOCK} SET owner = NULL, holder = NULL, fencing_token = fencing_token + 1,
    available_at = {{now}}, updated_at = {{now}}
WHERE method_name = %(key)s AND """
_IS_HELD = "owner = %(owner)s"
_IS_RESERVED = "fencing_token = %(token)s AND (owner IS NULL OR expires_at <= {now})"


class _Taken(NamedTuple):
    """A row that is not free, with the server's time."""

    server_now: datetime
    method_name: str
    description: str
    holder: str | None
    owner: str | None
    fencing_token: int
    waiters: int | None
    acquired_at: datetime | None
    expires_at: datetime
    available_at: datetime


class ServerNow(Now):
    """The present time of the server, in the form of lease rows."""

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Use the present time, not that of the beginning of the statement, which may have waited."""
        return self.as_sql(compiler, connection, template="CLOCK_TIMESTAMP()", **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Use UTC, not the time zone of this connection."""
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)


def rows(using: str) -> QuerySet[MethodLock]:
    """Return the lock rows, each with the server's time as *server_now*."""
    from django_distlock.models import MethodLock

    return MethodLock.objects.using(using).annotate(server_now=ServerNow())


def held(
    cursor: CursorWrapper, is_mine: Callable[[str], bool], key: str | None, has_positions: bool
) -> list[Held]:
    """Return the locks that are not free, ordered by their ends; with *key*, only that lock.

    *has_positions*: whether waiters have positions in the database, so that they can be counted.
    """
    found = _taken(cursor, key, has_positions=has_positions)
    return [as_held(row) for row in found if is_mine(row.method_name)]


def free_locks(cursor: CursorWrapper, head: str, text: str) -> list[Held]:
    """Return the free locks with *text* in their names or keys, in the order of these, at most MOST_FREE.

    *head*: what their keys have in front of the name.
    """
    # Search in the form in which the column stores names.
    stored = text if text.isascii() else json.dumps(text)[1:-1]
    has_text = Q(description__icontains=stored) | Q(method_name__icontains=stored)
    is_mine = Q(method_name__regex=rf"^{re.escape(head)}[^|]+$")
    is_free = Q(owner__isnull=True, available_at__lte=ServerNow())
    found = rows(cursor.db.alias).filter(is_free, is_mine, has_text).order_by("method_name")
    changed = ExpressionWrapper(F("updated_at"), Field())  # as in _taken()
    columns = found.values_list("method_name", "description", "fencing_token", changed)[:MOST_FREE]
    compiler, now = columns.query.get_compiler(connection=cursor.db), server_now(cursor)
    return [
        Held(shown(name), key, None, None, token, "", age=max(0.0, (now - then).total_seconds()))
        for key, name, token, then in compiler.results_iter()
    ]


def _taken(
    cursor: CursorWrapper, key: str | None, *, has_positions: bool = True
) -> Iterator[_Taken]:
    one = {} if key is None else {"method_name": key}
    is_taken = Q(owner__isnull=False) | Q(available_at__gt=ServerNow())
    waiters = _waiters(cursor.db.alias) if has_positions else Value(None, IntegerField())
    # Raw times of the driver, because Django's conversion takes long for thousands of rows.
    instants = {f"read_{name}": ExpressionWrapper(F(name), Field()) for name in _INSTANTS}
    found = rows(cursor.db.alias).filter(is_taken, **one).annotate(waiters=waiters, **instants)
    columns = found.order_by("available_at").values_list(*_COLUMNS, *instants)
    # A queryset would run on the application's connection, so its SQL is compiled for the cursor's connection.
    compiler, now = columns.query.get_compiler(connection=cursor.db), server_now(cursor)
    return (_Taken(now, *row) for row in compiler.results_iter())


def is_reserved(row: Any) -> bool:
    """Return True if min_hold reserves *row*, one of _taken(), and nobody holds it."""
    return row.owner is None or row.expires_at <= row.server_now < row.available_at


def as_held(row: Any) -> Held:
    """Return *row*, one of _taken(), as Held."""
    name, key, token = shown(row.description), row.method_name, row.fencing_token
    if is_reserved(row):
        left = (row.available_at - row.server_now).total_seconds()
        mark = digest_of_reservation(token)
        return Held(name, key, None, left, token, mark, waiters=row.waiters, reserved=True)
    left = (row.expires_at - row.server_now).total_seconds()
    age = row.acquired_at and max(0.0, (row.server_now - row.acquired_at).total_seconds())
    mark = digest(row.owner)
    holder = Holder.from_json(row.holder)
    return Held(name, key, holder, left, token, mark, waiters=row.waiters, age=age)


def force_release(cursor: CursorWrapper, key: str, owner_digest: str) -> bool:
    """Free the lock if it still has the holding with this *owner_digest*; return whether it had."""
    row = next(_taken(cursor, key), None)
    if row is None or as_held(row).owner_digest != owner_digest:
        return False
    with short_transaction(cursor):
        return free(cursor, row)


def free(cursor: CursorWrapper, row: Any) -> bool:
    """In a transaction, free the lock if it is still held or reserved as in *row*; return whether it was.

    The token is raised, so that guard() and fenced rows refuse the old holder from now on.
    """
    key = row.method_name
    known = {"key": key, "line": lock_of(key), "owner": row.owner, "token": row.fencing_token}
    is_same = _IS_RESERVED if is_reserved(row) else _IS_HELD
    # Write first: SQLite may refuse writes in a transaction that began with a read.
    cursor.execute((_CLEAR_OWNER + is_same).format(now=clock(cursor)), known)
    is_freed: bool = cursor.rowcount == 1
    if is_freed:
        raise_counter(cursor, known)
        if cursor.db.vendor == "postgresql":
            # Like a release: durable, and wakes the next waiter; on other servers, waiters look again after pauses.
            cursor.execute(AFTER_FORCED_RELEASE, known)
    return is_freed


def server_now(cursor: CursorWrapper) -> datetime:
    """Return the server's time, with a time zone if its driver returns one."""
    cursor.execute(f"SELECT {clock(cursor)}{cursor.db.features.bare_select_suffix}", {})
    (now,) = cursor.fetchone()
    return now if isinstance(now, datetime) else datetime.fromisoformat(now)


def clock(cursor: CursorWrapper) -> str:
    """Return the SQL of the server's time, in the form of lease rows."""
    from django_distlock.models import MethodLock

    compiler = MethodLock.objects.all().query.get_compiler(connection=cursor.db)
    text: str = compiler.compile(ServerNow())[0]
    return text


def raise_counter(cursor: CursorWrapper, known: dict[str, Any]) -> None:
    """Raise the token in the counter that guard() reads. If guard() has it locked, the next acquire raises it."""
    cursor.execute(
        f"SELECT id FROM {COUNTER} WHERE method_name = %(key)s{for_update(cursor)}", known
    )
    if cursor.fetchone() is not None:
        cursor.execute(f"UPDATE {COUNTER} SET value = value + 1 WHERE method_name = %(key)s", known)


def for_update(cursor: CursorWrapper) -> str:
    """Return the SQL that locks the selected rows; it skips locked rows if the server can."""
    features = cursor.db.features
    if not features.has_select_for_update:
        return ""
    skips = features.has_select_for_update_skip_locked
    return f" {cursor.db.ops.for_update_sql(skip_locked=skips)}"


def _waiters(using: str) -> Coalesce:
    from django_distlock.models import LockWaiter

    alive = LockWaiter.objects.using(using).filter(expires_at__gt=ServerNow())
    line = alive.filter(method_name=OuterRef("method_name")).order_by()
    numbers = line.values("method_name").annotate(number=Count("pk")).values("number")
    return Coalesce(Subquery(numbers), 0, output_field=IntegerField())
