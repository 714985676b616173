"""The keys that the holders and waiters of this process have in etcd."""

from __future__ import annotations

from dataclasses import dataclass, field

from django_distlock.backends.queue.standings import Standing


@dataclass(eq=False, slots=True)
class Entry(Standing):
    """The key of one holder or waiter.

    Keys are used again: etcd keeps deleted ones until its next compaction, and would pass over all of them
    to find the first one of a lock. So its name is that of the session, and of its *slot* there.
    """

    slot: int = 0
    #: Its lease and its key, once the session is known; and the revision that made it, which is its place in line.
    lease_id: str = ""
    key: str = ""
    revision: int = 0
    #: Whether a request to make it may still be carried out, and so make it again after it was deleted.
    is_late: bool = False
    #: Whether its last try has failed by an error, so that the next one waits.
    has_failed: bool = False
    #: Whether it stands in line.
    is_in_line: bool = False
    #: The keys before it that it waits for; whether these are all; whether all of them are gone.
    watched: set[str] = field(default_factory=set)
    watches_all: bool = False
    is_next: bool = False
    #: Of the turn of a waiter for any place: its keys in the lines of the places. And of such a key: the turn.
    claims: list[Entry] = field(default_factory=list)
    turn: Entry | None = None

    @property
    def is_watched(self) -> bool:
        """Whether the watch would tell if anything that it waits for happened, and has told nothing."""
        return bool(self.watched) and all(claim.watched for claim in self.claims)

    @property
    def place(self) -> str:
        """Its session and slot."""
        return _place(self.lease_id, self.slot)

    def leave(self, lease_id: str) -> None:
        """Begin again at the end of the line, with this lease: its key is gone."""
        kind = "r" if self.request.shared else "w"
        self.key = f"{self.folder}/{kind}-{_place(lease_id, self.slot)}"
        self.revision, self.claims = 0, []
        self.is_granted = self.is_ending = self.is_in_line = self.is_next = False
        # Last, as an exception may come between two lines: without a key, etcd would refuse to delete it.
        self.lease_id = lease_id


def _place(lease_id: str, slot: int) -> str:
    return f"{int(lease_id):x}-{slot}"
