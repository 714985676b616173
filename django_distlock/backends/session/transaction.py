"""transaction_lock(): a lock in the caller's own transaction, free exactly at its end."""

from __future__ import annotations

import enum
import math
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

from django.db import connections
from django.db.utils import OperationalError

from django_distlock import conf
from django_distlock.backends.database.base import SHORT_PAUSE, location_of
from django_distlock.backends.database.bounds import interruptible
from django_distlock.backends.database.connections import OwnConnections
from django_distlock.backends.database.engine import LOCK, schema_of_tables
from django_distlock.backends.database.mysql import MySQL, code
from django_distlock.backends.database.postgresql import PostgreSQL, sqlstate
from django_distlock.conf import DEFAULT_TIMEOUT, optional_seconds
from django_distlock.engine.caller import Caller, forks
from django_distlock.engine.naming import checked_name, printable, server_key
from django_distlock.engine.steps import settled
from django_distlock.engine.waiting import Wait
from django_distlock.engine.waits import HeldBy, LockId, Waiter, waits
from django_distlock.exceptions import (
    Contended,
    LockDeadlock,
    LockError,
    LockNotAcquired,
)
from django_distlock.transactions import Block

from . import mysql, postgresql

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

    from django_distlock.backends.database.engine import Engine

    from .sessions import SessionServer

#: What the rows of a RowLockBackend without KEY_PREFIX have in front: the same name is the same lock.
KIND = "row"
#: Seconds a request for a missing row may take, and on how many connections at once.
IO_TIMEOUT, AT_ONCE = 2.0, 2
#: Seconds to stand back for others, at most.
STAND_BACK = 0.1
#: Isolation levels at which a transaction reads what was committed when it began.
SNAPSHOT = {"repeatable read", "serializable", "REPEATABLE-READ", "SERIALIZABLE"}
#: Numbers of MariaDB's and MySQL's errors: a row is locked; a deadlock, or a row changed since the snapshot.
_TIMEOUT, _NOWAIT = 1205, 3572
_DEADLOCKS = {1213, 1020}


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

    #: For what a connection of our own does: the row is made outside of the caller's transaction.
    engine: ClassVar[Engine]
    #: What makes the row.
    server: ClassVar[type[SessionServer]]
    #: Whether it is known that nothing was done yet in the transaction: it is begun anew instead of a savepoint.
    _is_first = False

    def __init__(self, connection: BaseDatabaseWrapper, name: str, wait: Wait) -> None:
        self.connection = connection
        self.name = name
        self.key = server_key(name, kind=KIND)
        self.wait = wait
        self._lock = LockId(location_of(connection.settings_dict), self.key)

    def take(self) -> None:
        """Take the lock, or raise why not."""
        waiter = Waiter(
            name=self.name, lock=self._lock, caller=Caller(), shared=False, wait=self.wait
        )
        try:
            if not self.wait.is_over:
                waits.begin(waiter)
            with _pool(self.connection.alias, self.engine).translated():
                self.look_before()
                self._ask_for_row()
                attempts = 0
                while (found := self._attempt()) is not Found.LOCKED:
                    attempts += 1
                    if found is Found.MISSING:
                        self._ask_for_row()
                    elif attempts > 1:
                        # Others were in between: all would be for ever if nobody stood back.
                        time.sleep(self.wait.next_pause(longest=STAND_BACK))
        finally:
            waits.end(waiter)
        _taken.note(self.connection, self._lock, waiter.caller)

    @abstractmethod
    def look_before(self) -> None:
        """Raise LockError if the transaction reads what was committed before the lock can be ours."""

    @abstractmethod
    def lock(self, cursor: CursorWrapper) -> Found:
        """Lock the row within the time that is left; OperationalError if that is over."""

    @abstractmethod
    def is_deadlock(self, error: Exception) -> bool:
        """Return whether the server ended our wait for being one of a circle."""

    def select(self, what: str, how: str) -> str:
        table = f"{_schemas[self.connection.alias]}{LOCK}"
        return f"SELECT {what} FROM {table} WHERE method_name = %(key)s FOR UPDATE {how}"

    def _attempt(self) -> Found:
        self.begin()
        try:
            with self.connection.cursor() as cursor:
                found = self.lock(cursor)
        except LockError:
            self.undo()
            raise
        except OperationalError as error:
            if not self.engine.is_contention(error):
                raise
            if self.is_deadlock(error):
                self.after_deadlock()
                reason = "the server found a circle of transactions that wait for each other"
                raise LockDeadlock(self.name, reason) from error
            self.undo()
            if self.engine.is_wait_over(error):
                raise LockNotAcquired(self.name, self.wait.waited) from error
            # The row was changed since the snapshot: nobody need hold the lock, but what was read before is old.
            if not self._is_first:
                self.refuse_old_snapshot()
            return Found.STALE
        if found is Found.LOCKED:
            self.keep()
        else:
            self.undo()
        return found

    def begin(self) -> None:
        """Have a point to come back to if the lock is not had."""
        if not self._is_first:
            self._savepoint = self.connection.savepoint() or ""

    def undo(self) -> None:
        """Come back to before the attempt: the transaction can go on."""
        if self._is_first:
            self.connection.connection.rollback()
        else:
            self.connection.savepoint_rollback(self._savepoint)
            self.connection.savepoint_commit(self._savepoint)

    def keep(self) -> None:
        """Let what was done since then stand."""
        if not self._is_first:
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

    def _ask_for_row(self) -> None:
        alias = self.connection.alias
        pool = _pool(alias, self.engine)

        def ask() -> None:
            if alias not in _schemas:
                with pool.cursor() as cursor:
                    _schemas[alias] = schema_of_tables(cursor)
            with suppress(Contended), pool.cursor() as cursor:
                self.server.make_row(cursor, self.key, self.name)

        # An idle connection may have died, with a restarted server; made twice, it is still one row.
        settled(ask, within=math.inf)


class OnPostgreSQL(Taker):
    """Takes no savepoint where nothing was done yet: the transaction is begun anew instead.

    A snapshot is taken when a statement begins, before it waits: then what the holder before has
    committed is not in it. So at REPEATABLE READ and above the row is locked, the transaction begun
    anew, and the row locked again: if our first lock was the last one before, nobody was in between.
    """

    engine = PostgreSQL(fair=False)
    server = postgresql.PostgreSQLRows

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

    engine = MySQL(fair=False)
    server = mysql.MySQLRows

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
        return code(error) in _DEADLOCKS

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


class _Taken:
    """The locks that the transactions of this process have taken, as long as they surely have them."""

    def __init__(self) -> None:
        self.forget()
        waits.other_holders.append(self.holders)

    def forget(self) -> None:
        """Begin anew in a forked child: its parent's transactions are its parent's."""
        self._mutex = threading.Lock()
        self._known: WeakKeyDictionary[BaseDatabaseWrapper, tuple[list[Any], Caller, set[LockId]]]
        self._known = WeakKeyDictionary()

    def note(self, connection: BaseDatabaseWrapper, lock: LockId, caller: Caller) -> None:
        # Django makes a new list at each commit, rollback, and rollback to a savepoint: what is free then is not told.
        began = connection.run_on_commit
        with self._mutex:
            known = self._known.get(connection)
            locks = known[2] if known is not None and known[0] is began else set()
            self._known[connection] = began, caller, locks | {lock}

    def holders(self) -> Iterator[tuple[LockId, HeldBy]]:
        with self._mutex:
            known = list(self._known.items())
        for connection, (began, caller, locks) in known:
            if connection.in_atomic_block and connection.run_on_commit is began:
                yield from ((lock, HeldBy(caller, shared=False)) for lock in locks)


_TAKERS: dict[str, type[Taker]] = {"postgresql": OnPostgreSQL, "mysql": OnMySQL}
_taken = _Taken()
_in_memory_mutex = threading.Lock()
#: By alias and name, who took it last while tests run.
_in_memory: dict[tuple[str, str], Block] = {}
_pools: dict[str, OwnConnections] = {}
#: Where the rows are: the caller's connection may look elsewhere.
_schemas: dict[str, str] = {}


def _pool(alias: str, engine: Engine) -> OwnConnections:
    if alias not in _pools:
        _pools[alias] = OwnConnections(alias, alias, engine, limit=AT_ONCE, io_timeout=IO_TIMEOUT)
    return _pools[alias]


def _abandon_pools() -> None:
    for pool in _pools.values():
        pool.abandon()


forks.in_child(_abandon_pools)
forks.in_child(_taken.forget)
