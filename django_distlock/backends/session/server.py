"""What a server must do for locks that its sessions hold: one class for each kind of lock and server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_distlock.backends.database.engine import Engine
    from django_distlock.engine.values import Busy, Grant, Held, Request
    from django_distlock.engine.waiting import Wait

    from .deadlocks import Edge
    from .occupants import Counted
    from .sessions import Session

#: Seconds to wait for a fencing token that a guard() holds: a mere look, and while waiting anyway.
LOOK, STAY = 0.05, 1.0


def look(request: Request) -> float:
    """Return how long a mere look may take: of several readers each waits for the others' tokens."""
    return STAY if request.shared else LOOK


def stay(wait: Wait) -> float:
    """Return how long to wait for a token at the end of *wait*."""
    return STAY if wait.left is None else min(STAY, wait.left)


@dataclass(slots=True)
class Link:
    """What belongs to a connection that was set up to hold locks, whichever lock it holds.

    It must not refer to the connection, which nobody else keeps alive once it is lost.
    """

    #: The driver's own cursor.
    cursor: Any
    #: By what the server knows the session.
    number: int
    #: For how long the server was told to bear its silence, in the server's own unit.
    limit: int = -1


class SessionServer(ABC):
    """Its verbs are given a session, or a cursor of another connection, in autocommit."""

    supports_shared: ClassVar[bool] = True
    #: Writes down who reads, unless that is done: %(key)s, %(token)s, %(holder)s.
    note_reader: ClassVar[str]

    def __init__(self, engine: Engine, name: Callable[[], str], *, fencing: bool) -> None:
        """*engine*: of its own connections; *name*: what tells the name of the database."""
        self.engine = engine
        self.name = name
        self.fencing = fencing

    # On the session itself.

    @abstractmethod
    def begin(self, connection: BaseDatabaseWrapper) -> Link:
        """Set up a new connection to hold locks; Unusable where it cannot."""

    @abstractmethod
    def session_number(self, connection: BaseDatabaseWrapper) -> int:
        """Return the number by which the server knows the session."""

    @abstractmethod
    def take(self, session: Session, patience: float) -> Grant | Busy:
        """Take the lock if it is free, with the token if that is one statement; else leave nothing behind."""

    @abstractmethod
    def wait(self, session: Session, wait: Wait) -> Grant | Busy:
        """Do as take() does, but stand in the server's queue."""

    @abstractmethod
    def free(self, session: Session) -> bool:
        """Give the lock back; return whether it was still held."""

    @abstractmethod
    def keep(self, session: Session, seconds: float) -> None:
        """Have the server keep the session for *seconds* from now though it says nothing."""

    # Beside it, or on it.

    @abstractmethod
    def raise_token(self, cursor: Any, key: str, holder: str, patience: float) -> int:
        """Commit a new fencing token and its holder; an error of contention if a guard() holds it meanwhile."""

    @abstractmethod
    def make_row(self, cursor: Any, key: str, name: str) -> bool:
        """Make the lock's row, with its name, if there is none; tell whether there was none."""

    @abstractmethod
    def is_held(self, cursor: Any, key: str) -> bool:
        """Return whether anybody has the lock."""

    @abstractmethod
    def held(self, cursor: Any, known: dict[str, Counted]) -> Iterable[Held]:
        """Tell which of the *known* locks, by key, are held."""

    @abstractmethod
    def waits(self, cursor: Any) -> Iterable[Edge]:
        """Tell which caller waits for which."""

    @abstractmethod
    def end(self, cursor: Any, counted: Counted, owner_digest: str) -> bool:
        """End the session that holds the lock as *owner_digest* says; tell whether there was one."""
