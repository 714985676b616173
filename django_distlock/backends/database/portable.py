"""Any server with SELECT ... FOR UPDATE: locks the row in a short transaction of its own."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db.models.functions import Now
from django.db.utils import IntegrityError

from django_distlock.engine.values import Busy, Grant, Release, Request, first_to_end

from . import mysql, postgresql
from .connections import Crowded
from .dialect import (
    COUNTER,
    CREATE,
    LOCK,
    PATIENCE,
    WAITER,
    Dialect,
    busy,
    listed,
    microseconds,
    parameters,
    short_transaction,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

_COLUMNS = "owner, holder, fencing_token, acquired_at, expires_at, available_at"
_ROW = f"SELECT {_COLUMNS} FROM {LOCK} WHERE method_name = %(key)s"
# A list of keys follows.
_ROWS = f"SELECT method_name, {_COLUMNS} FROM {LOCK} WHERE method_name IN "

_TAKE = f"""
UPDATE {LOCK} SET owner = %(owner)s, holder = %(holder)s, fencing_token = %(token)s,
    acquired_at = %(now)s, expires_at = %(expires)s, available_at = %(available)s, updated_at = %(now)s
WHERE method_name = %(key)s"""
_COUNT = f"UPDATE {COUNTER} SET value = %(token)s, holder = %(holder)s WHERE method_name = %(key)s"

_TICKET = f"SELECT ticket FROM {WAITER} WHERE owner = %(owner)s"
_IS_OUR_TURN = f"SELECT 1 FROM {LOCK} WHERE method_name = %(key)s AND {{turn}}"


class _LeaseRow(NamedTuple):
    """The columns of _ROW."""

    owner: str | None
    holder: str | None
    token: int
    acquired: datetime | None
    expires: datetime
    available: datetime

    def busy(self, now: datetime) -> Busy:
        is_held = self.owner is not None and self.expires > now
        return busy(self.holder if is_held else None, _seconds(self.available - now))


class Portable(Dialect):
    """A few statements for each verb. All times come from the server, read after the row is locked."""

    on_release = on_enqueue = ""

    def __init__(self, *, fair: bool) -> None:
        super().__init__(fair=fair)
        self._clock = ""
        self._for_update = ""
        self._is_our_turn_sql = self.sql(_IS_OUR_TURN)

    def expressions(self) -> dict[str, str]:
        """Return parameters, as servers differ in how they calculate with times."""
        names = ("now", "expires", "reserved", "until", "soon", "left")
        known = {name: f"%({name})s" for name in names}
        return {**known, "updated": known["now"], "greatest": self.greatest}

    def cursor(self, connection: BaseDatabaseWrapper) -> CursorWrapper:
        """Return Django's cursor, which handles the differences between drivers."""
        return connection.cursor()

    def connection_options(self, settings: dict[str, Any], io_timeout: float) -> dict[str, Any]:
        """Only remove the isolation level: other options of a foreign driver are not known here."""
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
        # The codes of the servers on which this is tested.
        is_of_postgresql = postgresql.sqlstate(error) in postgresql.CONTENTION
        return is_of_postgresql or mysql.code(error) in mysql.CONTENTION

    def take(self, cursor: CursorWrapper, request: Request) -> Grant | Busy:
        """Try once; the first use of a name creates its rows, in transactions of their own."""
        if request.limit is not None:
            return self._take_any(cursor, request)
        answer = self._take(cursor, request)
        if answer is None:
            known = {**parameters(request), **self.times(cursor)}
            for statement in CREATE:
                with suppress(IntegrityError):  # another caller was first
                    cursor.execute(self.sql(statement), known)
            answer = self._take(cursor, request)
        if answer is None:
            raise Crowded
        return answer

    def _take_any(self, cursor: CursorWrapper, request: Request) -> Grant | Busy:
        """Try the places that seem to be free, after its own and before those that have no rows yet."""
        rows, now = self._rows(cursor, request), self._now(cursor)
        ranks = {
            key: 0 if row.owner == request.owner else 1
            for key, row in rows.items()
            if row.owner == request.owner or row.available <= now
        }
        refused = [row.busy(now) for key, row in rows.items() if key not in ranks]
        for each in sorted(request.from_any, key=lambda each: ranks.get(each.key, 2)):
            if each.key in rows and each.key not in ranks:
                continue
            answer = self.take(cursor, each)
            if isinstance(answer, Grant):
                return Grant(answer.token, place=each.place)
            refused.append(answer)
            if answer.remaining is None:
                break  # it is free: it is not our turn
        return first_to_end(refused) or Busy()

    def release(self, cursor: CursorWrapper, request: Request) -> Release:
        with self._locked(cursor, request) as (row, known):
            if row is not None and row.owner == request.owner:
                cursor.execute(self.release_sql, known)
                return Release.RELEASED if row.expires > known["now"] else Release.GONE
        return self.missed(cursor, request)

    def write(self, cursor: CursorWrapper, statement: str, request: Request, **more: str) -> None:
        with self._locked(cursor, request) as (_, known):
            cursor.execute(statement, {**known, **more})

    def probe(self, cursor: CursorWrapper, request: Request) -> Busy | None:
        rows = self._rows(cursor, request)
        if len(rows) < len(request.holdings):
            return None
        now = self._now(cursor)
        return first_to_end(row.busy(now) if row.available > now else None for row in rows.values())

    def _rows(self, cursor: CursorWrapper, request: Request) -> dict[str, _LeaseRow]:
        marks, keys = listed(each.key for each in request.holdings)
        cursor.execute(_ROWS + marks, keys)
        return {key: _LeaseRow(*columns) for key, *columns in cursor.fetchall()}

    def enqueue(self, cursor: CursorWrapper, request: Request, channel: str) -> int:
        known = {**parameters(request), "channel": channel}
        cursor.execute(_TICKET, known)
        if (row := cursor.fetchone()) is not None:
            self.keep_places(cursor, [request.owner])
        else:
            cursor.execute(self.enqueue_sql, {**known, **self.times(cursor)})
            cursor.execute(_TICKET, known)
            row = cursor.fetchone()
        ticket: int = row[0]
        return ticket

    def times(self, cursor: CursorWrapper) -> dict[str, Any]:
        now, place = self._now(cursor), timedelta(seconds=PATIENCE)
        return {"now": now, "until": now + place, "soon": now + place / 2}

    def _take(self, cursor: CursorWrapper, request: Request) -> Grant | Busy | None:
        """Return the answer, or None if a row is missing."""
        with self._locked(cursor, request) as (row, known):
            now = known["now"]
            if row is None:
                return None
            if row.owner == request.owner:
                return Grant(row.token)
            if row.available > now or not self._is_our_turn(cursor, known):
                return row.busy(now)
            cursor.execute(
                f"SELECT value FROM {COUNTER} WHERE method_name = %(key)s{self._for_update}", known
            )
            counter = cursor.fetchone()
            if counter is None:
                return None
            token = max(row.token + 1, counter[0] + 1, microseconds(now))
            cursor.execute(_TAKE, {**known, "token": token})
            cursor.execute(_COUNT, {**known, "token": token})
            return Grant(token)

    @contextmanager
    def _locked(
        self, cursor: CursorWrapper, request: Request
    ) -> Iterator[tuple[_LeaseRow | None, dict[str, Any]]]:
        """Lock the row, if there is one, for the block; give it and the parameters of statements, with times."""
        known = parameters(request)
        with short_transaction(cursor):
            cursor.execute(_ROW + self._for_update, known)
            columns = cursor.fetchone()
            row, times = None if columns is None else _LeaseRow(*columns), self.times(cursor)
            acquired = row and row.acquired
            times["reserved"] = acquired and acquired + timedelta(seconds=request.min_hold)
            times["expires"] = times["now"] + timedelta(seconds=request.ttl)
            times["available"] = times["now"] + timedelta(seconds=known["taken_for"])
            yield row, {**known, **times}

    def _now(self, cursor: CursorWrapper) -> datetime:
        cursor.execute(self._clock)
        now: datetime = cursor.fetchone()[0]
        return now

    def _is_our_turn(self, cursor: CursorWrapper, known: dict[str, Any]) -> bool:
        if self.fair:
            cursor.execute(self._is_our_turn_sql, known)
        return not self.fair or cursor.fetchone() is not None


def _seconds(span: timedelta) -> float | None:
    return span.total_seconds() if span > timedelta() else None
