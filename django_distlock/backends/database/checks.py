"""What `manage.py check` says of a database that holds locks."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from django.core.checks import Error
from django.db import connections

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.core.checks import CheckMessage

    from .options import DatabaseOptions

#: RETURNING came with it.
SQLITE = (3, 35, 0)


def check_database(
    alias: str, options: DatabaseOptions, databases: Sequence[str] | None
) -> list[CheckMessage]:
    """Return messages from the settings; with *databases*, from the server too."""
    if databases is None:
        return _check_settings(alias, options)
    return _check_server(alias, options) if options.using in databases else []


def _check_settings(alias: str, options: DatabaseOptions) -> list[CheckMessage]:
    connection = connections[options.using]
    if connection.vendor == "sqlite" and connection.settings_dict["NAME"] == ":memory:":
        text = f"DISTLOCK[{alias!r}]: the database {options.using!r} is in memory, where each connection has its own."
        return [
            Error(text, hint="Use a file, or LocMemBackend within one process.", id="distlock.E002")
        ]
    if not connection.features.has_select_for_update and connection.vendor != "sqlite":
        text = f"DISTLOCK[{alias!r}]: the database {options.using!r} has no SELECT ... FOR UPDATE."
        return [Error(text, hint="Choose another backend or database.", id="distlock.E003")]
    return []


def _check_server(alias: str, options: DatabaseOptions) -> list[CheckMessage]:
    if connections[options.using].vendor != "sqlite" or sqlite3.sqlite_version_info >= SQLITE:
        return []
    text = f"DISTLOCK[{alias!r}]: SQLite {sqlite3.sqlite_version} has no RETURNING."
    return [Error(text, hint="Install SQLite 3.35 or later.", id="distlock.E004")]
