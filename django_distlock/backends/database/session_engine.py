"""What servers must do for locks that are held by a session: one class for each kind of lock and server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from .engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

    from django_distlock.engine.values import Held, Request

    from .deadlocks import Edge
    from .occupants import Counted
    from .sessions import Session

#: Seconds to wait for a fencing token that a guard() holds: a mere look, and while waiting anyway.
LOOK, STAY = 0.05, 1.0


def look(request: Request) -> float:
    """Return how long a mere look may take: of several readers each waits for the others' tokens."""
    return STAY if request.shared else LOOK


class SessionEngine(Engine, ABC):
    """Verbs are given a session, or a cursor on another connection, in autocommit."""

    #: Writes down who reads, unless that is done: %(key)s, %(token)s, %(holder)s.
    note_reader: ClassVar[str]

    # On the session itself.

    @abstractmethod
    def session_number(self, connection: BaseDatabaseWrapper) -> int:
        """Return the number by which the server knows the session."""

    @abstractmethod
    def free(self, session: Session) -> bool:
        """Give the lock back; return whether it was still held."""

    @abstractmethod
    def keep(self, session: Session, seconds: float) -> None:
        """Have the server keep the session for *seconds* from now though it says nothing."""

    # Beside it.

    @abstractmethod
    def raise_token(
        self, cursor: CursorWrapper, request: Request, holder: str, patience: float
    ) -> int:
        """Commit a new fencing token and its holder; Contended if a guard() holds it meanwhile."""

    @abstractmethod
    def make_row(self, cursor: CursorWrapper, request: Request) -> bool:
        """Make the lock's row, with its name, if there is none; tell whether there was none."""

    @abstractmethod
    def is_held(self, cursor: CursorWrapper, key: str) -> bool:
        """Return whether anybody has the lock."""

    @abstractmethod
    def held(self, cursor: CursorWrapper, known: dict[str, Counted]) -> Iterable[Held]:
        """Tell which of the *known* locks, by key, are held."""

    @abstractmethod
    def waits(self, cursor: CursorWrapper) -> Iterable[Edge]:
        """Tell which caller waits for which."""

    @abstractmethod
    def end(self, cursor: CursorWrapper, counted: Counted, owner_digest: str) -> bool:
        """End the session that holds the lock as *owner_digest* says; tell whether there was one."""
