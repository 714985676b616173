"""No framework loses an update under ATOMIC_REQUESTS: real requests to three worker processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from testproject.models import Account
from tests.contract.profiles import BY_NAME
from tests.fixtures.workers import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORKERS, REQUESTS = 3, 60
PAGES = [
    *("with-lock", "decorated", "decorated-post", "rest", "rest-method-decorator"),
    *("rest-outside", "rest-inside", "ninja"),
]
#: A database, and where its locks are.
SAME, *_ = PLACES = [("postgres", "postgres"), ("mariadb", "mariadb"), ("postgres", "redis")]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def start_site(
    request: pytest.FixtureRequest, open_site: Callable[..., Site]
) -> Callable[..., Site]:
    """Start a site over a database and locks."""

    def start(place: tuple[str, str], **environment: str) -> Site:
        database, locks = place
        for fixture in (database, *BY_NAME[locks].fixtures):
            request.getfixturevalue(fixture)
        environment |= {"DISTLOCK_ATOMIC_DATABASE": database}
        alias = BY_NAME[locks].settings
        return open_site("gunicorn-sync", alias, workers=WORKERS, **environment)

    return start


@pytest.fixture(scope="module")
def site(place: tuple[str, str], start_site: Callable[..., Site]) -> Iterator[Site]:
    site = start_site(place)
    yield site
    site.close()


def lost_updates(site: Site, page: str, database: str) -> int:
    """Return how many of the requests to *page* are lost, of which all workers answered some."""
    accounts = Account.objects.using(database)
    pk = accounts.create(name=page, balance=0, opening_balance=0).pk
    with ThreadPoolExecutor(2 * WORKERS) as clients:
        answers = list(clients.map(lambda _: site.post(f"{page}/{pk}/"), range(REQUESTS)))
    assert [answer for answer in answers if answer.status != 200] == []
    assert len({answer.body["pid"] for answer in answers}) == WORKERS
    account = accounts.get(pk=pk)
    account.delete(using=database)
    return REQUESTS - int(account.balance)


@pytest.mark.parametrize("place", PLACES, ids="-".join, scope="module")
def test_no_update_is_lost(site: Site, place: tuple[str, str]) -> None:
    # Where its locks are not beside its data, the pages differ in how they hold a lock.
    pages = PAGES if place == SAME else PAGES[:2]

    lost = {page: lost_updates(site, page, place[0]) for page in pages}

    assert lost == dict.fromkeys(pages, 0)


@pytest.mark.parametrize("place", [SAME])
def test_updates_are_lost_if_the_lock_is_released_before_the_commit(
    start_site: Callable[..., Site], place: tuple[str, str]
) -> None:
    site = start_site(place, DISTLOCK_ATOMIC_RELEASE="at_exit")

    assert lost_updates(site, "with-lock", place[0]) > 0
