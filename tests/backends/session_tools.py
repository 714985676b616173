"""What the tests of locks held by a session share: their aliases, and what the server says of them."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections

from django_distlock import locks
from django_distlock.backends.session.backend import SessionBackend
from django_distlock.engine.values import Grant, Release
from django_distlock.ground.holder import Holder
from tests.backends.conftest import apart

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

KINDS = {
    "rowlock": "django_distlock.backends.rowlock.RowLockBackend",
    "advisory": "django_distlock.backends.advisory.AdvisoryBackend",
}
BOTH = [
    pytest.param((database, kind), id=f"{database}-{kind}", marks=pytest.mark.server)
    for database in ("postgres", "mariadb")
    for kind in KINDS
]
#: How a session tells its number.
NUMBER = {"postgres": "SELECT pg_backend_pid()", "mariadb": "SELECT connection_id()"}
#: Aliases by which as many servers of one application meet the same locks.
SITES = [f"site{number}" for number in range(12)]
#: Waits in a hunt, by eight threads. Set it to 50000 for a long run.
HUNT = int(os.environ.get("DISTLOCK_RACES", "2000"))


def aliases(database: str, kind: str, **options: Any) -> dict[str, Any]:
    """Return a DISTLOCK setting whose aliases all mean the same locks."""
    each = {"BACKEND": KINDS[kind], "OPTIONS": {"using": database, **options}}
    return dict.fromkeys(["locks", *SITES], each)


def backend(alias: str = "locks") -> SessionBackend:
    """Return the backend of *alias* as what it is."""
    found = locks[alias]
    assert isinstance(found, SessionBackend)
    return found


def ask(database: str, statement: str, *parameters: str | float) -> list[tuple[Any, ...]]:
    """Return what the server answers to the application's own connection."""
    with connections[database].cursor() as cursor:
        cursor.execute(statement, parameters)
        return list(cursor.fetchall()) if cursor.description else []


def waiters(database: str) -> int:
    """Return how many sessions the server makes wait for a lock."""
    if database == "postgres":
        [(number,)] = ask(
            database,
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'distlock:%%'",
        )
    else:
        [(number,)] = ask(
            database,
            "SELECT count(*) FROM information_schema.processlist WHERE info LIKE '/*distlock:%%' "
            "AND info NOT LIKE '%%NOWAIT' AND info NOT LIKE '%%, 0)'",
        )
    return int(number)


def end_session(database: str, number: int) -> None:
    """End a session as an operator would."""
    if database == "postgres":
        ask(database, "SELECT pg_terminate_backend(%s)", number)
    else:
        with connections[database].cursor() as cursor:
            cursor.execute("KILL %s", [number])


def end_session_of(connection: BaseDatabaseWrapper) -> None:
    """End the session of *connection*, which is this thread's and is not told."""
    [(number,)] = ask(connection.alias, NUMBER[connection.alias])
    apart(connection.alias, partial(end_session, connection.alias, number))


def session_number(owner: str, alias: str = "locks") -> int:
    """Return by what the server knows the session that holds for *owner*."""
    session = backend(alias)._sessions[owner]
    number: int = session.connection.distlock_number
    return number


def hunt(database: str, name: str, waits: int) -> int:
    """Have eight servers of an application wait for 1 to 3 ms, again and again; return the grants."""

    def work(site: str) -> int:
        hunter, number = backend(site), 0
        for _ in range(waits // 8):
            each = random.choice([name, f"{name}:{random.random()}"])  # its row may be new
            request = hunter.request(each, ttl=60.0, holder=Holder.current())
            answer = hunter.wait_for(request, random.uniform(0.001, 0.003))
            if isinstance(answer, Grant):
                number += 1
                assert hunter.release(request) is Release.RELEASED
        return number

    return sum(apart(database, *(partial(work, site) for site in SITES[:8])))
