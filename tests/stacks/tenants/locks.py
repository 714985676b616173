"""What KEY_PREFIX is set to."""

from __future__ import annotations

from typing import Any

from django.db import connections


def tenant() -> str:
    connection: Any = connections["default"]
    return str(connection.schema_name)
