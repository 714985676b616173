"""One call of transaction_lock(): what is the same on each kind of server."""

from __future__ import annotations

import enum
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

from django.db.utils import OperationalError

from django_distlock.engine.caller import Caller
from django_distlock.engine.forks import forks
from django_distlock.engine.naming import printable, server_key
from django_distlock.engine.waits import Holder, Lock, Waiter, waits
from django_distlock.exceptions import (
    Contended,
    LockDeadlock,
    LockError,
    LockNotAcquired,
    LockOutcomeUnknown,
)

from .base import place_of
from .connections import OwnConnections
from .engine import LOCK, schema_of_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

    from django_distlock.engine.waiting import Wait

    from .engine import Engine

#: What the rows of a RowLockBackend without KEY_PREFIX have in front: the same name is the same lock.
KIND = "row"
#: Seconds a request for a missing row may take, and on how many connections at once.
IO_TIMEOUT, AT_ONCE = 2.0, 2
#: Seconds to stand back for others, at most.
STAND_BACK = 0.1
#: Isolation levels at which a transaction reads what was committed when it began.
SNAPSHOT = {"repeatable read", "serializable", "REPEATABLE-READ", "SERIALIZABLE"}


class Found(enum.Enum):
    """What an attempt to lock the row found."""

    LOCKED = "locked"
    MISSING = "there is no row"
    STALE = "locked, in a snapshot from before it was free"


class Taker(ABC):
    """One call of transaction_lock()."""

    #: For what a connection of our own does: the row is made outside of the caller's transaction.
    engine: ClassVar[Engine]

    def __init__(self, connection: BaseDatabaseWrapper, name: str, wait: Wait) -> None:
        self.connection = connection
        self.name = name
        self.key = server_key(name, kind=KIND)
        self.wait = wait
        self._lock = Lock(place_of(connection.settings_dict), self.key)

    def take(self) -> None:
        """Take the lock, or raise why not."""
        waiter = Waiter(
            name=self.name, lock=self._lock, caller=Caller(), shared=False, wait=self.wait
        )
        try:
            if not self.wait.is_over:
                waits.begin(waiter)
            with _pool(self.connection.alias, self.engine).translated():
                self._take()
        finally:
            waits.end(waiter)
        _taken.note(self.connection, self._lock, waiter.caller)

    def _take(self) -> None:
        self.look_before()
        self._make_row()
        attempts = 0
        while (found := self._attempt()) is not Found.LOCKED:
            attempts += 1
            if found is Found.MISSING:
                self._make_row()
            elif attempts > 1:
                # Others were in between: all would be for ever if nobody stood back.
                time.sleep(self.wait.next_pause(longest=STAND_BACK))

    @abstractmethod
    def make_row(self, cursor: CursorWrapper) -> None:
        """Make the row if there is none. *cursor*: of a connection of our own."""

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
        """Return the statement that locks the row."""
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
            found = self._give_up(error)
        if found is Found.LOCKED:
            self.keep()
        else:
            self.undo()
        return found

    def begin(self) -> None:
        """Have a point to come back to if the lock is not had."""
        self._savepoint = self.connection.savepoint() or ""

    def undo(self) -> None:
        """Come back to that point: the transaction can go on."""
        self.connection.savepoint_rollback(self._savepoint)
        self.connection.savepoint_commit(self._savepoint)

    def keep(self) -> None:
        """Let what was done since then stand."""
        self.connection.savepoint_commit(self._savepoint)

    def after_deadlock(self) -> None:
        """Have the transaction as the server left it."""
        self.undo()

    def _give_up(self, error: Exception) -> Found:
        if self.is_deadlock(error):
            self.after_deadlock()
            reason = "the server found a circle of transactions that wait for each other"
            raise LockDeadlock(self.name, reason) from error
        if self.engine.is_wait_over(error):
            self.undo()
            raise LockNotAcquired(self.name, self.wait.waited) from error
        return self.after_conflict()

    def after_conflict(self) -> Found:
        """Begin anew after the row was changed since the snapshot: nobody need hold the lock."""
        return Found.STALE

    def refuse_old_snapshot(self) -> NoReturn:
        """Raise LockError."""
        msg = (
            f"transaction_lock({printable(self.name)!r}) must be the first statement of the outermost atomic block at this "
            "isolation level: what was read before is from before the lock was free. Or use READ COMMITTED."
        )
        raise LockError(msg)

    def _make_row(self) -> None:
        try:
            self._ask_for_row()
        except LockOutcomeUnknown:
            # An idle connection may have died, with a restarted server; made twice, it is still one row.
            self._ask_for_row()

    def _ask_for_row(self) -> None:
        alias = self.connection.alias
        pool = _pool(alias, self.engine)
        if alias not in _schemas:
            with pool.cursor() as cursor:
                _schemas[alias] = schema_of_tables(cursor)
        with suppress(Contended), pool.cursor() as cursor:
            self.make_row(cursor)


class _Taken:
    """The locks that the transactions of this process have taken, as long as they surely have them."""

    def __init__(self) -> None:
        self.forget()
        waits.other_holders.append(self.holders)

    def forget(self) -> None:
        """Begin anew in a forked child: its parent's transactions are its parent's."""
        self._mutex = threading.Lock()
        self._known: WeakKeyDictionary[BaseDatabaseWrapper, tuple[list[Any], Caller, set[Lock]]]
        self._known = WeakKeyDictionary()

    def note(self, connection: BaseDatabaseWrapper, lock: Lock, caller: Caller) -> None:
        """Note that the transaction of *connection* has *lock*."""
        # Django makes a new list at each commit, rollback, and rollback to a savepoint: what is free then is not told.
        began = connection.run_on_commit
        with self._mutex:
            known = self._known.get(connection)
            locks = known[2] if known is not None and known[0] is began else set()
            self._known[connection] = began, caller, locks | {lock}

    def holders(self) -> Iterator[tuple[Lock, Holder]]:
        """Tell who has which lock."""
        with self._mutex:
            known = list(self._known.items())
        for connection, (began, caller, locks) in known:
            if connection.in_atomic_block and connection.run_on_commit is began:
                yield from ((lock, Holder(caller, shared=False)) for lock in locks)


_taken = _Taken()
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
