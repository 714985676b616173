"""Who holds a lock by a session: kept as JSON beside its fencing token, told by the session's label; for operators."""

from __future__ import annotations

import json
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
    """The last holding of a lock: for people, and by what the server knows it."""

    name: str
    holder: Holder
    owner_digest: str
    caller: str
    session: int
    shared: bool

    @classmethod
    def of(cls, session: Session) -> Occupant:
        request, number = session.request, session.connection.distlock_number
        name = stored(request.name)[:LONGEST_NAME]
        known = digest(request.owner), session.caller, number
        return cls(name, request.holder, *known, request.shared)

    @classmethod
    def from_json(cls, text: str | None) -> Occupant | None:
        try:
            known: dict[str, Any] = json.loads(text or "")
            return cls(holder=Holder(**known.pop("holder")), **known)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def to_json(self) -> str:
        """Return it as a short JSON object, in ASCII; that of the holder is made once."""
        known = {
            "name": self.name,
            "owner_digest": self.owner_digest,
            "caller": self.caller,
            "session": self.session,
            "shared": self.shared,
        }
        text = json.dumps(known, separators=(",", ":"))
        return f'{text[:-1]},"holder":{self.holder.to_json()}}}'


class Label(NamedTuple):
    """What a session says of itself on the server: who waits or holds, and which lock.

    With 63 characters it is as long as PostgreSQL's application_name may be.
    """

    mode: str
    caller: str
    owner_digest: str
    key_digest: str

    @classmethod
    def of(cls, session: Session) -> Label:
        request = session.request
        mode = "r" if request.shared else "w"
        return cls(mode, session.caller, digest(request.owner), digest(request.key))

    @classmethod
    def parse(cls, text: str) -> Label | None:
        parts = text.removeprefix(PREFIX).split(":")
        return cls(*parts) if text.startswith(PREFIX) and len(parts) == 4 else None

    @property
    def shared(self) -> bool:
        return self.mode == "r"

    def __str__(self) -> str:
        return PREFIX + ":".join(self)


class Counted(NamedTuple):
    """A lock that was held once: its key, its name, its last token, who had it, and how many seconds ago; its readers."""

    key: str
    name: str
    token: int
    occupant: Occupant | None
    age: float
    readers: tuple[Counted, ...] = ()

    def by(self, owner_digest: str) -> Counted:
        """Return it with the token and the occupant of the reader that *owner_digest* names, if it is one."""
        return next((each for each in self.readers if each.is_of(owner_digest)), self)

    def is_of(self, owner_digest: str) -> bool:
        return self.occupant is not None and self.occupant.owner_digest == owner_digest


def reader_key(key: str, owner_digest: str) -> str:
    """Return where a reader of *key* has its token and its holder, beside those of the last one."""
    return f"{READER}{digest(key)}|{owner_digest}"


def as_held(counted: Counted, owner_digest: str, waiters: int, *, shared: bool) -> Held:
    """Return *counted* as an operator sees it, held by whom *owner_digest* names."""
    counted = counted.by(owner_digest)
    occupant, is_last = counted.occupant, counted.is_of(owner_digest)
    return Held(
        name=counted.name,
        key=counted.key,
        holder=occupant.holder if occupant is not None and is_last else None,
        remaining=None,
        token=counted.token if is_last else None,
        owner_digest=owner_digest,
        shared=shared,
        waiters=waiters,
        # Less than 0: the server's clock was set back.
        age=counted.age if is_last and counted.age >= 0 else None,
    )


def last_holder(cursor: CursorWrapper, key: str) -> Busy:
    """Return as busy who was the last to be granted the lock."""
    cursor.execute(f"SELECT holder FROM {COUNTER} WHERE method_name = %(key)s", {"key": key})
    row = cursor.fetchone()
    occupant = Occupant.from_json(row[0]) if row else None
    return Busy(occupant.holder if occupant else None)


def forget_readers(cursor: CursorWrapper, keys: Collection[str]) -> None:
    """Delete what note_reader() has written."""
    for key in keys:
        cursor.execute(f"DELETE FROM {COUNTER} WHERE method_name = %(key)s", {"key": key})


def held(
    cursor: CursorWrapper, server: SessionServer, keeps: Callable[[str], bool], key: str | None
) -> list[Held]:
    """Return the locks that are held, of those whose key one *keeps*, or this one; forget readers that died."""
    one = "" if key is None else " WHERE c.method_name = %(key)s OR c.method_name LIKE %(readers)s"
    keys = {"key": key, "readers": reader_key(key or "", "%")}
    known = {lock.key: lock for lock in _locks(cursor, server, one, keys, keeps)}
    found = list(server.held(cursor, known))
    noted = {
        reader_key(lock.key, reader.occupant.owner_digest)
        for lock in known.values()
        for reader in lock.readers
        if reader.occupant
    }
    forget_readers(cursor, noted - {reader_key(one.key, one.owner_digest) for one in found})
    return found


def end_holding(cursor: CursorWrapper, server: SessionServer, key: str, owner_digest: str) -> bool:
    """End the session that holds the lock, and raise the token past it; tell whether there was one."""
    keys = {"key": key, "reader": reader_key(key, owner_digest)}
    locks = _locks(cursor, server, " WHERE c.method_name IN (%(key)s, %(reader)s)", keys)
    if not any(server.end(cursor, lock, owner_digest) for lock in locks):
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
) -> list[Counted]:
    """Return the locks that *where* picks and one *keeps*, each with its readers. A token is the instant of its grant."""
    cursor.execute(
        f"""SELECT c.method_name, c.value, c.holder, l.description, {server.now_sql} - c.value
        FROM {COUNTER} AS c LEFT JOIN {LOCK} AS l ON l.method_name = c.method_name{where}""",
        keys,
    )
    locks, readers = list[Counted](), dict[str, list[Counted]]()
    for key, token, holder, name, age in cursor.fetchall():
        is_reader = key.startswith(READER)
        if not (is_reader or keeps(key)):
            continue
        occupant = Occupant.from_json(holder)
        known = shown(name or (occupant.name if occupant else key))
        beside = readers.setdefault(key.split("|")[1], []) if is_reader else locks
        beside.append(Counted(key, known, token, occupant, age / 1e6))
    return [
        lock._replace(
            readers=tuple(
                reader._replace(key=lock.key, name=lock.name)
                for reader in readers.get(digest(lock.key), ())
            )
        )
        for lock in locks
    ]
