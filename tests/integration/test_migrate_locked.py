"""``manage.py migrate_locked``: processes that start together, on databases without any table."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import call_command

from django_distlock.management.base import BUSY, LOST, NO_SERVER, WRONG_ARGUMENTS
from tests.fixtures.eventually import eventually
from tests.fixtures.pgbouncer import PgBouncer
from tests.fixtures.pods import WAITS, Pods, execute, new_database
from tests.fixtures.postgres import PostgreSQL

DATABASES = ["sqlite", "postgres", "mariadb"]


@pytest.mark.parametrize("pods", DATABASES, indirect=True)
def test_of_three_that_start_together_one_migrates_and_all_succeed(pods: Pods) -> None:
    started = [pods.migrate() for _ in range(3)]
    [first] = pods.began()
    others = [pod for pod in started if pod.pid != first]
    eventually(lambda: all(WAITS in pods.output(pod) for pod in others), 60)
    impatient = pods.migrate("--wait", "0")
    assert impatient.wait(60) == BUSY
    [line] = pods.output(impatient).splitlines()
    assert line.startswith("CommandError: Lock 'migrate:")
    assert "is held: gave up after" in line

    pods.let_go()

    assert pods.wait() == [0, 0, 0, BUSY]
    assert pods.began() == [first]
    assert all(pods.output(pod).endswith("Nothing to migrate.\n") for pod in others)


def test_without_the_lock_two_migrate_and_one_fails(pods: Pods) -> None:
    pods.start("migrate")
    pods.began(1)
    pods.start("migrate")
    pods.began(2)

    pods.let_go()

    assert sorted(pods.wait()) == [0, 1]


@pytest.mark.parametrize("pods", DATABASES, indirect=True)
def test_when_one_is_killed_the_next_goes_on(pods: Pods) -> None:
    first = pods.migrate()
    pods.began()
    second = pods.migrate()
    eventually(lambda: WAITS in pods.output(second), 60)

    first.kill()
    assert pods.began(2)[1] == second.pid
    pods.let_go()

    assert pods.wait() == [-signal.SIGKILL, 0]


def test_who_finds_nothing_to_do_does_not_wait(pods: Pods) -> None:
    assert pods.migrate("django_distlock").wait(60) == 0
    pods.migrate()
    pods.began()

    other = pods.migrate("django_distlock")
    looks = [pods.start("migrate_locked", option) for option in ("--plan", "--check")]

    assert other.wait(60) == 0
    assert pods.output(other) == "Nothing to migrate.\n"
    assert [look.wait(60) for look in looks] == [0, 1]
    assert "Create model Parcel" in pods.output(looks[0])


def test_the_lock_of_an_alias_serves_as_well(pods: Pods) -> None:
    name = str(pods.folder / "elsewhere")
    pods.databases["elsewhere"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": name}
    assert pods.migrate("--database", "elsewhere", "django_distlock").wait(60) == 0
    pods.migrate("--using", "elsewhere")
    pods.began()
    second = pods.migrate("--using", "elsewhere", "--wait", "0")

    assert second.wait(60) == BUSY
    assert "is held by" in pods.output(second)
    unknown = pods.migrate("--using", "nowhere")
    assert unknown.wait(60) == WRONG_ARGUMENTS
    assert "DISTLOCK has no alias 'nowhere'" in pods.output(unknown)
    assert not (pods.folder / f"{pods.databases['default']['NAME']}.migrate-lock").exists()


def test_an_unknown_alias_is_told_though_there_is_nothing_to_migrate(pods: Pods) -> None:
    pods.let_go()
    assert pods.migrate().wait(60) == 0

    unknown = pods.migrate("--using", "nowhere")
    assert unknown.wait(60) == WRONG_ARGUMENTS
    assert "DISTLOCK has no alias 'nowhere'" in pods.output(unknown)


def test_a_lock_that_a_migration_does_not_get_is_its_own_error(pods: Pods) -> None:
    (pods.folder / "busy").touch()
    pods.let_go()

    pod = pods.migrate()

    assert pod.wait(60) == 1
    assert "Lock 'of-a-migration' is held" in pods.output(pod)


@pytest.mark.parametrize("command", ["migrate_locked", "migrate"])
def test_the_command_of_the_project_is_run_under_the_lock(pods: Pods, command: str) -> None:
    apps = ("django_distlock.contrib.migrate", "tests.integration.pods.own")
    used = apps if command == "migrate" else apps[1:]
    first = pods.start(command, apps=used)
    pods.began()
    second = pods.start(command, apps=used)
    eventually(lambda: WAITS in pods.output(second), 60)
    assert not (pods.folder / "own").exists()

    pods.let_go()

    assert pods.wait() == [0, 0], pods.output(first)
    assert len(pods.began()) == 1
    assert (pods.folder / "own").exists()


@pytest.mark.parametrize("pods", ["postgres"], indirect=True)
def test_an_engine_prepares_its_database_under_the_lock(pods: Pods) -> None:
    pods.databases["default"]["ENGINE"] = "tests.integration.pods.prepared"
    started = [pods.migrate() for _ in range(2)]
    [first] = pods.began()
    [other] = [pod for pod in started if pod.pid != first]
    eventually(lambda: WAITS in pods.output(other), 60)

    pods.let_go()

    assert pods.wait() == [0, 0]
    assert pods.began(2) == [first] * 2  # the extension and the first migration


@pytest.mark.parametrize("pods", ["postgres"], indirect=True)
def test_after_its_lock_is_lost_no_further_migration_begins(
    pods: Pods, postgres: PostgreSQL
) -> None:
    pod = pods.migrate()
    pods.began()
    name = pods.databases["default"]["NAME"]
    execute(
        postgres,
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' "
        "AND application_name LIKE 'distlock%'",
    )
    pods.let_go()

    assert pod.wait(60) == LOST
    assert pods.output(pod).splitlines()[-1].startswith("CommandError: Lock 'migrate:")
    assert pods.applied(pod) == 1


def test_a_pooler_is_refused_and_an_alias_beside_it_has_the_lock(
    pods: Pods, postgres: PostgreSQL, pgbouncer: PgBouncer, request: pytest.FixtureRequest
) -> None:
    with new_database(request, "postgres", f"pods_{uuid.uuid4().hex}") as direct:
        pods.databases = {"default": {**direct, "PORT": pgbouncer.port}, "direct": direct}
        backend = "django_distlock.backends.advisory.AdvisoryBackend"
        options = {"using": "direct", "fencing": False}
        pods.distlock["migrations"] = {"BACKEND": backend, "OPTIONS": options}
        refused = pods.migrate()
        assert refused.wait(60) == NO_SERVER
        assert "is reached through a pooler" in pods.output(refused)
        assert "name it with --using: see https://" in pods.output(refused)
        pods.migrate("--using", "migrations")
        pods.began()
        second = pods.migrate("--using", "migrations")
        eventually(lambda: WAITS in pods.output(second), 60)

        pods.let_go()

        assert pods.wait()[1:] == [0, 0]
        assert len(pods.began()) == 1


def test_databases_of_tests_need_no_lock(tmp_path: Path) -> None:
    lock = Path(f"{settings.DATABASES['default']['NAME']}.migrate-lock")

    call_command("migrate_locked", verbosity=0)

    assert not lock.exists()
