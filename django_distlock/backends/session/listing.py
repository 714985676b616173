"""Locks that are held by sessions, as operators see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_distlock.backends.database.engine import COUNTER, LOCK
from django_distlock.backends.database.portable import short_transaction
from django_distlock.backends.database.records import raise_counter
from django_distlock.engine.naming import shown
from django_distlock.engine.values import digest

from .occupants import READER, Counted, Occupant, reader_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from django.db.backends.utils import CursorWrapper

    from django_distlock.engine.values import Held

    from .server import SessionServer

_COUNTERS = f"""
SELECT c.method_name, c.value, c.holder, l.description
FROM {COUNTER} AS c LEFT JOIN {LOCK} AS l ON l.method_name = c.method_name"""


def occupant(cursor: CursorWrapper, key: str) -> Occupant | None:
    """Return who was the last to be granted the lock."""
    cursor.execute(f"SELECT holder FROM {COUNTER} WHERE method_name = %(key)s", {"key": key})
    row = cursor.fetchone()
    return None if row is None else Occupant.from_json(row[0])


def note_reader(cursor: CursorWrapper, *, server: SessionServer, known: dict[str, Any]) -> None:
    """Write a reader down: its key, token and holder; for the second time, nothing."""
    cursor.execute(server.note_reader, known)


def forget_readers(cursor: CursorWrapper, *, keys: Collection[str]) -> None:
    """Delete what note_reader() has written."""
    for key in keys:
        cursor.execute(f"DELETE FROM {COUNTER} WHERE method_name = %(key)s", {"key": key})


def held(
    cursor: CursorWrapper, *, server: SessionServer, keeps: Callable[[str], bool], key: str | None
) -> list[Held]:
    """Return the locks that are held, of those whose key one *keeps*, or this one; forget readers that died."""
    one = "" if key is None else " WHERE c.method_name = %(key)s OR c.method_name LIKE %(readers)s"
    cursor.execute(_COUNTERS + one, {"key": key, "readers": reader_key(key or "", "%")})
    known = {lock.key: lock for lock in _counted(cursor.fetchall()) if keeps(lock.key)}
    found = list(server.held(cursor, known))
    noted = {
        reader_key(lock.key, reader.occupant.owner_digest)
        for lock in known.values()
        for reader in lock.readers
        if reader.occupant
    }
    forget_readers(cursor, keys=noted - {reader_key(one.key, one.owner_digest) for one in found})
    return found


def end_holding(
    cursor: CursorWrapper, *, server: SessionServer, key: str, owner_digest: str
) -> bool:
    """End the session that holds the lock, and raise the token past it; tell whether there was one."""
    keys = {"key": key, "reader": reader_key(key, owner_digest)}
    cursor.execute(f"{_COUNTERS} WHERE c.method_name IN (%(key)s, %(reader)s)", keys)
    if not any(server.end(cursor, lock, owner_digest) for lock in _counted(cursor.fetchall())):
        return False
    with short_transaction(cursor):
        raise_counter(cursor, keys)
    return True


def _counted(rows: Iterable[tuple[str, int, str | None, str | None]]) -> list[Counted]:
    """Return the locks among *rows*, each with its readers."""
    locks, readers = list[Counted](), dict[str, list[Counted]]()
    for key, token, holder, name in rows:
        occupant = Occupant.from_json(holder)
        known = shown(name or (occupant.name if occupant else key))
        if key.startswith(READER):
            readers.setdefault(key.split("|")[1], []).append(Counted(key, known, token, occupant))
        else:
            locks.append(Counted(key, known, token, occupant))
    return [
        lock._replace(
            readers=tuple(
                reader._replace(key=lock.key, name=lock.name)
                for reader in readers.get(digest(lock.key), ())
            )
        )
        for lock in locks
    ]
