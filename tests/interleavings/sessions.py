"""A session: a process with a backend of its own, played by a thread that stops before each statement."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from django.db import connections

from django_distlock.backends import rowlock
from django_distlock.backends.database import base
from django_distlock.backends.database.bounds import NoAnswer
from django_distlock.backends.database.mysql import MySQL
from django_distlock.backends.database.postgresql import LeanCursor, PostgreSQL
from django_distlock.backends.database.sqlite import SQLite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What a session does before it goes on.
READY, PAUSING, ASLEEP, RUNNING, ENDED = "ready", "pausing", "asleep", "running", "ended"
#: Seconds in which a session ends, or stands still.
LONGEST = 20.0
_here = threading.local()


class GivenUp(BaseException):
    """Ends a session whose schedule is over."""


class Session:
    """One thread, which goes on only when it is let go."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._thread = ThreadPoolExecutor(1, f"session-{number}")
        self._stands = threading.Event()
        self.begin()

    def begin(self) -> None:
        """Forget the last schedule."""
        self.state, self.at = ENDED, ""
        self._may_go = threading.Semaphore(0)
        self.is_given_up = False
        self.error: BaseException | None = None
        #: The server's number of the connection that it uses.
        self.pid: int | None = None
        #: Whether its next statement loses its "request" or its "reply".
        self.loses = ""
        #: Called when it is let go for the first time from now on.
        self.when_let_go: Callable[[], object] | None = None

    def start(self, play: Callable[[], object]) -> None:
        """Begin to *play*; it stops before its first statement."""
        self.state = RUNNING
        self._stands.clear()

        def run() -> None:
            _here.session = self
            try:
                self.stop("begin")
                play()
            except GivenUp:
                pass
            except BaseException as error:  # noqa: BLE001 - the stage shows it
                self.error = error
            self.state = ENDED
            self._stands.set()

        self._thread.submit(run)

    def call(self, act: Callable[[], Any]) -> Any:
        """Return what *act* returns in the thread, without stops."""
        return self._thread.submit(act).result(30)

    def close(self) -> None:
        self.call(connections.close_all)
        self._thread.shutdown()

    # What its own thread calls.

    def stop(self, at: str, state: str = READY) -> None:
        """Stand still until the stage lets it go."""
        if self.is_given_up:
            raise GivenUp
        self.at, self.state = at, state
        self._stands.set()
        self._may_go.acquire()
        if self.is_given_up:
            raise GivenUp
        act, self.when_let_go = self.when_let_go, None
        if act is not None:
            act()

    def take_loss(self, kind: str) -> None:
        """Lose the answer of this statement, if the plan says so."""
        if self.loses == kind:
            self.loses = ""
            raise NoAnswer

    # What the stage calls.

    def let_go(self) -> None:
        self.state = RUNNING
        self._stands.clear()
        self._may_go.release()

    def give_up(self) -> None:
        """End it at this stop, or at its next one."""
        self.is_given_up = True
        if self.state != ENDED:
            self._stands.clear()
            self._may_go.release()

    def stands_within(self, seconds: float) -> bool:
        return self._stands.wait(seconds)


def here() -> Session | None:
    """Return the session of this thread."""
    found: Session | None = getattr(_here, "session", None)
    return found


class SteppedCursor:
    """The cursor of an own connection: what it runs in autocommit becomes a statement and a commit, with a stop before each.

    So others can do something between the writes of a statement and their commit, as they can on a busy server.
    """

    def __init__(self, connection: Any, cursor: Any, isolation: str) -> None:
        self._connection, self._cursor, self._isolation = connection, cursor, isolation
        self._rows: list[Any] = []
        #: What MariaDB has prepared, by the beginning of the statement that executes it.
        self._prepared: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    def execute(self, statement: str, values: Any = None) -> SteppedCursor:
        session = here()
        if statement.startswith("PREPARE"):
            self._prepared[statement.split()[1]] = values[0]
        if session is None or statement.startswith("PREPARE"):
            self._run(statement, values)
            return self
        is_prepared = statement.startswith("EXECUTE")
        shown = self._prepared[statement.split()[1]] if is_prepared else statement
        stop_before(self._connection, shown)
        session.take_loss("request")
        self._command(f"BEGIN{self._isolation}")
        try:
            self._run(statement, values)
            session.stop("commit")
            self._command("COMMIT")
        except BaseException:
            self._command("ROLLBACK")
            raise
        session.take_loss("reply")
        return self

    def _run(self, statement: str, values: Any) -> None:
        self._cursor.execute(statement, *([] if values is None else [values]))
        self._rows = [*self._cursor.fetchall()]

    def _command(self, text: str) -> None:
        raw = self._connection.connection
        if isinstance(self._cursor, LeanCursor):
            LeanCursor(self._connection, prepares=False).execute(text)
        else:
            raw.cursor().execute(text)


def stop_before(connection: Any, statement: str) -> None:
    """Have the session of this thread stop before *statement*."""
    session = here()
    if session is not None:
        raw = connection.connection
        session.pid = raw.thread_id() if hasattr(raw, "thread_id") else _pid_of(raw)
        session.stop(" ".join(statement.split())[:60])


def _pid_of(raw: Any) -> int | None:
    info = getattr(raw, "info", None)
    return info.backend_pid if info is not None else None


def step_through(connection: Any) -> None:
    """Have sessions stop before each statement of Django's cursors on *connection*, and before commits."""

    def execute(run: Callable[..., Any], sql: str, *args: Any) -> Any:
        stop_before(connection, sql)
        return run(sql, *args)

    def stepped(end: Callable[[], object], what: str) -> Callable[[], object]:
        def run() -> None:
            stop_before(connection, what)
            end()

        return run

    connection.execute_wrappers.append(execute)
    connection._commit = stepped(connection._commit, "commit")


@contextmanager
def stepping(isolation: str) -> Iterator[None]:
    """Step through the connections of all backends that are opened meanwhile; *isolation*: after their BEGIN."""

    def cursor_of(make: Callable[..., Any]) -> Callable[..., Any]:
        def cursor(self: Any, connection: Any) -> Any:
            step_through(connection)
            level = isolation if isinstance(self, PostgreSQL) else ""
            return SteppedCursor(connection, make(self, connection), level)

        return cursor

    class Time:
        @staticmethod
        def sleep(seconds: float) -> None:
            session = here()
            assert session is not None
            session.stop("pause", PAUSING)

    with (
        patch.object(PostgreSQL, "cursor", cursor_of(PostgreSQL.cursor)),
        patch.object(MySQL, "cursor", cursor_of(MySQL.cursor)),
        patch.object(SQLite, "cursor", cursor_of(SQLite.cursor)),
        patch.object(base, "time", Time),
        patch.object(rowlock, "time", Time),
    ):
        yield
