"""Locks and the caller's transactions: release after their end, and warnings about a wrong order."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
import weakref
from asyncio import _get_running_loop
from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections, transaction

from .exceptions import LockError, ReleasedBeforeCommit, SnapshotBeforeLock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_distlock")
_View = TypeVar("_View", bound="Callable[..., Any]")
_PACKAGE = __name__.rpartition(".")[0]
#: Where Django stores the connections of threads without an event loop, by alias.
_of_thread = getattr(connections._connections, "_storage", None)  # type: ignore[attr-defined]  # noqa: SLF001 - a fast way to them
#: By file, a registry for ``warnings.warn_explicit()``, which shows each call site once.
_told: dict[str, dict[str | tuple[str, type[Warning], int], int]] = {}


def never_atomic(view: _View) -> _View:
    """Exempt *view* from ATOMIC_REQUESTS: SQLite has one writer, so the view's transaction would block its locks."""
    for database in connections:
        transaction.non_atomic_requests(database)(view)
    return view


def open_here() -> tuple[Any, ...]:
    """Return a mark for each open transaction of this thread: its outermost atomic block.

    The mark of a connection without autocommit is the connection, even if no statement has begun a transaction.
    """
    found: tuple[Any, ...] = ()
    if _get_running_loop() is None:  # async code has no transactions
        for alias, settings in [*connections.settings.items()]:
            if not settings.get("AUTOCOMMIT", True):
                connections[alias]  # the first statement, which opens it, begins a transaction
    for connection in _used_here():
        if connection.in_atomic_block or _is_manual(connection):
            mark = _mark(connection)
            if mark is not None:
                found += (mark,)
    return found


def still_open(marks: Collection[Any] | None) -> list[BaseDatabaseWrapper]:
    """Return the connections whose open transaction is one of *marks*; None: any transaction."""
    found = []
    for connection in _used_here():
        mark = _mark(connection)
        if mark is not None and (marks is None or mark in marks) and _is_open(connection):
            found.append(connection)
    return found


def call_at_end(open_ones: Sequence[BaseDatabaseWrapper], then: Callable[[bool], None]) -> None:
    """Call *then* when the transactions of *open_ones* have ended, with True if all were committed.

    Functions that wait for the same end are called in the order of these calls.
    """
    ends = list[bool]()

    def note(is_committed: bool) -> None:
        ends.append(is_committed)
        if len(ends) == len(open_ones):
            then(all(ends))

    for connection in open_ones:
        _Ends.of(connection).wait(note)


def call_at_rollback(then: Callable[[], object]) -> None:
    """Call *then* when an open transaction of this thread, or an atomic block that is open now, is rolled back.

    *then* may be called several times.
    """
    for connection in still_open(None):
        _Ends.of(connection).wait_for_rollback(then)


def tell_of_release(name: str, *, strict: bool) -> None:
    """Warn if the lock *name* is released inside an open atomic block, even if it was acquired before the block."""
    for connection in _used_here():
        if connection.in_atomic_block and connection in still_open(None):
            _tell(ReleasedBeforeCommit, name, connection.alias, strict=strict)


def tell_of_snapshots(name: str, marks: Collection[Any], *, strict: bool) -> None:
    """Warn if an open transaction keeps reading data from before the lock *name* was acquired."""
    for connection in still_open(marks):
        if connection.in_atomic_block and _has_snapshot(connection):
            _tell(SnapshotBeforeLock, name, connection.alias, strict=strict)


class Block:
    """The caller's outermost atomic block on one connection; blocks of a TestCase do not count."""

    def __init__(self, connection: Any, what: str) -> None:
        """Raise LockError if no block is open; *what* names the function that needs one."""
        # A weak reference: when a thread leaves its connection open, garbage collection closes it.
        self._connection: weakref.ref[BaseDatabaseWrapper] = weakref.ref(connection)
        blocks = connection.atomic_blocks
        #: How many blocks of a TestCase are around this block.
        self._outside = sum(getattr(block, "_from_testcase", False) for block in blocks)
        if len(blocks) == self._outside:
            msg = f"{what} needs a transaction: call it inside atomic(using={connection.alias!r})."
            raise LockError(msg)
        self._savepoint = connection.savepoint_ids[self._outside - 1] if self._outside else None
        # Django drops this on-commit function when the transaction ends: nothing else tells the next transaction apart.
        self._mark: Any = lambda: None
        if not self._outside:
            connection.run_on_commit.append((set(), self._mark, False))

    def is_on(self, connection: BaseDatabaseWrapper) -> bool:
        return self._connection() is connection

    @property
    def is_open(self) -> bool:
        connection = self._connection()
        if connection is None:
            return False
        if not self._outside:
            return any(entry[1] is self._mark for entry in connection.run_on_commit)
        if self._savepoint is None:  # of atomic(savepoint=False)
            return bool(len(connection.atomic_blocks) > self._outside)
        return bool(self._savepoint in connection.savepoint_ids)


#: The mark of a transaction of a caller that has turned autocommit off: it ends with commit() or rollback().
_BY_HAND = "by hand"
#: The mark of a transaction that ends with its outermost block. In a TestCase the mark is that block's savepoint.
_BLOCK = "block"


class _Ends:
    """Replaces the methods of a connection that end transactions, and then calls the functions that wait for an end.

    Django's on-commit functions are not enough: Django drops them at a rollback and after one that fails,
    keeps them until autocommit is on again, and never calls them in a TestCase.
    """

    _METHODS = (
        *("set_autocommit", "close", "commit", "rollback"),
        *("savepoint_commit", "savepoint_rollback"),
    )

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._django = {name: getattr(connection, name) for name in self._METHODS}
        #: The functions that wait, each with the mark of its transaction, and a number of savepoints: a rollback to
        #: one of the first so many also calls the function.
        self._waiting: list[tuple[str, int, Callable[[bool], None]]] = []
        #: Whether the last transaction was committed; None after set_autocommit().
        self._outcome: bool | None = None
        for name in self._METHODS:
            setattr(connection, name, getattr(self, name))

    @classmethod
    def of(cls, connection: BaseDatabaseWrapper) -> _Ends:
        """Return the instance for *connection*, made at the first call."""
        known = getattr(connection.commit, "__self__", None)
        return known if isinstance(known, cls) else cls(connection)

    def wait(self, then: Callable[[bool], None], after: int = 0) -> None:
        """Call *then* when the open transaction has ended, with True if it was committed.

        A rollback to one of the first *after* savepoints also calls *then*, with False.
        """
        connection, mark = self._connection, _BLOCK
        if _is_manual(connection):
            mark = _BY_HAND
        elif depth := self._depth:
            mark = connection.savepoint_ids[depth - 1]
        self._waiting.append((mark, after, then))

    def wait_for_rollback(self, then: Callable[[], object]) -> None:
        """Call *then* when the open transaction is rolled back, completely or to a savepoint made before now."""

        def note(is_committed: bool) -> None:
            if not is_committed:
                then()

        self.wait(note, after=self._connection.savepoint_state)

    @property
    def _depth(self) -> int:
        """How many blocks of a TestCase are around the open transaction."""
        connection = self._connection
        return (
            0 if _is_manual(connection) else connection.atomic_blocks.index(_outermost(connection))
        )

    def set_autocommit(self, autocommit: bool, **options: Any) -> None:
        """Call the functions after a block's commit or rollback: Django calls its on-commit functions here."""
        # Those may run other transactions, whose ends do not concern the functions that wait now.
        outcome, self._outcome = self._outcome, None
        waiting, self._waiting = self._waiting, []
        try:
            self._django["set_autocommit"](autocommit, **options)
        finally:
            self._waiting = [*waiting, *self._waiting]
            if self._connection.autocommit:
                # MySQL and SQLite commit an open transaction when autocommit is turned on.
                self._end(_BY_HAND, is_committed=True)
                self._end(is_committed=bool(outcome))
            elif outcome is not None:  # autocommit could not be turned on again
                self._end(_BLOCK, is_committed=outcome)

    def close(self) -> None:
        connection = self._connection
        try:
            self._django["close"]()
        finally:
            # close() does nothing for an in-memory database, and raises in another thread.
            if connection.connection is None or connection.closed_in_transaction:
                self._end(is_committed=False)

    def commit(self) -> None:
        self._outcome = False  # if it fails: Django rolls back after most errors, but not after an InterfaceError
        self._django["commit"]()
        self._outcome = True
        self._end(_BY_HAND, is_committed=True)

    def rollback(self) -> None:
        self._django["rollback"]()
        self._outcome = False
        self._end(_BY_HAND, is_committed=False)

    def savepoint_commit(self, sid: str) -> None:
        self._django["savepoint_commit"](sid)
        self._end(sid, is_committed=True)

    def savepoint_rollback(self, sid: str) -> None:
        self._django["savepoint_rollback"](sid)
        if sid is not None:  # as savepoint() returns outside a transaction
            # Django numbers the savepoints of a connection: s140_x1, s140_x2 ...
            self._end(sid, int(sid.rpartition("x")[2]), is_committed=False)

    def _end(self, mark: str | None = None, number: float = inf, *, is_committed: bool) -> None:
        """Call the functions that wait for the end of the transaction *mark*; None: of any transaction.

        *number* is that of the savepoint to which the transaction was rolled back.
        """
        ended = [each for each in self._waiting if mark in (None, each[0]) or each[1] >= number]
        self._waiting = [each for each in self._waiting if each not in ended]
        with ExitStack() as stack:  # call all, even if an asynchronous exception ends one
            for *_, then in reversed(ended):
                stack.callback(then, is_committed)


def _used_here() -> Sequence[BaseDatabaseWrapper]:
    """Return the connections that this thread or task has used."""
    if _get_running_loop() is None and isinstance(_of_thread, threading.local):
        # The same as `connections.all()`, ten times faster.
        return [*filter(None, map(vars(_of_thread).get, [*connections.settings]))]
    return connections.all(initialized_only=True)


def _mark(connection: BaseDatabaseWrapper) -> Any:
    """Return the mark of the transaction of *connection*; see open_here()."""
    return connection if _is_manual(connection) else _outermost(connection)


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    """Return True if the transaction of _mark() is open, or may be: MySQL's drivers do not show it."""
    if connection.closed_in_transaction or connection.connection is None:
        return False
    if not _is_manual(connection):
        return True
    driver: Any = connection.connection
    if connection.vendor == "postgresql":
        return bool(driver.info.transaction_status)
    return connection.vendor != "sqlite" or bool(driver.in_transaction)


def _is_manual(connection: BaseDatabaseWrapper) -> bool:
    """Return True if the caller has turned autocommit off and calls commit() itself, also around an atomic block."""
    if connection.in_atomic_block:
        return not connection.commit_on_exit
    if connection.connection is None:  # it will be opened with the setting
        return not connection.settings_dict.get("AUTOCOMMIT", True)
    return not connection.autocommit


def _outermost(connection: BaseDatabaseWrapper) -> Any:
    """Return the outermost atomic block of the code under test; None if there is none.

    Blocks of a TestCase do not count, nor does a block inside them without a savepoint, as its end is not visible.
    """
    if connection.in_atomic_block:
        for depth, block in enumerate(connection.atomic_blocks):
            is_from_testcase = getattr(block, "_from_testcase", False)
            if not is_from_testcase and (depth == 0 or connection.savepoint_ids[depth - 1]):
                return block
    return None


def _has_snapshot(connection: BaseDatabaseWrapper) -> bool:
    """Return True if the transaction certainly reads an older snapshot; False also if only a query could tell."""
    driver: Any = connection.connection
    level = getattr(connection, "isolation_level", None)
    if connection.vendor == "postgresql":
        is_high = getattr(level, "name", "") in {"REPEATABLE_READ", "SERIALIZABLE"}
        # After a savepoint, which takes no snapshot, the transaction's status does not tell whether it has read.
        is_first_block = not any(connection.savepoint_ids)
        return is_high and is_first_block and bool(driver.info.transaction_status)
    if connection.vendor == "mysql" and level == "repeatable read":
        # A write takes no snapshot; Django's INSERT returns the key on MariaDB, and the fence of a FencedModel.
        last = driver if hasattr(driver, "field_count") else getattr(driver, "_result", None)
        fields = getattr(last, "field_count", 0)
        return (fields() if callable(fields) else fields) > 2
    return False


def _tell(
    kind: type[ReleasedBeforeCommit | SnapshotBeforeLock], name: str, alias: str, *, strict: bool
) -> None:
    """Warn once for each call site, for all names together; if *strict*, raise an error instead."""
    if strict:
        raise kind(name, alias)
    path, line, module = _call_site()
    warnings.warn_explicit(
        kind("", alias), None, path, line, module, registry=_told.setdefault(path, {})
    )


def _call_site() -> tuple[str, int, str]:
    """Return file, line and module of the code that uses the lock: the decorated function, or the caller of the package."""
    frame = sys._getframe(1)  # noqa: SLF001 - as the module warnings does itself
    while frame.f_back and _is_between(frame.f_globals.get("__name__", "")):
        if locked := frame.f_locals.get("locked"):
            function = inspect.unwrap(locked.function)
            if code := getattr(function, "__code__", None):
                return code.co_filename, code.co_firstlineno, function.__module__
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")


def _is_between(module: str) -> bool:
    return module in {_PACKAGE, "contextlib"} or module.startswith(f"{_PACKAGE}.")
