"""Locks and the caller's transactions: releasing after their end, warning where the order is wrong."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
import weakref
from asyncio import _get_running_loop
from typing import TYPE_CHECKING, Any

from django.db import connections

from .engine.naming import log_fields, printable
from .exceptions import LockError, ReleasedBeforeCommit, SnapshotBeforeLock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

    from .lease import Lease

logger = logging.getLogger("django_distlock")
_PACKAGE = __name__.rpartition(".")[0]
#: What was warned of in each file: the registries of ``warnings``, for places that are not the caller's line.
_told: dict[str, dict[str | tuple[str, type[Warning], int], int]] = {}


def open_here() -> tuple[Any, ...]:
    """Return what stands for each transaction of this thread: its outermost atomic block.

    For a connection without autocommit it is the connection, whether a statement has begun one or not.
    """
    found: tuple[Any, ...] = ()
    for connection in _used_here():
        is_open = connection.connection is not None
        if connection.in_atomic_block or (is_open and not connection.autocommit):
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


def release_at_end(lease: Lease, open_ones: Sequence[BaseDatabaseWrapper]) -> None:
    """Release *lease* once after the transactions of *open_ones* have ended.

    Django calls its on-commit functions after a commit, and drops them at a rollback and when the
    connection is closed. A finalizer then releases the lease.
    """
    last = _LastEnd(lease, len(open_ones))
    for connection in open_ones:
        waiting: list[Any] = connection.run_on_commit
        savepoints: set[Any] = set()
        end = _End(last)
        if _is_manual(connection):
            end.told_by = ()
            # MySQL and SQLite commit, too, when autocommit is turned on.
            connection.run_commit_hooks_on_set_autocommit_on = True
            _Telling.instead_of("commit", connection)
        else:
            # As on_commit() in the outermost block: an inner block's function is dropped with its savepoint.
            outside = connection.atomic_blocks.index(_outermost(connection))
            savepoints.update(connection.savepoint_ids[:outside])
            if outside:  # in the block of a TestCase
                end.told_by = (connection.savepoint_ids[outside - 1],)
                _Telling.instead_of("savepoint_commit", connection)
        waiting.append((savepoints, end, False))


def tell_of_release(name: str, open_ones: Iterable[BaseDatabaseWrapper], *, strict: bool) -> None:
    """Warn that the lock *name* was released inside the atomic blocks of *open_ones*."""
    for connection in open_ones:
        if connection.in_atomic_block:
            _tell(ReleasedBeforeCommit, name, connection.alias, strict=strict)


def tell_of_snapshots(name: str, marks: Collection[Any], *, strict: bool) -> None:
    """Warn if an open transaction goes on reading what it read before the lock *name* is taken."""
    for connection in still_open(marks):
        if connection.in_atomic_block and _has_snapshot(connection):
            _tell(SnapshotBeforeLock, name, connection.alias, strict=strict)


class Block:
    """The caller's outermost atomic block on one connection; those of a TestCase do not count."""

    def __init__(self, connection: Any, what: str) -> None:
        """Raise LockError if none is open; *what* needs one."""
        # One that its thread left open is closed when nobody has it any more.
        self._connection: weakref.ref[BaseDatabaseWrapper] = weakref.ref(connection)
        blocks = connection.atomic_blocks
        #: How many blocks of a TestCase are around it.
        self._outside = sum(getattr(block, "_from_testcase", False) for block in blocks)
        if len(blocks) == self._outside:
            msg = f"{what} needs a transaction: call it inside atomic(using={connection.alias!r})."
            raise LockError(msg)
        self._savepoint = connection.savepoint_ids[self._outside - 1] if self._outside else None
        # Django drops it when the transaction ends: nothing else tells it from the next.
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


class _LastEnd:
    """Releases a lease once, when the last of the open transactions has ended."""

    def __init__(self, lease: Lease, open_ones: int) -> None:
        self._lease = lease
        self._open = open_ones

    def _is_last(self) -> bool:
        self._open -= 1
        if self._open == 0:
            self._lease.awaits_end = False
        return self._open == 0

    def release(self) -> None:
        if not self._is_last():
            return
        try:
            if self._lease.is_entered:
                self._lease.release_now()
        except LockError:
            # The data is committed; an error would look as if it was not.
            logger.exception(
                "Lock %s could not be released after the commit",
                printable(self._lease.name),
                extra=log_fields(self._lease.name, self._lease.using),
            )

    def drop(self) -> None:
        self._lease.hold_on_success = 0.0  # rolled back
        if self._is_last():
            self._lease.release_later()


class _End:
    """The end of one transaction: Django calls it at the commit, or drops it."""

    #: The arguments of the call that ends it, if Django's on-commit functions come later than that or never.
    told_by: tuple[Any, ...] | None = None

    def __init__(self, last: _LastEnd) -> None:
        self._last = last
        # A finalizer can run in any thread at any moment, so it does no I/O itself.
        self._dropped = weakref.finalize(self, last.drop)
        self._dropped.atexit = False

    def __call__(self) -> None:
        self._dropped.detach()
        self._last.release()


class _Telling:
    """A connection's method that commits, and then calls the ends that wait for it.

    Without autocommit, Django calls on-commit functions only when autocommit is on again, which may
    be never. In a TestCase it does not call them at all: there, the outermost block of the code
    under test ends with a savepoint.
    """

    def __init__(self, commit: Any, connection: BaseDatabaseWrapper) -> None:
        self._commit = commit
        self._connection = connection

    @classmethod
    def instead_of(cls, method: str, connection: BaseDatabaseWrapper) -> None:
        commit = getattr(connection, method)
        if not isinstance(commit, cls):
            setattr(connection, method, cls(commit, connection))

    def __call__(self, *savepoint: str) -> None:
        self._commit(*savepoint)
        waiting: list[Any] = self._connection.run_on_commit
        ended = [entry for entry in waiting if getattr(entry[1], "told_by", None) == savepoint]
        self._connection.run_on_commit = [entry for entry in waiting if entry not in ended]
        for _, end, _ in ended:
            end()


def _used_here() -> Sequence[BaseDatabaseWrapper]:
    """Return the connections that this thread, or this task, has used."""
    if _get_running_loop() is None:
        # What Django's own all() asks for alias by alias, at ten times the cost.
        storage = getattr(connections._connections, "_storage", None)  # type: ignore[attr-defined]  # noqa: SLF001
        if isinstance(storage, threading.local):
            return [*filter(None, map(vars(storage).get, connections))]
    return connections.all(initialized_only=True)


def _mark(connection: BaseDatabaseWrapper) -> Any:
    """Return what stands for the transaction of *connection*; see open_here()."""
    return connection if _is_manual(connection) else _outermost(connection)


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the transaction that _mark() stands for goes on, or may: not every driver tells."""
    if connection.closed_in_transaction:
        return False
    if not _is_manual(connection):
        return True
    driver: Any = connection.connection
    if connection.vendor == "postgresql":
        return bool(driver.info.transaction_status)
    # The drivers of MySQL do not show whether a statement has begun one.
    return connection.vendor != "sqlite" or bool(driver.in_transaction)


def _is_manual(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the caller uses set_autocommit(False) and commits, also around an atomic block."""
    if connection.in_atomic_block:
        return not connection.commit_on_exit
    return connection.connection is not None and not connection.autocommit


def _outermost(connection: BaseDatabaseWrapper) -> Any:
    if not connection.in_atomic_block:
        return None
    # The atomic blocks of a TestCase are not transactions of the code under test.
    blocks = (b for b in connection.atomic_blocks if not getattr(b, "_from_testcase", False))
    return next(blocks, None)


def _has_snapshot(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the transaction reads data of an earlier moment; False, too, if only a query could tell."""
    driver: Any = connection.connection
    level = getattr(connection, "isolation_level", None)
    if connection.vendor == "postgresql":
        is_high = getattr(level, "name", "") in {"REPEATABLE_READ", "SERIALIZABLE"}
        # A savepoint, too, is a statement, but does not read.
        is_first_block = not any(connection.savepoint_ids)
        return is_high and is_first_block and bool(driver.info.transaction_status)
    if connection.vendor == "mysql" and level == "repeatable read":
        # A write alone makes no snapshot; that of Django returns one column on MariaDB, the key.
        last = driver if hasattr(driver, "field_count") else getattr(driver, "_result", None)
        fields = getattr(last, "field_count", 0)
        return (fields() if callable(fields) else fields) > 1
    return False


def _tell(
    kind: type[ReleasedBeforeCommit | SnapshotBeforeLock], name: str, alias: str, *, strict: bool
) -> None:
    """Warn, once for each place in the code and not for each name; raise an error if *strict*."""
    if strict:
        raise kind(name, alias)
    path, line, module = _place()
    warnings.warn_explicit(
        kind("", alias), None, path, line, module, registry=_told.setdefault(path, {})
    )


def _place() -> tuple[str, int, str]:
    """Return the file, line and module of the code that uses the lock: a decorated function, or our caller."""
    frame = sys._getframe(1)  # noqa: SLF001 - what warnings does itself
    while frame.f_back and frame.f_globals.get("__name__", "").startswith((_PACKAGE, "contextlib")):
        if locked := frame.f_locals.get("locked"):
            function = inspect.unwrap(locked.function)
            if code := getattr(function, "__code__", None):
                return code.co_filename, code.co_firstlineno, function.__module__
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")
