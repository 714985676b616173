"""What processes of the project do."""

from __future__ import annotations

from typing import Any

from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connections, transaction
from django_tenants.utils import schema_context

from django_distlock import LockNotAcquired, current_lease, force_release, lock, transaction_lock
from django_distlock.operators import holdings
from tests.fixtures.child import hear_word, say

from .models import Shop

#: django-tenants' own, of the only thread.
connection: Any = connections["default"]
TENANTS = ("north", "south")


def migrate() -> None:
    """Make the schemas, as a project does: of all tenants too."""
    with connection.cursor() as cursor:
        cursor.execute(f'CREATE SCHEMA IF NOT EXISTS "{connection.schema_name}"')
    call_command("migrate_schemas", shared=True, run_syncdb=True, verbosity=0)
    for tenant in TENANTS:
        Shop(schema_name=tenant, name=tenant).save(verbosity=0)


def check() -> list[str | None]:
    """Return what the checks find: the ids, and the aliases that they name."""
    found = run_checks(databases=["default"])
    return [f"{each.id} {each.msg.partition(':')[0]}" for each in found]


def hold(first: str, then: str, using: str) -> bool:
    """Use a lock as one tenant, then try that of another one; keep it until the word."""
    connection.set_schema(first)
    with lock("warm-up", using=using, timeout=10):
        pass
    connection.set_schema(then)
    lease = lock("import:7", using=using, timeout=0).acquire()
    say("held" if lease else "busy")
    hear_word("end")
    if lease:
        connection.set_schema(first)  # wherever its thread is by then
        lease.extend()
        lease.release()
    return lease is not None


def nest(using: str) -> list[str]:
    """Hold the lock of both tenants in one thread, which goes from the one to the other."""
    seen = []
    with schema_context("north"), lock("import:7", using=using, timeout=0) as north:
        with schema_context("south"):
            south = lock("import:7", using=using, timeout=0).acquire()
            assert south
            assert south is not north
            assert current_lease("import:7") is south
            with schema_context("north"), lock("import:7", using=using, timeout=0) as again:
                assert again is north
            seen += [held.name for held in holdings(using)]
            assert force_release("import:7", using=using) == 1
            assert south.lost
        assert north.held
    return seen


def in_transactions() -> str:
    """Take transaction_lock() of both tenants at once, of which the other process has one."""
    told = {}
    for tenant in TENANTS:
        with schema_context(tenant), transaction.atomic():
            try:
                transaction_lock("import:7", timeout=0)
            except LockNotAcquired:
                told[tenant] = "busy"
            else:
                told[tenant] = "taken"
    return " ".join(f"{tenant} {told[tenant]}" for tenant in TENANTS)


def hold_in_transaction() -> None:
    with schema_context("north"), transaction.atomic():
        transaction_lock("import:7", timeout=0)
        say("held")
        hear_word("end")
