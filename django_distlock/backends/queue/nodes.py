"""The nodes on ZooKeeper and the keys on etcd that stand for this process's holders and waiters. No I/O."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple

from django_distlock.engine.values import Busy

if TYPE_CHECKING:
    from django_distlock.engine.bells import Bell
    from django_distlock.engine.values import Request


@dataclass(eq=False, slots=True)
class Sleeper:
    """A caller that sleeps until one of the nodes that it watches has gone."""

    request: Request
    _: KW_ONLY
    bell: Bell | None = None
    #: The paths of these nodes; empty once one of them has gone.
    watched: tuple[str, ...] = ()
    #: Whether one of them has gone since the caller looked.
    is_rung: bool = False

    def ring(self) -> bool:
        """Wake the caller; return False if it no longer exists."""
        # Set before the bell rings, because the caller looks at these right before it sleeps.
        self.watched, self.is_rung = (), True
        return self.bell is None or self.bell.ring()


@dataclass(eq=False, slots=True, kw_only=True)
class Node(Sleeper):
    """The node of one holder or waiter: kept from before the request to make it until it is certainly deleted."""

    #: The path of the lock, under which the node is made.
    folder: str
    #: When the holder releases the lock (``clock.lease_time()``) unless it is extended.
    ends: float = 0.0
    #: The fencing token is the server's own number of the node plus this offset, which is also in the node's label.
    number: int = 0
    offset: int = 0
    is_granted: bool = False
    #: Whether a request to delete the node may have been carried out.
    is_ending: bool = False
    #: The holder that refused the node; None before the first refusal.
    busy: Busy | None = None

    @property
    def may_exist(self) -> bool:
        """Whether the server may have made the node, or may yet make it."""
        raise NotImplementedError


class First(NamedTuple):
    """The first node in the queue of a lock; *busy* names the holder, if it was read."""

    path: str
    busy: Busy = Busy()


class Standing(NamedTuple):
    """The answer to Server.put(): *ahead* is the path of the node that the new node waits for, empty if there is none.

    *first* is the first node of the queue, *revision* the revision of the server's data. *start*: see Grant.
    """

    ahead: str = ""
    first: First = First("")
    revision: int = 0
    start: float | None = None
