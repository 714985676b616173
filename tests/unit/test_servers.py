"""The servers do what tests of faults rely on; what each database promises is tested elsewhere."""

import shutil
from collections.abc import Iterator

import psycopg
import pymysql
import pytest

from tests.fixtures.environment import is_listening
from tests.fixtures.eventually import eventually
from tests.fixtures.launch import family, state
from tests.fixtures.mariadb import MariaDB
from tests.fixtures.postgres import PostgreSQL
from tests.fixtures.processes import run_to_its_death
from tests.fixtures.servers import ServerError

pytestmark = pytest.mark.server

Database = PostgreSQL | MariaDB


@pytest.fixture(params=[PostgreSQL, MariaDB])
def server(request: pytest.FixtureRequest) -> Iterator[Database]:
    with request.param() as server:
        yield server


def run_sql(server: Database, sql: str) -> None:
    with server.admin("distlock") as connection, connection.cursor() as cursor:
        cursor.execute(sql)


def read(server: Database, sql: str) -> object:
    with server.admin("distlock") as connection, connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()


def run_as_distlock(server: PostgreSQL, sql: str) -> None:
    url = f"postgresql://distlock:distlock@{server.host}:{server.port}/distlock"
    with psycopg.connect(url) as connection:
        connection.execute(sql.encode())


def test_committed_data_survives_a_kill(server: Database) -> None:
    run_sql(server, "CREATE TABLE seen (what INTEGER)")
    run_sql(server, "INSERT INTO seen VALUES (42)")
    pids = family(server.pid)

    server.kill()
    assert all(state(pid) in "XZ" for pid in pids)
    assert not is_listening(server.port)
    server.start()

    assert read(server, "SELECT what FROM seen") == (42,)


def test_restart_keeps_port_and_data(server: Database) -> None:
    run_sql(server, "CREATE TABLE seen (what INTEGER)")
    before = (server.port, server.pid)

    server.restart()

    assert read(server, "SELECT count(*) FROM seen") == (0,)
    assert server.port == before[0]
    assert server.pid != before[1]


def test_paused_server_answers_nobody_until_resumed(server: Database) -> None:
    server.pause()
    assert not server.is_ready()

    server.resume()
    eventually(server.is_ready)


def test_settings_of_its_own() -> None:
    with PostgreSQL(settings={"max_connections": "7", "fsync": "on"}) as postgres:
        assert read(postgres, "SHOW max_connections") == ("7",)
        assert read(postgres, "SHOW fsync") == ("on",)


def test_server_that_does_not_start_shows_its_log() -> None:
    server = MariaDB(settings={"no-such-option": "1"})

    with pytest.raises(ServerError, match=r"(?s)ended at its start.*no-such-option"), server:
        pass


def test_missing_server_tells_what_to_install() -> None:
    class Missing(PostgreSQL):
        def prepare(self) -> None:
            self.binary("/usr/lib/no-such-thing/*/bin/initdb", "no-such-initdb")

    with pytest.raises(ServerError, match="apt-get install postgresql"), Missing():
        pass


def test_taken_port_is_an_error_and_not_somebody_elses_answer(postgres: PostgreSQL) -> None:
    with pytest.raises(ServerError, match="another process listens"), PostgreSQL(postgres.port):
        pass


def test_session_databases_have_the_tables(postgres: PostgreSQL, mariadb: MariaDB) -> None:
    assert read(postgres, "SELECT count(*) > 0 FROM django_migrations") == (True,)
    assert read(mariadb, "SELECT count(*) > 0 FROM django_migrations") == (1,)


def test_ordinary_user_is_no_superuser(postgres: PostgreSQL, mariadb: MariaDB) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        run_as_distlock(postgres, "CREATE ROLE other")
    with pytest.raises(pymysql.OperationalError):
        pymysql.connect(host=mariadb.host, port=mariadb.port, user="distlock", password="wrong")


def test_servers_die_with_the_run() -> None:
    code = (
        "import os, signal;"
        "from tests.fixtures.launch import family;"
        "from tests.fixtures.postgres import PostgreSQL;"
        "server = PostgreSQL();"
        "server.start();"
        "print(server.folder, *family(server.pid), flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    folder, *pids = run_to_its_death(code).split()

    eventually(lambda: all(state(int(pid)) in "XZ" for pid in pids))
    shutil.rmtree(folder)
