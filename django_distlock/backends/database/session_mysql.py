"""MariaDB and MySQL, for locks held by a session: its limits, and what its neighbours do."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from django_distlock.engine.naming import stored

from .bounds import keep_alive
from .engine import COUNTER, LOCK
from .mysql import CREATE, MICROSECONDS, MySQL
from .occupants import PREFIX, Occupant
from .session_engine import SessionEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

    from django_distlock.engine.values import Request

    from .deadlocks import Edge
    from .occupants import Counted
    from .sessions import Session

#: The longest limit, in seconds, that the server takes: a year.
LONGEST = 31_536_000

# Raises the fencing token of %(key)s, which LAST_INSERT_ID tells; matches no row before its first use.
_COUNT = f"""
UPDATE {COUNTER} SET value = LAST_INSERT_ID(GREATEST(value + 1, {MICROSECONDS})), holder = %(holder)s
WHERE method_name = %(key)s
"""
_CREATE = f"INSERT IGNORE INTO {COUNTER} (method_name, value) VALUES (%(key)s, 0)"

# Statements that wait begin with who waits and for what: everybody sees those of the same user.
_WAITING = f"SELECT info FROM information_schema.processlist WHERE info LIKE '/*{PREFIX}%%'"
_WAITS = re.compile(rf"/\*{PREFIX}(\w+) (\S+)\*/")


class MySQLSessions(SessionEngine, MySQL):
    """What row locks and GET_LOCK have in common."""

    note_reader = (
        f"INSERT IGNORE INTO {COUNTER} (method_name, value, holder)"
        " VALUES (%(key)s, %(token)s, %(holder)s)"
    )

    def __init__(self, *, fair: bool) -> None:
        super().__init__(fair=fair)
        self._limits: WeakKeyDictionary[BaseDatabaseWrapper, int] = WeakKeyDictionary()

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Lift the limits that an operator may have set for everybody; find a dead server soon."""
        super().prepare(connection)
        keep_alive(connection)
        is_mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]  # of Django's MySQL
        limits = (
            "max_statement_time = 0, idle_write_transaction_timeout = 0, idle_readonly_transaction_timeout = 0"
            if is_mariadb
            else "max_execution_time = 0"
        )
        with connection.cursor() as cursor:
            cursor.execute(f"SET SESSION {limits}")

    def session_number(self, connection: BaseDatabaseWrapper) -> int:
        """Return the id of the connection."""
        number: int = connection.connection.thread_id()
        return number

    def keep(self, session: Session, seconds: float) -> None:
        """A word is enough, unless the limit is another."""
        with session.connection.cursor() as cursor:
            if not self.limit(cursor, seconds):
                cursor.execute("SELECT 1")

    def limit(self, cursor: CursorWrapper, seconds: float) -> bool:
        """Have the server end the session after *seconds* without a word; tell whether that was sent."""
        wanted = min(LONGEST, math.ceil(seconds))
        if self._limits.get(cursor.db) == wanted:
            return False
        is_mariadb = cursor.db.mysql_is_mariadb
        more = f", idle_transaction_timeout = {wanted}" if is_mariadb else ""
        cursor.execute(f"SET SESSION wait_timeout = {wanted}{more}")
        self._limits[cursor.db] = wanted
        return True

    def raise_token(
        self, cursor: CursorWrapper, request: Request, holder: str, patience: float
    ) -> int:
        """One statement, or three at the first use of a name."""
        known = {"key": request.key, "holder": holder}
        # MySQL waits for a second at least: prepare() says so.
        now = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR" if cursor.db.mysql_is_mariadb else ""
        if not cursor.execute(now + _COUNT, known):
            cursor.execute(_CREATE, known)
            cursor.execute(now + _COUNT, known)
        token: int = cursor.lastrowid
        return token

    def make_row(self, cursor: CursorWrapper, request: Request) -> bool:
        """Look first: even an INSERT IGNORE waits for a row that is held."""
        return make_row(cursor, request.key, request.name)

    def waits(self, cursor: CursorWrapper) -> Iterator[Edge]:
        """Who waits stands in the statement, who holds beside the token."""
        cursor.execute(_WAITING)
        waiting = [found.groups() for (text,) in cursor.fetchall() if (found := _WAITS.match(text))]
        for caller, key in waiting:
            cursor.execute(f"SELECT holder FROM {COUNTER} WHERE method_name = %s", [key])
            row = cursor.fetchone()
            if row and (occupant := Occupant.from_json(row[0])):
                yield caller, occupant.caller

    def end(self, cursor: CursorWrapper, counted: Counted, owner_digest: str) -> bool:
        """Kill the one that is written beside the token, if the lock is held still."""
        occupant = counted.by(owner_digest).occupant
        if occupant is None or occupant.owner_digest != owner_digest:
            return False
        if not self.is_held(cursor, counted.key):
            return False
        return self.kill(cursor, occupant.session)

    def kill(self, cursor: CursorWrapper, number: int) -> bool:
        """End a session; tell whether there was one that is ours to end."""
        cursor.execute("SELECT 1 FROM information_schema.processlist WHERE id = %s", [number])
        if cursor.fetchone() is None:
            return False
        cursor.execute("KILL %s", [number])
        return True


def who_waits(session: Session) -> str:
    """Return the comment that a waiting statement begins with."""
    return f"/*{PREFIX}{session.caller} {session.request.key}*/ "


def make_row(cursor: CursorWrapper, key: str, name: str) -> bool:
    """See SessionEngine.make_row()."""
    known = {"key": key, "name": stored(name)}
    cursor.execute(f"SELECT 1 FROM {LOCK} WHERE method_name = %(key)s", known)
    if cursor.fetchone() is not None:
        return False
    cursor.execute(CREATE[0], known)
    return True
