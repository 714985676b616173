"""AdvisoryBackend: advisory locks of PostgreSQL, GET_LOCK of MariaDB and MySQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django_distlock.engine.naming import stored
from django_distlock.engine.values import Busy, Grant
from django_distlock.engine.waiting import Wait

from .database.advisory_mysql import MySQLAdvisory
from .database.advisory_postgresql import PostgreSQLAdvisory
from .database.advisory_server import AdvisoryServer
from .database.occupants import LONGEST_NAME
from .database.options import AdvisoryOptions
from .database.session_backend import SessionBackend
from .database.session_engine import look

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

    from django_distlock.conf import BackendSettings

    from .database.sessions import Session


class AdvisoryBackend(SessionBackend):
    """The fastest lock of a database: its server remembers it, and writes nothing for it."""

    options_class = AdvisoryOptions
    options: AdvisoryOptions
    kind = "advisory"
    servers: ClassVar = {"postgresql": PostgreSQLAdvisory, "mysql": MySQLAdvisory}
    server: AdvisoryServer

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.supports_fencing = self.supports_listing = self.options.fencing
        self.supports_shared = self.server.supports_shared

    def take(self, session: Session) -> Grant | Busy:
        """Ask once."""
        self._keep_name(session)
        with session.connection.cursor() as cursor:
            return self.server.take(self, cursor, session, look(session.request))

    def wait(self, session: Session, seconds: float | None) -> Grant | Busy:
        """Stand in the server's queue."""
        with session.connection.cursor() as cursor:
            return self.server.wait(self, cursor, session, Wait(seconds))

    def refused(self, cursor: CursorWrapper, key: str) -> Busy:
        """Return who had it last, if that is kept."""
        return super().refused(cursor, key) if self.options.fencing else Busy()

    def _keep_name(self, session: Session) -> None:
        """Keep a name that is too long to stand beside the token, for people."""
        if self.options.fencing and len(stored(session.request.name)) > LONGEST_NAME:
            self.make_row(session.request)
