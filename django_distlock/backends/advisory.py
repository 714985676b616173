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

    fencing: give fencing tokens and tell holders, by a row beside each lock; False: no rows at all.
    """

    fencing: bool = True


class AdvisoryBackend(SessionBackend):
    """The fastest lock of a database: its server remembers it, and writes nothing for it."""

    options_class = AdvisoryOptions
    options: AdvisoryOptions
    kind = "advisory"
    servers: ClassVar = {"postgresql": PostgreSQLAdvisory, "mysql": MySQLAdvisory}
