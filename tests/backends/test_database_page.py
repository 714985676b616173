"""The page of the database backend says how many statements a verb takes: they are counted here."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from django_distlock import lock, locks
from django_distlock.ground.holder import Holder
from tests.backends.conftest import counted_statements
from tests.fixtures.pages import DOCS, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_django import Settings

PAGE = DOCS / "reference" / "backends" / "database.md"
COLUMNS = ["postgres", "mariadb", "default"]
#: Of the *n* leases of the page.
LEASES = 2


def test_a_verb_takes_as_many_statements_as_the_page_says(
    database: str, settings: Settings
) -> None:
    settings.DISTLOCK = {"default": {"OPTIONS": {"using": database}}}
    said = {
        verb: number_in(columns[COLUMNS.index(database)])
        for verb, columns in table(PAGE, "## How it works").items()
    }

    counted = statements_of_each_verb(database)

    assert counted == said


def number_in(text: str) -> int:
    number = int(found[0]) if (found := re.match(r"\d+", text)) else 1
    return number * (LEASES if "*n*" in text else 1)


def statements_of_each_verb(using: str) -> dict[str, int]:
    locked, name = locks["default"], uuid.uuid4().hex
    mine, other, again = (locked.request(name, ttl=30, holder=Holder.current()) for _ in range(3))
    with lock("warm connection"):
        pass
    counted = {
        "acquire, the first time for a name": count(lambda: locked.try_acquire(mine, queued=False)),
        "acquire, busy": count(lambda: locked.try_acquire(other, queued=False)),
        "look again while waiting": count(lambda: locked.probe(other)),
        "renewal of *n* leases": count(lambda: locked.extend([mine] * LEASES)),
        "release": count(lambda: locked.release(mine)),
        "acquire, free": count(lambda: locked.try_acquire(again, queued=False)),
    }
    locked.release(again)
    places = locked.request(f"{name}:places", ttl=30, holder=Holder.current()).with_limit(4)
    counted["look at all places"] = count(lambda: locked.probe_all(places.holdings))
    with lock(name) as held, transaction.atomic(using=using):
        counted["re-entry"] = count(lock(name).acquire)
        with CaptureQueriesContext(connections[using]) as queries:
            held.guard(using=using)
        counted["guard()"] = len(queries)
        held.release()
    return counted


def count(verb: Callable[[], object]) -> int:
    with counted_statements("default") as statements:
        verb()
    return len(statements)
