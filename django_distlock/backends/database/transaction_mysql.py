"""transaction_lock() on MariaDB and MySQL."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from django.db.utils import OperationalError

from .base import SHORT_PAUSE
from .bounds import interruptible
from .mysql import MySQL, code
from .session_mysql import LONGEST, make_row
from .transaction_taker import SNAPSHOT, Found, Taker

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

_TIMEOUT, _NOWAIT = 1205, 3572


class OnMySQL(Taker):
    engine = MySQL(fair=False)

    def make_row(self, cursor: CursorWrapper) -> None:
        """One statement, two at the first use of a name."""
        make_row(cursor, self.key, self.name)

    def look_before(self) -> None:
        """A locking read makes no snapshot here, so only what was done before the lock matters."""
        is_mariadb = self.connection.mysql_is_mariadb  # type: ignore[attr-defined]  # of Django's MySQL
        with self.connection.cursor() as cursor:
            # MySQL does not tell whether it has begun.
            has_begun = "@@in_transaction" if is_mariadb else "1"
            isolation = "@@tx_isolation" if is_mariadb else "@@transaction_isolation"
            cursor.execute(f"SELECT {isolation}, {has_begun}")
            level, begun = cursor.fetchone()
        if level in SNAPSHOT and begun:
            self.refuse_old_snapshot()

    def lock(self, cursor: CursorWrapper) -> Found:
        """Whole seconds are waited for on the server, the rest by looking again."""
        whole = LONGEST if self.wait.left is None else min(LONGEST, int(self.wait.left))
        if whole:
            try:
                with interruptible(self.connection):
                    return self._wait(cursor, whole)
            except OperationalError as error:
                if code(error) != _TIMEOUT or self.wait.left is None:
                    raise
        while True:
            try:
                return self._select(cursor, "NOWAIT")
            except OperationalError as error:
                if self.wait.is_over or code(error) not in {_TIMEOUT, _NOWAIT}:
                    raise
            time.sleep(self.wait.next_pause(longest=SHORT_PAUSE))

    def is_deadlock(self, error: Exception) -> bool:
        """Or a record that has changed since the snapshot, which ends as badly."""
        return code(error) in {1213, 1020}

    def after_deadlock(self) -> None:
        """The server has rolled the whole transaction back: Django must let nothing more into it."""
        self.connection.needs_rollback = True

    def _select(self, cursor: CursorWrapper, how: str) -> Found:
        cursor.execute(self.select("1", how), {"key": self.key})
        return Found.MISSING if cursor.fetchone() is None else Found.LOCKED

    def _wait(self, cursor: CursorWrapper, seconds: int) -> Found:
        if cursor.db.mysql_is_mariadb:
            return self._select(cursor, f"WAIT {seconds}")
        cursor.execute("SELECT @@innodb_lock_wait_timeout")
        (before,) = cursor.fetchone()
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {seconds}")
        try:
            return self._select(cursor, "")
        finally:
            cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {before}")
