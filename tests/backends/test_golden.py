"""What is sent to servers, as it can be read in tests/golden: each script of Redis, and the statements of each verb on databases."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
import psycopg
import pymysql
import pytest
from django.db.backends.sqlite3.base import SQLiteCursorWrapper

from django_distlock import locks
from django_distlock.backends.database.dialect import Dialect
from django_distlock.backends.database.postgresql import LeanCursor
from django_distlock.backends.redis.scripts import SCRIPTS, Script
from django_distlock.ground.holder import Holder

from .conftest import Counted
from .session_tools import aliases

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_django.fixtures import Settings

GOLDEN = Path(__file__).parent.parent / "golden"
AGAIN = "DISTLOCK_GOLDEN"
ADVICE = f"{{}} differs: if that is wanted, make it again by {AGAIN}=1 .venv/bin/python -m pytest -n0 tests/backends/test_golden.py, and read the difference"
LEASES = {"BACKEND": "django_distlock.backends.database.DatabaseBackend"}


def compare(path: Path, text: str) -> None:
    if os.environ.get(AGAIN):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), ADVICE.format(path)
    assert text == path.read_text(), ADVICE.format(path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_of_redis(script: Script) -> None:
    compare(GOLDEN / "redis" / f"{script.name}.lua", script.text.lstrip())


def test_each_script_has_a_file_and_no_file_is_left_over() -> None:
    assert {path.stem for path in (GOLDEN / "redis").iterdir()} == {each.name for each in SCRIPTS}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that this thread has sent to any database since."""
    statements: list[str] = []

    def note(statement: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            statements.append(statement if isinstance(statement, str) else statement.decode())

    def noting(execute: Callable[..., Any]) -> Callable[..., Any]:
        def noted(cursor: Any, statement: Any, *rest: Any, **options: Any) -> Any:
            note(statement)
            return execute(cursor, statement, *rest, **options)

        return noted

    cursor_of = Dialect.cursor
    # That of SQLite is written in C.
    monkeypatch.setattr(
        Dialect,
        "cursor",
        lambda self, connection: (
            Counted(cursor_of(self, connection), note)
            if connection.vendor == "sqlite"
            else cursor_of(self, connection)
        ),
    )
    cursors: list[Any] = [SQLiteCursorWrapper, LeanCursor, psycopg.Cursor, pymysql.cursors.Cursor]
    for cursor in cursors:
        monkeypatch.setattr(cursor, "execute", noting(cursor.execute))
    return statements


def readable(statement: str) -> str:
    """Return *statement* without the texts and numbers that differ from run to run."""
    statement = re.sub(r"\{\"host\".*?\}", "HOLDER", statement)
    statement = re.sub(r"\b[0-9a-f]{12,64}\b", "HEX", statement)
    # A list asks for each lock that was left by other tests.
    statement = re.sub(r"(IS_USED_LOCK\(%s\))(, IS_USED_LOCK\(%s\))+", r"\1", statement)
    return re.sub(r"\b\d{10,}\b", "NUMBER", statement).strip()


@pytest.mark.skipif(
    django.VERSION[:2] != (5, 2), reason="another Django begins a session otherwise"
)
@pytest.mark.parametrize(
    ("server", "kind"),
    [
        ("default", "leases"),
        *(
            pytest.param(server, kind, marks=pytest.mark.server)
            for server in ("postgres", "mariadb")
            for kind in ("leases", "rowlock", "advisory")
        ),
    ],
)
def test_statements_of_databases(
    server: str,
    kind: str,
    name: str,
    *,
    request: pytest.FixtureRequest,
    settings: Settings,
    sent: list[str],
) -> None:
    if server == "mariadb" and os.environ.get("DISTLOCK_MYSQL_DRIVER") == "mysqlclient":
        pytest.skip("what PyMySQL sends is noted")
    if server != "default":
        request.getfixturevalue(server)
    leases = {"locks": {**LEASES, "OPTIONS": {"using": server}}}
    settings.DISTLOCK = leases if kind == "leases" else aliases(server, kind)
    backend = locks["locks"]
    one, another = (backend.request(name, ttl=60, holder=Holder.current()) for _ in range(2))
    chapters: list[str] = []

    def tell(heading: str, verb: Callable[[], object]) -> None:
        sent.clear()
        verb()
        # Listings send some of them for each lock that was left by other tests.
        texts = "".join(f"{each};\n" for each in dict.fromkeys(map(readable, sent)))
        chapters.append(f"-- {heading}\n{texts}")

    tell("the first acquire, with a new connection", lambda: backend.try_acquire(one, queued=False))
    tell("release", lambda: backend.release(one))
    tell("acquire", lambda: backend.try_acquire(another, queued=False))
    tell("acquire, refused", lambda: backend.try_acquire(one, queued=False))
    tell("probe", lambda: backend.probe(one))
    tell("extend", lambda: backend.extend([another]))
    tell("list", lambda: list(backend.held()))
    (held,) = (each for each in backend.held() if each.name == name)
    tell("force release", lambda: backend.force_release(held.key, held.owner_digest))
    locks.close()

    compare(GOLDEN / f"{server.replace('default', 'sqlite')}-{kind}.sql", "\n".join(chapters))
