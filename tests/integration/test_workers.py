"""Locks under what runs Django in production: real worker processes of each kind, over real servers."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

from django_distlock import lock
from testproject.services import audit, open_account
from tests.contract.crew import can_take, held_in_thread
from tests.contract.profiles import BY_NAME, Profile
from tests.fixtures.eventually import eventually
from tests.fixtures.launch import kill_family
from tests.fixtures.workers import Answer, Site
from tests.integration import worker_tasks

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from tests.fixtures.celery_worker import StartWorkers
    from tests.fixtures.postgres import PostgreSQL

TTL = 1.0
#: Longer than the ttl: only who is renewed still holds.
BEYOND_TTL = 2 * TTL
#: Of a lease that nobody waits for the end of.
LONG = 30.0
#: Seconds until a signal must have ended a wait, on a busy machine.
AT_ONCE = 4.0
CHARGES = 12
_numbers = itertools.count(1)
pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True, slots=True)
class Combination:
    """A kind of server and a backend."""

    kind: str
    profile: Profile

    @property
    def fixtures(self) -> tuple[str, ...]:
        """The servers that it needs."""
        return self.profile.fixtures


def combinations(*pairs: tuple[str, str]) -> list[Any]:
    return [
        pytest.param(Combination(kind, BY_NAME[backend]), id=f"{kind}-{backend}")
        for kind, backend in pairs
    ]


ALL = combinations(
    ("gunicorn-sync", "sqlite"),
    ("gunicorn-gthread", "memcached-pylibmc"),
    ("gunicorn-gevent", "redis"),
    ("uvicorn", "postgres-rowlock"),
    ("uvicorn-uvloop", "redis"),
    ("uvicorn-uvloop", "postgres"),
    ("gunicorn-uvicorn", "redis"),
    ("gunicorn-asgi", "redis"),
    ("granian-wsgi", "postgres"),
    ("granian-asgi", "redis"),
    ("hypercorn", "redis"),
    ("waitress", "redis"),
    ("daphne", "redis"),
    ("uwsgi-threads", "postgres"),
)

StartSite = Callable[..., Site]


@pytest.fixture(scope="module")
def start_site(request: pytest.FixtureRequest, open_site: StartSite) -> StartSite:
    """Start a site of a combination, and return once it answers."""

    def start(combination: Combination, *, workers: int = 2, **environment: str) -> Site:
        for fixture in combination.fixtures:
            request.getfixturevalue(fixture)
        alias = combination.profile.settings
        return open_site(combination.kind, alias, workers=workers, **environment)

    return start


@pytest.fixture(scope="module")
def site(combination: Combination, start_site: StartSite) -> Iterator[Site]:
    """One with two worker processes, which tests leave as it is."""
    site = start_site(combination)
    yield site
    site.close()


@pytest.fixture
def name(settings: Settings, combination: Combination) -> str:
    """A name that is free, of a lock that this process knows too."""
    settings.DISTLOCK = {"default": combination.profile.settings}
    return f"workers:{os.getpid()}:{next(_numbers)}"


def over(*pairs: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("combination", combinations(*pairs), scope="module")


def ttl_of(combination: Combination) -> float:
    return 2.0 if "whole_seconds" in combination.profile.traits else TTL


@pytest.mark.parametrize("combination", ALL, scope="module")
def test_all_workers_renew_their_leases_exclude_each_other_and_lose_no_update(
    site: Site, name: str, combination: Combination
) -> None:
    ttl, account = ttl_of(combination), open_account(name, Decimal("100000.00"))

    def charge(_: int) -> Answer:
        answer = eventually(lambda: accepted(site.post(f"accounts/{account.pk}/charge/")), 40)
        assert answer
        return answer

    first, second = [site.hold(name, 1.5 * ttl, ttl=ttl) for _ in range(2)]

    holdings = [done_well(future.result()) for future in (first, second)]
    early, late = sorted((holding["entered"], holding["left"]) for holding in holdings)
    assert early[1] <= late[0]

    with ThreadPoolExecutor(CHARGES) as clients:
        answers = list(clients.map(charge, range(CHARGES)))

    assert [answer.status for answer in answers] == [200] * CHARGES
    assert (audit(account.pk).made, audit(account.pk).lost) == (CHARGES, 0)


# Requests of a worker process share one thread: greenlets or tasks. Those of uvloop are below.
@over(
    ("gunicorn-gevent", "redis"),
    ("gunicorn-gevent", "postgres-advisory"),
    ("gunicorn-gevent", "zookeeper"),
    ("gunicorn-gevent", "etcd"),
    ("uvicorn", "postgres-rowlock"),
    ("uwsgi-gevent", "redis"),
)
def test_a_wait_keeps_a_worker_from_nothing(
    start_site: StartSite, name: str, combination: Combination
) -> None:
    site, ttl = start_site(combination, workers=1), ttl_of(combination)
    with held_in_thread(lock(name, ttl=LONG)):
        waiting = [site.hold(name, 0, ttl=ttl) for _ in range(3)]

        other = site.hold(f"{name}:other", 1.5 * ttl, ttl=ttl)
        pings = [site.get("ping/").status for _ in range(20)]

        done_well(other.result())
        assert pings == [200] * 20
        assert not any(future.done() for future in waiting)
    for future in waiting:
        done_well(future.result())
    site.close()


over_uvloop = over(("uvicorn-uvloop", "redis"), ("uvicorn-uvloop", "postgres"))


@over_uvloop
def test_three_hundred_requests_of_an_async_view_exclude_each_other(site: Site, name: str) -> None:
    names = [f"{name}:{number % 6}" for number in range(300)]

    holds = [site.hold(each, 0.001, ttl=LONG, timeout=60) for each in names]

    holdings = [done_well(hold.result()) for hold in holds]
    for each in set(names):
        found = sorted(
            (holding["entered"], holding["left"])
            for holding, of in zip(holdings, names, strict=True)
            if of == each
        )
        assert len(found) == 50
        assert all(early[1] <= late[0] for early, late in itertools.pairwise(found))


@over_uvloop
def test_requests_that_nobody_waits_for_any_more_leave_no_lock(
    start_site: StartSite, name: str, combination: Combination
) -> None:
    site, ttl = start_site(combination, workers=1), ttl_of(combination)
    with held_in_thread(lock(name, ttl=LONG)):
        terms = {"seconds": 1, "ttl": LONG, "timeout": 60}
        asked = [site.begin(f"ahold/{name}/?{urlencode(terms)}") for _ in range(100)]
        eventually(lambda: site.get("ping/").body["asked"] == 100, what="all are at work")
        for connection in asked:
            connection.close()

    # Each of them would hold it for a second.
    done_well(site.hold(name, 0, ttl=ttl, timeout=10).result())
    assert can_take("default", name, 5)
    site.close()


@over(("gunicorn-gthread", "sqlite"), ("gunicorn-gevent", "postgres-rowlock"))
def test_the_lock_of_killed_workers_comes_free_with_its_ttl(
    start_site: StartSite, name: str, combination: Combination
) -> None:
    site = start_site(combination)
    lost = site.hold(name, LONG, ttl=2)
    eventually(lambda: not can_take("default", name))

    kill_family(site.process.pid)

    assert lost.result().status == 0
    assert can_take("default", name, 10)


@over(
    ("gunicorn-sync", "sqlite"),
    ("gunicorn-gevent", "redis"),
    ("gunicorn-asgi", "sqlite"),
    ("uwsgi-lazy", "sqlite"),
)
def test_a_site_that_is_stopped_ends_its_requests_and_leaves_no_lock(
    start_site: StartSite, name: str, combination: Combination
) -> None:
    site = start_site(combination, workers=1)
    site.get(f"keep/{name}:kept/", ttl=LONG, timeout=5)
    last = site.hold(name, 1, ttl=LONG)
    eventually(lambda: not can_take("default", name))

    site.stop()

    done_well(last.result())
    assert can_take("default", name, 5)
    assert can_take("default", f"{name}:kept", 5)


@over(("gunicorn-gevent", "postgres-rowlock"))
def test_greenlets_learn_at_once_that_the_server_has_ended_their_session(
    start_site: StartSite, name: str, combination: Combination, postgres: PostgreSQL
) -> None:
    site = start_site(combination, workers=1)
    # Its next renewal would be too late for this request.
    holding = site.hold(name, LONG / 4, ttl=LONG)
    eventually(lambda: not can_take("default", name))

    with postgres.admin() as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND state = 'idle in transaction'"
        )

    answer = holding.result()
    assert answer.status == 500
    assert "the session that held it has ended" in answer.body
    site.close()


@over(("uwsgi", "sqlite"))
def test_workers_that_uwsgi_forked_hold_nothing_of_their_master_and_renew_their_own(
    start_site: StartSite, name: str, combination: Combination
) -> None:
    site = start_site(combination, DISTLOCK_WORKERS_AT_START=name)

    found = site.get("ping/").body
    own = done_well(site.hold(f"{name}:own", BEYOND_TTL, ttl=TTL).result())

    assert found["held"] == []
    assert own["left"] - own["entered"] >= BEYOND_TTL
    assert not can_take("default", name)
    site.close()


@over(("gunicorn-gevent-preload", "sqlite"))
def test_threads_that_became_greenlets_too_late_are_refused_in_words(
    start_site: StartSite, name: str, combination: Combination
) -> None:
    site = start_site(combination, workers=1)

    answer = site.hold(name, 0, ttl=TTL).result()

    assert answer.status == 500
    assert "gunicorn without --preload" in answer.body
    site.close()


@pytest.mark.parametrize("driver", ["mysqlclient", "pymysql"])
@pytest.mark.usefixtures("celery_connections", "mariadb")
def test_a_soft_time_limit_ends_a_wait_by_each_driver(
    start_workers: StartWorkers, settings: Settings, driver: str
) -> None:
    kinds = ("mariadb", "mariadb-rowlock", "mariadb-advisory")
    settings.DISTLOCK = {kind: BY_NAME[kind].settings for kind in kinds}
    aliases = {"DISTLOCK_ALIASES": json.dumps(settings.DISTLOCK), "DISTLOCK_MYSQL_DRIVER": driver}
    [worker] = start_workers(children=1, include=worker_tasks.__name__, environment=aliases)
    name = f"workers:{os.getpid()}:{next(_numbers)}"

    for kind in kinds:
        with held_in_thread(lock(name, using=kind, ttl=LONG)):
            waits = worker_tasks.wait.apply_async((name, kind), queue=worker.queue)
            waited = waits.get(timeout=40)

        assert worker_tasks.SOFT_LIMIT * 0.9 <= waited < worker_tasks.SOFT_LIMIT + AT_ONCE
        with lock(name, using=kind, timeout=5):
            pass
    worker.stop()


def accepted(answer: Answer) -> Answer | None:
    """Return an answer, or None if the fee is to be asked for again."""
    return None if answer.status == 409 else answer


def done_well(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.body
    return found
