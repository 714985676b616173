"""Any server with SELECT ... FOR UPDATE: the row is locked in a short transaction of our own."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db.models.functions import Now
from django.db.utils import DatabaseError, Error, IntegrityError

from django_distlock.engine.values import Busy, Grant, Release, Request

from . import mysql, postgresql
from .connections import Crowded
from .engine import COUNTER, LOCK, PATIENCE, WAITER, Engine, busy, parameters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

_ROW = f"""
SELECT owner, last_owner, holder, fencing_token, acquired_at, expires_at, available_at
FROM {LOCK} WHERE method_name = %(key)s"""

_TAKE = f"""
UPDATE {LOCK} SET owner = %(owner)s, holder = %(holder)s, fencing_token = %(token)s,
    acquired_at = %(now)s, expires_at = %(expires)s, available_at = %(available)s, updated_at = %(now)s
WHERE method_name = %(key)s"""
_COUNT = f"UPDATE {COUNTER} SET value = %(token)s, holder = %(holder)s WHERE method_name = %(key)s"

_FREE = f"""
UPDATE {LOCK} SET owner = NULL, last_owner = %(owner)s, holder = NULL, available_at = %(available)s,
    updated_at = %(now)s
WHERE method_name = %(key)s"""

_LENGTHEN = f"""
UPDATE {LOCK} SET expires_at = %(expires)s, available_at = %(available)s, updated_at = %(now)s
WHERE method_name = %(key)s"""

_TAKE_OVER = f"""
UPDATE {LOCK} SET owner = %(owner)s, holder = %(holder)s, expires_at = %(expires)s,
    available_at = %(available)s, updated_at = %(now)s
WHERE method_name = %(key)s"""

_CREATE = (
    f"""INSERT INTO {LOCK} (method_name, description, fencing_token, available_at, updated_at)
    VALUES (%(key)s, %(name)s, 0, %(now)s, %(now)s)""",
    f"INSERT INTO {COUNTER} (method_name, value) VALUES (%(key)s, 0)",
)

_AHEAD = f"""
SELECT count(*) FROM {WAITER} WHERE method_name = %(key)s AND expires_at > %(now)s AND owner <> %(owner)s
    AND ticket < coalesce((SELECT ticket FROM {WAITER} WHERE owner = %(owner)s), 9223372036854775807)"""

_ENQUEUE = f"""
INSERT INTO {WAITER} (method_name, owner, channel, expires_at)
VALUES (%(key)s, %(owner)s, %(channel)s, %(until)s)"""
_TICKET = f"SELECT ticket FROM {WAITER} WHERE owner = %(owner)s"

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - servers' clocks are read in UTC, some without saying so


class _Row(NamedTuple):
    """The columns of _ROW."""

    owner: str | None
    last_owner: str | None
    holder: str | None
    token: int
    acquired: datetime
    expires: datetime
    available: datetime

    def busy(self, now: datetime) -> Busy:
        is_held = self.owner is not None and self.expires > now
        return busy(self.holder if is_held else None, _seconds(self.available - now))


class Portable(Engine):
    """A few statements a verb. All instants come from the server, read after the row is locked."""

    def __init__(self, *, fair: bool) -> None:
        super().__init__(fair=fair)
        self._clock = ""
        self._for_update = ""

    def cursor(self, connection: BaseDatabaseWrapper) -> CursorWrapper:
        """Return Django's, which knows what differs between drivers."""
        return connection.cursor()

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """Leave the options as they are, but for the isolation: what else a driver takes is not known here."""
        settings["OPTIONS"].pop("isolation_level", None)
        return {}

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        from django_distlock.models import MethodLock

        compiler = MethodLock.objects.all().query.get_compiler(connection=connection)
        self._clock = f"SELECT {compiler.compile(Now())[0]}{connection.features.bare_select_suffix}"
        nowait = connection.features.has_select_for_update_nowait
        self._for_update = " " + connection.ops.for_update_sql(nowait=nowait)
        if connection.vendor == "mysql":
            mysql.settle(connection)
        elif connection.vendor == "postgresql":
            postgresql.settle(connection)

    def is_contention(self, error: Exception) -> bool:
        # By the codes of the servers this is tried on.
        is_of_postgresql = postgresql.sqlstate(error) in postgresql.CONTENTION
        return is_of_postgresql or mysql.code(error) in mysql.CONTENTION

    def take(self, cursor: CursorWrapper, request: Request) -> Grant | Busy:
        """Ask once; the rows are made at the first use of a name, in transactions of their own."""
        known = parameters(request)
        with short_transaction(cursor):
            answer = self._take(cursor, request, known)
        if answer is None:
            now = self._now(cursor)
            for statement in _CREATE:
                with suppress(IntegrityError):  # somebody else was first
                    cursor.execute(statement, {**known, "now": now})
            with short_transaction(cursor):
                answer = self._take(cursor, request, known)
        if answer is None:
            raise Crowded
        return answer

    def release(self, cursor: CursorWrapper, request: Request) -> Release:
        known = parameters(request)
        with short_transaction(cursor):
            row, now = self._lock(cursor, known)
            if row is None:
                return Release.GONE
            if row.owner != request.owner:
                is_taken = row.owner is not None and row.expires > now
                if row.last_owner == request.owner:
                    return Release.RELEASED
                return Release.TAKEN if is_taken else Release.GONE
            in_time = row.expires > now
            freed = row.acquired + timedelta(seconds=request.min_hold)
            # A late one leaves its lock_delay in force.
            available = freed if in_time else row.available
            cursor.execute(_FREE, {**known, "now": now, "available": available})
            return Release.RELEASED if in_time else Release.GONE

    def extend(self, cursor: CursorWrapper, requests: Sequence[Request]) -> list[bool]:
        return [self._extend(cursor, request) for request in requests]

    def take_over(self, cursor: CursorWrapper, request: Request, former: str) -> bool:
        known = parameters(request)
        with short_transaction(cursor):
            row, now = self._lock(cursor, known)
            if row is not None and row.owner == former and row.expires > now:
                expires = now + timedelta(seconds=request.ttl)
                available = max(
                    row.acquired + timedelta(seconds=request.min_hold),
                    expires + timedelta(seconds=request.lock_delay),
                )
                ends = {"now": now, "expires": expires, "available": available}
                cursor.execute(_TAKE_OVER, {**known, **ends})
        return self._extend(cursor, request)

    def probe(self, cursor: CursorWrapper, request: Request) -> Busy | None:
        cursor.execute(_ROW, {"key": request.key})
        columns = cursor.fetchone()
        if columns is None:
            return None
        row, now = _Row(*columns), self._now(cursor)
        return row.busy(now) if row.available > now else None

    def enqueue(self, cursor: CursorWrapper, request: Request, channel: str) -> int:
        known: dict[str, Any] = {"key": request.key, "owner": request.owner, "channel": channel}
        self.keep_places(cursor, [request.owner])
        if not cursor.rowcount:
            until = self._now(cursor) + timedelta(seconds=PATIENCE)
            cursor.execute(_ENQUEUE, {**known, "until": until})
        cursor.execute(_TICKET, known)
        ticket: int = cursor.fetchone()[0]
        return ticket

    def keep_places(self, cursor: CursorWrapper, owners: Sequence[str]) -> None:
        marks = ", ".join(["%s"] * len(owners))
        until = self._now(cursor) + timedelta(seconds=PATIENCE)
        statement = f"UPDATE {WAITER} SET expires_at = %s WHERE owner IN ({marks})"
        cursor.execute(statement, [until, *owners])

    def guard(self, cursor: CursorWrapper, schema: str, key: str, token: int) -> int | None:
        """FOR UPDATE on the counter, which an acquire of somebody else locks too."""
        select = f"SELECT value FROM {schema}{COUNTER} WHERE method_name = %(key)s"
        cursor.execute(select + " FOR UPDATE", {"key": key})
        row = cursor.fetchone()
        return None if row is None else row[0]

    def _take(
        self, cursor: CursorWrapper, request: Request, known: dict[str, Any]
    ) -> Grant | Busy | None:
        """Return the answer, or None if a row is missing."""
        row, now = self._lock(cursor, known)
        if row is None:
            return None
        if row.owner == request.owner:
            return Grant(row.token)
        if row.available > now or (self.fair and self._is_behind(cursor, {**known, "now": now})):
            return row.busy(now)
        cursor.execute(
            f"SELECT value FROM {COUNTER} WHERE method_name = %(key)s{self._for_update}", known
        )
        counter = cursor.fetchone()
        if counter is None:
            return None
        token = max(row.token + 1, counter[0] + 1, microseconds(now))
        values = {**known, "now": now, "token": token, **_ends(now, request)}
        cursor.execute(_TAKE, values)
        cursor.execute(_COUNT, values)
        return Grant(token)

    def _extend(self, cursor: CursorWrapper, request: Request) -> bool:
        known = parameters(request)
        with short_transaction(cursor):
            row, now = self._lock(cursor, known)
            if row is None or row.owner != request.owner or row.expires <= now:
                return False
            ends = _ends(now, request)
            expires, available = (
                max(row.expires, ends["expires"]),
                max(row.available, ends["available"]),
            )
            cursor.execute(
                _LENGTHEN, {**known, "now": now, "expires": expires, "available": available}
            )
            return True

    def _lock(self, cursor: CursorWrapper, known: dict[str, Any]) -> tuple[_Row | None, datetime]:
        cursor.execute(_ROW + self._for_update, known)
        columns = cursor.fetchone()
        return None if columns is None else _Row(*columns), self._now(cursor)

    def _now(self, cursor: CursorWrapper) -> datetime:
        cursor.execute(self._clock)
        now: datetime = cursor.fetchone()[0]
        return now

    def _is_behind(self, cursor: CursorWrapper, known: dict[str, Any]) -> bool:
        cursor.execute(_AHEAD, known)
        return bool(cursor.fetchone()[0])


def is_guarded(cursor: CursorWrapper, engine: Engine, key: str) -> bool:
    """Return whether a guard() is what is in the way of an acquire: all others lock the lock's own row too."""
    if not cursor.db.features.has_select_for_update_nowait:
        return False
    now = cursor.db.ops.for_update_sql(nowait=True)
    has_row = False
    try:
        with short_transaction(cursor):
            cursor.execute(f"SELECT id FROM {LOCK} WHERE method_name = %(key)s {now}", {"key": key})
            has_row = True
            cursor.execute(
                f"SELECT id FROM {COUNTER} WHERE method_name = %(key)s {now}", {"key": key}
            )
    except DatabaseError as error:
        if not engine.is_contention(error):
            raise
        return has_row
    return False


@contextmanager
def short_transaction(cursor: CursorWrapper) -> Iterator[None]:
    """Make one transaction of what is executed inside."""
    connection = cursor.db
    # SQLite's driver begins one only where it thinks there is need.
    connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
    try:
        yield
        connection.commit()
    except BaseException:
        # A connection broken off in the middle of an answer stays out of autocommit, and is not used again.
        with suppress(Error, OSError):
            connection.rollback()
            connection.set_autocommit(True)
        raise
    connection.set_autocommit(True)


def _ends(now: datetime, request: Request) -> dict[str, datetime]:
    expires = now + timedelta(seconds=request.ttl)
    available = max(
        now + timedelta(seconds=request.min_hold), expires + timedelta(seconds=request.lock_delay)
    )
    return {"expires": expires, "available": available}


def _seconds(span: timedelta) -> float | None:
    return span.total_seconds() if span > timedelta() else None


def microseconds(now: datetime) -> int:
    """Return the lowest fencing token that can be issued at this instant, in UTC, of the server."""
    utc = now if now.tzinfo is None else now.astimezone(UTC).replace(tzinfo=None)
    return (utc - _EPOCH) // timedelta(microseconds=1)
