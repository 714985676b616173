"""The holders of session locks, for operators: written as JSON beside the fencing token."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django_distlock.backends.database.dialect import COUNTER, LOCK, short_transaction
from django_distlock.backends.database.records import raise_counter
from django_distlock.engine.values import Busy, Held, digest
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from django.db.backends.utils import CursorWrapper

    from django_distlock.backends.database.dialect import Dialect

    from .sessions import SessionServer

#: The prefix of readers' keys; no other kind of lock has it.
READER = "reader|"
_SESSION = re.compile(r'"session":(\d+)')


@dataclass(frozen=True, slots=True)
class Occupant:
    """A holding of a lock, as DatabaseSession.record() has written it; *age* is in seconds."""

    name: str
    holder: Holder
    owner_digest: str
    session: int
    shared: bool
    token: int | None = None
    age: float = 0.0

    @classmethod
    def from_json(cls, text: str | None, **counted: Any) -> Occupant | None:
        """Return the occupant written in *text* by DatabaseSession.record(), or None; *counted*: its token and age."""
        if not text:
            return None
        try:
            known: dict[str, Any] = json.loads(text)
            return cls(holder=Holder(**known.pop("holder")), **known, **counted)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


@dataclass(frozen=True)
class Counted:
    """A lock that was held before: its last occupant, and the recorded readers by the digests of their owners.

    There may be 100,000 such locks, most of them free, so *record* is parsed only when it is needed.
    """

    key: str
    title: str | None
    record: str | None
    token: int
    age: float
    readers: dict[str, Occupant]

    @property
    def name(self) -> str:
        return shown(self.title or (self.last.name if self.last else self.key))

    @cached_property
    def last(self) -> Occupant | None:
        return Occupant.from_json(self.record, token=self.token, age=self.age)

    @property
    def session(self) -> int | None:
        """The session of the last occupant."""
        found = _SESSION.search(self.record or "")
        return int(found[1]) if found else None

    @property
    def occupants(self) -> list[Occupant]:
        """The occupants that may hold the lock now: all recorded readers if the last occupant was a reader, else only it."""
        if self.last is None:
            return []
        return ([*self.readers.values()] if self.last.shared else []) or [self.last]

    def by(self, owner_digest: str) -> Occupant | None:
        """Return the occupant with this *owner_digest*; None if there is none."""
        is_last = self.last is not None and self.last.owner_digest == owner_digest
        return self.readers.get(owner_digest, self.last if is_last else None)


def reader_key(key: str, owner_digest: str) -> str:
    """Return the key of the row in which a reader of *key* has its token and its holder."""
    return f"{READER}{digest(key)}|{owner_digest}"


def as_held(counted: Counted, owner_digest: str, waiters: int, *, shared: bool) -> Held:
    """Return *counted* as Held, with the occupant of this *owner_digest*."""
    occupant = counted.by(owner_digest)
    return Held(
        name=counted.name,
        key=counted.key,
        holder=occupant.holder if occupant else None,
        remaining=None,
        token=occupant.token if occupant else None,
        owner_digest=owner_digest,
        shared=shared,
        waiters=waiters,
        # The age is below 0 if the server's clock was set back.
        age=occupant.age if occupant and occupant.age >= 0 else None,
    )


def last_occupant(cursor: CursorWrapper, key: str) -> Occupant | None:
    """Return the occupant that acquired the lock last."""
    cursor.execute(f"SELECT holder FROM {COUNTER} WHERE method_name = %(key)s", {"key": key})
    row = cursor.fetchone()
    return Occupant.from_json(row[0]) if row else None


def busy(occupant: Occupant | None) -> Busy:
    return Busy(occupant.holder if occupant else None)


def forget_readers(cursor: CursorWrapper, dialect: Dialect, keys: Collection[str]) -> None:
    """Delete the rows of readers with these *keys*."""
    statement = f"DELETE FROM {COUNTER} WHERE method_name = %(key)s{dialect.on_tidying}"
    for key in keys:
        cursor.execute(statement, {"key": key})


def held(
    cursor: CursorWrapper, server: SessionServer, keeps: Callable[[str], bool], key: str | None
) -> list[Held]:
    """Return the held locks whose keys pass *keeps*, or the one with *key*; delete the rows of dead readers."""
    one = "" if key is None else " WHERE c.method_name = %(key)s OR c.method_name LIKE %(readers)s"
    keys = {"key": key, "readers": reader_key(key or "", "%")}
    known = _locks(cursor, server, one, keys, keeps)
    found = list(server.held(cursor, known))
    noted = {reader_key(key, reader) for key, lock in known.items() for reader in lock.readers}
    dead = noted - {reader_key(one.key, one.owner_digest) for one in found}
    forget_readers(cursor, server.dialect, dead)
    return found


def end_holding(cursor: CursorWrapper, server: SessionServer, key: str, owner_digest: str) -> bool:
    """End the session that holds the lock, and raise the token past it; return whether there was one."""
    keys = {"key": key, "reader": reader_key(key, owner_digest)}
    locks = _locks(cursor, server, " WHERE c.method_name IN (%(key)s, %(reader)s)", keys)
    if not any(server.end(cursor, lock, owner_digest) for lock in locks.values()):
        return False
    with short_transaction(cursor):
        raise_counter(cursor, keys)
    return True


def _locks(
    cursor: CursorWrapper,
    server: SessionServer,
    where: str,
    keys: Mapping[str, str | None],
    keeps: Callable[[str], bool] = bool,
) -> dict[str, Counted]:
    """Return by key the locks that *where* selects and whose keys pass *keeps*. A token is the time of its grant."""
    cursor.execute(
        f"""SELECT c.method_name, c.value, c.holder, l.description, {server.now_sql} - c.value
        FROM {COUNTER} AS c LEFT JOIN {LOCK} AS l ON l.method_name = c.method_name{where}""",
        keys,
    )
    locks, readers = dict[str, Counted](), defaultdict[str, dict[str, Occupant]](dict)
    for key, token, record, title, age in cursor.fetchall():
        if key.startswith(READER):
            if reader := Occupant.from_json(record, token=token, age=age / 1e6):
                readers[key.split("|")[1]][reader.owner_digest] = reader
        elif keeps(key):
            locks[key] = Counted(key, title, record, token, age / 1e6, readers[digest(key)])
    return locks
