"""Locks and the caller's transactions: releasing after their end, warning about a release before it."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
import weakref
from asyncio import _get_running_loop
from typing import TYPE_CHECKING, Any

from django.db import connections

from .engine.naming import printable
from .exceptions import LockError, ReleasedBeforeCommit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

    from .lease import Lease

logger = logging.getLogger("django_distlock")
_PACKAGE = __name__.rpartition(".")[0]


def open_blocks() -> dict[str, Any]:
    """Return the outermost open atomic block of each database in this thread."""
    found = {}
    for connection in _used_here():
        if connection.in_atomic_block and (block := _outermost(connection)) is not None:
            found[connection.alias] = block
    return found


def release_at_end(lease: Lease) -> bool:
    """Release *lease* after all open transactions of this thread have ended; False if none is open.

    Django calls its on-commit functions after a commit, and drops them at a rollback and when the
    connection is closed. A finalizer then releases the lease.
    """
    open_ones = [c for c in connections.all(initialized_only=True) if _has_transaction(c)]
    if open_ones:
        _LastEnd(lease, len(open_ones)).listen(open_ones)
    return bool(open_ones)


def warn_if_before_commit(lease: Lease, began_in: dict[str, Any], *, strict: bool) -> None:
    """Warn, once for each place in the code, if a block around the acquire of *lease* is still open."""
    now = open_blocks() if began_in else {}
    for alias, block in began_in.items():
        if now.get(alias) is block:
            problem = ReleasedBeforeCommit(lease.name, alias)
            if strict:
                raise problem
            warnings.warn(problem, stacklevel=_frames_to_caller())


class _LastEnd:
    """Releases a lease once, when the last of the open transactions has ended."""

    def __init__(self, lease: Lease, open_ones: int) -> None:
        self._lease = lease
        self._open = open_ones

    def listen(self, open_ones: Iterable[BaseDatabaseWrapper]) -> None:
        for connection in open_ones:
            waiting: list[Any] = connection.run_on_commit
            if _is_manual(connection):
                waiting.append((set(), _ManualEnd(self), False))
                _tell_of_commits(connection)
            else:
                # As on_commit() in the outermost block: an inner block's function is dropped with its savepoint.
                outside = connection.atomic_blocks.index(_outermost(connection))
                savepoints = set(connection.savepoint_ids[:outside])
                waiting.append((savepoints, _End(self), False))

    def is_last(self) -> bool:
        self._open -= 1
        return self._open == 0

    def release(self) -> None:
        try:
            self._lease.release_now()
        except LockError:
            # The data is committed; an error would look as if it was not.
            logger.exception(
                "Lock %s could not be released after the commit", printable(self._lease.name)
            )

    def drop(self) -> None:
        if self.is_last():
            self._lease.release_later()


class _End:
    """The end of one transaction: Django calls it at the commit, or drops it."""

    def __init__(self, last: _LastEnd) -> None:
        self._last = last
        # A finalizer can run in any thread at any moment, so it does no I/O itself.
        self._dropped = weakref.finalize(self, last.drop)
        self._dropped.atexit = False

    def __call__(self) -> None:
        self._dropped.detach()
        if self._last.is_last():
            self._last.release()


class _ManualEnd(_End):
    """The end of a transaction that the caller commits without Django."""


class _TellingCommit:
    """A connection's commit() that also calls the ends of manual transactions.

    Django calls on-commit functions only when autocommit is on again, which may be never.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._commit = connection.commit

    def __call__(self) -> None:
        self._commit()
        waiting: list[Any] = self._connection.run_on_commit
        ended = [entry for entry in waiting if isinstance(entry[1], _ManualEnd)]
        self._connection.run_on_commit = [entry for entry in waiting if entry not in ended]
        for _, end, _ in ended:
            end()


def _tell_of_commits(connection: BaseDatabaseWrapper) -> None:
    # MySQL and SQLite commit, too, when autocommit is turned on.
    connection.run_commit_hooks_on_set_autocommit_on = True
    if not isinstance(connection.commit, _TellingCommit):
        connection.commit = _TellingCommit(connection)  # type: ignore[method-assign]  # on this one


def _used_here() -> Sequence[BaseDatabaseWrapper]:
    """Return the connections that this thread, or this task, has used."""
    if _get_running_loop() is None:
        # What Django's own all() asks for alias by alias, at ten times the cost.
        storage = getattr(connections._connections, "_storage", None)  # type: ignore[attr-defined]  # noqa: SLF001
        if isinstance(storage, threading.local):
            known = vars(storage)
            return [known[alias] for alias in connections if alias in known]
    return connections.all(initialized_only=True)


def _has_transaction(connection: BaseDatabaseWrapper) -> bool:
    if connection.closed_in_transaction:
        return False
    if not _is_manual(connection):
        return _outermost(connection) is not None
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


def _frames_to_caller() -> int:
    """Return the number of stack frames between here and the code that used the lock."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001 - what warnings does itself
    while frame.f_back and frame.f_globals.get("__name__", "").startswith((_PACKAGE, "contextlib")):
        frame, level = frame.f_back, level + 1
    return level
