"""Row locks and GET_LOCK of MariaDB and MySQL, held by a session."""

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
from django_distlock.backends.database.dialect import COUNTER, LOCK
from django_distlock.backends.database.mysql import CREATE, MICROSECONDS, MySQL
from django_distlock.engine.values import Busy, Grant, batches
from django_distlock.engine.waiting import Wait
from django_distlock.ground.naming import stored

from .occupants import as_held
from .sessions import ENDS_WITHIN, OWN_LOCKS, PREFIX, PRIMARY, SessionServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_distlock.engine.values import Held

    from .occupants import Counted, Occupant
    from .sessions import DatabaseSession

#: The longest timeout in seconds that the server accepts: a year.
LONGEST = 31_536_000
#: Names of locks in one statement.
BATCH = 250
#: The variable of Group Replication that is OFF if it has several primaries.
ONE_PRIMARY = "group_replication_single_primary_mode"

# Raises the fencing token of %(key)s, and returns it as LAST_INSERT_ID; matches no row before the first use.
_COUNT = f"""
UPDATE {COUNTER} SET value = LAST_INSERT_ID(GREATEST(value + 1, {MICROSECONDS})), holder = %(holder)s
WHERE method_name = %(key)s
"""

# Waiting statements begin with a comment that names the key; a user sees all statements of its own.
_WAITING = f"SELECT info FROM information_schema.processlist WHERE info LIKE '/*{PREFIX}%%'"
_WAITS = re.compile(rf"/\*{PREFIX}(\S+)\*/")
_SELECT = f"SELECT 1 FROM {LOCK} WHERE method_name = %(key)s"
# One row if the session in %(session)s, a pattern for DatabaseSession.record(), has acquired a lock after %(token)s.
_WAS_USED = f"SELECT 1 FROM {COUNTER} WHERE value > %(token)s AND holder LIKE %(session)s LIMIT 1"


# Needs no privilege. The server leaves out variables that it does not have.
MODES = f"SHOW VARIABLES WHERE variable_name IN ('wsrep_on', 'read_only', '{ONE_PRIMARY}')"


class OneServer(MySQL):
    """A dialect that refuses servers that do not know all locks: the nodes of a cluster, a replica."""

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        super().prepare(connection)
        with connection.cursor() as cursor:
            cursor.execute(MODES)
            must_know_all_locks(connection.alias, dict(cursor.fetchall()))


def must_know_all_locks(alias: str, modes: dict[str, str]) -> None:
    """Raise Unusable if the server of *alias*, which has the variables *modes*, does not know all locks."""
    cluster = advice = ""
    if modes.get("wsrep_on", "OFF") != "OFF":
        cluster, advice = "Galera cluster", "DatabaseBackend works on a Galera cluster"
    elif modes.get(ONE_PRIMARY) == "OFF":
        cluster = "Group Replication with several primaries"
        advice = "DatabaseBackend; or let Group Replication have a single primary"
    if cluster:
        problem = (
            f"the database {alias!r} is a {cluster}, each node of which has row locks and GET_LOCK "
            "of its own: callers on two nodes would hold the same lock. Use leases, by DatabaseBackend"
        )
        raise Unusable(problem, f"Use leases: {advice}.")
    if modes.get("read_only", "OFF") != "OFF":
        raise Unusable(f"the database {alias!r} is read-only, like a replica, {OWN_LOCKS}", PRIMARY)


class MySQLSessions(SessionServer):
    """The common part of row locks and GET_LOCK."""

    dialect_class = OneServer
    writers_first = True
    now_sql = MICROSECONDS
    note_reader_sql = (
        f"INSERT IGNORE INTO {COUNTER} (method_name, value, holder)"
        " VALUES (%(key)s, %(token)s, %(holder)s)"
    )
    is_mariadb = False

    def begin(self, connection: Any) -> None:
        """Remove time limits that an operator may have set for all sessions; set TCP keepalive."""
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

    def keep(self, session: DatabaseSession, seconds: float) -> None:
        connection = session.connection
        if connection.distlock_limit is not None:
            # A primary that has become a replica keeps its connections, while the new primary grants the same locks.
            must_know_all_locks(connection.alias, dict(session.execute(MODES).fetchall()))
        wanted = min(LONGEST, math.ceil(seconds))
        more = f", idle_transaction_timeout = {wanted}" if self.is_mariadb else ""
        session.execute(f"SET SESSION wait_timeout = {wanted}{more}")
        connection.distlock_limit = seconds

    def take(self, session: DatabaseSession, patience: float) -> Grant | Busy | None:
        if session.connection.distlock_limit != session.request.ttl:
            self.keep(session, session.request.ttl)
        return self._try(session, 0)

    def wait(self, session: DatabaseSession, wait: Wait) -> Grant | Busy | None:
        """Wait on the server, which may count whole seconds only; for less than a second, try again after pauses."""
        if session.connection.distlock_limit != session.request.ttl:
            self.keep(session, session.request.ttl)
        left = LONGEST if wait.left is None else min(LONGEST, wait.left)
        answer = self._try(session, left)
        if left >= 1:
            return answer
        while isinstance(answer, Busy) and not (wait.is_over or session.is_interrupted):
            time.sleep(wait.next_pause(longest=SHORT_PAUSE))
            answer = self._try(session, 0)
        return answer

    @abstractmethod
    def _try(self, session: DatabaseSession, seconds: float) -> Grant | Busy | None:
        """Acquire the lock in *seconds*, maybe rounded down; None if the lock's row is missing."""

    def raise_token(self, cursor: Any, key: str, holder: str, patience: float) -> int:
        """Raise the token by one statement, or by three at the first use of a name."""
        known = {"key": key, "holder": holder}
        # On MySQL innodb_lock_wait_timeout is at least one second; the dialect has set it.
        now = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR" if self.is_mariadb else ""
        if not cursor.execute(now + _COUNT, known):
            cursor.execute(CREATE[1], known)
            cursor.execute(now + _COUNT, known)
        token: int = cursor.lastrowid
        return token

    def make_row(self, cursor: Any, key: str, name: str) -> None:
        """Make the row, but look first: even an INSERT IGNORE waits for a locked row."""
        known = {"key": key, "name": stored(name)}
        cursor.execute(_SELECT, known)
        if cursor.fetchone() is None:
            cursor.execute(CREATE[0], known)

    def end(self, cursor: Any, counted: Counted, owner_digest: str) -> bool:
        """Kill the session that is recorded with the token, if it still holds the lock, and wait for its end."""
        occupant = counted.by(owner_digest)
        if (
            occupant is None
            or not self.is_held(cursor, counted.key)
            or not _is_there(cursor, occupant.session)
            or _was_used_since(cursor, occupant)
        ):
            return False
        cursor.execute("KILL %s", [occupant.session])
        wait = Wait(ENDS_WITHIN)
        while _is_there(cursor, occupant.session) and not wait.is_over:
            time.sleep(wait.next_pause(longest=SHORT_PAUSE))
        return True


class MySQLRows(MySQLSessions):
    """Rows locked by SELECT FOR UPDATE, with autocommit off: the first statement begins the transaction."""

    def begin(self, connection: Any) -> None:
        super().begin(connection)
        with connection.wrap_database_errors:
            connection.distlock_cursor.execute("SET SESSION autocommit = 0")

    def free(self, session: DatabaseSession) -> bool:
        """Free the lock by COMMIT, which does not wait for the disk, as nothing was written."""
        session.execute("COMMIT")
        return True

    def is_held(self, cursor: Any, key: str) -> bool:
        """Try to lock the row for a moment, in autocommit."""
        try:
            cursor.execute(f"{_SELECT} FOR UPDATE NOWAIT", {"key": key})
        except OperationalError as error:
            if not self.dialect.is_wait_over(error):
                raise
            return True
        return False

    def held(self, cursor: Any, known: dict[str, Counted]) -> Iterator[Held]:
        """Return the held locks: briefly try to lock each row that a living session acquired last."""
        cursor.execute("SELECT id FROM information_schema.processlist")
        newest = {number: 0 for (number,) in cursor.fetchall()}
        for counted in known.values():
            for each in counted.occupants if counted.readers else [counted]:
                if each.session in newest:
                    newest[each.session] = max(newest[each.session], each.token or 0)
        waiters = Counter(_waiting(cursor))
        for key, counted in known.items():
            if not counted.readers and newest.get(counted.session) != counted.token:
                continue
            found = [one for one in counted.occupants if newest.get(one.session) == one.token]
            if found and self.is_held(cursor, key):
                for one in found:
                    yield as_held(counted, one.owner_digest, waiters[key], shared=one.shared)

    def _try(self, session: DatabaseSession, seconds: float) -> Grant | Busy | None:
        """Lock the row; after a refusal, which is an error, end the transaction."""
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
        answer = None
        try:
            if session.execute(statement, {"key": session.request.key}).fetchone() is not None:
                return Grant(None)
        except OperationalError as error:
            if not self.dialect.is_wait_over(error):
                raise
            answer = Busy()
        session.execute("ROLLBACK")
        return answer


class MySQLAdvisory(MySQLSessions):
    """Named locks of the whole server (GET_LOCK)."""

    supports_shared = False
    waits_in_transaction = False

    def free(self, session: DatabaseSession) -> bool:
        """Free the lock. RELEASE_LOCK returns 1: freed; 0: not ours; NULL: not held."""
        name = lock_name(session.connection.settings_dict["NAME"], session.request.key)
        return bool(session.execute("SELECT RELEASE_LOCK(%s)", [name]).fetchone()[0] == 1)

    def is_held(self, cursor: Any, key: str) -> bool:
        return self._users(cursor, [key])[key] is not None

    def held(self, cursor: Any, known: dict[str, Counted]) -> Iterator[Held]:
        waiters = Counter(_waiting(cursor))
        for key, user in self._users(cursor, [*known]).items():
            counted = known[key]
            if user and user == counted.session and (last := counted.last):
                yield as_held(counted, last.owner_digest, waiters[key], shared=False)

    def _users(self, cursor: Any, keys: list[str]) -> dict[str, int | None]:
        """Return the session that holds the lock, or None, by key."""
        found: dict[str, int | None] = {}
        for some in batches(keys, BATCH):
            names = [lock_name(cursor.db.settings_dict["NAME"], key) for key in some]
            cursor.execute(f"SELECT {', '.join(['IS_USED_LOCK(%s)'] * len(some))}", names)
            found |= zip(some, cursor.fetchone(), strict=True)
        return found

    def _try(self, session: DatabaseSession, seconds: float) -> Grant | Busy | None:
        """Wait for the lock; MariaDB counts fractions of seconds, MySQL whole seconds."""
        name = lock_name(session.connection.settings_dict["NAME"], session.request.key)
        longest = seconds if self.is_mariadb else int(seconds)
        statement = f"{_who_waits(session)}SELECT GET_LOCK(%s, %s)"
        answer = session.execute(statement, [name, longest]).fetchone()[0]
        if answer is None:
            problem = "GET_LOCK failed: the server is out of memory, or the session was killed"
            raise Unusable(problem)
        return Grant(None) if answer else Busy()


def _is_there(cursor: Any, number: int | None) -> bool:
    cursor.execute("SELECT 1 FROM information_schema.processlist WHERE id = %s", [number])
    return cursor.fetchone() is not None


def _was_used_since(cursor: Any, occupant: Occupant) -> bool:
    """Return True if the session has acquired another lock since, so that it no longer holds this one."""
    session = f'%"session":{occupant.session},%'
    cursor.execute(_WAS_USED, {"token": occupant.token, "session": session})
    return cursor.fetchone() is not None


def _waiting(cursor: Any) -> list[str]:
    """Return the key of each waiter."""
    cursor.execute(_WAITING)
    return [found[1] for (text,) in cursor.fetchall() if (found := _WAITS.match(text))]


def _who_waits(session: DatabaseSession) -> str:
    """Return the comment that begins a waiting statement."""
    return f"/*{PREFIX}{session.request.key}*/ "


@lru_cache(maxsize=1000)
def lock_name(database: str, key: str) -> str:
    """Return a name of at most 64 characters for *key* in *database*: GET_LOCK has one set of names for the server."""
    return f"distlock:{hashlib.sha256(f'{database}|{key}'.encode()).hexdigest()[:48]}"
