"""A row kept locked by SELECT FOR UPDATE, on each kind of server."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from django.db.utils import OperationalError

from .base import SHORT_PAUSE
from .engine import LOCK
from .occupants import Label, as_held
from .session_engine import SessionEngine
from .session_mysql import LONGEST, MySQLSessions, who_waits
from .session_postgresql import PostgreSQLSessions, last_result, milliseconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

    from django_distlock.engine.values import Held
    from django_distlock.engine.waiting import Wait

    from .occupants import Counted
    from .sessions import Session

# Begins a transaction that the server ends if it says nothing for %(limit)s ms, and locks the row in it.
_BEGIN = f"""
BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = %(limit)s;
SET LOCAL application_name = %(label)s; SET LOCAL lock_timeout = %(patience)s;
SELECT 1 FROM {LOCK} WHERE method_name = %(key)s FOR {{mode}}
"""
_SELECT = f"SELECT 1 FROM {LOCK} WHERE method_name = %(key)s {{mode}}"
_EXISTS = f"SELECT 1 FROM {LOCK} WHERE method_name = %(key)s"

#: By whether it is shared, and whether the server is MariaDB, which has no FOR SHARE.
_MODES = {
    (False, True): "FOR UPDATE",
    (False, False): "FOR UPDATE",
    (True, True): "LOCK IN SHARE MODE",
    (True, False): "FOR SHARE",
}


class RowServer(SessionEngine):
    """What a server does with rows."""

    @abstractmethod
    def take(self, cursor: CursorWrapper, session: Session) -> bool:
        """Lock the row; False if it is locked by others, or missing: nothing is left behind."""

    @abstractmethod
    def wait(self, cursor: CursorWrapper, session: Session, wait: Wait) -> bool:
        """See take(); others are waited for."""


class PostgreSQLRows(RowServer, PostgreSQLSessions):
    """The whole of begin, limits and lock is one round trip."""

    prepares = False

    def take(self, cursor: CursorWrapper, session: Session) -> bool:
        """SKIP LOCKED: a refusal is no error, for which the server would keep a log."""
        mode = "SHARE" if session.request.shared else "UPDATE"
        return self._begin(cursor, session, f"{mode} SKIP LOCKED", None)

    def wait(self, cursor: CursorWrapper, session: Session, wait: Wait) -> bool:
        """The server counts in milliseconds."""
        try:
            return self._begin(
                cursor, session, "SHARE" if session.request.shared else "UPDATE", wait.left
            )
        except OperationalError as error:
            if not self.is_wait_over(error):
                raise
            cursor.execute("ROLLBACK")
            return False

    def free(self, session: Session) -> bool:
        """A transaction that has failed is rolled back by its commit: its locks were gone before."""
        with session.connection.cursor() as cursor:
            cursor.execute("COMMIT")
            return bool(cursor.statusmessage == "COMMIT")

    def keep(self, session: Session, seconds: float) -> None:
        """A word is enough, unless the limit is another."""
        limit = milliseconds(seconds)
        with session.connection.cursor() as cursor:
            if limit == session.limit:
                cursor.execute("SELECT 1")
            else:
                cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = {limit}")
        session.limit = limit

    def is_held(self, cursor: CursorWrapper, key: str) -> bool:
        """Try it for a moment: what is skipped is held."""
        known = {"key": key}
        cursor.execute(_SELECT.format(mode="FOR UPDATE SKIP LOCKED"), known)
        if cursor.fetchone() is not None:
            return False
        cursor.execute(_EXISTS, known)
        return cursor.fetchone() is not None

    def _begin(
        self, cursor: CursorWrapper, session: Session, mode: str, patience: float | None
    ) -> bool:
        session.limit = milliseconds(session.request.ttl)
        known: dict[str, Any] = {"key": session.request.key, "label": str(Label.of(session))}
        known |= {"limit": session.limit, "patience": milliseconds(patience)}
        cursor.execute(_BEGIN.format(mode=mode), known)
        last_result(cursor)
        if cursor.fetchone() is not None:
            return True
        cursor.execute("ROLLBACK")
        return False


class MySQLRows(RowServer, MySQLSessions):
    """Its session has autocommit off: the first statement begins the transaction."""

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """See MySQLSessions.prepare()."""
        super().prepare(connection)
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION autocommit = 0")

    def take(self, cursor: CursorWrapper, session: Session) -> bool:
        """NOWAIT: a refusal is an error, and its transaction must be ended all the same."""
        self.limit(cursor, session.request.ttl)
        return self._lock(cursor, session, "NOWAIT")

    def wait(self, cursor: CursorWrapper, session: Session, wait: Wait) -> bool:
        """The server counts whole seconds; what is left of them is waited by looking again."""
        self.limit(cursor, session.request.ttl)
        whole = LONGEST if wait.left is None else min(LONGEST, int(wait.left))
        if whole and (self._wait_whole(cursor, session, whole) or wait.left is None):
            return True
        while not self._lock(cursor, session, "NOWAIT"):
            if wait.is_over or session.interrupted.wait(wait.next_pause(longest=SHORT_PAUSE)):
                return False
        return True

    def free(self, session: Session) -> bool:
        """Nothing is written: there is nothing to flush."""
        with session.connection.cursor() as cursor:
            cursor.execute("COMMIT")
        return True

    def is_held(self, cursor: CursorWrapper, key: str) -> bool:
        """Try it for a moment, in autocommit."""
        try:
            cursor.execute(_SELECT.format(mode="FOR UPDATE NOWAIT"), {"key": key})
        except OperationalError as error:
            if not self.is_wait_over(error):
                raise
            return True
        return False

    def held(self, cursor: CursorWrapper, known: dict[str, Counted]) -> Iterator[Held]:
        """Try each for a moment; a reader holds as long as its session is there."""
        cursor.execute("SELECT id FROM information_schema.processlist")
        sessions = {number for (number,) in cursor.fetchall()}
        for key, counted in known.items():
            if (last := counted.occupant) is None or not self.is_held(cursor, key):
                continue
            readers = [each.occupant for each in counted.readers if last.shared and each.occupant]
            for occupant in [one for one in readers if one.session in sessions] or [last]:
                yield as_held(counted, occupant.owner_digest, shared=occupant.shared)

    def _wait_whole(self, cursor: CursorWrapper, session: Session, seconds: int) -> bool:
        if cursor.db.mysql_is_mariadb:
            return self._lock(cursor, session, f"WAIT {seconds}")
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {seconds}")
        return self._lock(cursor, session, "")

    def _lock(self, cursor: CursorWrapper, session: Session, how: str) -> bool:
        mode = _MODES[bool(session.request.shared), bool(cursor.db.mysql_is_mariadb)]
        statement = who_waits(session) + _SELECT.format(mode=f"{mode} {how}")
        try:
            cursor.execute(statement, {"key": session.request.key})
            if cursor.fetchone() is not None:
                return True
        except OperationalError as error:
            if not self.is_wait_over(error):
                raise
        cursor.execute("ROLLBACK")
        return False
