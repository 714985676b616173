"""Rows and GET_LOCK of MariaDB and MySQL, held by a session: its limits, and what its neighbours do."""

from __future__ import annotations

import hashlib
import math
import re
import time
from abc import abstractmethod
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.db.utils import OperationalError

from django_distlock.backends.database.base import SHORT_PAUSE
from django_distlock.backends.database.bounds import keep_alive
from django_distlock.backends.database.connections import Unusable
from django_distlock.backends.database.engine import COUNTER, LOCK
from django_distlock.backends.database.mysql import CREATE, MICROSECONDS, MySQL
from django_distlock.engine.naming import stored
from django_distlock.engine.values import Busy, Grant, batches
from django_distlock.engine.waiting import Wait

from .occupants import PREFIX, as_held, last_occupant
from .sessions import ENDS_WITHIN, SessionServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_distlock.engine.values import Held

    from .occupants import Counted
    from .sessions import Edge, Session

#: The longest limit, in seconds, that the server takes: a year.
LONGEST = 31_536_000
#: Names of locks in one statement.
BATCH = 250

# Raises the fencing token of %(key)s, which LAST_INSERT_ID tells; matches no row before its first use.
_COUNT = f"""
UPDATE {COUNTER} SET value = LAST_INSERT_ID(GREATEST(value + 1, {MICROSECONDS})), holder = %(holder)s
WHERE method_name = %(key)s
"""

# Statements that wait begin with who waits and for what: everybody sees those of the same user.
_WAITING = f"SELECT info FROM information_schema.processlist WHERE info LIKE '/*{PREFIX}%%'"
_WAITS = re.compile(rf"/\*{PREFIX}(\w+) (\S+)\*/")
_SELECT = f"SELECT 1 FROM {LOCK} WHERE method_name = %(key)s"


class MySQLSessions(SessionServer):
    """What row locks and GET_LOCK have in common."""

    engine_class = MySQL
    now_sql = MICROSECONDS
    note_reader_sql = (
        f"INSERT IGNORE INTO {COUNTER} (method_name, value, holder)"
        " VALUES (%(key)s, %(token)s, %(holder)s)"
    )
    is_mariadb = False

    def begin(self, connection: Any) -> None:
        """Lift the limits that an operator may have set for everybody; find a dead server soon."""
        keep_alive(connection)
        self.is_mariadb = connection.mysql_is_mariadb
        limits = (
            "max_statement_time = 0, idle_write_transaction_timeout = 0, idle_readonly_transaction_timeout = 0"
            if self.is_mariadb
            else "max_execution_time = 0"
        )
        with connection.cursor() as cursor:
            cursor.execute(f"SET SESSION {limits}")
        connection.distlock_number = connection.connection.thread_id()

    def keep(self, session: Session, seconds: float) -> None:
        wanted = min(LONGEST, math.ceil(seconds))
        more = f", idle_transaction_timeout = {wanted}" if self.is_mariadb else ""
        session.execute(f"SET SESSION wait_timeout = {wanted}{more}")
        session.connection.distlock_limit = seconds

    def take(self, session: Session, patience: float) -> Grant | Busy:
        self.keep_for_ttl(session)
        return Grant(None) if self._try(session, 0) else Busy()

    def wait(self, session: Session, wait: Wait) -> Grant | Busy:
        """What is less than the server can count is waited by looking again."""
        self.keep_for_ttl(session)
        is_taken = self._try(session, LONGEST if wait.left is None else min(LONGEST, wait.left))
        while is_taken is False and not (wait.is_over or session.is_interrupted):
            time.sleep(wait.next_pause(longest=SHORT_PAUSE))
            is_taken = self._try(session, 0)
        return Grant(None) if is_taken else Busy()

    @abstractmethod
    def _try(self, session: Session, seconds: float) -> bool | None:
        """Return whether the lock was got within *seconds*, or as much of them as the server counts; None: it has no row."""

    def raise_token(self, cursor: Any, key: str, holder: str, patience: float) -> int:
        """One statement, or three at the first use of a name."""
        known = {"key": key, "holder": holder}
        # MySQL waits for a second at least: its engine says so.
        now = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR" if self.is_mariadb else ""
        if not cursor.execute(now + _COUNT, known):
            cursor.execute(CREATE[1], known)
            cursor.execute(now + _COUNT, known)
        token: int = cursor.lastrowid
        return token

    def make_row(self, cursor: Any, key: str, name: str) -> bool:
        """Look first: even an INSERT IGNORE waits for a row that is held."""
        known = {"key": key, "name": stored(name)}
        cursor.execute(_SELECT, known)
        if cursor.fetchone() is not None:
            return False
        cursor.execute(CREATE[0], known)
        return True

    def waits(self, cursor: Any) -> Iterator[Edge]:
        """Who waits stands in the statement, who holds beside the token."""
        for caller, key in _waiting(cursor):
            if occupant := last_occupant(cursor, key):
                yield caller, occupant.caller

    def end(self, cursor: Any, counted: Counted, owner_digest: str) -> bool:
        """Kill the one that is written beside the token, if the lock is held still; return when it is gone."""
        occupant = counted.by(owner_digest)
        if (
            occupant is None
            or not self.is_held(cursor, counted.key)
            or not _is_there(cursor, occupant.session)
        ):
            return False
        cursor.execute("KILL %s", [occupant.session])
        wait = Wait(ENDS_WITHIN)
        while _is_there(cursor, occupant.session) and not wait.is_over:
            time.sleep(wait.next_pause(longest=SHORT_PAUSE))
        return True


class MySQLRows(MySQLSessions):
    """Rows kept locked by SELECT FOR UPDATE, with autocommit off: the first statement begins the transaction."""

    def begin(self, connection: Any) -> None:
        super().begin(connection)
        with connection.wrap_database_errors:
            connection.distlock_cursor.execute("SET SESSION autocommit = 0")

    def free(self, session: Session) -> bool:
        """Nothing is written: there is nothing to flush."""
        session.execute("COMMIT")
        return True

    def is_held(self, cursor: Any, key: str) -> bool:
        """Try it for a moment, in autocommit."""
        try:
            cursor.execute(f"{_SELECT} FOR UPDATE NOWAIT", {"key": key})
        except OperationalError as error:
            if not self.engine.is_wait_over(error):
                raise
            return True
        return False

    def held(self, cursor: Any, known: dict[str, Counted]) -> Iterator[Held]:
        """Try each for a moment; a reader holds as long as its session is there."""
        cursor.execute("SELECT id FROM information_schema.processlist")
        sessions = {number for (number,) in cursor.fetchall()}
        waiters = Counter(key for _, key in _waiting(cursor))
        for key, counted in known.items():
            if (last := counted.last) is None or not self.is_held(cursor, key):
                continue
            readers = counted.readers.values() if last.shared else ()
            for occupant in [one for one in readers if one.session in sessions] or [last]:
                yield as_held(counted, occupant.owner_digest, waiters[key], shared=occupant.shared)

    def _try(self, session: Session, seconds: float) -> bool | None:
        """A refusal is an error, whose transaction must be ended all the same: nothing is left behind."""
        whole, how = int(seconds), "NOWAIT"
        if whole and self.is_mariadb:
            how = f"WAIT {whole}"
        elif whole:
            session.execute(f"SET SESSION innodb_lock_wait_timeout = {whole}")
            how = ""
        mode = "FOR UPDATE"
        if session.request.shared:  # MariaDB has no FOR SHARE
            mode = "LOCK IN SHARE MODE" if self.is_mariadb else "FOR SHARE"
        statement = f"{_who_waits(session)}{_SELECT} {mode} {how}"
        is_taken = None
        try:
            if session.execute(statement, {"key": session.request.key}).fetchone() is not None:
                return True
        except OperationalError as error:
            if not self.engine.is_wait_over(error):
                raise
            is_taken = False
        session.execute("ROLLBACK")
        return is_taken


class MySQLAdvisory(MySQLSessions):
    """Locks by names, for the whole server."""

    supports_shared = False

    def free(self, session: Session) -> bool:
        """1: freed; 0: not ours; NULL: nobody's."""
        name = lock_name(session.connection.settings_dict["NAME"], session.request.key)
        return bool(session.execute("SELECT RELEASE_LOCK(%s)", [name]).fetchone()[0] == 1)

    def is_held(self, cursor: Any, key: str) -> bool:
        return self._users(cursor, [key])[key] is not None

    def held(self, cursor: Any, known: dict[str, Counted]) -> Iterator[Held]:
        waiters = Counter(key for _, key in _waiting(cursor))
        for key, user in self._users(cursor, [*known]).items():
            if (last := known[key].last) and user == last.session:
                yield as_held(known[key], last.owner_digest, waiters[key], shared=False)

    def _users(self, cursor: Any, keys: list[str]) -> dict[str, int | None]:
        """Return the session that has each lock, or None."""
        found: dict[str, int | None] = {}
        for some in batches(keys, BATCH):
            names = [lock_name(cursor.db.settings_dict["NAME"], key) for key in some]
            cursor.execute(f"SELECT {', '.join(['IS_USED_LOCK(%s)'] * len(some))}", names)
            found |= zip(some, cursor.fetchone(), strict=True)
        return found

    def _try(self, session: Session, seconds: float) -> bool | None:
        """MariaDB knows fractions of seconds."""
        name = lock_name(session.connection.settings_dict["NAME"], session.request.key)
        longest = seconds if self.is_mariadb else int(seconds)
        statement = f"{_who_waits(session)}SELECT GET_LOCK(%s, %s)"
        answer = session.execute(statement, [name, longest]).fetchone()[0]
        if answer is None:
            problem = "GET_LOCK failed: the server is out of memory, or the session was killed"
            raise Unusable(problem)
        return bool(answer)


def _is_there(cursor: Any, number: int | None) -> bool:
    cursor.execute("SELECT 1 FROM information_schema.processlist WHERE id = %s", [number])
    return cursor.fetchone() is not None


def _waiting(cursor: Any) -> list[tuple[str, str]]:
    """Return who waits, and for which key."""
    cursor.execute(_WAITING)
    return [(found[1], found[2]) for (text,) in cursor.fetchall() if (found := _WAITS.match(text))]


def _who_waits(session: Session) -> str:
    """Return the comment that a waiting statement begins with."""
    return f"/*{PREFIX}{session.caller} {session.request.key}*/ "


@lru_cache(maxsize=1000)
def lock_name(database: str, key: str) -> str:
    """Return a name of at most 64 characters for *key*: its locks are the whole server's, not the database's."""
    return f"distlock:{hashlib.sha256(f'{database}|{key}'.encode()).hexdigest()[:48]}"
