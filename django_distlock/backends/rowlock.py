"""RowLockBackend: a row kept locked by SELECT FOR UPDATE. transaction_lock(): in the caller's own transaction."""

from __future__ import annotations

import enum
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

from django.db import connections
from django.db.utils import OperationalError

from django_distlock import conf
from django_distlock.conf import DEFAULT_TIMEOUT, BackendSettings, optional_seconds
from django_distlock.engine.caller import Caller, forks
from django_distlock.engine.naming import checked_name, printable
from django_distlock.engine.waiting import Wait
from django_distlock.engine.waits import HeldBy, LockId, Waiter, waits
from django_distlock.exceptions import LockDeadlock, LockError, LockNotAcquired
from django_distlock.transactions import Block

from .database.base import SHORT_PAUSE, ConnectionOptions, location_of
from .database.bounds import interruptible
from .database.engine import LOCK
from .database.postgresql import sqlstate
from .session import mysql, postgresql
from .session.backend import SessionBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

#: Seconds to stand back for others, at most.
STAND_BACK = 0.1
#: Isolation levels at which a transaction reads what was committed when it began.
SNAPSHOT = {"repeatable read", "serializable", "REPEATABLE-READ", "SERIALIZABLE"}


class RowLockBackend(SessionBackend):
    """The server itself queues and frees; a lock ends with the connection that holds its row."""

    options_class = ConnectionOptions
    options: ConnectionOptions
    kind = "row"
    servers: ClassVar = {"postgresql": postgresql.PostgreSQLRows, "mysql": mysql.MySQLRows}
    needs_row = True


def transaction_lock(
    name: str, *, using: str = "default", timeout: float | timedelta | None = DEFAULT_TIMEOUT
) -> None:
    """Take the lock *name* in the transaction that is open on *using*, until its commit or rollback.

    LockNotAcquired after *timeout* seconds (0: one try, None: no limit); the transaction can continue.
    It is the lock of a RowLockBackend on *using*. At REPEATABLE READ and above it must be the first
    statement of the outermost atomic block; otherwise it raises LockError. While Django's tests run,
    it is in memory, and works on SQLite too.
    """
    name, wait = checked_name(name), Wait(optional_seconds(timeout, "timeout"))
    connection = connections[using]
    if not connection.in_atomic_block:
        msg = f"transaction_lock() needs a transaction: call it inside atomic(using={using!r})."
        raise LockError(msg)
    taker = _TAKERS.get(connection.vendor)
    if conf.tests_run() and (taker or connection.vendor == "sqlite"):
        _take_in_memory(connection, name, wait)
        return
    if taker is None:
        msg = f"transaction_lock() needs PostgreSQL, MariaDB or MySQL: {using!r} is {connection.vendor}."
        raise LockError(msg)
    taker(connection, name, wait).take()


def _take_in_memory(connection: BaseDatabaseWrapper, name: str, wait: Wait) -> None:
    block, key = Block(connection, "transaction_lock()"), (connection.alias, name)
    while True:
        with _in_memory_mutex:
            holder = _in_memory.get(key)
            if holder is None or not holder.is_open:
                holder = _in_memory[key] = block
        if holder.is_on(connection):
            return
        if wait.is_over:
            raise LockNotAcquired(name, wait.waited)
        time.sleep(wait.next_pause(longest=SHORT_PAUSE))


class Found(enum.Enum):
    """What an attempt to lock the row found."""

    LOCKED = "locked"
    MISSING = "there is no row"
    STALE = "locked, in a snapshot from before it was free"


class Taker(ABC):
    """One call of transaction_lock(): what is the same on each kind of server."""

    #: Whether it is known that nothing was done yet in the transaction: it is begun anew instead of a savepoint.
    _is_first = False

    def __init__(self, connection: BaseDatabaseWrapper, name: str, wait: Wait) -> None:
        self.connection = connection
        self.name = name
        self.wait = wait
        #: Makes the row, outside of the caller's transaction.
        self.backend = _backend(connection.alias)
        self.engine = self.backend.engine
        self.key = self.backend.key_of(name)
        self._lock = LockId(location_of(connection.settings_dict), self.key)

    def take(self) -> None:
        """Take the lock, or raise why not."""
        waiter = Waiter(
            name=self.name, lock=self._lock, caller=Caller(), shared=False, wait=self.wait
        )
        try:
            if not self.wait.is_over:
                waits.begin(waiter)
            with self.backend._own.translated():  # noqa: SLF001 - our own
                self.look_before()
                self.backend.make_row(self.name)
                attempts = 0
                while (found := self._attempt()) is not Found.LOCKED:
                    attempts += 1
                    if found is Found.MISSING:
                        self.backend.make_row(self.name)
                    elif attempts > 1:
                        # Others were in between: all would be for ever if nobody stood back.
                        time.sleep(self.wait.next_pause(longest=STAND_BACK))
        finally:
            waits.end(waiter)
        _note(self.connection, self._lock, waiter.caller)

    @abstractmethod
    def look_before(self) -> None:
        """Raise LockError if the transaction reads what was committed before the lock can be ours."""

    @abstractmethod
    def lock(self, cursor: CursorWrapper) -> Found:
        """Lock the row within the time that is left; OperationalError if that is over."""

    @abstractmethod
    def is_deadlock(self, error: Exception) -> bool:
        """Return whether, of what is contention, the server ended our wait for being one of a circle."""

    def select(self, what: str, how: str) -> str:
        table = f"{self.backend.schema}{LOCK}"
        return f"SELECT {what} FROM {table} WHERE method_name = %(key)s FOR UPDATE {how}"  # noqa: S608 - of constants

    def _attempt(self) -> Found:
        if not self._is_first:
            self._savepoint = self.connection.savepoint() or ""
        try:
            with self.connection.cursor() as cursor:
                found = self.lock(cursor)
        except LockError:
            self.undo()
            raise
        except OperationalError as error:
            self._undo_refused(error)
            return Found.STALE
        if found is not Found.LOCKED:
            self.undo()
        elif not self._is_first:
            self.connection.savepoint_commit(self._savepoint)
        return found

    def _undo_refused(self, error: OperationalError) -> None:
        """Raise why the row is not ours; return if it was only changed since the snapshot that was made with it."""
        if not self.engine.is_contention(error):
            raise error
        if self.is_deadlock(error):
            self.after_deadlock()
            reason = "the server found a circle of transactions that wait for each other"
            raise LockDeadlock(self.name, reason) from error
        self.undo()
        if self.engine.is_wait_over(error):
            raise LockNotAcquired(self.name, self.wait.waited) from error
        # Nobody need hold the lock, but what was read before is old.
        if not self._is_first:
            self.refuse_old_snapshot()

    def undo(self) -> None:
        """Come back to before the attempt: the transaction can go on."""
        if self._is_first:
            self.connection.connection.rollback()
        else:
            self.connection.savepoint_rollback(self._savepoint)
            self.connection.savepoint_commit(self._savepoint)

    def after_deadlock(self) -> None:
        """Have the transaction as the server left it."""
        self.undo()

    def refuse_old_snapshot(self) -> NoReturn:
        msg = (
            f"transaction_lock({printable(self.name)!r}) must be the first statement of the outermost atomic block at this "
            "isolation level: what was read before is from before the lock was free. Or use READ COMMITTED."
        )
        raise LockError(msg)


class OnPostgreSQL(Taker):
    """Takes no savepoint where nothing was done yet: the transaction is begun anew instead.

    A snapshot is taken when a statement begins, before it waits: then what the holder before has
    committed is not in it. So at REPEATABLE READ and above the row is locked, the transaction begun
    anew, and the row locked again: if our first lock was the last one before, nobody was in between.
    """

    def look_before(self) -> None:
        """Only look whether the transaction has begun: its isolation is told with the lock."""
        self._is_first = self.connection.connection.info.transaction_status == 0
        self._our_first: int | None = None

    def lock(self, cursor: CursorWrapper) -> Found:
        """Leave lock_timeout as it was; no statement before the locking one takes a snapshot."""
        cursor.execute("SHOW lock_timeout")
        (before,) = cursor.fetchone()
        cursor.execute(f"SET LOCAL lock_timeout = {postgresql.milliseconds(self.wait.left)}")
        # The list is computed before the row is waited for: xmax is who locked it last, before us.
        what = "xmax::text::bigint, pg_current_xact_id()::text::bigint"
        statement = self.select(what, "NOWAIT" if self.wait.is_over else "")
        cursor.execute(statement, {"key": self.key})
        row = cursor.fetchone()
        cursor.execute(f"SET LOCAL lock_timeout = '{before}'")
        cursor.execute("SHOW transaction_isolation")
        (isolation,) = cursor.fetchone()
        if isolation in SNAPSHOT and not self._is_first:
            self.refuse_old_snapshot()
        if row is None:
            return Found.MISSING
        last, ours = row
        if isolation not in SNAPSHOT or last == self._our_first:
            return Found.LOCKED
        self._our_first = ours % 2**32
        return Found.STALE

    def is_deadlock(self, error: Exception) -> bool:
        return sqlstate(error) == "40P01"  # deadlock_detected


class OnMySQL(Taker):
    """A locking read makes no snapshot here, so only what was done before the lock matters."""

    def look_before(self) -> None:
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
        whole = mysql.LONGEST if self.wait.left is None else min(mysql.LONGEST, int(self.wait.left))
        if whole:
            try:
                with interruptible(self.connection):
                    return self._wait(cursor, whole)
            except OperationalError as error:
                if self.wait.left is None or not self.engine.is_wait_over(error):
                    raise
        while True:
            try:
                return self._select(cursor, "NOWAIT")
            except OperationalError as error:
                if self.wait.is_over or not self.engine.is_wait_over(error):
                    raise
            time.sleep(self.wait.next_pause(longest=SHORT_PAUSE))

    def is_deadlock(self, error: Exception) -> bool:
        return not self.engine.is_wait_over(error)

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


def _note(connection: BaseDatabaseWrapper, lock: LockId, caller: Caller) -> None:
    # Django makes a new list at each commit, rollback, and rollback to a savepoint: what is free then is not told.
    began = connection.run_on_commit
    known = _taken.get(connection)
    locks = known[2] if known is not None and known[0] is began else frozenset[LockId]()
    _taken[connection] = began, caller, locks | {lock}


def _holders() -> Iterator[tuple[LockId, HeldBy]]:
    """Tell the locks that the transactions of this process have taken, as long as they surely have them."""
    for connection in [ref() for ref in _taken.keyrefs()]:
        if connection is None:
            continue
        began, caller, locks = _taken[connection]
        if connection.in_atomic_block and connection.run_on_commit is began:
            yield from ((lock, HeldBy(caller, shared=False)) for lock in locks)


_TAKERS: dict[str, type[Taker]] = {"postgresql": OnPostgreSQL, "mysql": OnMySQL}
#: By connection: the list it had meanwhile, see _note().
_taken = WeakKeyDictionary["BaseDatabaseWrapper", tuple[list[Any], Caller, frozenset[LockId]]]()
_in_memory_mutex = threading.Lock()
#: By alias and name, who took it last while tests run.
_in_memory: dict[tuple[str, str], Block] = {}
#: By alias of DATABASES, whose locks these are: without KEY_PREFIX, the same name is the same lock.
_backends: dict[str, RowLockBackend] = {}


def _backend(alias: str) -> RowLockBackend:
    if alias not in _backends:
        _backends[alias] = RowLockBackend(BackendSettings(alias, options={"using": alias}))
    return _backends[alias]


def _abandon_backends() -> None:
    for backend in _backends.values():
        backend.abandon_after_fork()


waits.other_holders.append(_holders)
forks.in_child(_abandon_backends)
# A parent's transactions are its parent's.
forks.in_child(_taken.clear)
