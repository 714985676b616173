"""AdvisoryBackend: advisory locks of PostgreSQL, GET_LOCK of MariaDB and MySQL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .database.base import ConnectionOptions
from .session.backend import SessionBackend
from .session.mysql import MySQLAdvisory
from .session.postgresql import PostgreSQLAdvisory


@dataclass(frozen=True, slots=True)
class AdvisoryOptions(ConnectionOptions):
    """OPTIONS of AdvisoryBackend.

    fencing: issue fencing tokens and show holders, by a row for each lock; False: no rows.
    """

    fencing: bool = True


class AdvisoryBackend(SessionBackend):
    """Advisory locks, the fastest in a database: the server keeps them in memory."""

    options_class = AdvisoryOptions
    options: AdvisoryOptions
    kind = "advisory"
    servers: ClassVar = {"postgresql": PostgreSQLAdvisory, "mysql": MySQLAdvisory}
