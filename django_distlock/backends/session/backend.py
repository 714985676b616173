"""The common part of RowLockBackend and AdvisoryBackend: each lock has a session, and is lost with its connection."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from django.core.checks import Error

from django_distlock.backends.database.base import SHORT_PAUSE, BaseDatabaseBackend
from django_distlock.backends.database.bounds import cut, is_cut, is_under_way, patient
from django_distlock.backends.database.connections import Unusable, abandon, is_word_of_server
from django_distlock.backends.database.dialect import COUNTER, LOCK
from django_distlock.engine.background import background
from django_distlock.engine.values import Busy, Grant, Recent, Release
from django_distlock.engine.waiting import SLICE, Wait, Waiting, Way
from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockOutcomeUnknown,
    NotSupported,
)
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from django_distlock.ground.mutexes import section
from django_distlock.ground.naming import stored

from . import occupants
from .occupants import busy, last_occupant, reader_key
from .sessions import LONGEST_NAME, LOOK, STAY, DatabaseSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from django.core.checks import CheckMessage

    from django_distlock.backends.database.dialect import Dialect
    from django_distlock.conf import BackendSettings
    from django_distlock.engine.values import Held, Request

    from .sessions import SessionServer

#: How many connections there are for statements outside the sessions.
BESIDE = 4
#: A wait of less than this part of the ttl shortens the lease, because an extension would cost more.
SHORT_WAIT = 0.05
#: The error for a signal handler or finalizer that interrupted a request on the connection that it needs.
INTERRUPTS = "this code has interrupted its own thread in the midst of a request of the same lock"


class SessionBackend(BaseDatabaseBackend):
    """Locks that end with the connection that holds them, or once it has been silent for the ttl."""

    session_bound = True
    #: By kind of server, the class with its SQL.
    servers: ClassVar[dict[str, type[SessionServer]]]
    #: Whether a lock is a row, which must exist before it can be locked.
    needs_row: ClassVar[bool] = False

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._pool, self._own = self._own, self.make_pool(self.dialect, BESIDE)
        fencing: bool = getattr(self.options, "fencing", True)
        self.server = self._server_class(self.dialect, fencing=fencing)
        self.supports_fencing = self.supports_listing = fencing
        self.supports_shared = self.server.supports_shared
        self.waiting = Waiting(
            way=Way.ON_SERVER,
            look_again=SLICE if self.server.waits_in_transaction else None,
            writers_first=self.server.writers_first,
            position_is_grant=True,
        )
        self._forget_sessions()

    def _forget_sessions(self) -> None:
        self._mutex = section()
        #: The sessions that hold or wait, by owner.
        self._sessions: dict[str, DatabaseSession] = {}
        self._released, self._interrupted = Recent(), Recent()

    def make_dialect(self, vendor: str) -> Dialect:
        self._server_class = self.servers[vendor]
        return self._server_class.dialect_class(fair=False)

    # The verbs.

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        return self._acquire(request, partial(self._take, left=left), left)

    def wait_for(self, request: Request, left: float | None) -> Grant | Busy:
        return self._acquire(request, partial(self._wait, wait=Wait(left)), left, to_wait=True)

    def _acquire(
        self,
        request: Request,
        verb: Callable[[DatabaseSession], Grant | Busy],
        left: float | None,
        *,
        to_wait: bool = False,
    ) -> Grant | Busy:
        known = self._sessions.get(request.owner)
        if known is not None and known.grant is not None:
            return known.grant
        session = DatabaseSession(request)
        try:
            return self._ask_on(session, verb, left, to_wait=to_wait)
        except LockBackendError:
            # An idle connection had died, or a new one died while it was opened. It holds no lock, so use another one.
            if not session.was_cut or (to_wait and session.is_open):
                raise
        return self._ask_on(session, verb, left, to_wait=to_wait)

    def interrupt(self, request: Request) -> None:
        """End the wait of this request, even if it is only about to begin."""
        with self._mutex:
            session = self._sessions.get(request.owner)
            if session is None and request.owner not in self._released:
                self._interrupted.add(request.owner)
        if session is not None:
            session.interrupt()

    def dequeue(self, request: Request) -> None:
        """End the wait of this request, and release the lock if it was granted meanwhile."""
        self.interrupt(request)
        self.release(request)

    def is_session_over(self, request: Request) -> bool:
        session = self._holding(request)
        return request.owner not in self._released if session is None else session.is_over

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Send a request on each session, so that the server counts its silence from now."""
        began = clock.lease_time()
        return [self._keep(request, began) for request in requests]

    def release(self, request: Request) -> Release:
        session = self._holding(request)
        if session is None:
            if (waiting := self._sessions.get(request.owner)) is not None:
                waiting.interrupt()
            if request.owner in self._released:
                return Release.RELEASED
            return Release.GONE if self.probe(request) is None else Release.TAKEN
        # Before the session ends, because is_session_over() may be called before the lease knows of its release.
        self._released.add(request.owner)
        is_freed = self._free(session)
        if request.shared and self.supports_listing:
            keys = [reader_key(request.key, session.owner_digest)]
            with suppress(LockBackendError):  # else a listing deletes the row
                self._query(occupants.forget_readers, self.dialect, keys)
        return Release.RELEASED if is_freed else Release.GONE

    def probe(self, request: Request) -> Busy | None:
        return self._query_once(self._look, request)

    def held(self, key: str | None = None) -> Iterable[Held]:
        if not self.supports_listing:
            raise NotSupported(
                self.alias, "listing", "Without fencing nothing stands beside its locks."
            )
        return self._query(occupants.held, self.server, self.keeps, key)

    def end_holding(self, key: str, owner_digest: str) -> bool:
        return self._query_once(occupants.end_holding, self.server, key, owner_digest)

    def check(self, databases: Sequence[str] | None = None) -> list[CheckMessage]:
        """Return an error for a server that cannot be used, such as a pooler or a Galera cluster; ask only *databases*."""
        tables = (LOCK, COUNTER) if self.supports_fencing else ()
        if databases is None:
            return [*self.check_driver(), *(self.check_installed() if tables else ())]
        if self.options.using not in databases:
            return []
        session = DatabaseSession(
            self.request("check", ttl=self.ttl, holder=Holder.current("check"))
        )
        try:
            self._ask_on(session, lambda session: Busy())
        except LockBackendError as error:
            if isinstance(error.__cause__, Unusable):
                return [Error(str(error), hint=error.__cause__.advice, id="distlock.E005")]
        return self.check_tables(tables)

    def close(self) -> None:
        super().close()
        self._close_ended()
        self._pool.close()

    def abandon_after_fork(self) -> None:
        """Drop the parent's sessions, too, without closing them."""
        super().abandon_after_fork()
        for session in self._sessions.values():
            abandon(session.connection)
        self._pool.abandon()
        self._forget_sessions()

    # Sessions. A session is closed when anything fails on it.

    def _holding(self, request: Request) -> DatabaseSession | None:
        session = self._sessions.get(request.owner)
        return session if session is not None and session.grant is not None else None

    def _open(self, session: DatabaseSession, left: float | None, *, to_wait: bool) -> None:
        """Give *session* a connection; NotSent if none comes free in *left* seconds.

        With *to_wait*, test an idle connection before it is used; otherwise the first statement finds a dead one.
        """
        if len(self._sessions) >= self.options.max_connections:
            self._close_ended()
        owner = session.request.owner
        borrow = partial(self._pool.borrow, left, partial(self._interrupted.pop, owner, None))
        connection = borrow()
        while to_wait and is_cut(connection):
            self._pool.give_back(connection, is_sound=False)
            connection = borrow()
        session.connection = connection
        with self._mutex:
            self._sessions[owner] = session
            # The owner may have been interrupted before this, or may have released an earlier lock.
            self._released.pop(owner, None)
            if self._interrupted.pop(owner, False):
                session.is_interrupted = True
        if not hasattr(connection, "distlock_number"):
            #: After how many seconds of silence the server ends the session.
            connection.distlock_limit = None
            self.server.begin(connection)
        session.is_open = True

    def _close_ended(self) -> None:
        """Close sessions that the server has ended and no release has closed: they count towards max_connections."""
        for each in [each for each in list(self._sessions.values()) if each.is_over]:
            self._close(each, is_sound=False)

    def _close(self, session: DatabaseSession, *, is_sound: bool) -> None:
        """Forget *session*; use its connection again if it *is_sound*, else close it."""
        with self._mutex:
            if self._sessions.get(session.request.owner) is not session:
                return
            del self._sessions[session.request.owner]
        session.was_cut = not is_sound and is_cut(session.connection)
        self._pool.give_back(session.connection, is_sound=is_sound)

    def _ask_on(
        self,
        session: DatabaseSession,
        verb: Callable[[DatabaseSession], Grant | Busy],
        left: float | None = 0.0,
        *,
        to_wait: bool = False,
    ) -> Grant | Busy:
        """Open the session and return the answer of *verb*; unless that is a Grant, close the session."""
        try:
            # Inside "try", because an asynchronous exception must not leave the session open.
            self._open(session, left, to_wait=to_wait)
            start = clock.lease_time()  # the lease begins after the wait for a connection
            answer = verb(session)
            if isinstance(answer, Grant):
                start = answer.start or start
                session.ends = start + session.request.ttl
                session.grant = answer = Grant(answer.token, start)
            else:
                self._close(session, is_sound=True)
        except BaseException:
            self._close(session, is_sound=False)
            with self._translated(session):
                raise
        return answer

    def _take(self, session: DatabaseSession, *, left: float | None) -> Grant | Busy:
        request = session.request
        # More patience for readers, who wait for each other's tokens.
        patience = STAY if request.shared else LOOK
        answer = self.server.take(session, patience)
        if answer is None:
            self.make_row(request.key, request.name)
        # Try again if the row has just been made, or for a single try: is_held() of another caller locks a row briefly.
        is_only_try = left == 0 and self.needs_row
        if answer is None or (is_only_try and isinstance(answer, Busy)):
            answer = self.server.take(session, patience)
        return self._completed(session, answer or Busy(), patience)

    def _wait(self, session: DatabaseSession, *, wait: Wait) -> Grant | Busy:
        request, usually = session.request, self.options.io_timeout
        longest = None if wait.left is None else wait.left + usually
        began = clock.lease_time()
        with patient(session.connection, longest, usually=usually), session.waiting():
            while (answer := self.server.wait(session, wait)) is None:
                self.make_row(request.key, request.name)
            if isinstance(answer, Grant):
                # The server counts the silence from the grant, whose time is not known. After a long wait, send
                # a request, from which the server counts again.
                start = clock.lease_time()
                if start - began > request.ttl * SHORT_WAIT:
                    self.server.keep(session, request.ttl)
                    began = start
                answer = Grant(answer.token, began)
            patience = STAY if wait.left is None else min(STAY, wait.left)
            return self._completed(session, answer, patience)

    def _completed(
        self, session: DatabaseSession, answer: Grant | Busy, patience: float
    ) -> Grant | Busy:
        """Return a grant with a new token, or a refusal with the last holder, both from the tables."""
        request = session.request
        if not self.supports_fencing:
            return answer
        if isinstance(answer, Busy):
            if answer.holder is not None:
                return answer
            return busy(self._query(last_occupant, request.key))
        if answer.token is None:
            token = self._count(session, patience)
            if token is None:
                self.server.free(session)
                return Busy()
            answer = Grant(token, answer.start)
        if request.shared:
            # Each reader has its own row, because the counter names only the last holder.
            reader = reader_key(request.key, session.owner_digest)
            known = {"key": reader, "token": answer.token, "holder": session.record()}
            self._query(lambda cursor: cursor.execute(self.server.note_reader_sql, known))
        if not self.needs_row and len(stored(request.name)) > LONGEST_NAME:
            self.make_row(request.key, request.name)  # stores the long name for listings
        return answer

    def _count(self, session: DatabaseSession, patience: float) -> int | None:
        """Return a new fencing token, committed; None while a guard() holds the old one."""
        known, began = (session.request.key, session.record(), patience), clock.wait_time()
        wait: Wait | None = None
        is_again = False
        while True:
            try:
                return self._own.ask(self.server.raise_token, *known)
            except Contended:
                wait = wait or Wait(patience, began)
                if wait.is_over:
                    return None
                time.sleep(wait.next_pause(longest=SHORT_PAUSE))
            except LockOutcomeUnknown:
                # An idle connection had died unnoticed. Raising a token twice does no harm.
                if is_again:
                    raise
                is_again = True

    def _keep(self, request: Request, began: float) -> bool:
        """Renew the time for which the server keeps the session; return False if the session is over.

        *began*: when the renewal of the first session began (lease time).
        """
        session = self._holding(request)
        if session is None:
            return False
        if session.interrupts_request:
            raise LockBackendError(self.alias, INTERRUPTS)
        with session.mutex:
            if self._sessions.get(request.owner) is not session:
                return False  # another session may use the connection by now
            start = clock.lease_time()
            # An extension never shortens the lease.
            seconds = max(request.ttl, session.ends - start)
            # Only this session can extend the lock, so a slow server gets more time, once for all sessions: several
            # dead connections must not use up the ttl of the locks of those that come after them.
            usually = self.options.io_timeout
            longest = max(usually, request.ttl / 3 - (start - began))
            try:
                with (
                    self._translated(session),
                    patient(session.connection, longest, usually=usually),
                ):
                    self.server.keep(session, seconds)
            except LockBackendError:
                self._close(session, is_sound=False)
                return False
            except BaseException:
                # An asynchronous exception in the midst of a request, after which no other can be sent.
                if is_under_way(session.connection):
                    self._close(session, is_sound=False)
                raise
            session.ends = start + seconds
        return True

    def _free(self, session: DatabaseSession) -> bool:
        """Release the lock; return False if the session had ended before."""
        if session.interrupts_request:
            # The lock ends with the connection; the job cleans up once the interrupted request is over.
            cut(session.connection)
            background.submit(self.alias, partial(self._free, session), 0.0)
            return True
        with session.mutex:
            if self._sessions.get(session.request.owner) is not session:
                return False
            is_freed = is_answer_lost = False
            was_cut = is_cut(session.connection)
            try:
                is_freed = self.server.free(session)
            except Exception:  # noqa: BLE001 - raised again, translated if it is a database error
                try:
                    with self._translated(session):
                        raise
                except LockBackendError as error:
                    if not is_cut(session.connection):
                        raise
                    # As far as we know, the connection broke after the request: the lock was held until then.
                    is_answer_lost = not was_cut and not is_word_of_server(error)
            finally:
                self._close(session, is_sound=is_freed)
        return is_freed or is_answer_lost

    @contextmanager
    def _translated(self, session: DatabaseSession) -> Iterator[None]:
        """Raise lock errors. The server drops a session's lock with its connection, so the outcome is known: not held."""
        try:
            with self._pool.translated():
                yield
        except LockOutcomeUnknown as error:
            raise LockBackendError(self.alias, error.problem) from error

    # Statements on other connections.

    def make_row(self, key: str, name: str) -> None:
        """Make the lock's row if there is none, in a separate transaction."""
        self._query(self.server.make_row, key, name)

    def _look(self, cursor: Any, request: Request) -> Busy | None:
        if not self.server.is_held(cursor, request.key):
            return None
        return busy(last_occupant(cursor, request.key)) if self.supports_fencing else Busy()
