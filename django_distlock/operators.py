"""For operators, in code, commands and the admin: list held locks, and end a holding."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from django.db import connections
from django.utils import timezone
from django.utils.translation import gettext as _, ngettext

from .backends.base import MOST_FREE
from .conf import DEFAULT_ALIAS
from .engine.steps import settled
from .engine.values import LockState
from .exceptions import first_line
from .ground import clock
from .ground.naming import checked_name, limit_key, lock_of, warn
from .handler import locks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from django.db.models import Model

    from .backends.base import BaseLockBackend
    from .engine.values import Held

    Read = Callable[[BaseLockBackend], Iterable[Held]]

#: Seconds for which a page waits for all servers together.
PATIENCE = 2.0
#: Seconds for which a late listing is shown while the next one is read.
KEPT = 60.0

#: Listings that are or were late, by alias, key prefix of the caller, and what they read. While one is being read, no
#: second one is started.
_late: dict[tuple[str, str, str], Listing] = {}


@dataclass(frozen=True, slots=True)
class Row:
    """A lock in a list for people; *aliases* are the aliases of DISTLOCK that list it, at least one."""

    held: Held
    aliases: tuple[str, ...]

    @property
    def value(self) -> str:
        """The text that identifies this holding in forms and links; read_value() reads it."""
        return f"{quote(self.aliases[0], safe='')}:{self.held.owner_digest}:{self.held.key}"

    @property
    def host(self) -> str:
        """The host of the holder, for people."""
        return self.held.holder.host if self.held.holder else ""

    @property
    def state(self) -> str:
        """The state in the language of the page."""
        text = str(LockState(self.held.state).label)
        if self.held.place is not None:
            place = {"state": text, "place": self.held.place, "limit": self.held.limit}
            if self.held.limit is None:  # nobody holds it, or the holder cannot be read
                return _("%(state)s, place %(place)s") % place
            return _("%(state)s, place %(place)s of %(limit)s") % place
        return _("%s, shared") % text if self.held.shared else text

    @property
    def since(self) -> datetime | None:
        """When the lock was acquired, by the clock of this machine; None if that is not known."""
        if (age := self.held.age) is None:
            return None
        # An aware datetime in the page's time zone, also with USE_TZ = False.
        return timezone.localtime(datetime.now(UTC) - timedelta(seconds=age))

    @property
    def ago(self) -> str:
        """How long ago the lock was acquired."""
        return _("%s ago") % clock.in_words(self.held.age or 0.0, ngettext)

    @property
    def remaining(self) -> str:
        """The lease's remaining time, the end of a reservation, or how long ago a stale lease ended."""
        left = self.held.remaining
        if left is None:
            return "-"
        if self.held.reserved:
            return _("until %s") % clock.time_of_day(datetime.now(UTC) + timedelta(seconds=left))
        span = clock.in_words(abs(left), ngettext)
        return span if left > 0 else _("ended %s ago") % span


def read_value(value: str) -> tuple[str, str, str]:
    """Return alias, digest of the owner, and key of the holding in *value*, a Row.value."""
    alias, _colon, rest = value.partition(":")
    owner_digest, _colon, key = rest.partition(":")
    return unquote(alias), owner_digest, key


def holdings(using: str, name: str | Model | None = None) -> list[Held]:
    """Return the holdings of all locks of the alias *using*, or of the lock *name*, with a limit or without.

    NotSupported if the alias cannot list its locks, LockBackendError if its server does not answer, KeyFunctionFailed
    if the project's function for the keys fails.
    """
    backend = locks[using]
    backend.check_key()
    # Read the whole result: an open query blocks writers.
    if name is None:
        return grouped(settled(lambda: [*backend.held()]))
    key = backend.key_of(checked_name(name))
    alone = settled(lambda: [*backend.held(key)])
    if any(each.state != LockState.STALE for each in alone):
        return alone
    # A stale row of the time before the lock had a limit does not hide its places.
    return [*alone, *(each for each in holdings(using) if lock_of(each.key) == limit_key(key))]


def elsewhere(name: str | Model, using: str) -> list[str]:
    """Return the aliases other than *using* that list a holding of the lock *name* in time."""
    rows, _problems = survey(alias for alias in locks if alias != using)
    found = {alias for row in rows for alias in row.aliases if row.held.name == checked_name(name)}
    return sorted(found)


def grouped(found: Iterable[Held]) -> list[Held]:
    """Return *found* in the same order, but with all places of a lock together."""
    by_lock: dict[str, list[Held]] = {}
    for held in found:
        by_lock.setdefault(lock_of(held.key), []).append(held)
    return [
        held
        for places in by_lock.values()
        for held in sorted(places, key=lambda each: each.place or 0)
    ]


def force_release(name: str | Model, using: str = DEFAULT_ALIAS) -> int:
    """Free the lock *name*, held or reserved by min_hold, with a limit all its places; return how many holdings were ended.

    The holder is not stopped: its lease is lost at the next renewal, or at once if the holder is in this process.
    If only another alias has the lock, a warning names that alias. NotSupported if the alias cannot list its locks.
    """
    backend, found = locks[using], holdings(using, name)
    for alias in () if found else elsewhere(name, using):
        warn(
            "Nothing was released: the lock is held on the alias %s.",
            alias,
            name=checked_name(name),
            using=using,
        )
    return sum(backend.force_release(held.key, held.owner_digest) for held in found)


class Listing:
    """The locks of *alias* that *read* returns. A thread reads them into *held*, which grows meanwhile.

    *before* is an earlier complete listing, shown until this one is complete.
    """

    def __init__(self, alias: str, read: Read, before: Listing | None = None) -> None:
        self.alias, self.read, self.before = alias, read, before
        self.held: list[Held] = []
        self.error: Exception | None = None
        self.is_read = Event()
        self._began = self._ended = clock.lease_time()
        try:
            # Not in the thread, which does not know the tenant of the caller.
            backend = locks[alias]
            self._backend = backend.seen_from_here() if backend.supports_listing else backend
        except Exception as error:  # noqa: BLE001 - as in _read()
            self.error = error
            self.is_read.set()
        else:
            Thread(target=self._read, name="distlock-admin", daemon=True).start()

    @property
    def took(self) -> float:
        """How many seconds the reading took."""
        return self._ended - self._began

    @property
    def age(self) -> float:
        """How many seconds ago the reading ended."""
        return clock.lease_time() - self._ended

    def _read(self) -> None:
        try:
            settled(self._read_all)
        except Exception as error:  # noqa: BLE001 - the other aliases are shown all the same
            self.error = error
        finally:
            connections.close_all()
            self._ended = clock.lease_time()
            self.is_read.set()

    def _read_all(self) -> None:
        self.held.clear()
        self.held.extend(self.read(self._backend))


def survey(aliases: Iterable[str]) -> tuple[list[Row], dict[str, str]]:
    """Return the locks of *aliases* that could be read in time, and by alias the problems.

    A late listing is kept: the next call shows its locks, and its age as the problem.
    """
    return _in_time(aliases, "held", lambda backend: backend.held())


def free_locks(aliases: Iterable[str], text: str) -> tuple[list[Row], dict[str, str]]:
    """Return the free locks of *aliases* with *text* in their names or keys, and by alias the problems."""
    rows, problems = _in_time(aliases, f"free {text}", lambda backend: backend.free_locks(text))
    for alias, number in Counter(alias for row in rows for alias in row.aliases).items():
        if number >= MOST_FREE:
            told = _("At most %d of its free locks are shown. Search by name for others.")
            problems.setdefault(alias, told % MOST_FREE)
    return rows, problems


def _in_time(aliases: Iterable[str], what: str, read: Read) -> tuple[list[Row], dict[str, str]]:
    """Run *read* for each alias, as survey() does; *what* names this kind of listing in _late."""
    for key, late in _late.copy().items():
        if late.is_read.is_set() and late.age > max(KEPT, late.took):
            _late.pop(key, None)
    keys = {alias: _seen_from_here(alias, what) for alias in aliases}
    listings = [_listing(alias, _late.get(key), read) for alias, key in keys.items()]
    _wait(listing for listing in listings if listing.before is None)
    shown, problems = [], {}
    for listing in listings:
        alias = listing.alias
        is_read = listing.is_read.is_set()
        if is_read and listing.took <= PATIENCE:
            _late.pop(keys[alias], None)
        else:
            _late[keys[alias]] = listing
            known = listing if is_read else listing.before
            problems[alias] = _of_late(known) if known else _unread(listing)
        shown.append(listing if is_read else listing.before or listing)
    return _rows(shown, problems)


def look_up(keys: Mapping[str, Iterable[str]]) -> tuple[list[Row], dict[str, str]]:
    """Return the locks with these *keys* of each alias, and by alias the problems."""

    def read(keys: Iterable[str], backend: BaseLockBackend) -> Iterable[Held]:
        return (held for key in keys if backend.keeps(key) for held in backend.held(key))

    listings = [Listing(alias, partial(read, each)) for alias, each in keys.items()]
    _wait(listings)
    problems = {each.alias: _unread(each) for each in listings if not each.is_read.is_set()}
    return _rows(listings, problems)


def look_up_names(
    names: Iterable[str | Model], aliases: Iterable[str]
) -> tuple[list[Row], dict[str, str]]:
    """Return the locks with these *names*, without the places of locks with a limit, and by alias the problems."""
    wanted = [checked_name(name) for name in names]
    keys: dict[str, list[str]] = {}
    problems: dict[str, str] = {}
    for alias in aliases:
        try:
            locks[alias].check_key()
            keys[alias] = [locks[alias].key_of(name) for name in wanted]
        except Exception as error:  # noqa: BLE001 - of wrong settings, or of a function for the prefix
            problems[alias] = _problem(alias, error)
    rows, more = look_up(keys)
    return rows, problems | more


def forget_late(aliases: Iterable[str]) -> None:
    """Read the held locks of *aliases* again: a late listing still has a lock that was freed."""
    for alias in {key[0] for key in _late.copy()} & {*aliases}:
        _late.pop(_seen_from_here(alias), None)


def _seen_from_here(alias: str, what: str = "held") -> tuple[str, str, str]:
    """Return the key in _late of the caller's listing: each tenant has its own."""
    with suppress(Exception):  # the listing shows the error
        return alias, locks[alias].key_of("x"), what
    return alias, "", what


def _listing(alias: str, late: Listing | None, read: Read) -> Listing:
    """Return *late*, the listing of an earlier page, or start a new one; an alias is read at most half of the time."""
    if late is None:
        return Listing(alias, read)
    if not late.is_read.is_set() or late.age < late.took:
        return late
    return Listing(alias, read, before=None if late.error else late)


def _wait(listings: Iterable[Listing]) -> None:
    until = clock.wait_time() + PATIENCE
    for listing in listings:
        listing.is_read.wait(max(0.0, until - clock.wait_time()))


def _rows(
    listings: Iterable[Listing], problems: dict[str, str]
) -> tuple[list[Row], dict[str, str]]:
    """Return the locks that were read, and *problems* with the errors added; aliases with one location share rows."""
    rows: dict[object, Row] = {}
    for listing in listings:
        alias = listing.alias
        if listing.error:
            problems[alias] = _problem(alias, listing.error)
            continue
        for held in grouped([*listing.held]):
            known = locks[alias].location, held.owner_digest, held.key
            before = rows[known].aliases if known in rows else ()
            rows[known] = Row(held, (*before, alias))
    return [*rows.values()], problems


def _problem(alias: str, error: Exception) -> str:
    """Return the text of *error* without the *alias*, which the page shows beside the text."""
    return first_line(error).removeprefix(f"DISTLOCK[{alias!r}]: ")


def _of_late(listing: Listing) -> str:
    ago = clock.in_words(listing.age, ngettext)
    return _("Its list takes long to read. This one is %s old.") % ago


def _unread(listing: Listing) -> str:
    if number := len(listing.held):
        text = _("Its list takes long to read. Locks read so far: %d.")
        return text % number
    return _("It did not answer within %g s.") % PATIENCE
