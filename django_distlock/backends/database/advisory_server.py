"""What a server must do for advisory locks."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from .session_engine import SessionEngine

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

    from django_distlock.engine.values import Busy, Grant
    from django_distlock.engine.waiting import Wait

    from .options import AdvisoryOptions
    from .sessions import Session


class Fencer(Protocol):
    """What a server asks of the backend."""

    options: AdvisoryOptions

    def count(self, session: Session, patience: float) -> int | None:
        """See SessionBackend.count()."""

    def confirm(self, session: Session) -> float:
        """See SessionBackend.confirm()."""

    def refused(self, cursor: CursorWrapper, key: str) -> Busy:
        """See SessionBackend.refused()."""


class AdvisoryServer(SessionEngine):
    """What a server does with its advisory locks."""

    #: Whether readers can hold one together.
    supports_shared: ClassVar[bool]

    @abstractmethod
    def take(
        self, backend: Fencer, cursor: CursorWrapper, session: Session, patience: float
    ) -> Grant | Busy:
        """Take it if it is free, with a token if the backend fences."""

    @abstractmethod
    def wait(
        self, backend: Fencer, cursor: CursorWrapper, session: Session, wait: Wait
    ) -> Grant | Busy:
        """See take(); others are waited for."""
