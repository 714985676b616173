"""Behind PgBouncer in transaction mode: leases work, locks of a session are refused, nothing leaks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from django.db import connections, transaction

from django_distlock import (
    LockBackendError,
    LockOutcomeUnknown,
    force_release,
    lock,
    locks,
    transaction_lock,
)
from django_distlock.checks import check_servers
from django_distlock.exceptions import DOCS
from tests.contract.crew import start, take_and_release
from tests.contract.rivals import Rival
from tests.fixtures.eventually import eventually
from tests.fixtures.pgbouncer import PgBouncer

from .session_tools import KINDS, aliases, ask, backend

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from tests.fixtures.postgres import PostgreSQL

pytestmark = pytest.mark.server


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, pgbouncer: PgBouncer, settings: Settings) -> Iterator[str]:
    """Each kind of lock of a session, through PgBouncer, as the alias "locks"."""
    settings.DISTLOCK = aliases("pgbouncer", request.param)
    yield str(request.param)
    locks.close()
    connections["pgbouncer"].close()


@pytest.mark.parametrize("timeout", [0, 2])
def test_locks_of_a_session_are_refused_at_first_use(kind: str, name: str, timeout: float) -> None:
    for _ in range(2):
        with pytest.raises(LockBackendError, match=r"^DISTLOCK\['locks'\].*PgBouncer.*direct"):
            lock(name, using="locks", timeout=timeout).acquire()

    assert backend()._sessions == {}
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    eventually(lambda: ask("postgres", held) == [(0,)])


def test_check_says_so_where_the_server_may_be_asked(kind: str) -> None:
    messages = check_servers(databases=["pgbouncer"])

    assert {message.id for message in messages} == {"distlock.E005"}
    assert "PgBouncer" in messages[0].msg
    assert check_servers(databases=["default"]) == []


def test_a_lock_in_the_callers_transaction_works(
    pgbouncer: PgBouncer, settings: Settings, name: str
) -> None:
    settings.DISTLOCK = aliases("postgres", "rowlock")

    with transaction.atomic(using="pgbouncer"):
        transaction_lock(name, using="pgbouncer", timeout=1)
        assert lock(name, using="locks").locked()

    assert not lock(name, using="locks").locked()
    connections["pgbouncer"].close()


def test_a_pooler_that_keeps_notifications_is_named_by_check_and_in_the_log(
    pgbouncer: PgBouncer, settings: Settings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DISTLOCK = {"leases": {"OPTIONS": {"using": "pgbouncer"}}}

    [message] = [each for each in check_servers(databases=["pgbouncer"]) if "leases" in each.msg]
    rival = Rival.of(locks["leases"], name, ttl=30)
    rival.takes()
    waiting = start(lambda: take_and_release("leases", name, 20))
    eventually(lambda: "keeps its notifications" in caplog.text, 10)
    rival.leaves()

    assert waiting.result(20)
    assert message.id == "distlock.W002"
    assert message.hint is not None
    assert message.hint.startswith("Set OPTIONS 'listen' to False")
    connections["pgbouncer"].close()


def test_statement_mode_is_named(postgres: PostgreSQL, settings: Settings, name: str) -> None:
    told = "transaction blocks not allowed in statement pooling mode: set pool_mode of PgBouncer to transaction or session"
    told += f" (see {DOCS}howto/with-your-stack.html#stack-poolers)"
    with through(postgres, "statement"):
        settings.DISTLOCK = {"leases": {"OPTIONS": {"using": "by_statement"}}}
        with lock(name, using="leases"):
            with pytest.raises(LockBackendError, match=re.escape(told)) as refused:
                force_release(name, using="leases")
        [message] = check_servers(databases=["by_statement"])

        assert not isinstance(refused.value, LockOutcomeUnknown)
        assert message.id == "distlock.E006"
        assert message.msg == f"DISTLOCK['leases']: {told}."
        locks.close()


@contextmanager
def through(postgres: PostgreSQL, mode: str) -> Iterator[None]:
    """Have a pooler of this mode, by an alias of DATABASES."""
    using = f"by_{mode}"
    with PgBouncer(postgres, mode) as bouncer:
        direct = connections.settings["postgres"]
        connections.settings[using] = {**direct, "PORT": str(bouncer.port)}
        yield
        connections[using].close()
        del connections[using], connections.settings[using]


def test_nothing_that_a_lease_sets_stays_with_the_session(
    pgbouncer: PgBouncer, settings: Settings, name: str
) -> None:
    database = "django_distlock.backends.database.DatabaseBackend"
    options = {"using": "pgbouncer", "listen": False}
    settings.DISTLOCK = {"leases": {"BACKEND": database, "OPTIONS": options}}
    names = "('lock_timeout', 'synchronous_commit', 'plan_cache_mode', 'statement_timeout')"
    statement = f"SELECT name, setting, source FROM pg_settings WHERE name IN {names} ORDER BY name"
    before = ask("pgbouncer", statement)

    for _ in range(20):
        with lock(name, using="leases"):
            pass

    assert ask("pgbouncer", statement) == before
    connections["pgbouncer"].close()
