"""GET_LOCK of MariaDB and MySQL."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from django_distlock.engine.values import Busy, Grant

from .advisory_server import AdvisoryServer, Fencer
from .base import SHORT_PAUSE
from .connections import Unusable
from .occupants import as_held
from .session_engine import STAY
from .session_mysql import LONGEST, MySQLSessions, who_waits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.backends.utils import CursorWrapper

    from django_distlock.engine.values import Held
    from django_distlock.engine.waiting import Wait

    from .occupants import Counted
    from .sessions import Session


class MySQLAdvisory(AdvisoryServer, MySQLSessions):
    """Locks by names, for the whole server."""

    supports_shared = False

    def take(
        self, backend: Fencer, cursor: CursorWrapper, session: Session, patience: float
    ) -> Grant | Busy:
        """One trip for the lock and one for the token."""
        self.limit(cursor, session.request.ttl)
        if not self._get(cursor, session, 0):
            return self._refused(backend, cursor, session)
        return self._counted(backend, session, patience, None)

    def wait(
        self, backend: Fencer, cursor: CursorWrapper, session: Session, wait: Wait
    ) -> Grant | Busy:
        """MariaDB knows fractions of seconds; with MySQL what is left of them is waited by looking again."""
        self.limit(cursor, session.request.ttl)
        left = LONGEST if wait.left is None else min(LONGEST, wait.left)
        is_taken = self._get(cursor, session, left if cursor.db.mysql_is_mariadb else int(left))
        while not is_taken and not wait.is_over:
            if session.interrupted.wait(wait.next_pause(longest=SHORT_PAUSE)):
                break
            is_taken = self._get(cursor, session, 0)
        if not is_taken:
            return self._refused(backend, cursor, session)
        patience = STAY if wait.left is None else min(STAY, wait.left)
        return self._counted(backend, session, patience, backend.confirm(session))

    def free(self, session: Session) -> bool:
        """1: freed; 0: not ours; NULL: nobody's."""
        with session.connection.cursor() as cursor:
            cursor.execute("SELECT RELEASE_LOCK(%s)", [lock_name(cursor, session.request.key)])
            return bool(cursor.fetchone()[0] == 1)

    def is_held(self, cursor: CursorWrapper, key: str) -> bool:
        """The server tells by whom."""
        return self._user(cursor, key) is not None

    def held(self, cursor: CursorWrapper, known: dict[str, Counted]) -> Iterator[Held]:
        """Ask for each."""
        for key, counted in known.items():
            if counted.occupant and self._user(cursor, key) == counted.occupant.session:
                occupant = counted.occupant
                yield as_held(counted, occupant.owner_digest, shared=occupant.shared)

    def _user(self, cursor: CursorWrapper, key: str) -> int | None:
        cursor.execute("SELECT IS_USED_LOCK(%s)", [lock_name(cursor, key)])
        found: int | None = cursor.fetchone()[0]
        return found

    def _get(self, cursor: CursorWrapper, session: Session, seconds: float) -> bool:
        name = lock_name(cursor, session.request.key)
        cursor.execute(f"{who_waits(session)}SELECT GET_LOCK(%s, %s)", [name, seconds])
        answer = cursor.fetchone()[0]
        if answer is None:
            problem = "GET_LOCK failed: the server is out of memory, or the session was killed"
            raise Unusable(problem)
        return bool(answer)

    def _refused(self, backend: Fencer, cursor: CursorWrapper, session: Session) -> Busy:
        return backend.refused(cursor, session.request.key)

    def _counted(
        self, backend: Fencer, session: Session, patience: float, start: float | None
    ) -> Grant | Busy:
        if not backend.options.fencing:
            return Grant(None, start)
        token = backend.count(session, patience)
        if token is None:
            self.free(session)
            return Busy()
        return Grant(token, start)


def lock_name(cursor: CursorWrapper, key: str) -> str:
    """Return a name of at most 64 characters for *key*: its locks are the whole server's, not the database's."""
    database = cursor.db.settings_dict["NAME"]
    return f"distlock:{hashlib.sha256(f'{database}|{key}'.encode()).hexdigest()[:48]}"
