"""RowLockBackend and transaction_lock(): a row locked by SELECT FOR UPDATE, here in the caller's own transaction."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

from django.db import Error, connections, transaction
from django.db.utils import OperationalError

from django_distlock import conf
from django_distlock.conf import (
    DEFAULT_ALIAS,
    DEFAULT_TIMEOUT,
    BackendSettings,
    optional_seconds,
)
from django_distlock.engine import handover
from django_distlock.engine.deadlocks import HeldBy, LockId, Waiter, wait_graph
from django_distlock.engine.waiting import Wait
from django_distlock.exceptions import (
    InvalidLockBackend,
    LockBackendError,
    LockDeadlock,
    LockError,
    LockNotAcquired,
)
from django_distlock.ground.caller import Caller, forks
from django_distlock.ground.mutexes import new_mutex
from django_distlock.ground.naming import checked_name, printable, server_key
from django_distlock.transactions import Block

from .database.base import SHORT_PAUSE, ConnectionOptions, location_of
from .database.bounds import interruptible
from .database.dialect import LOCK
from .session import mysql, postgresql
from .session.backend import SessionBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

#: Isolation levels at which a transaction reads the data of its begin.
SNAPSHOT = {"repeatable read", "serializable", "REPEATABLE-READ", "SERIALIZABLE"}
#: Seconds that a statement has in addition to its wait: a busy server is slow to lock a free row, too.
BESIDE_WAIT = 0.25
# One row: lock_timeout and statement_timeout before they become %(limit)s and, unless that is NULL, %(longest)s.
_LIMIT = """
SELECT current_setting('lock_timeout'), current_setting('statement_timeout'), set_config('lock_timeout', %(limit)s, true),
    set_config('statement_timeout', coalesce(%(longest)s::text, current_setting('statement_timeout')), true)
"""


class RowLockBackend(SessionBackend):
    """Locks as locked rows: the server queues waiters, and frees a lock with the connection that holds its row."""

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
    The lock is the same as *name* of a RowLockBackend on *using*, with the KEY_PREFIX of the alias "default" if that
    is a function. LockError if the isolation level is not READ COMMITTED; on MariaDB, any level will do if this is
    the first statement of the outermost atomic block. LockBackendError on a Galera cluster, where rows are locked
    on one node only. While Django's tests run, the lock is in memory, and works on SQLite, too.
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


def _prefix_here() -> str:
    """Return the result of KEY_PREFIX of the alias "default", if that is a function; "" if it is a text."""
    try:
        backend = handover.backend_of(DEFAULT_ALIAS)
    except InvalidLockBackend:
        return ""  # no alias is needed
    return "" if isinstance(backend.key_prefix, str) else backend.prefix()


def _take_in_memory(connection: BaseDatabaseWrapper, name: str, wait: Wait) -> None:
    block = Block(connection, "transaction_lock()")
    key = connection.alias, _prefix_here(), name
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


class Taker(ABC):
    """One call of transaction_lock(): the part that all kinds of servers share."""

    def __init__(self, connection: BaseDatabaseWrapper, name: str, wait: Wait) -> None:
        self.connection = connection
        self.name = name
        self.wait = wait
        #: The backend makes the row, outside of the caller's transaction.
        self.backend = _backend(connection.alias)
        self.dialect = self.backend.dialect
        self.key = server_key(name, _prefix_here(), kind=self.backend.kind)
        self._lock = LockId(location_of(connection), self.key)

    def take(self) -> None:
        """Take the lock, or raise the reason why it cannot be taken."""
        waiter = Waiter(
            name=self.name,
            lock=self._lock,
            caller=Caller(),
            shared=False,
            wait=self.wait,
            transaction=self.connection,
        )
        try:
            if not self.wait.is_over:
                wait_graph.begin(waiter)
            with self.backend._own.translated():  # noqa: SLF001 - our own
                self.prepare()
                while not self._lock_row():
                    self.backend.make_row(self.key, self.name)
        finally:
            wait_graph.end(waiter)
        _note(self.connection, self._lock, waiter.caller)

    @abstractmethod
    def prepare(self) -> None:
        """Raise LockError if the transaction could read data from before the lock is ours."""

    @abstractmethod
    def lock(self, cursor: CursorWrapper) -> bool:
        """Lock the row in the time left, or raise OperationalError; return False if there is no row."""

    def select(self, how: str) -> str:
        table = f"{self.backend.schema}{LOCK}"
        return f"SELECT 1 FROM {table} WHERE method_name = %(key)s FOR UPDATE {how}"  # noqa: S608 - of constants

    def refuse_isolation(self, advice: str) -> NoReturn:
        msg = (
            f"transaction_lock({printable(self.name)!r}) {advice}: at this isolation level the transaction would "
            "read data from before the lock was free."
        )
        raise LockError(msg)

    def _lock_row(self) -> bool:
        """Lock the row in a savepoint, so that the transaction can go on after a refusal."""
        try:
            # After a deadlock MySQL has dropped the savepoint: Django then refuses further queries.
            with (
                transaction.atomic(using=self.connection.alias),
                self.connection.cursor() as cursor,
            ):
                return self.lock(cursor)
        except OperationalError as error:
            if self.dialect.is_wait_over(error):
                if self.connection.needs_rollback:
                    problem = (
                        "the lock is busy, and the server has rolled back the whole transaction "
                        "(innodb_rollback_on_timeout): let this error end the block"
                    )
                    raise LockBackendError(self.connection.alias, problem) from error
                raise LockNotAcquired(self.name, self.wait.waited) from error
            if self.dialect.is_contention(error):
                reason = "the server found a circle of transactions that wait for each other"
                raise LockDeadlock(self.name, reason) from error
            raise


class OnPostgreSQL(Taker):
    """A call on PostgreSQL, which refuses snapshots: taken before the wait, they lack the last holder's commit."""

    def prepare(self) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            if cursor.fetchone()[0] in SNAPSHOT:
                self.refuse_isolation("needs READ COMMITTED on PostgreSQL")

    def lock(self, cursor: CursorWrapper) -> bool:
        """Wait with our own limits; restore statement_timeout in the waiting statement, and lock_timeout after it."""
        left, waits = self.wait.left, not self.wait.is_over
        longest = None if left is None else left + BESIDE_WAIT
        limits = {
            "limit": str(postgresql.milliseconds(left)),
            "longest": str(postgresql.milliseconds(longest)) if waits else None,
        }
        cursor.execute(_LIMIT, limits)
        before, of_statement, *_ = cursor.fetchone()
        unlimited = postgresql.UNLIMITED % f"'{of_statement}'"
        select = self.select("" if waits else "NOWAIT")
        try:
            cursor.execute(f"SELECT {unlimited}, ({select})", {"key": self.key})
        except OperationalError as error:
            if not postgresql.is_limit_over(error, self.wait):
                raise
            raise LockNotAcquired(self.name, self.wait.waited) from error
        is_locked = cursor.fetchone()[1] is not None
        cursor.execute(f"SET LOCAL lock_timeout = '{before}'")
        return is_locked


class OnMySQL(Taker):
    """A call on MariaDB or MySQL, where a locking read takes no snapshot: only earlier statements matter."""

    #: Whether the server rolls back the transaction of a statement that has waited too long.
    _ends_by_timeout = 0

    def prepare(self) -> None:
        """Make the row, too: FOR UPDATE of a missing row would lock the gap, so that our other connection cannot make it."""
        is_mariadb = self.connection.mysql_is_mariadb  # type: ignore[attr-defined]  # of Django's MySQL
        with self.connection.cursor() as cursor:
            # MySQL does not show whether the transaction has begun.
            has_begun = "@@in_transaction" if is_mariadb else "1"
            isolation = "@@tx_isolation" if is_mariadb else "@@transaction_isolation"
            cursor.execute(f"SELECT {isolation}, {has_begun}, @@innodb_rollback_on_timeout")
            level, begun, self._ends_by_timeout = cursor.fetchone()
        if level in SNAPSHOT and begun:
            self.refuse_isolation(
                "needs READ COMMITTED, or must be the first statement of the outermost atomic block"
            )
        self.backend.make_row(self.key, self.name)

    def lock(self, cursor: CursorWrapper) -> bool:
        """Wait whole seconds on the server, and the rest by trying again, unless a refusal ends the transaction."""
        whole = mysql.LONGEST if self.wait.left is None else min(mysql.LONGEST, int(self.wait.left))
        if whole:
            try:
                return self._wait(cursor, whole)
            except OperationalError as error:
                is_last = self._ends_by_timeout or self.wait.left is None
                if is_last or not self.dialect.is_wait_over(error):
                    raise
        while True:
            try:
                return self._select(cursor, "NOWAIT")
            except OperationalError as error:
                is_last = self._ends_by_timeout or self.wait.is_over
                if is_last or not self.dialect.is_wait_over(error):
                    raise
            time.sleep(self.wait.next_pause(longest=SHORT_PAUSE))

    def _select(self, cursor: CursorWrapper, how: str, limits: str = "") -> bool:
        with interruptible(self.connection):
            cursor.execute(limits + self.select(how), {"key": self.key})
        return cursor.fetchone() is not None

    def _wait(self, cursor: CursorWrapper, seconds: int) -> bool:
        """Wait without the server's time limit for statements."""
        if cursor.db.mysql_is_mariadb:
            unlimited = "SET STATEMENT max_statement_time = 0 FOR "
            return self._select(cursor, f"WAIT {seconds}", unlimited)
        cursor.execute("SELECT @@innodb_lock_wait_timeout")
        (before,) = cursor.fetchone()
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {seconds}")
        try:
            return self._select(cursor, "")
        finally:
            with suppress(Error):  # fails if a signal has ended the wait, whose exception goes on
                cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {before}")


def _note(connection: BaseDatabaseWrapper, lock: LockId, caller: Caller) -> None:
    # Django makes a new list at each commit, rollback, and rollback to a savepoint, each of which may free the lock.
    began = connection.run_on_commit
    known = _taken.get(connection)
    locks = known[2] if known is not None and known[0] is began else frozenset[LockId]()
    _taken[connection] = began, caller, locks | {lock}


def _holders() -> Iterator[tuple[LockId, HeldBy]]:
    """Yield the locks that transactions of this process certainly hold."""
    for connection in [ref() for ref in _taken.keyrefs()]:
        if connection is None:
            continue
        began, caller, locks = _taken[connection]
        if connection.in_atomic_block and connection.run_on_commit is began:
            held = HeldBy(caller, shared=False, transaction=connection)
            yield from ((lock, held) for lock in locks)


_TAKERS: dict[str, type[Taker]] = {"postgresql": OnPostgreSQL, "mysql": OnMySQL}
#: By connection: the run_on_commit list of its transaction (see _note()), the caller, and the locks.
_taken = WeakKeyDictionary["BaseDatabaseWrapper", tuple[list[Any], Caller, frozenset[LockId]]]()
_in_memory_mutex = new_mutex()
#: By alias, prefix and name: the transaction that took the lock last, while tests run.
_in_memory: dict[tuple[str, str, str], Block] = {}
#: The backends of transaction_lock(), by alias of DATABASES. They have no KEY_PREFIX.
_backends: dict[str, RowLockBackend] = {}


def _backend(alias: str) -> RowLockBackend:
    if (known := _backends.get(alias)) is not None:
        return known
    made = RowLockBackend(BackendSettings(alias, options={"using": alias}))
    return _backends.setdefault(alias, made)  # another thread may have made one first


def _abandon_backends() -> None:
    for backend in _backends.values():
        backend.abandon_after_fork()


wait_graph.other_holders.append(_holders)
forks.in_child(_abandon_backends)
# A forked child does not own the parent's transactions.
forks.in_child(_taken.clear)
