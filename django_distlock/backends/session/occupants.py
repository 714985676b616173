"""Who holds a lock by a session: kept as JSON beside its fencing token, told by the session's label; for operators."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from django_distlock.backends.database.engine import COUNTER, LOCK
from django_distlock.backends.database.portable import short_transaction
from django_distlock.backends.database.records import raise_counter
from django_distlock.engine.holder import Holder
from django_distlock.engine.naming import shown, stored
from django_distlock.engine.values import Busy, Held, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from django.db.backends.utils import CursorWrapper

    from .sessions import Session, SessionServer

#: What labels of sessions begin with.
PREFIX = "distlock:"
#: What the keys of readers begin with: no other kind of lock is called that.
READER = "reader|"
#: Characters of a name, for people, where there is little place.
LONGEST_NAME = 120


@dataclass(frozen=True, slots=True)
class Occupant:
    """A holding of a lock, its token, and how many seconds ago it began: for people, and by what the server knows it."""

    name: str
    holder: Holder
    owner_digest: str
    caller: str
    session: int
    shared: bool
    token: int | None = None
    age: float = 0.0

    @classmethod
    def from_json(cls, text: str | None, **counted: Any) -> Occupant | None:
        """Return what record() has written; *counted*: its token and its age."""
        try:
            known: dict[str, Any] = json.loads(text or "")
            return cls(holder=Holder(**known.pop("holder")), **known, **counted)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


def record(session: Session) -> str:
    """Return who holds by *session* as a short JSON object, in ASCII; that of the holder is made once."""
    request = session.request
    known = {
        "name": stored(request.name)[:LONGEST_NAME],
        "owner_digest": session.owner_digest,
        "caller": session.caller,
        "session": session.connection.distlock_number,
        "shared": request.shared,
    }
    text = json.dumps(known, separators=(",", ":"))
    return f'{text[:-1]},"holder":{request.holder.to_json()}}}'


class Counted(NamedTuple):
    """A lock that was held once: who had it last, and who are noted to read, by the digests of their owners."""

    key: str
    name: str
    last: Occupant | None
    readers: dict[str, Occupant]

    def by(self, owner_digest: str) -> Occupant | None:
        """Return the one that *owner_digest* names, if it is one of them."""
        is_last = self.last is not None and self.last.owner_digest == owner_digest
        return self.readers.get(owner_digest, self.last if is_last else None)


def reader_key(key: str, owner_digest: str) -> str:
    """Return where a reader of *key* has its token and its holder, beside those of the last one."""
    return f"{READER}{digest(key)}|{owner_digest}"


def as_held(counted: Counted, owner_digest: str, waiters: int, *, shared: bool) -> Held:
    """Return *counted* as an operator sees it, held by whom *owner_digest* names."""
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
        # Less than 0: the server's clock was set back.
        age=occupant.age if occupant and occupant.age >= 0 else None,
    )


def last_occupant(cursor: CursorWrapper, key: str) -> Occupant | None:
    """Return who was the last to be granted the lock."""
    cursor.execute(f"SELECT holder FROM {COUNTER} WHERE method_name = %(key)s", {"key": key})
    row = cursor.fetchone()
    return Occupant.from_json(row[0]) if row else None


def busy(occupant: Occupant | None) -> Busy:
    return Busy(occupant.holder if occupant else None)


def forget_readers(cursor: CursorWrapper, keys: Collection[str]) -> None:
    """Delete what stands of readers beside a lock."""
    for key in keys:
        cursor.execute(f"DELETE FROM {COUNTER} WHERE method_name = %(key)s", {"key": key})


def held(
    cursor: CursorWrapper, server: SessionServer, keeps: Callable[[str], bool], key: str | None
) -> list[Held]:
    """Return the locks that are held, of those whose key one *keeps*, or this one; forget readers that died."""
    one = "" if key is None else " WHERE c.method_name = %(key)s OR c.method_name LIKE %(readers)s"
    keys = {"key": key, "readers": reader_key(key or "", "%")}
    known = _locks(cursor, server, one, keys, keeps)
    found = list(server.held(cursor, known))
    noted = {reader_key(key, reader) for key, lock in known.items() for reader in lock.readers}
    forget_readers(cursor, noted - {reader_key(one.key, one.owner_digest) for one in found})
    return found


def end_holding(cursor: CursorWrapper, server: SessionServer, key: str, owner_digest: str) -> bool:
    """End the session that holds the lock, and raise the token past it; tell whether there was one."""
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
    """Return the locks that *where* picks and one *keeps*, by key. A token is the instant of its grant."""
    cursor.execute(
        f"""SELECT c.method_name, c.value, c.holder, l.description, {server.now_sql} - c.value
        FROM {COUNTER} AS c LEFT JOIN {LOCK} AS l ON l.method_name = c.method_name{where}""",
        keys,
    )
    locks, readers = dict[str, Counted](), defaultdict[str, dict[str, Occupant]](dict)
    for key, token, holder, name, age in cursor.fetchall():
        occupant = Occupant.from_json(holder, token=token, age=age / 1e6)
        if key.startswith(READER):
            if occupant:
                readers[key.split("|")[1]][occupant.owner_digest] = occupant
        elif keeps(key):
            known = shown(name or (occupant.name if occupant else key))
            locks[key] = Counted(key, known, occupant, readers[digest(key)])
    return locks
