"""What a backend is asked and what it answers: values, no I/O."""

from __future__ import annotations

import enum
import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from .holder import Holder
from .naming import LONGEST_LISTED, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Returns the secret of a new holding: 128 random bits from the operating system, as hex.
new_owner = partial(secrets.token_hex, 16)
#: How many owners are remembered.
REMEMBERED = 1000


_T = TypeVar("_T")


def batches(some: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """Return *some* in parts of *size*, the last of which may be smaller; servers take so many at once."""
    return (some[first : first + size] for first in range(0, len(some), size))


def digest(owner: str) -> str:
    """Return what tells two holdings apart and does not tell the owner."""
    return hashlib.sha256(owner.encode()).hexdigest()[:16]


def digest_of_reservation(token: int) -> str:
    """Return the digest of what min_hold or lock_delay of the holding with this *token* reserves."""
    return digest(f"reserved {token}")


@dataclass(frozen=True, slots=True)
class Request:
    """One wish to hold one lock. The owner is made with it, before anything is sent.

    *ttl*, *min_hold* and *lock_delay* are seconds. *key* is what the server knows the lock by.
    """

    name: str
    key: str
    ttl: float
    holder: Holder
    shared: bool = False
    min_hold: float = 0.0
    lock_delay: float = 0.0
    owner: str = field(default_factory=new_owner, repr=False)


@dataclass(frozen=True, slots=True)
class Grant:
    """The lock is ours; *token* is None where the backend has no fencing.

    *start*: since when its ttl runs at the earliest, on ``clock.lease_time()``, where that is later
    than when it was asked for: a server that lets us wait begins to count at the end of the wait.
    """

    token: int | None
    start: float | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """Somebody else has it; what is not known is None. *remaining* is seconds.

    *mark* tells this holding from the next one, also of the same holder; it may be its owner.
    *reserved*: nobody has it, but min_hold or lock_delay refuses it for *remaining* seconds.
    """

    holder: Holder | None = None
    remaining: float | None = None
    mark: object = field(default=None, repr=False, compare=False)
    reserved: bool = False


class Release(enum.Enum):
    """What a release found on the server."""

    RELEASED = "released"
    GONE = "gone"
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Held:
    """A lock as an operator sees it. *remaining* is seconds; below 0 the record is stale.

    *age* is seconds since it was acquired, None if that is not known. *waiters* is how many callers of
    all processes wait for the lock, None if the server is not told of them; but for *behind*, those that
    wait for a holder of their own process, as many as it told the server when its lease was last extended.
    *owner_digest* tells two holdings apart without telling the owner. *reserved*: see Busy.
    """

    name: str
    key: str
    holder: Holder | None
    remaining: float | None
    token: int | None
    owner_digest: str
    shared: bool = False
    waiters: int | None = None
    behind: int = 0
    reserved: bool = False
    age: float | None = None

    def __post_init__(self) -> None:
        # Whoever may write to the server may have written anything there.
        object.__setattr__(self, "name", printable(self.name, LONGEST_LISTED))
        object.__setattr__(self, "key", printable(self.key))

    @property
    def state(self) -> str:
        if self.reserved:
            return "reserved"
        return "stale" if self.remaining is not None and self.remaining <= 0 else "held"


@dataclass(frozen=True, slots=True)
class Purged:
    """One batch of a purge; *progress* is how far the whole of it is, from 0 to 1."""

    looked_at: int
    deleted: int
    progress: float


class RecentOwners:
    """The owners of one backend that ended last: what they send again, or late, is told from what others send."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, None] = OrderedDict()

    def add(self, owner: str) -> None:
        self._owners[owner] = None
        if len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)

    def discard(self, owner: str) -> bool:
        return self._owners.pop(owner, self) is None

    def __contains__(self, owner: str) -> bool:
        return owner in self._owners
