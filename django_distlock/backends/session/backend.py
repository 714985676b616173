"""What RowLockBackend and AdvisoryBackend share: a session for each lock, lost with its connection."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

from django.core.checks import Error

from django_distlock.backends.database.base import SHORT_PAUSE, BaseDatabaseBackend
from django_distlock.backends.database.bounds import is_cut, patient
from django_distlock.backends.database.connections import abandon
from django_distlock.backends.database.engine import COUNTER, LOCK
from django_distlock.engine import clock
from django_distlock.engine.background import background
from django_distlock.engine.holder import Holder
from django_distlock.engine.naming import stored, warn
from django_distlock.engine.values import Busy, Grant, RecentOwners, Release
from django_distlock.engine.waiting import Wait, Waiting, Way
from django_distlock.engine.waits import REASON
from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockDeadlock,
    LockOutcomeUnknown,
    NotSupported,
)

from . import occupants
from .occupants import LONGEST_NAME, busy, last_occupant, reader_key, record
from .sessions import LOOK, STAY, Session, SessionRequest, is_victim, stay

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
#: Seconds until the first look for a deadlock, as servers have it; between looks; before what was seen is believed.
FIRST, AGAIN, CONFIRM = 1.0, 2.0, 0.1


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
    #: All of this process: who holds a lock of one may wait for one of another.
    everywhere: ClassVar[WeakSet[SessionBackend]] = WeakSet()

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._pool, self._own = self._own, self.make_pool(self.engine, BESIDE)
        fencing: bool = getattr(self.options, "fencing", True)
        self.server = self._server_class(self.engine, fencing=fencing)
        self.supports_fencing = self.supports_listing = fencing
        self.supports_shared = self.server.supports_shared
        self._forget_sessions()
        self.everywhere.add(self)

    def _forget_sessions(self) -> None:
        self._mutex = threading.Lock()
        #: By owner, those that hold and those that wait.
        self._sessions: dict[str, Session] = {}
        self._released, self._interrupted = RecentOwners(), RecentOwners()

    def make_engine(self, vendor: str) -> Engine:
        if vendor not in self.servers:
            msg = f"'using' names {self.options.using!r}, which is none of PostgreSQL, MariaDB and MySQL ({vendor})."
            raise ValueError(msg)
        self._server_class = self.servers[vendor]
        return self._server_class.engine_class(fair=False)

    # The verbs.

    def try_acquire(
        self, request: Request, *, queued: int, left: float | None = 0.0
    ) -> Grant | Busy:
        if queued:
            wait = partial(self._wait, wait=Wait(left))
            return self._ask_on(Session(request), wait, to_wait=True)
        known = self._sessions.get(request.owner)
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
        has_room = len(self._sessions) < self.options.max_connections * ROOM
        return has_room and self._holds_any(getattr(request, "caller", ""))

    def interrupt(self, request: Request) -> None:
        """End its wait, which may only be about to begin."""
        with self._mutex:
            session = self._sessions.get(request.owner)
            if session is None and request.owner not in self._released:
                self._interrupted.add(request.owner)
        if session is not None:
            session.interrupt()

    def is_session_over(self, request: Request) -> bool:
        session = self._holding(request)
        return request.owner not in self._released if session is None else session.is_over

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Say a word on each session, so that the server begins anew to count its silence."""
        return [self._keep(request) for request in requests]

    def release(self, request: Request) -> Release:
        session = self._holding(request)
        if session is None:
            if (waiting := self._sessions.get(request.owner)) is not None:
                waiting.interrupt()
            if request.owner in self._released:
                return Release.RELEASED
            return Release.GONE if self.probe(request) is None else Release.TAKEN
        # First, for whoever asks is_session_over() before the lease knows that it is released.
        self._released.add(request.owner)
        is_freed = self._free(session)
        if request.shared and self.supports_listing:
            keys = [reader_key(request.key, session.owner_digest)]
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
        self._pool.close()

    def abandon_after_fork(self) -> None:
        """Drop the parent's sessions, too, with no goodbye."""
        super().abandon_after_fork()
        for session in self._sessions.values():
            abandon(session.connection)
        self._pool.abandon()
        self._forget_sessions()

    # Sessions: one on which something fails is closed.

    def _holding(self, request: Request) -> Session | None:
        session = self._sessions.get(request.owner)
        return session if session is not None and session.grant is not None else None

    def _holds_any(self, caller: str) -> bool:
        """Return whether *caller* holds a lock by any backend of this kind: else it is in no circle."""
        return any(
            session.caller == caller and session.grant is not None
            for backend in list(self.everywhere)
            for session in list(backend._sessions.values())  # noqa: SLF001 - our own
        )

    def _open(self, session: Session, *, to_wait: bool) -> None:
        """Give *session* its connection; LockBackendError if there is none for it.

        Whoever is *to_wait* gets none that died while it was idle: else that is found out by asking.
        """
        try:
            connection = self._pool.borrow()
        except LockBackendError:
            # Sessions that the server has ended are nobody's any more, and take places.
            ended = [each for each in list(self._sessions.values()) if each.is_over]
            for each in ended:
                self._close(each, is_sound=False)
            if not ended:
                raise
            connection = self._pool.borrow()
        while to_wait and is_cut(connection):
            self._pool.give_back(connection, is_sound=False)
            connection = self._pool.borrow()
        session.connection = connection
        owner = session.request.owner
        with self._mutex:
            self._sessions[owner] = session
            # It may have been interrupted before it began; one that was released may ask again.
            self._released.discard(owner)
            if self._interrupted.discard(owner):
                session.is_interrupted = True
        if not hasattr(connection, "distlock_number"):
            #: For how many seconds the server was told to bear the session's silence.
            connection.distlock_limit = None
            self.server.begin(connection)

    def _close(self, session: Session, *, is_sound: bool) -> None:
        """Forget *session*; its connection is used again if it *is_sound*, else closed."""
        with self._mutex:
            if self._sessions.get(session.request.owner) is not session:
                return
            del self._sessions[session.request.owner]
        session.was_cut = not is_sound and is_cut(session.connection)
        self._pool.give_back(session.connection, is_sound=is_sound)

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
            self._open(session, to_wait=to_wait)
            answer = verb(session)
            if isinstance(answer, Grant):
                session.ends = (answer.start or start) + session.request.ttl
                session.grant = answer
            else:
                self._close(session, is_sound=True)
        except BaseException:
            self._close(session, is_sound=False)
            with self._translated(session):
                raise
        return answer

    def _take(self, session: Session) -> Grant | Busy:
        # Of several readers each waits for the others' tokens.
        patience = STAY if session.request.shared else LOOK
        answer = self.server.take(session, patience)
        if isinstance(answer, Busy) and self.needs_row:
            # Whoever made it: what was not there, or only looked at, may be free.
            self.make_row(session.request.name)
            answer = self.server.take(session, patience)
        return self._completed(session, answer, patience)

    def _wait(self, session: Session, *, wait: Wait) -> Grant | Busy:
        if self._holds_any(session.caller):
            background.submit(self.alias, partial(self._look_for_deadlock, session), FIRST)
        request, usually = session.request, self.options.io_timeout
        longest = None if wait.left is None else wait.left + usually
        with patient(session.connection, longest, usually=usually), session.waiting():
            answer = self.server.wait(session, wait)
            while isinstance(answer, Busy) and self.needs_row and self.make_row(request.name):
                answer = self.server.wait(session, wait)
            if isinstance(answer, Grant) and answer.start is None:
                # From when on the server cannot have ended a session that was just granted: it hears a word.
                start = clock.lease_time()
                self.server.keep(session, request.ttl)
                answer = Grant(answer.token, start)
            return self._completed(session, answer, stay(wait))

    def _look_for_deadlock(self, session: Session, *, was_seen: bool = False) -> None:
        """End the wait of *session* if it is seen twice in a circle of such locks, which no server can see."""
        if not session.is_waiting:
            return
        is_seen, name = False, session.request.name
        try:
            waits = self._ask(lambda cursor: [*self.server.waits(cursor)])
            is_seen = is_victim(session.caller, waits)
        except LockBackendError as error:
            warn("Deadlocks cannot be looked for: %s", error, name=name, using=self.alias)
        if is_seen and was_seen:
            warn("Lock %s: deadlock", name, name=name, using=self.alias)
            session.deadlock = REASON
            session.interrupt()
            return
        # Holders are written down a moment after they hold: one look may join two moments.
        again = partial(self._look_for_deadlock, session, was_seen=is_seen)
        background.submit(self.alias, again, CONFIRM if is_seen else AGAIN)

    def _completed(self, session: Session, answer: Grant | Busy, patience: float) -> Grant | Busy:
        """Return *answer* with what stands in the tables: a new token, or who had it last."""
        request = session.request
        if not self.supports_fencing:
            return answer
        if isinstance(answer, Busy):
            if answer.holder is not None:
                return answer
            return busy(self._insist(last_occupant, request.key))
        if answer.token is None:
            token = self._count(session, patience)
            if token is None:
                self.server.free(session)
                return Busy()
            answer = Grant(token, answer.start)
        if request.shared:
            # Each is written down, since the counter has place for the last one only.
            reader = reader_key(request.key, session.owner_digest)
            known = {"key": reader, "token": answer.token, "holder": record(session)}
            self._insist(lambda cursor: cursor.execute(self.server.note_reader_sql, known))
        if not self.needs_row and len(stored(request.name)) > LONGEST_NAME:
            self.make_row(request.name)  # for people, beside the token
        return answer

    def _count(self, session: Session, patience: float) -> int | None:
        """Return a new fencing token, committed; None while a guard() holds the old one."""
        known = session.request.key, record(session), patience
        wait: Wait | None = None
        is_again = False
        while True:
            try:
                return self._own.ask(self.server.raise_token, *known)
            except Contended:
                wait = wait or Wait(patience)
                if wait.is_over:
                    return None
                time.sleep(wait.next_pause(longest=SHORT_PAUSE))
            except LockOutcomeUnknown:
                # An idle connection had died unseen; a token may well be raised twice.
                if is_again:
                    raise
                is_again = True

    def _keep(self, request: Request) -> bool:
        """Have the server keep the session for its ttl from now; False if it is over."""
        session = self._holding(request)
        if session is None:
            return False
        with session.mutex:
            if self._sessions.get(request.owner) is not session:
                return False  # its connection may be another session's by now
            start = clock.lease_time()
            # An extension never shortens.
            seconds = max(request.ttl, session.ends - start)
            # There is no other session to ask by: a slow server is given time.
            usually = self.options.io_timeout
            longest = max(usually, request.ttl / 3)
            try:
                with (
                    self._translated(session),
                    patient(session.connection, longest, usually=usually),
                ):
                    self.server.keep(session, seconds)
            except LockBackendError:
                self._close(session, is_sound=False)
                return False
            session.ends = start + seconds
        return True

    def _free(self, session: Session) -> bool:
        """Give the lock back; False if the session had ended before."""
        with session.mutex:
            if self._sessions.get(session.request.owner) is not session:
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
                self._close(session, is_sound=is_freed)
        return is_freed or is_answer_lost

    @contextmanager
    def _translated(self, session: Session) -> Iterator[None]:
        """Raise lock errors; a lock whose connection broke is not held, which is no unknown outcome."""
        try:
            with self._pool.translated():
                yield
        except (LockOutcomeUnknown, Contended) as error:
            if session.deadlock:
                raise LockDeadlock(session.request.name, session.deadlock) from error
            if isinstance(error, Contended):
                raise
            raise LockBackendError(self.alias, error.problem) from error

    # What stands in the tables, by other connections.

    def make_row(self, name: str) -> bool:
        """Make the lock's row if there is none, in a transaction of its own; tell whether there was none."""
        return self._insist(self.server.make_row, self.key_of(name), name)

    def _look(self, cursor: Any, request: Request) -> Busy | None:
        if not self.server.is_held(cursor, request.key):
            return None
        return busy(last_occupant(cursor, request.key)) if self.supports_fencing else Busy()


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
