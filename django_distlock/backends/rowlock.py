"""RowLockBackend: a row kept locked by SELECT FOR UPDATE."""

from __future__ import annotations

from typing import ClassVar

from .database.base import ConnectionOptions
from .session.backend import SessionBackend
from .session.mysql import MySQLRows
from .session.postgresql import PostgreSQLRows


class RowLockBackend(SessionBackend):
    """The server itself queues and frees; a lock ends with the connection that holds its row."""

    options_class = ConnectionOptions
    options: ConnectionOptions
    kind = "row"
    servers: ClassVar = {"postgresql": PostgreSQLRows, "mysql": MySQLRows}
    needs_row = True
