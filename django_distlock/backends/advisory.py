"""AdvisoryBackend: advisory locks of PostgreSQL, GET_LOCK of MariaDB and MySQL."""

from __future__ import annotations

from typing import ClassVar

from .database.options import AdvisoryOptions
from .session.backend import SessionBackend
from .session.mysql import MySQLAdvisory
from .session.postgresql import PostgreSQLAdvisory


class AdvisoryBackend(SessionBackend):
    """The fastest lock of a database: its server remembers it, and writes nothing for it."""

    options_class = AdvisoryOptions
    options: AdvisoryOptions
    kind = "advisory"
    servers: ClassVar = {"postgresql": PostgreSQLAdvisory, "mysql": MySQLAdvisory}
    counts_on_session = True
