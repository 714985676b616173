"""The keys that the holders and waiters of this process have in etcd."""

from __future__ import annotations

from dataclasses import dataclass, field

from django_distlock.engine.bells import Bell
from django_distlock.engine.values import Busy, Request, digest


@dataclass(eq=False, slots=True)
class Entry:
    """The key of one holder or waiter, from before the request for it until it is certainly gone."""

    request: Request
    folder: str
    key: str = field(init=False)
    #: The revision that made it, which is its place in line, and its lease, once they are known.
    revision: int = 0
    lease_id: str = ""
    is_granted: bool = False
    #: Whether a request to make it may still be carried out, and so make it again after it was deleted.
    is_late: bool = False
    #: Whether a request to delete it may have been carried out.
    is_ending: bool = False
    #: The end of its hold (``clock.lease_time()``), unless it is extended.
    ends: float = 0.0
    bell: Bell | None = None
    #: The key that it waits for, if any; the holder that was seen last; whether it stands in line.
    watched: str = ""
    busy: Busy = field(default_factory=Busy)
    is_in_line: bool = False
    looked_at: float = 0.0

    def __post_init__(self) -> None:
        kind = "r" if self.request.shared else "w"
        self.key = f"{self.folder}/{kind}-{digest(self.request.owner)}"

    def leave(self, lease_id: str) -> None:
        """Begin again at the end of the line, with this lease: its key is gone."""
        self.revision, self.lease_id = 0, lease_id
        self.is_granted = self.is_ending = self.is_in_line = False
