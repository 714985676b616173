"""What RowLockBackend and AdvisoryBackend share: a session for each lock, lost with its connection."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from django.core.checks import Error

from django_distlock.engine import clock
from django_distlock.engine.holder import Holder
from django_distlock.engine.settling import settled
from django_distlock.engine.values import Busy, Grant, Release, digest
from django_distlock.engine.waiting import Wait, Waiting, Way
from django_distlock.exceptions import Contended, LockBackendError, NotSupported

from . import listing
from .base import SHORT_PAUSE, BaseDatabaseBackend
from .deadlocks import DeadlockWatch
from .mysql import MySQL
from .occupants import Occupant, reader_key
from .postgresql import PostgreSQL
from .session_verbs import SessionVerbs
from .sessions import SessionRequest, Sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from django.core.checks import CheckMessage
    from django.db.backends.utils import CursorWrapper

    from django_distlock.conf import BackendSettings
    from django_distlock.engine.values import Held, Request

    from .deadlocks import Edge
    from .engine import Engine
    from .session_engine import SessionEngine
    from .sessions import Session

#: How many connections serve the statements beside the sessions.
BESIDE = 4
#: The part of its connections up to which those who could wait in the line of this process use them.
ROOM = 0.75
_PLAIN: dict[str, type[Engine]] = {"postgresql": PostgreSQL, "mysql": MySQL}


class SessionBackend(BaseDatabaseBackend):
    """Locks that end with the connection that holds them, or once it has been silent for the ttl."""

    session_bound = True
    clock = "session"
    request_class = SessionRequest
    waiting = Waiting(way=Way.ON_SERVER)
    #: What is written for each kind of server.
    servers: ClassVar[dict[str, type[SessionEngine]]]

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._own = self.make_pool(self.engine, BESIDE)
        self.server = self.servers[self._vendor](fair=False)
        self._sessions = Sessions(self.make_pool(self.server, self.options.max_connections))
        self._verbs = SessionVerbs(self.alias, self._sessions, self.server, self.options.io_timeout)

    def make_engine(self, vendor: str) -> Engine:
        """Return what is written for the statements beside the sessions; ValueError where nothing is."""
        if vendor not in _PLAIN:
            msg = f"'using' names {self.options.using!r}, which is none of PostgreSQL, MariaDB and MySQL ({vendor})."
            raise ValueError(msg)
        self._vendor = vendor
        return _PLAIN[vendor](fair=False)

    # What the kinds of locks differ in.

    def take(self, session: Session) -> Grant | Busy:
        """Take the lock if it is free now."""
        raise NotImplementedError

    def wait(self, session: Session, seconds: float | None) -> Grant | Busy:
        """Let the server make us wait for it."""
        raise NotImplementedError

    # The verbs.

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        """Ask once, or wait in the server's queue."""
        if queued:
            wait = partial(self._wait_watched, seconds=left)
            return self._verbs.ask(self._sessions.open(request), partial(self._noted, verb=wait))
        known = self._sessions.held(request.owner)
        if known is not None and known.grant is not None:
            return known.grant
        return self._take_anew(request)

    def leaves_line(self, request: Request) -> bool:
        """Have it seen by the deadlock watches of other processes, if it may be one of a circle."""
        caller = request.caller if isinstance(request, SessionRequest) else ""
        most = self.options.max_connections * ROOM
        return self._sessions.in_use < most and Sessions.holds_any(caller)

    def interrupt(self, request: Request) -> None:
        """Cut the line under the thread that waits."""
        self._sessions.interrupt(request.owner)

    def is_session_over(self, request: Request) -> bool:
        """Look at the socket."""
        session = self._sessions.held(request.owner)
        if session is None:
            return not self._sessions.has_released(request.owner)
        return session.is_over

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Say a word on each session, so that the server begins anew to count its silence."""
        held = [(request, self._sessions.held(request.owner)) for request in requests]
        return [
            session is not None and self._verbs.keep(session, request) for request, session in held
        ]

    def release(self, request: Request) -> Release:
        """Give it back, and its connection to the pool."""
        session = self._sessions.held(request.owner)
        if session is None:
            return self._tell(request)
        # First, for whoever asks is_session_over() before the lease knows that it is released.
        self._sessions.note_release(request.owner)
        is_freed = self._verbs.free(session)
        if self._is_noted(request):
            keys = [reader_key(request.key, digest(request.owner))]
            with suppress(LockBackendError):  # listing forgets it too
                self._insist(partial(listing.forget_readers, keys=keys))
        return Release.RELEASED if is_freed else Release.GONE

    def probe(self, request: Request) -> Busy | None:
        """Look."""
        return self._insist(partial(self._look, request=request))

    def held(self, key: str | None = None) -> Iterable[Held]:
        """Tell the locks of this alias that are held."""
        if not self.supports_listing:
            raise NotSupported(
                self.alias, "listing", "Without fencing nothing stands beside its locks."
            )
        return self._insist(partial(listing.held, server=self.server, keeps=self.keeps, key=key))

    def end_holding(self, key: str, owner_digest: str) -> bool:
        """End the session that *owner_digest* names, and raise the token past it."""
        return self._press(
            partial(listing.end_holding, server=self.server, key=key, owner_digest=owner_digest)
        )

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        """Say, where the server may be asked, if it is reached through a pooler."""
        if databases is None or self.options.using not in databases:
            return []
        try:
            request = self.request("check", ttl=self.ttl, holder=Holder.current("check"))
            self._sessions.close(self._sessions.open(request), is_sound=True)
        except LockBackendError as error:
            hint = "See the reference of django_distlock, checks, distlock.E005."
            return [Error(str(error), hint=hint, id="distlock.E005")]
        return []

    def close(self) -> None:
        """Close what is idle: held locks stay."""
        super().close()
        self._sessions.close_idle()

    def abandon_after_fork(self) -> None:
        """Leave the sessions to the parent."""
        super().abandon_after_fork()
        self._sessions.abandon()

    # What take() and wait() are made of.

    def count(self, session: Session, patience: float) -> int | None:
        """Return a new fencing token, committed beside the lock; None while a guard() holds the old one."""
        occupant = Occupant.of(session, self.server.session_number(session.connection))
        verb = partial(
            self.server.raise_token,
            request=session.request,
            holder=occupant.to_json(),
            patience=patience,
        )
        wait = Wait(patience)
        while True:
            try:
                return self._ask_again(verb)
            except Contended:
                if wait.is_over:
                    return None
                time.sleep(wait.next_pause(longest=SHORT_PAUSE))

    def confirm(self, session: Session) -> float:
        """Return a time from which on the server cannot have ended a session that was just granted."""
        start = clock.lease_time()
        self.server.keep(session, session.request.ttl)
        return start

    def make_row(self, request: Request) -> bool:
        """Make the lock's row if there is none, in a transaction of its own; tell whether there was none."""
        return self._insist(lambda cursor: self.server.make_row(cursor, request))

    def refused(self, cursor: CursorWrapper, key: str) -> Busy:
        """Return who had it last."""
        occupant = listing.occupant(cursor, key)
        return Busy(None if occupant is None else occupant.holder)

    # The rest is ours.

    def _take_anew(self, request: Request) -> Grant | Busy:
        session, take = self._sessions.open(request), partial(self._noted, verb=self.take)
        try:
            return self._verbs.ask(session, take)
        except LockBackendError:
            # An idle connection may have died unseen; what it did not get it does not hold.
            if not session.was_idle or not session.was_cut:
                raise
        return self._verbs.ask(self._sessions.open(request), take)

    def _noted(self, session: Session, *, verb: Callable[[Session], Grant | Busy]) -> Grant | Busy:
        """Ask; of several readers each is written down, since the counter has place for the last one only."""
        answer = verb(session)
        if isinstance(answer, Grant) and self._is_noted(session.request):
            occupant = Occupant.of(session, self.server.session_number(session.connection))
            key = reader_key(session.request.key, occupant.owner_digest)
            known = {"key": key, "token": answer.token, "holder": occupant.to_json()}
            self._insist(partial(listing.note_reader, server=self.server, known=known))
        return answer

    def _is_noted(self, request: Request) -> bool:
        return request.shared and self.supports_listing

    def _wait_watched(self, session: Session, seconds: float | None) -> Grant | Busy:
        if Sessions.holds_any(session.caller):
            DeadlockWatch(self.alias, session, partial(self._ask, self._waits))
        with self._verbs.waiting(session, seconds):
            return self.wait(session, seconds)

    def _ask_again(self, verb: Callable[[CursorWrapper], int]) -> int:
        """Ask, once more if an idle connection had died unseen: a token may well be raised twice."""
        return settled(partial(self._ask, verb), within=math.inf)

    def _waits(self, cursor: CursorWrapper) -> list[Edge]:
        return list(self.server.waits(cursor))

    def _tell(self, request: Request) -> Release:
        """Return what became of a holding that has no session."""
        if (waiting := self._sessions.get(request.owner)) is not None:
            waiting.interrupt()
        if self._sessions.has_released(request.owner):
            return Release.RELEASED
        return Release.GONE if self.probe(request) is None else Release.TAKEN

    def _look(self, cursor: CursorWrapper, *, request: Request) -> Busy | None:
        if not self.server.is_held(cursor, request.key):
            return None
        return self.refused(cursor, request.key)
