"""The requests to a backend and its answers: values, no I/O."""

from __future__ import annotations

import enum
import hashlib
import math
import random
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _

from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import LONGEST_LISTED, limit_key, place_key, place_of, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: How many texts a Recent keeps at least.
REMEMBERED = 1000


_T = TypeVar("_T")


class _Hidden:
    """Mixin for secret text: error reports, which show the variables of all frames, show "<secret>" instead."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"


class Secret(_Hidden, str):
    """A text that contains an owner."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a cache may pickle the text


class SecretBytes(_Hidden, bytes):
    """Bytes that contain an owner."""


def new_owner() -> Secret:
    """Return the secret of a new holding: 128 random bits from the operating system, as hex."""
    return Secret(secrets.token_hex(16))


def batches(some: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """Return *some* in parts of at most *size*, as servers limit the number of items in one request."""
    return (some[first : first + size] for first in range(0, len(some), size))


def digest(owner: str) -> str:
    """Return a hash of *owner*: it identifies one holding without revealing the owner."""
    return hashlib.sha256(owner.encode()).hexdigest()[:16]


def digest_of_reservation(token: int) -> str:
    """Return the digest of the reservation (min_hold) that the holding with this *token* left."""
    return digest(f"reserved {token}")


@dataclass(frozen=True, slots=True)
class Request:
    """A request to hold one lock. Its owner is made with it, before anything is sent.

    *ttl* and *min_hold* are seconds. *key* is the lock's name on the server. With a *limit*, the request is for
    any of so many places, and *key* is that of all places; at() returns the request for one *place*.
    *position*: the id of the position in the server's queue, which belongs to the process; empty: the owner.
    """

    name: str
    key: str
    ttl: float
    holder: Holder
    shared: bool = False
    min_hold: float = 0.0
    owner: str = field(default_factory=new_owner, repr=False)
    limit: int | None = None
    place: int | None = None
    position: str = field(default="", repr=False)

    def with_limit(self, limit: int) -> Self:
        """Return a request for any of *limit* places under this name."""
        holder = replace(self.holder, limit=limit)
        return replace(self, key=limit_key(self.key), holder=holder, limit=limit)

    @property
    def holdings(self) -> list[Self]:
        """The requests for single locks: this one, or for any place, one request for each place."""
        if self.limit is None or self.place is not None:
            return [self]
        return [self.at(place) for place in range(self.limit)]

    @property
    def line(self) -> str:
        """The key of the queue: for a place, the key of all places."""
        return self.key if self.place is None else place_key(self.key, "")

    @property
    def waiter(self) -> str:
        """The id of the position in the server's queue."""
        return self.position or self.owner

    @property
    def kept_for(self) -> float:
        """For how many seconds the holder keeps the lock without an extension."""
        return self.ttl

    @property
    def lock_key(self) -> str:
        """The key that the backend's key_of() made from the name: the same for all places."""
        return self.line.removesuffix(limit_key(""))

    def at(self, place: int | None) -> Self:
        """Return the request for this *place*, which is a separate lock; None: for any place."""
        return replace(self, key=place_key(self.key, "" if place is None else place), place=place)


def first_place(limit: int) -> int:
    """Return a random place to begin with, so that callers rarely try the same place."""
    return random.randrange(limit)  # noqa: S311 - no secret


@dataclass(frozen=True, slots=True)
class Grant:
    """The lock is ours; *token* is None where the backend has no fencing.

    *start* (``clock.lease_time()``): the earliest start of the ttl, if that is later than the request:
    a server that lets the request wait starts the ttl at the end of the wait.
    """

    token: int | None
    start: float | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """Another holder has the lock. *remaining* is in seconds; None if it is not known.

    *mark*, such as the owner, identifies this holding: the holder's next holding has another mark.
    *reserved*: nobody holds the lock, but min_hold refuses it for *remaining* seconds.
    """

    holder: Holder | None = None
    remaining: float | None = None
    mark: object = field(default=None, repr=False, compare=False)
    reserved: bool = False


def first_to_end(places: Iterable[Busy | None]) -> Busy | None:
    """Return the Busy of *places* that ends first, as far as that is known; None if a place is free."""
    found = [*places]
    known = [busy for busy in found if busy is not None]
    if len(known) < len(found):
        return None
    return min(known, key=lambda busy: math.inf if busy.remaining is None else busy.remaining)


class Release(enum.Enum):
    """The result of a release: whether the lock was ours, free, or another holder's."""

    RELEASED = "released"
    GONE = "gone"
    TAKEN = "taken"


class State(enum.Enum):
    """The states of a lease; all but the first two are final."""

    PENDING = "pending"
    HELD = "held"
    LOST = "lost"
    RELEASED = "released"
    DETACHED = "handed to another process"
    INHERITED = "held by the process that this one was forked from"


#: The states that are not final.
NOT_ENDED = State.PENDING, State.HELD


class Read(NamedTuple):
    """An instance that locked() has read: its database, its ``_state``, which identifies it, and the depth of its block."""

    using: str
    state: object
    depth: int


class LockState(TextChoices):
    """The state of a lock in a listing, by the clock of the server."""

    HELD = "held", _("held")
    STALE = "stale", _("stale")
    RESERVED = "reserved", _("reserved")
    FREE = "free", _("free")


@dataclass(frozen=True, slots=True)
class Held:
    """A lock as an operator sees it. *remaining* is seconds; below 0 the record is stale.

    *age* is the seconds since the grant, on ZooKeeper since the request, which may have waited; None if that is not
    known. *waiters* is the number of positions in the server's queue; None if there is no queue, and for one of
    several places, because a waiter waits for any of them. *owner_digest* identifies the holding without revealing
    the owner; it is "" for a free lock, whose *age* counts from its last change. *reserved*: see Busy.
    """

    name: str
    key: str
    holder: Holder | None
    remaining: float | None
    token: int | None
    owner_digest: str
    shared: bool = False
    waiters: int | None = None
    reserved: bool = False
    age: float | None = None

    @property
    def place(self) -> int | None:
        """The place that is held; None for a lock without a limit."""
        return place_of(self.key)

    @property
    def limit(self) -> int | None:
        """How many places the lock has, as far as the holder says; None without a limit."""
        return self.holder.limit if self.holder else None

    def __post_init__(self) -> None:
        # Other programs may have written any text to the server.
        object.__setattr__(self, "name", printable(self.name, LONGEST_LISTED))
        object.__setattr__(self, "key", printable(self.key))
        if self.place is not None:
            object.__setattr__(self, "waiters", None)

    @property
    def state(self) -> str:
        if self.reserved or not self.owner_digest:
            return "reserved" if self.reserved else "free"
        return "stale" if self.remaining is not None and self.remaining <= 0 else "held"


@dataclass(frozen=True, slots=True)
class Purged:
    """One batch of a purge; *progress* is how far the whole purge is, from 0 to 1."""

    looked_at: int
    deleted: int
    progress: float


class Recent:
    """The last texts that were added, such as owners that released, to recognise repeated and late requests.

    Threads change it without a mutex, so it uses a plain dict: an OrderedDict breaks in a Python without the GIL.
    """

    def __init__(self) -> None:
        self._texts: dict[str, bool] = {}

    def __contains__(self, text: str) -> bool:
        return text in self._texts

    def add(self, text: str) -> None:
        self._texts[text] = True
        if len(self._texts) > 2 * REMEMBERED:
            # Copied in one step. The last texts stay, even if several threads run this.
            for oldest in [*self._texts][:-REMEMBERED]:
                self.pop(oldest)

    def pop(self, text: str, default: bool | None = None) -> bool | None:
        return self._texts.pop(text, default)
