"""transaction_lock() on PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .postgresql import PostgreSQL, sqlstate
from .session_postgresql import make_row, milliseconds
from .transaction_taker import SNAPSHOT, Found, Taker

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper


class OnPostgreSQL(Taker):
    """Takes no savepoint where nothing was done yet: the transaction is begun anew instead.

    A snapshot is taken when a statement begins, before it waits: then what the holder before has
    committed is not in it. So at REPEATABLE READ and above the row is locked, the transaction begun
    anew, and the row locked again: if our first lock was the last one before, nobody was in between.
    """

    engine = PostgreSQL(fair=False)

    def make_row(self, cursor: CursorWrapper) -> None:
        """One statement."""
        make_row(cursor, self.key, self.name)

    def look_before(self) -> None:
        """Only look whether the transaction has begun: its isolation is told with the lock."""
        self._is_first = self.connection.connection.info.transaction_status == 0
        self._our_first: int | None = None

    def begin(self) -> None:
        """See Taker.begin()."""
        if not self._is_first:
            super().begin()

    def undo(self) -> None:
        """See Taker.undo()."""
        if self._is_first:
            self.connection.connection.rollback()
        else:
            super().undo()

    def keep(self) -> None:
        """See Taker.keep()."""
        if not self._is_first:
            super().keep()

    def lock(self, cursor: CursorWrapper) -> Found:
        """Leave lock_timeout as it was; no statement before the locking one takes a snapshot."""
        cursor.execute("SHOW lock_timeout")
        (before,) = cursor.fetchone()
        cursor.execute(f"SET LOCAL lock_timeout = {milliseconds(self.wait.left)}")
        # The list is computed before the row is waited for: xmax is who locked it last, before us.
        what = "xmax::text::bigint, pg_current_xact_id()::text::bigint"
        statement = self.select(what, "NOWAIT" if self.wait.is_over else "")
        cursor.execute(statement, {"key": self.key})
        row = cursor.fetchone()
        cursor.execute(f"SET LOCAL lock_timeout = '{before}'")
        cursor.execute("SHOW transaction_isolation")
        (isolation,) = cursor.fetchone()
        if isolation not in SNAPSHOT:
            return Found.MISSING if row is None else Found.LOCKED
        if not self._is_first:
            self.refuse_old_snapshot()
        return Found.MISSING if row is None else self._compared(*row)

    def after_conflict(self) -> Found:
        """See Taker.after_conflict(). What was read before stands in the way of a new snapshot."""
        if not self._is_first:
            self.undo()
            self.refuse_old_snapshot()
        return Found.STALE

    def _compared(self, last: int, ours: int) -> Found:
        if last == self._our_first:
            return Found.LOCKED
        self._our_first = ours % 2**32
        return Found.STALE

    def is_deadlock(self, error: Exception) -> bool:
        """deadlock_detected."""
        return sqlstate(error) == "40P01"
