"""A minute of schedules: no order of statements breaks a promise, and each planted mistake is found."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from .faults import FAULTS, Fault
from .search import all_orders, order_that_shows, replay, walk
from .servers import Database, OnMariaDB, OnPostgreSQL, OnSQLite

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)
KINDS = {"postgres": OnPostgreSQL, "mariadb": OnMariaDB}
SERVERS = (*KINDS, "sqlite")
SCHEDULES = 60


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Database]]:
    """The databases of the tests so far, by server."""
    with ExitStack() as stack:
        found: dict[str, Database] = {}
        yield found
        for database in found.values():
            stack.callback(database.close)


@pytest.fixture(params=SERVERS)
def server(
    request: pytest.FixtureRequest,
    made: dict[str, Database],
    tmp_path_factory: pytest.TempPathFactory,
) -> Database:
    name = request.param
    started = request.getfixturevalue(name) if name in KINDS else None
    if name not in made:
        folder = str(tmp_path_factory.mktemp("interleavings"))
        made[name] = KINDS[name](started) if name in KINDS else OnSQLite(folder)
    return made[name]


def test_no_order_of_statements_breaks_a_promise(server: Database) -> None:
    (totals,) = deque(walk(server, range(SCHEDULES)), maxlen=1)

    assert totals.found == {}
    assert bool(totals.waits) == server.waits
    assert len(totals.checked) > 10


def test_a_seed_makes_the_same_steps_again(server: Database) -> None:
    first, again = replay(server, "7"), replay(server, "7")

    assert len(first.steps) > 10
    assert again.steps == first.steps


def test_an_order_that_breaks_a_promise_is_made_again(server: Database) -> None:
    fault = next(each for each in FAULTS if each.name == "a token that is issued twice")
    with fault.planted():
        with closing(all_orders(server, 0)) as runs:
            [(what, found)] = next(totals for totals in runs if totals.found).found.items()
        again = replay(server, what)

    assert again.broken is not None
    assert again.steps == found.steps


@pytest.mark.parametrize(
    ("server", "fault"),
    [
        pytest.param(name, fault, id=f"{name}: {fault.name}")
        for name in SERVERS
        for fault in FAULTS
        if name in fault.servers
    ],
    indirect=["server"],
)
def test_a_planted_mistake_is_found(server: Database, fault: Fault) -> None:
    number, _ = order_that_shows(server, fault)

    assert number
