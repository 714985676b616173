"""The transaction of a caller, as what is kept in memory needs to know it: whether it goes on."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from django_distlock.exceptions import LockError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


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
