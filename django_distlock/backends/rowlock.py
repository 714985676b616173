"""RowLockBackend: a row kept locked by SELECT FOR UPDATE. transaction_lock(): in the caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django_distlock.engine.values import Busy, Grant
from django_distlock.engine.waiting import Wait

from .database.options import SessionOptions
from .database.row_servers import MySQLRows, PostgreSQLRows, RowServer
from .database.session_backend import SessionBackend
from .database.session_engine import STAY, look
from .database.transaction_lock import transaction_lock

if TYPE_CHECKING:
    from django_distlock.engine.values import Request

    from .database.sessions import Session

__all__ = ["RowLockBackend", "transaction_lock"]


class RowLockBackend(SessionBackend):
    """The server itself queues and frees; a lock ends with the connection that holds its row."""

    options_class = SessionOptions
    options: SessionOptions
    kind = "row"
    supports_fencing = True
    supports_shared = True
    supports_listing = True
    servers: ClassVar = {"postgresql": PostgreSQLRows, "mysql": MySQLRows}
    server: RowServer

    def take(self, session: Session) -> Grant | Busy:
        """Lock the row if it is free, then commit a token beside it."""
        with session.connection.cursor() as cursor:
            is_taken = self.server.take(cursor, session)
            if not is_taken:
                # Whoever made it: what was not there, or only looked at, may be free.
                self.make_row(session.request)
                is_taken = self.server.take(cursor, session)
        return (
            self._counted(session, look(session.request))
            if is_taken
            else self._refused(session.request)
        )

    def wait(self, session: Session, seconds: float | None) -> Grant | Busy:
        """Stand in the queue for the row."""
        wait = Wait(seconds)
        with session.connection.cursor() as cursor:
            while not self.server.wait(cursor, session, wait):
                if not self.make_row(session.request):
                    return self._refused(session.request)
        left = wait.left
        return self._counted(session, STAY if left is None else min(STAY, left), has_waited=True)

    def _refused(self, request: Request) -> Busy:
        return self._insist(lambda cursor: self.refused(cursor, request.key))

    def _counted(
        self, session: Session, patience: float, *, has_waited: bool = False
    ) -> Grant | Busy:
        start = self.confirm(session) if has_waited else None
        token = self.count(session, patience)
        if token is None:
            self.server.free(session)
            return Busy()
        return Grant(token, start)
