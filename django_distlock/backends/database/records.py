"""Locks as operators see them: rows for the admin, and what the backend tells on a cursor of its own."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db.models import (
    Case,
    CharField,
    ExpressionWrapper,
    F,
    Field,
    IntegerField,
    OuterRef,
    Q,
    Subquery,
    Sum,
    TextChoices,
    Value,
    When,
)
from django.db.models.functions import Coalesce, Now
from django.utils.translation import gettext_lazy as _

from django_distlock.engine.holder import Holder
from django_distlock.engine.naming import shown
from django_distlock.engine.values import Held, digest, digest_of_reservation

from .engine import COUNTER, LOCK, WAITER
from .portable import short_transaction

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
_RING_NEXT = f"""
SELECT pg_notify(channel, ticket::text) FROM {WAITER}
WHERE method_name = %(key)s AND expires_at > clock_timestamp() AND channel <> '' ORDER BY ticket LIMIT 1"""


class State(TextChoices):
    """What a lock row says at this moment of the server's clock."""

    HELD = "held", _("held")
    STALE = "stale", _("stale")
    RESERVED = "reserved", _("reserved")
    FREE = "free", _("free")


class _Taken(NamedTuple):
    """A row that is not free, at the time of the server."""

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
    cursor: CursorWrapper, is_mine: Callable[[str], bool], key: str | None, has_places: bool
) -> list[Held]:
    """Return the locks that are not free, those that end first at the front; with *key*, that one.

    *has_places*: whether waiters have places in the database, by which they are counted.
    """
    found = _taken(cursor, key, has_places=has_places)
    return [as_held(row) for row in found if is_mine(row.method_name)]


def _taken(cursor: CursorWrapper, key: str | None, *, has_places: bool = True) -> Iterator[_Taken]:
    one = {} if key is None else {"method_name": key}
    is_taken = Q(owner__isnull=False) | Q(available_at__gt=ServerNow())
    waiters = _waiters(cursor.db.alias) if has_places else Value(None, IntegerField())
    # Instants as the driver reads them: to have Django convert those of thousands of rows takes long.
    instants = {f"read_{name}": ExpressionWrapper(F(name), Field()) for name in _INSTANTS}
    found = rows(cursor.db.alias).filter(is_taken, **one).annotate(waiters=waiters, **instants)
    columns = found.order_by("available_at").values_list(*_COLUMNS, *instants)
    # By its alias, Django would run it on the application's connection.
    compiler, now = columns.query.get_compiler(connection=cursor.db), server_now(cursor)
    return (_Taken(now, *row) for row in compiler.results_iter())


def is_reserved(row: Any) -> bool:
    """Return whether nobody holds a row of rows() that is not free: min_hold or lock_delay refuses it to others."""
    return row.owner is None or row.expires_at <= row.server_now < row.available_at


def as_held(row: Any) -> Held:
    """Return a row of described() that is not free, for people."""
    name, key, token = shown(row.description), row.method_name, row.fencing_token
    if is_reserved(row):
        left = (row.available_at - row.server_now).total_seconds()
        mark, waiters = digest_of_reservation(token), row.waiters
        return Held(name, key, None, left, token, mark, waiters=waiters, reserved=True)
    left = (row.expires_at - row.server_now).total_seconds()
    age = row.acquired_at and max(0.0, (row.server_now - row.acquired_at).total_seconds())
    mark = digest(row.owner)
    return Held(name, key, holder_of(row), left, token, mark, waiters=row.waiters, age=age)


def holder_of(row: Any) -> Holder | None:
    """Return who holds the lock, for people; None where the row does not tell in words we know."""
    return Holder.from_json(row.holder)


def force_release(cursor: CursorWrapper, key: str, owner_digest: str) -> bool:
    """Free the lock if it is still the holding that *owner_digest* names; tell whether it was."""
    row = next(_taken(cursor, key), None)
    if row is None or as_held(row).owner_digest != owner_digest:
        return False
    with short_transaction(cursor):
        return free(cursor, row)


def free(cursor: CursorWrapper, row: Any) -> bool:
    """In a transaction, free the lock if it is still held or reserved as *row* says; tell whether it was.

    The token is raised: what the old holder guards or has claimed refuses it from here on.
    """
    known = {"key": row.method_name, "owner": row.owner, "token": row.fencing_token}
    is_same = _IS_RESERVED if is_reserved(row) else _IS_HELD
    # A write comes first: a transaction of SQLite that has read may not be let write any more.
    cursor.execute((_CLEAR_OWNER + is_same).format(now=clock(cursor)), known)
    is_freed: bool = cursor.rowcount == 1
    if is_freed:
        raise_counter(cursor, known)
        if cursor.db.vendor == "postgresql":
            # As a release does; waiters on other servers look again by themselves.
            cursor.execute(_RING_NEXT, known)
    return is_freed


def server_now(cursor: CursorWrapper) -> datetime:
    """Return the server's time, with a zone if its driver tells one."""
    cursor.execute(f"SELECT {clock(cursor)}{cursor.db.features.bare_select_suffix}", {})
    (now,) = cursor.fetchone()
    return now if isinstance(now, datetime) else datetime.fromisoformat(now)


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
        When(available_at__gt=ServerNow(), then=Value(State.RESERVED)),
        When(owner__isnull=False, then=Value(State.STALE)),
        default=Value(State.FREE),
        output_field=CharField(),
    )


def _waiters(using: str) -> Coalesce:
    from django_distlock.models import LockWaiter

    alive = LockWaiter.objects.using(using).filter(expires_at__gt=ServerNow())
    line = alive.filter(method_name=OuterRef("method_name")).order_by()
    numbers = line.values("method_name").annotate(number=Sum("callers")).values("number")
    return Coalesce(Subquery(numbers), 0, output_field=IntegerField())
