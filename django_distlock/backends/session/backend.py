"""What RowLockBackend and AdvisoryBackend share: a session for each lock, lost with its connection."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from django.core.checks import Error
from django.db import connections

from django_distlock.backends.database.base import SHORT_PAUSE, BaseDatabaseBackend
from django_distlock.backends.database.bounds import is_cut, patient
from django_distlock.backends.database.engine import COUNTER, LOCK
from django_distlock.backends.database.mysql import MySQL
from django_distlock.backends.database.postgresql import PostgreSQL
from django_distlock.engine import clock
from django_distlock.engine.holder import Holder
from django_distlock.engine.naming import stored
from django_distlock.engine.values import Busy, Grant, Release, digest
from django_distlock.engine.waiting import Wait, Waiting, Way
from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockDeadlock,
    LockOutcomeUnknown,
    NotSupported,
)

from . import occupants
from .deadlocks import DeadlockWatch
from .occupants import LONGEST_NAME, Occupant, reader_key
from .sessions import Session, SessionRequest, Sessions, look, stay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from django.core.checks import CheckMessage

    from django_distlock.backends.database.engine import Engine
    from django_distlock.conf import BackendSettings
    from django_distlock.engine.values import Held, Request

    from .sessions import SessionServer

#: How many connections serve the statements beside the sessions.
BESIDE = 4
#: The part of its connections up to which those who could wait in the line of this process use them.
ROOM = 0.75
#: Where the numbers begin of errors that drivers for MariaDB and MySQL find out by themselves.
_OF_DRIVERS = 2000
_ENGINES: dict[str, type[Engine]] = {"postgresql": PostgreSQL, "mysql": MySQL}


class SessionBackend(BaseDatabaseBackend):
    """Locks that end with the connection that holds them, or once it has been silent for the ttl."""

    session_bound = True
    clock = "session"
    request_class = SessionRequest
    waiting = Waiting(way=Way.ON_SERVER)
    #: What is written for each kind of server.
    servers: ClassVar[dict[str, type[SessionServer]]]
    #: Whether a lock is a row, which must be there before it is locked.
    needs_row: ClassVar[bool] = False
    #: Whether a token is counted on the session itself: it is in no transaction.
    counts_on_session: ClassVar[bool] = False

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._own = self.make_pool(self.engine, BESIDE)
        known = connections.settings[self.options.using]
        fencing: bool = getattr(self.options, "fencing", True)
        self.server = self.servers[self._vendor](
            self.engine, lambda: known["NAME"], fencing=fencing
        )
        self.supports_fencing = self.supports_listing = fencing
        self.supports_shared = self.server.supports_shared
        pool = self.make_pool(self.engine, self.options.max_connections)
        self._sessions = Sessions(pool, self.server)

    def make_engine(self, vendor: str) -> Engine:
        if vendor not in _ENGINES:
            msg = f"'using' names {self.options.using!r}, which is none of PostgreSQL, MariaDB and MySQL ({vendor})."
            raise ValueError(msg)
        self._vendor = vendor
        return _ENGINES[vendor](fair=False)

    # The verbs.

    def try_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
    ) -> Grant | Busy:
        if queued:
            wait = partial(self._wait, wait=Wait(left))
            return self._ask_on(Session(request), wait, to_wait=True)
        known = self._sessions.held(request.owner)
        if known is not None and known.grant is not None:
            return known.grant
        session = Session(request)
        try:
            return self._ask_on(session, self._take)
        except LockBackendError:
            # An idle connection may have died unseen; what it did not get it does not hold.
            if not session.was_cut:
                raise
        return self._ask_on(Session(request), self._take)

    def leaves_line(self, request: Request) -> bool:
        """Have it seen by the deadlock watches of other processes, if it may be one of a circle."""
        caller = request.caller if isinstance(request, SessionRequest) else ""
        most = self.options.max_connections * ROOM
        return self._sessions.in_use < most and Sessions.holds_any(caller)

    def interrupt(self, request: Request) -> None:
        self._sessions.interrupt(request.owner)

    def is_session_over(self, request: Request) -> bool:
        session = self._sessions.held(request.owner)
        if session is None:
            return request.owner not in self._sessions.released
        return session.is_over

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Say a word on each session, so that the server begins anew to count its silence."""
        held = [(request, self._sessions.held(request.owner)) for request in requests]
        return [
            session is not None and self._keep(session, request.ttl) for request, session in held
        ]

    def release(self, request: Request) -> Release:
        session = self._sessions.held(request.owner)
        if session is None:
            return self._tell(request)
        # First, for whoever asks is_session_over() before the lease knows that it is released.
        self._sessions.released.add(request.owner)
        is_freed = self._free(session)
        if request.shared and self.supports_listing:
            keys = [reader_key(request.key, digest(request.owner))]
            with suppress(LockBackendError):  # listing forgets it too
                self._insist(occupants.forget_readers, keys)
        return Release.RELEASED if is_freed else Release.GONE

    def probe(self, request: Request) -> Busy | None:
        return self._press(self._look, request)

    def held(self, key: str | None = None) -> Iterable[Held]:
        if not self.supports_listing:
            raise NotSupported(
                self.alias, "listing", "Without fencing nothing stands beside its locks."
            )
        return self._insist(occupants.held, self.server, self.keeps, key)

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._press(occupants.end_holding, self.server, key, owner_digest)

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        """Say, where the server may be asked, whether it can be used, and is not reached through a pooler."""
        if databases is None or self.options.using not in databases:
            return []
        if found := self.check_tables((LOCK, COUNTER) if self.supports_fencing else ()):
            return found
        session = Session(self.request("check", ttl=self.ttl, holder=Holder.current("check")))
        try:
            self._ask_on(session, lambda session: Busy())
        except LockBackendError as error:
            hint = "Let OPTIONS 'using' name an alias of DATABASES that connects to the server directly."
            return [Error(str(error), hint=hint, id="distlock.E005")]
        return []

    def close(self) -> None:
        super().close()
        self._sessions.close_idle()

    def abandon_after_fork(self) -> None:
        super().abandon_after_fork()
        self._sessions.abandon()

    # What is asked on a session: one that fails is closed.

    def _ask_on(
        self,
        session: Session,
        verb: Callable[[Session], Grant | Busy],
        *,
        to_wait: bool = False,
    ) -> Grant | Busy:
        """Return what *verb* answers: granted, the session holds; else it is over."""
        start = clock.lease_time()
        try:
            # Opened in here: an exception from outside must not leave it open.
            self._sessions.open(session, to_wait=to_wait)
            answer = verb(session)
            if isinstance(answer, Grant):
                session.ends = (answer.start or start) + session.request.ttl
                session.grant = answer
            else:
                self._sessions.close(session, is_sound=True)
        except BaseException:
            self._sessions.close(session, is_sound=False)
            with self._translated(session):
                raise
        return answer

    def _take(self, session: Session) -> Grant | Busy:
        patience = look(session.request)
        answer = self.server.take(session, patience)
        if isinstance(answer, Busy) and self.needs_row:
            # Whoever made it: what was not there, or only looked at, may be free.
            self._make_row(session.request)
            answer = self.server.take(session, patience)
        return self._completed(session, answer, patience)

    def _wait(self, session: Session, *, wait: Wait) -> Grant | Busy:
        if Sessions.holds_any(session.caller):
            DeadlockWatch(
                self.alias, session, partial(self._ask, lambda cursor: [*self.server.waits(cursor)])
            )
        usually = self.options.io_timeout
        longest = None if wait.left is None else wait.left + usually
        with patient(session.connection, longest, usually=usually), session.waiting():
            answer = self.server.wait(session, wait)
            while isinstance(answer, Busy) and self.needs_row and self._make_row(session.request):
                answer = self.server.wait(session, wait)
            if isinstance(answer, Grant) and answer.start is None:
                # From when on the server cannot have ended a session that was just granted: it hears a word.
                start = clock.lease_time()
                if not (self.counts_on_session and self.supports_fencing):
                    self.server.keep(session, session.request.ttl)
                answer = Grant(answer.token, start)
            return self._completed(session, answer, stay(wait))

    def _completed(self, session: Session, answer: Grant | Busy, patience: float) -> Grant | Busy:
        """Return *answer* with what stands in the tables: a new token, or who had it last."""
        request = session.request
        if not self.supports_fencing:
            return answer
        if isinstance(answer, Busy):
            if answer.holder is not None:
                return answer
            return self._insist(occupants.last_holder, request.key)
        occupant = Occupant.of(session)
        if answer.token is None:
            token = self._count(session, occupant, patience)
            if token is None:
                self.server.free(session)
                return Busy()
            answer = Grant(token, answer.start)
        if request.shared:
            # Each is written down, since the counter has place for the last one only.
            known = {
                "key": reader_key(request.key, occupant.owner_digest),
                "token": answer.token,
                "holder": occupant.to_json(),
            }
            self._insist(self.server.note_reader, known)
        if not self.needs_row and len(stored(request.name)) > LONGEST_NAME:
            self._make_row(request)  # for people, beside the token
        return answer

    def _count(self, session: Session, occupant: Occupant, patience: float) -> int | None:
        """Return a new fencing token, committed; None while a guard() holds the old one."""
        known = session.request.key, occupant.to_json(), patience
        wait: Wait | None = None
        is_again = False
        while True:
            try:
                if not self.counts_on_session:
                    return self._own.ask(self.server.raise_token, *known)
                with self._sessions.translated(), session.connection.wrap_database_errors:
                    return self.server.raise_token(session.connection.distlock_cursor, *known)
            except Contended:
                wait = wait or Wait(patience)
                if wait.is_over:
                    return None
                time.sleep(wait.next_pause(longest=SHORT_PAUSE))
            except LockOutcomeUnknown:
                # An idle connection had died unseen; a token may well be raised twice.
                if is_again or self.counts_on_session:
                    raise
                is_again = True

    def _keep(self, session: Session, ttl: float) -> bool:
        """Have the server keep the session for *ttl* from now; False if it is over."""
        with session.mutex:
            if self._sessions.held(session.request.owner) is not session:
                return False  # its connection may be another session's by now
            start = clock.lease_time()
            # An extension never shortens.
            seconds = max(ttl, session.ends - start)
            # There is no other session to ask by: a slow server is given time.
            usually = self.options.io_timeout
            longest = max(usually, ttl / 3)
            try:
                with (
                    self._translated(session),
                    patient(session.connection, longest, usually=usually),
                ):
                    self.server.keep(session, seconds)
            except LockBackendError:
                self._sessions.close(session, is_sound=False)
                return False
            session.ends = start + seconds
        return True

    def _free(self, session: Session) -> bool:
        """Give the lock back; False if the session had ended before."""
        with session.mutex:
            if self._sessions.held(session.request.owner) is not session:
                return False
            is_freed = is_answer_lost = False
            was_cut = is_cut(session.connection)
            try:
                is_freed = self.server.free(session)
            except Exception:  # noqa: BLE001 - translated, or raised as it is
                try:
                    with self._translated(session):
                        raise
                except LockBackendError as error:
                    if not is_cut(session.connection):
                        raise
                    # It was there until it was given back, as far as anybody can know, and is free by now.
                    is_answer_lost = not was_cut and not _is_word_of_server(error)
            finally:
                self._sessions.close(session, is_sound=is_freed)
        return is_freed or is_answer_lost

    @contextmanager
    def _translated(self, session: Session) -> Iterator[None]:
        """Raise lock errors; a lock whose connection broke is not held, which is no unknown outcome."""
        try:
            with self._sessions.translated():
                yield
        except (LockOutcomeUnknown, Contended) as error:
            if session.deadlock:
                raise LockDeadlock(session.request.name, session.deadlock) from error
            if isinstance(error, Contended):
                raise
            raise LockBackendError(self.alias, error.problem) from error

    # What stands in the tables, by other connections.

    def _make_row(self, request: Request) -> bool:
        """Make the lock's row if there is none, in a transaction of its own; tell whether there was none."""
        return self._insist(self.server.make_row, request.key, request.name)

    def _look(self, cursor: Any, request: Request) -> Busy | None:
        if not self.server.is_held(cursor, request.key):
            return None
        return occupants.last_holder(cursor, request.key) if self.supports_fencing else Busy()

    def _tell(self, request: Request) -> Release:
        """Return what became of a holding that has no session."""
        if (waiting := self._sessions.get(request.owner)) is not None:
            waiting.interrupt()
        if request.owner in self._sessions.released:
            return Release.RELEASED
        return Release.GONE if self.probe(request) is None else Release.TAKEN


def _is_word_of_server(error: BaseException | None) -> bool:
    """Return whether the server said that it ends the session: else the line broke, and nobody knows why."""
    while error is not None:
        if getattr(error, "sqlstate", None) or getattr(error, "pgcode", None):
            return True
        number = error.args[0] if error.args else None
        if isinstance(number, int) and not _OF_DRIVERS <= number < _OF_DRIVERS + 1000:
            return True
        error = error.__cause__
    return False
