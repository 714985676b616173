"""RowLockBackend: a row kept locked by SELECT FOR UPDATE. transaction_lock(): in the caller's transaction."""

from __future__ import annotations

from typing import ClassVar

from .database.base import ConnectionOptions
from .session.backend import SessionBackend
from .session.mysql import MySQLRows
from .session.postgresql import PostgreSQLRows
from .session.transaction import transaction_lock

__all__ = ["RowLockBackend", "transaction_lock"]


class RowLockBackend(SessionBackend):
    """The server itself queues and frees; a lock ends with the connection that holds its row."""

    options_class = ConnectionOptions
    options: ConnectionOptions
    kind = "row"
    servers: ClassVar = {"postgresql": PostgreSQLRows, "mysql": MySQLRows}
    needs_row = True
