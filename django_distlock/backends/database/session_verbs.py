"""What is asked on a session: bounded in time, in our own errors; a session that fails is closed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from django_distlock.engine import clock
from django_distlock.engine.values import Grant
from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockDeadlock,
    LockOutcomeUnknown,
)

from .bounds import is_cut, patient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django_distlock.engine.values import Busy, Request

    from .session_engine import SessionEngine
    from .sessions import Session, Sessions

#: Where the numbers begin of errors that drivers for MariaDB and MySQL find out by themselves.
_OF_DRIVERS = 2000


class SessionVerbs:
    """Asks for a lock, keeps it, and gives it back, on the sessions of one backend."""

    def __init__(
        self, alias: str, sessions: Sessions, server: SessionEngine, io_timeout: float
    ) -> None:
        self._alias = alias
        self._sessions = sessions
        self._server = server
        self._io_timeout = io_timeout

    def ask(self, session: Session, verb: Callable[[Session], Grant | Busy]) -> Grant | Busy:
        """Return what *verb* answers: granted, the session holds; else it is over."""
        answer: Grant | Busy | None = None
        start = clock.lease_time()
        try:
            with self._translated(session):
                answer = verb(session)
        finally:
            if isinstance(answer, Grant):
                session.ends = (answer.start or start) + session.request.ttl
                session.grant = answer
            else:
                self._sessions.close(session, is_sound=answer is not None)
        return answer

    @contextmanager
    def waiting(self, session: Session, seconds: float | None) -> Iterator[None]:
        """Let requests take so much longer meanwhile, and be interrupted."""
        longest = None if seconds is None else seconds + self._io_timeout
        with patient(session.connection, longest, usually=self._io_timeout), session.waiting():
            yield

    def keep(self, session: Session, request: Request) -> bool:
        """Have the server keep the session for the ttl of *request* from now; False if it is over."""
        with session.mutex:
            if not self._is_known(session):
                return False
            try:
                self._say(session, request.ttl)
            except LockBackendError:
                self._sessions.close(session, is_sound=False)
                return False
        return True

    def free(self, session: Session) -> bool:
        """Give the lock back; False if the session had ended before."""
        with session.mutex:
            if not self._is_known(session):
                return False
            is_freed = is_answer_lost = False
            was_cut = is_cut(session.connection)
            try:
                with self._translated(session):
                    is_freed = self._server.free(session)
            except LockBackendError as error:
                if not is_cut(session.connection):
                    raise
                # It was there until it was given back, as far as anybody can know, and is free by now.
                is_answer_lost = not was_cut and not _is_word_of_server(error)
            finally:
                self._sessions.close(session, is_sound=is_freed)
        return is_freed or is_answer_lost

    def _say(self, session: Session, ttl: float) -> None:
        start = clock.lease_time()
        # An extension never shortens.
        seconds = max(ttl, session.ends - start)
        # There is no other session to ask by: a slow server is given time.
        longest = max(self._io_timeout, ttl / 3)
        with (
            self._translated(session),
            patient(session.connection, longest, usually=self._io_timeout),
        ):
            self._server.keep(session, seconds)
        session.ends = start + seconds

    def _is_known(self, session: Session) -> bool:
        # One that was closed meanwhile has a connection that may be another session's.
        return self._sessions.held(session.request.owner) is session

    @contextmanager
    def _translated(self, session: Session) -> Iterator[None]:
        """A lock whose connection broke is not held, which is no unknown outcome."""
        try:
            with self._sessions.translated():
                yield
        except (LockOutcomeUnknown, Contended) as error:
            if session.deadlock:
                raise LockDeadlock(session.request.name, session.deadlock) from error
            if isinstance(error, Contended):
                raise
            raise LockBackendError(self._alias, error.problem) from error


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
