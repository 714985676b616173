"""Locks that are held by sessions, as operators see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_distlock.naming import shown

from .engine import COUNTER, LOCK
from .occupants import Counted, Occupant

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.utils import CursorWrapper

    from django_distlock.protocol import Held

    from .session_engine import SessionEngine

_COUNTERS = f"""
SELECT c.method_name, c.value, c.holder, l.description
FROM {COUNTER} AS c LEFT JOIN {LOCK} AS l ON l.method_name = c.method_name"""


def occupant(cursor: CursorWrapper, key: str) -> Occupant | None:
    """Return who was the last to be granted the lock."""
    cursor.execute(f"SELECT holder FROM {COUNTER} WHERE method_name = %(key)s", {"key": key})
    row = cursor.fetchone()
    return None if row is None else Occupant.from_json(row[0])


def held(
    cursor: CursorWrapper, *, server: SessionEngine, keeps: Callable[[str], bool], key: str | None
) -> list[Held]:
    """Return the locks that are held, of those whose key one *keeps*, or this one."""
    one = "" if key is None else " WHERE c.method_name = %(key)s"
    cursor.execute(_COUNTERS + one, {"key": key})
    counted = (_counted(*row) for row in cursor.fetchall())
    return list(server.held(cursor, {lock.key: lock for lock in counted if keeps(lock.key)}))


def end_holding(
    cursor: CursorWrapper, *, server: SessionEngine, key: str, owner_digest: str
) -> bool:
    """End the session that holds the lock, and raise the token past it; tell whether there was one."""
    cursor.execute(f"{_COUNTERS} WHERE c.method_name = %(key)s", {"key": key})
    row = cursor.fetchone()
    if row is None or not server.end(cursor, _counted(*row), owner_digest):
        return False
    cursor.execute(
        f"UPDATE {COUNTER} SET value = value + 1 WHERE method_name = %(key)s", {"key": key}
    )
    return True


def _counted(key: str, token: int, holder: str | None, name: str | None) -> Counted:
    occupant = Occupant.from_json(holder)
    written = name or (occupant.name if occupant else key)
    return Counted(key, shown(written), token, occupant)
