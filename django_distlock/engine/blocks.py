"""The transaction of a caller, as what is kept in memory needs to know it: whether it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_distlock.exceptions import LockError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


class Block:
    """The caller's outermost atomic block on one connection; those of a TestCase do not count."""

    def __init__(self, connection: Any, what: str) -> None:
        """Raise LockError if none is open; *what* needs one."""
        self.connection: BaseDatabaseWrapper = connection
        blocks = connection.atomic_blocks
        #: How many blocks of a TestCase are around it.
        self.outside = sum(getattr(block, "_from_testcase", False) for block in blocks)
        if len(blocks) == self.outside:
            msg = f"{what} needs a transaction: call it inside atomic(using={connection.alias!r})."
            raise LockError(msg)
        self._savepoint = connection.savepoint_ids[self.outside - 1] if self.outside else None
        # Django drops it when the transaction ends: nothing else tells it from the next.
        self._entry: Any = (set(), lambda: None, False)
        if not self.outside:
            connection.run_on_commit.append(self._entry)

    @property
    def is_open(self) -> bool:
        """Whether it goes on."""
        connection = self.connection
        if not self.outside:
            return any(entry is self._entry for entry in connection.run_on_commit)
        if self._savepoint is None:  # of atomic(savepoint=False)
            return bool(len(connection.atomic_blocks) > self.outside)
        return bool(self._savepoint in connection.savepoint_ids)
