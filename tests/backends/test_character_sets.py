"""Databases whose tables hold no more than Latin letters, or nothing beyond the first 65,536 characters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connections, transaction
from django.test import Client
from django.urls import reverse

from django_distlock import LockNotAcquired, lock, locks, transaction_lock
from django_distlock.backends import rowlock
from django_distlock.engine.values import Held
from django_distlock.models import FencingCounter, LockWaiter, MethodLock
from tests.fixtures.databases import migrate
from tests.fixtures.mariadb import MariaDB
from tests.fixtures.postgres import PostgreSQL

from .session_tools import KINDS

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

LEASES = "django_distlock.backends.database.DatabaseBackend"
BACKENDS: dict[str, dict[str, Any]] = {
    "lease": {"BACKEND": LEASES},
    "fair": {"BACKEND": LEASES, "OPTIONS": {"fair": True}},
    **{kind: {"BACKEND": path} for kind, path in KINDS.items()},
}
#: A character that is in none of these sets, one that is in utf8mb3, and one that is in all.
BEYOND = "\U0001f512 \u65e5\u672c \u00e9"
LIST = reverse("admin:django_distlock_heldlock_changelist")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(narrow, id="-".join(narrow), marks=pytest.mark.server)
        for narrow in [("mariadb", "latin1"), ("mariadb", "utf8mb3"), ("postgres", "latin1")]
    ],
)
def made(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database in this character set, with the app's tables."""
    server, characters = request.param
    alias = f"{server}_{characters}"
    make(request.getfixturevalue(server), alias, characters)
    connections.settings[alias] = {**connections.settings[server], "NAME": alias}
    migrate(alias)
    yield alias
    connections[alias].close()
    del connections[alias], connections.settings[alias]


@pytest.fixture
def narrow(made: str) -> Iterator[str]:
    """The database, which has no rows before the test."""
    for model in (MethodLock, FencingCounter, LockWaiter):
        model.objects.using(made).all().delete()
    yield made
    locks.close()
    connections[made].close()


def make(server: MariaDB | PostgreSQL, name: str, characters: str) -> None:
    admin = server.admin()
    with closing(admin), admin.cursor() as cursor:
        if isinstance(server, MariaDB):
            cursor.execute(f"DROP DATABASE IF EXISTS {name}")
            cursor.execute(f"CREATE DATABASE {name} CHARACTER SET {characters}")
            cursor.execute(f"GRANT ALL ON {name}.* TO distlock@'127.0.0.1'")
        else:
            cursor.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
            cursor.execute(
                f"CREATE DATABASE {name} OWNER distlock ENCODING '{characters}' "
                "LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
            )


@pytest.fixture(params=BACKENDS)
def using(request: pytest.FixtureRequest, narrow: str, settings: Settings) -> str:
    """Each way to lock in it, as an alias, and another one as from another process."""
    chosen = BACKENDS[request.param]
    options = {**chosen.get("OPTIONS", {}), "using": narrow}
    settings.DISTLOCK = {alias: {**chosen, "OPTIONS": options} for alias in ("locks", "rival")}
    return "locks"


def listed(using: str) -> list[Held]:
    """Return what is held, in a thread that ends with it."""
    try:
        return list(locks[using].held())
    finally:
        connections.close_all()


async def test_names_purposes_and_tasks_may_have_any_character(using: str, name: str) -> None:
    named, task = f"{name} {BEYOND}", asyncio.current_task()
    assert task
    task.set_name(BEYOND)

    async with lock(named, using=using, purpose=f"GET /{BEYOND}") as lease:
        [held] = await asyncio.to_thread(listed, using)
        with pytest.raises(LockNotAcquired) as busy:
            async with lock(named, using="rival", timeout=0):
                pass

    assert (held.name, held.holder) == (named, lease.holder)
    assert busy.value.holder == lease.holder
    assert lease.holder.purpose.startswith("GET /")


def test_a_lock_of_a_transaction_may_have_such_a_name(narrow: str, name: str) -> None:
    with transaction.atomic(using=narrow):
        transaction_lock(f"{name} {BEYOND}", using=narrow)
    rowlock._backends.pop(narrow).close()

    assert [row.name for row in MethodLock.objects.using(narrow)] == [f"{name} {BEYOND}"]


def test_the_purge_deletes_rows_of_such_names(narrow: str, settings: Settings, name: str) -> None:
    settings.DISTLOCK = {"locks": {"BACKEND": LEASES, "OPTIONS": {"using": narrow}}}
    with lock(f"{name} {BEYOND}", using="locks"):
        pass
    connections[narrow].cursor().execute(
        "UPDATE django_distlock_methodlock SET fencing_token = 1, updated_at = '2001-01-01', available_at = '2001-01-01'"
    )

    call_command("purge_stale_locks", using=["locks"], verbosity=0)

    assert not MethodLock.objects.using(narrow).exists()


class _ToOne:
    """A router of everything to one database."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return self.alias

    db_for_write = db_for_read


def test_the_admin_shows_finds_and_frees_them(narrow: str, settings: Settings, name: str) -> None:
    settings.DISTLOCK = {"locks": {"BACKEND": LEASES, "OPTIONS": {"using": narrow}}}
    settings.DATABASE_ROUTERS = [_ToOne(narrow)]
    operator = User.objects.create_user("operator", is_staff=True)
    operator.user_permissions.set(
        Permission.objects.filter(content_type__app_label="django_distlock")
    )
    client = Client()
    client.force_login(operator)
    named = f"{name} {BEYOND}"
    lease = lock(named, using="locks").acquire()
    assert lease

    found = client.get(LIST, {"q": "\u65e5\u672c"})
    [row] = found.context["page"]
    url = reverse("admin:django_distlock_heldlock_force_release")
    asked = client.get(url, {"lock": row.value})
    confirmed = [found.value for found in asked.context["rows"]]
    freed = client.post(url, {"lock": confirmed}, follow=True)

    assert row.held.name == named
    assert named in found.content.decode()
    assert "1 lock was released." in freed.content.decode()
    [entry] = LogEntry.objects.all()
    assert name in entry.object_repr
    assert not MethodLock.objects.using(narrow).exclude(owner=None).exists()


def test_rows_of_before_are_listed_as_they_are(narrow: str, settings: Settings, name: str) -> None:
    settings.DISTLOCK = {"locks": {"BACKEND": LEASES, "OPTIONS": {"using": narrow}}}
    with lock(name, using="locks"):
        MethodLock.objects.using(narrow).update(description="\u00e9t\u00e9 \\u0041")

        assert [held.name for held in locks["locks"].held()] == ["\u00e9t\u00e9 \\u0041"]
