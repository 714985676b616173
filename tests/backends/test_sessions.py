"""Locks held by a session, on rows and advisory: they end with their session, at once, and tell it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections, transaction

from django_distlock import (
    Lease,
    LockBackendError,
    LockDeadlock,
    LockLost,
    LockNotAcquired,
    LockNotOwned,
    lock,
    locks,
)
from django_distlock.backends.session.backend import SessionBackend
from django_distlock.backends.session.occupants import Occupant
from django_distlock.backends.session.sessions import DatabaseSession
from django_distlock.engine.values import Busy, Grant, Release, Request, digest
from django_distlock.ground.holder import Holder
from django_distlock.models import FencingCounter
from django_distlock.signals import lock_acquired
from tests.backends.conftest import apart, paused
from tests.contract.crew import start, taken, together
from tests.fixtures.databases import migrate
from tests.fixtures.eventually import eventually, in_time, never, told_in_time
from tests.fixtures.interruption import TimeLimit
from tests.fixtures.mariadb import MariaDB
from tests.fixtures.processes import Child
from tests.fixtures.proxy import Proxy

from .queue_tools import set_options
from .session_tools import (
    BOTH,
    KINDS,
    SITES,
    aliases,
    ask,
    backend,
    end_session,
    session_number,
    waiters,
)

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from pytest_django.fixtures import Settings

    from tests.fixtures.processes import Spawn

Start = Callable[..., Child]
LEASES = "django_distlock.backends.database.DatabaseBackend"
#: A row for each statement in which a session waits for a lock.
WAITING_STATEMENTS = {
    "postgres": "SELECT pid, xact_start FROM pg_stat_activity"
    " WHERE wait_event_type = 'Lock' AND application_name LIKE 'distlock:%%'",
    "mariadb": "SELECT query_id FROM information_schema.processlist WHERE info LIKE '/*distlock:%% WAIT %%'",
}
#: A table of the application.
INDEXED = "indexed_while_others_wait"


@pytest.fixture(params=BOTH)
def kind(request: pytest.FixtureRequest, settings: Settings) -> tuple[str, str]:
    """Each kind of lock on each server, as the alias "locks"."""
    database, of = request.param
    request.getfixturevalue(database)
    settings.DISTLOCK = aliases(database, of)
    return database, of


@pytest.fixture
def database(kind: tuple[str, str]) -> str:
    return kind[0]


@pytest.fixture
def proxy(
    request: pytest.FixtureRequest, kind: tuple[str, str], settings: Settings, name: str
) -> Iterator[Proxy]:
    """What stands before the server of "locks", and of the alias "leases" for locks as leases."""
    database, of = kind
    with Proxy(request.getfixturevalue(database).port) as found:
        # A name that no thread has a connection by.
        behind = f"{database}-{name}"
        connections.settings[behind] = {**connections.settings[database], "PORT": str(found.port)}
        leases = {"BACKEND": LEASES, "OPTIONS": {"using": behind}}
        settings.DISTLOCK = {**aliases(behind, of), "leases": leases}
        yield found
        locks.close()
        del connections[behind], connections.settings[behind]


@pytest.fixture
def act(kind: tuple[str, str], spawn: Spawn) -> Start:
    """Start another process that runs one of session_acts.py."""

    def start(verb: str, /, **arguments: Any) -> Child:
        return spawn(f"tests.backends.session_acts:{verb}", aliases=aliases(*kind), **arguments)

    return start


def rival(name: str, **wishes: Any) -> Request:
    """Return a request as another process would make it."""
    return backend().request(name, **{"ttl": 30.0, "holder": Holder.current("rival"), **wishes})


def test_the_next_holder_has_it_within_100_ms_of_the_death_of_the_one_before(
    act: Start, database: str, name: str
) -> None:
    delays = []
    for _ in range(3):
        holder = act("hold", name=name, using="locks")
        holder.expect("held")
        taking = start(partial(_take, name))
        eventually(lambda: waiters(database) == 1)

        holder.kill()
        killed = time.monotonic()
        delays.append(taking.result(10) - killed)

    assert min(delays) < 0.1
    assert sorted(delays)[1] < 1


def _take(name: str, using: str = "locks", timeout: float = 60) -> float:
    """Return when the lock was had."""
    with lock(name, using=using, timeout=timeout):
        return time.monotonic()


def test_a_holder_that_is_not_frozen_outlives_its_ttl(name: str, kind: tuple[str, str]) -> None:
    other = rival(name)
    with lock(name, using="locks", ttl=3) as lease:
        never(lambda: isinstance(locks["site0"].try_acquire(other, queued=False), Grant), 3.6)
        lease.check()


def test_killed_waiters_leave_no_ghosts(act: Start, kind: tuple[str, str], name: str) -> None:
    database, _ = kind
    with lock(name, using="locks"):
        dead = [act("wait", name=name, using="locks") for _ in range(3)]
        eventually(lambda: waiters(database) == 3)
        for each in dead:
            each.kill()
        # InnoDB looks after its clients only when it has something to tell them.
        if kind != ("mariadb", "rowlock"):
            eventually(lambda: waiters(database) == 0, 5)

    eventually(lambda: waiters(database) == 0, 5)
    with lock(name, using="locks", timeout=5):
        pass


def test_waiters_are_served_in_the_order_they_came(database: str, name: str) -> None:
    served: list[int] = []

    def wait(number: int) -> None:
        with lock(name, using=SITES[number], timeout=60) as lease:
            served.append(number)
            lease.check()

    waiting = []
    with lock(name, using="locks"):
        for number in range(len(SITES)):
            waiting.append(start(partial(wait, number)))
            eventually(lambda number=number: waiters(database) == number + 1)  # type: ignore[misc]
    for each in waiting:
        each.result(30)

    assert served == list(range(len(SITES)))


@pytest.fixture
def in_slices(kind: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Limit each wait on the server to some seconds, on every alias whose waits are transactions."""

    def limit(seconds: float) -> None:
        for alias in ("locks", *SITES):
            if backend(alias).waiting.look_again is None:
                pytest.skip("a wait keeps nothing on this server")
            limited = replace(backend(alias).waiting, look_again=seconds)
            monkeypatch.setattr(backend(alias), "waiting", limited)

    return limit


def test_a_wait_keeps_no_transaction_for_longer_than_a_slice_and_is_granted_at_the_release(
    in_slices: Callable[[float], None], database: str, name: str
) -> None:
    in_slices(3)
    seen = set[Any]()

    def begun() -> int:
        seen.update(ask(database, WAITING_STATEMENTS[database]))
        return len(seen)

    with lock(name, using="locks"):
        waiting = start(partial(_take, name, "site0"))
        eventually(lambda: begun() > 2, 30)
        in_slices(300)  # so that no end of a slice grants it
        last = begun()
        eventually(lambda: begun() > last, 30)

    waiting.result(20)


def test_an_index_is_built_concurrently_while_others_wait(
    in_slices: Callable[[float], None], database: str, name: str
) -> None:
    if database != "postgres":
        pytest.skip("PostgreSQL waits for snapshots as it builds an index")
    in_slices(1)
    ask(database, f"CREATE TABLE IF NOT EXISTS {INDEXED} AS SELECT 1 AS id")

    with lock(name, using="locks"):
        waiting = start(partial(_take, name, "site0"))
        eventually(lambda: waiters(database) == 1)
        try:
            ask(database, "SET statement_timeout = '15s'")
            ask(database, f"CREATE INDEX CONCURRENTLY ON {INDEXED} (id)")
        finally:
            ask(database, "RESET statement_timeout")
            ask(database, f"DROP TABLE {INDEXED}")
        assert not waiting.done()
    waiting.result(20)


def test_who_has_waited_for_six_slices_is_served_though_others_come_all_the_time(
    in_slices: Callable[[float], None], database: str, name: str
) -> None:
    seconds = {"postgres": 2, "mariadb": 4}[database]  # MariaDB counts whole ones
    in_slices(seconds)
    is_served = threading.Event()

    def come_again(site: str) -> None:
        while not is_served.is_set():
            with lock(name, using=site, timeout=60):
                is_served.wait(0.2 * seconds)

    others = [start(partial(come_again, site)) for site in SITES[:5]]
    eventually(lambda: waiters(database) == len(others) - 1)
    try:
        with lock(name, using="locks", timeout=6 * seconds):
            pass
    finally:
        is_served.set()
    for each in others:
        each.result(60)


@pytest.fixture
def requests() -> Iterator[list[int]]:
    """How many requests each grant of the alias "locks" took."""
    told: list[int] = []

    def note(lease: Lease, requests: int, **facts: Any) -> None:
        if lease.using == "locks":
            told.append(requests)

    lock_acquired.connect(note)
    yield told
    lock_acquired.disconnect(note)


def test_who_has_just_released_a_lock_to_others_waits_for_it_without_a_try(
    database: str, name: str, requests: list[int]
) -> None:
    _pass_on(database, name)
    other = _pass_on(database, name)
    with lock(name, using="locks", timeout=30):
        other.result(20)

    assert requests == [1, 2, 1]


def test_who_wants_a_lock_of_a_caller_that_waits_without_a_try_is_told_of_the_deadlock(
    database: str, name: str
) -> None:
    def want_both() -> None:
        with pytest.raises(LockDeadlock):
            lock(f"{name}:mine", using="site0", timeout=20).acquire()

    with lock(f"{name}:mine", using="locks"):
        _pass_on(database, name)
        other = _pass_on(database, name, want_both)
        with lock(name, using="locks", timeout=30):
            other.result(20)


def test_readers_ask_at_once_again_soon_after_one_of_them_has_waited(
    database: str, name: str
) -> None:
    backend = locks["locks"]
    if not backend.supports_shared:
        pytest.skip("no readers")
    other = _pass_on(database, name)
    with lock(name, using="locks", shared=True, timeout=30):
        other.result(20)
        assert backend.queue.contested.wanted

    with lock(name, using="locks", shared=True, timeout=30):
        pass

    assert not backend.queue.contested.wanted


def _pass_on(database: str, name: str, act: Callable[[], None] = lambda: None) -> Future[Any]:
    """Hold the lock, and release it to another server, which keeps it until this one waits for it, and then does *act*."""
    has_it = threading.Event()

    def keep() -> None:
        with lock(name, using="site0", timeout=30):
            has_it.set()
            eventually(lambda: waiters(database) == 1)
            act()

    with lock(name, using="locks", timeout=30):
        other = start(partial(apart, database, keep))
        eventually(lambda: waiters(database) == 1)
    assert has_it.wait(20)
    return other


def test_a_terminated_session_is_lost_long_before_its_next_renewal(
    database: str, name: str
) -> None:
    told: list[str] = []
    lease = lock(name, using="locks", ttl=60).acquire()
    assert lease
    lease.on_lost(told.append)

    end_session(database, session_number(lease.request.owner))

    eventually(lambda: told, 10)
    with pytest.raises(LockLost):
        lease.check()
    with pytest.raises(LockLost):
        lease.release()
    with lock(name, using="locks", timeout=5):
        pass


def test_a_wait_whose_session_is_terminated_is_an_error_and_holds_nothing(
    database: str, name: str
) -> None:
    with lock(name, using="locks"):
        waiting = start(lock(name, using="site0", timeout=30).acquire)
        eventually(lambda: waiters(database) == 1)
        [session] = backend("site0")._sessions.values()
        end_session(database, session.connection.distlock_number)
        with pytest.raises(LockBackendError):
            waiting.result(10)

    with lock(name, using="locks", timeout=5):
        pass


def test_a_wait_on_a_server_that_hangs_is_an_error_in_time_and_a_lease_is_lost(
    request: pytest.FixtureRequest, kind: tuple[str, str], settings: Settings, name: str
) -> None:
    database, _ = kind
    server = request.getfixturevalue(database)
    settings.DISTLOCK = aliases(*kind, io_timeout=1.0)
    lease = lock(name, using="locks", ttl=3).acquire()
    assert lease
    waiting = start(lambda: lock(name, using="site0", timeout=2).acquire())
    eventually(lambda: waiters(database) == 1)

    with paused(server):
        with pytest.raises(LockBackendError):
            waiting.result(10)
        eventually(lambda: lease.lost)

    # What the server has not cleaned up yet may still hold it.
    with pytest.raises((LockLost, LockNotOwned)):
        lease.release()
    with lock(name, using="locks", timeout=10):
        pass


@pytest.mark.parametrize("using", ["locks", "leases"])
def test_a_server_that_is_cut_off_is_an_error_within_four_seconds(
    proxy: Proxy, name: str, using: str
) -> None:
    lately = lock(name, using=using, timeout=0)

    def ask() -> None:
        proxy.black_hole()
        with pytest.raises(LockBackendError):
            lately.acquire()
        proxy.pass_through()

    # The connections of this one have stood idle.
    with lately:
        pass
    in_time(ask, 1.0, 4.0)


@pytest.mark.parametrize("kind", BOTH[2:], indirect=True)  # PostgreSQL's driver notices earlier
def test_dead_connections_of_some_locks_end_no_others(
    proxy: Proxy, kind: tuple[str, str], name: str, settings: Settings
) -> None:
    set_options(settings, io_timeout=0.5)
    dead = [taken(f"{name}:{number}", using="locks", ttl=9) for number in range(3)]
    proxy.swallow()
    other = taken(f"{name}:other", using="locks", ttl=9)
    before = other.deadline

    eventually(lambda: all(lease.lost for lease in dead), 30)
    eventually(lambda: other.deadline > before or other.lost, 30)

    other.release()


@pytest.mark.parametrize("kind", BOTH[::2], indirect=True)
def test_connections_of_leases_that_a_router_swallows_are_replaced_unseen(
    proxy: Proxy, name: str
) -> None:
    with lock(f"{name}:warm", using="leases"):
        pass
    proxy.swallow()
    with lock(name, using="leases", timeout=0) as lease:
        proxy.swallow()
        lease.extend()
        proxy.swallow()


def test_who_waits_over_tls_is_told_at_once(
    mariadb: MariaDB, certificate: Path, settings: Settings, name: str
) -> None:
    keys = {"ssl-cert": str(certificate), "ssl-key": str(certificate)}
    behind = f"tls-{name}"
    with MariaDB(settings=keys) as server:
        connections.settings[behind] = {
            **connections.settings["mariadb"],
            "PORT": str(server.port),
            "OPTIONS": {"ssl": {"ca": str(certificate)}},
        }
        migrate(behind)
        assert ask(behind, "SHOW STATUS LIKE 'Ssl_cipher'")[0][1]
        for of in KINDS:
            settings.DISTLOCK = aliases(behind, of)
            with lock(name, using="locks"):
                waiting = start(partial(_take, name, "site0"))
                eventually(lambda: waiters(behind) == 1)
            assert waiting.result(10)
            locks.close()
        connections[behind].close()
        del connections[behind], connections.settings[behind]


def test_a_task_that_was_cancelled_while_it_waited_keeps_no_process(
    act: Start, kind: tuple[str, str], name: str
) -> None:
    with lock(name, using="locks"):
        child = act("cancel_and_end", name=name, using="locks")
        eventually(lambda: waiters(kind[0]) == 1)

        child.tell("cancel")

        child.result(20)
        # See above of InnoDB.
        if kind != ("mariadb", "rowlock"):
            eventually(lambda: waiters(kind[0]) == 0)
    with lock(name, using="locks", timeout=5):
        pass


@contextmanager
def impatient_operator(request: pytest.FixtureRequest, database: str) -> Iterator[None]:
    """Have limits for everybody that are shorter than any body."""
    server = request.getfixturevalue(database)
    with server.admin() as admin:
        for setting in LIMITS[database]:
            _execute(admin, setting)
    locks.close()
    connections[database].close()
    try:
        yield
    finally:
        with server.admin() as admin:
            for setting in UNLIMITED[database]:
                _execute(admin, setting)
        locks.close()


def _execute(admin: Any, statement: str) -> None:
    with admin.cursor() as cursor:
        cursor.execute(statement)


_POSTGRES = (
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
)
_MARIADB = {
    "wait_timeout": 28800,
    "idle_transaction_timeout": 0,
    "idle_write_transaction_timeout": 0,
    "idle_readonly_transaction_timeout": 0,
    "innodb_lock_wait_timeout": 50,
    "max_statement_time": 0,
}
LIMITS = {
    "postgres": [f"ALTER ROLE distlock SET {name} = '500ms'" for name in _POSTGRES],
    "mariadb": [f"SET GLOBAL {name} = 1" for name in _MARIADB],
}
UNLIMITED = {
    "postgres": [f"ALTER ROLE distlock RESET {name}" for name in _POSTGRES],
    "mariadb": [f"SET GLOBAL {name} = {usual}" for name, usual in _MARIADB.items()],
}


def test_limits_that_an_operator_sets_for_everybody_end_no_healthy_lock(
    request: pytest.FixtureRequest, database: str, name: str
) -> None:
    with impatient_operator(request, database):
        with lock(name, using="locks", ttl=30) as lease:
            taking = start(partial(_take, name, "site0"))
            never(lambda: lease.lost or taking.done(), 2.5)
            lease.extend()

        assert taking.result(10)


def test_a_greenlet_that_waits_costs_no_other_its_lease(act: Start, name: str) -> None:
    with lock(name, using="locks"):
        beside = act("hold_beside_a_waiter", on_gevent=True, name=name, using="locks")

        assert beside.result() == {"refused": ["LockNotAcquired"], "held": True}


def test_more_locks_than_connections_is_an_error_that_names_the_option(
    kind: tuple[str, str], settings: Settings, name: str
) -> None:
    settings.DISTLOCK = aliases(*kind, max_connections=2)
    with lock(f"{name}:a", using="locks"), lock(f"{name}:b", using="locks"):
        with pytest.raises(LockBackendError, match="max_connections"):
            lock(f"{name}:c", using="locks", timeout=1).acquire()

    with lock(f"{name}:c", using="locks"):
        pass


def test_many_more_threads_than_connections_take_turns(
    kind: tuple[str, str], settings: Settings, name: str
) -> None:
    settings.DISTLOCK = aliases(*kind, max_connections=8, io_timeout=20.0)

    def use(thread: int) -> int:
        taken = 0
        for _ in range(5):
            with lock(f"{name}:{thread}", using="locks", timeout=20) as lease:
                taken += lease.held
        return taken

    assert together(*(partial(use, thread) for thread in range(40))) == [5] * 40


def test_a_lost_lease_that_nobody_releases_takes_no_place_for_ever(
    kind: tuple[str, str], settings: Settings, name: str
) -> None:
    settings.DISTLOCK = aliases(*kind, max_connections=1)
    kept = lock(f"{name}:a", using="locks").acquire()
    assert kept
    end_session(kind[0], session_number(kept.request.owner))
    eventually(lambda: kept.lost, 5)

    with lock(f"{name}:b", using="locks"):
        pass


def test_an_exception_from_outside_as_a_session_is_opened_takes_no_place(
    kind: tuple[str, str], settings: Settings, name: str
) -> None:
    settings.DISTLOCK = aliases(*kind, max_connections=1)

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is SessionBackend._open.__code__:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            backend().try_acquire(rival(name), queued=False)
    finally:
        sys.setprofile(None)

    with lock(name, using="locks", timeout=0):
        pass


@pytest.mark.parametrize("kind", BOTH[:2], indirect=True)
def test_an_exception_from_outside_in_the_request_of_an_extension_ends_the_session(
    kind: tuple[str, str], name: str
) -> None:
    def interrupt(*args: object) -> None:
        raise TimeLimit

    with pytest.raises(LockLost), lock(name, using="locks") as lease:
        (session,) = backend()._sessions.values()
        session.connection.connection.distlock_poll = interrupt
        with pytest.raises(TimeLimit):
            lease.extend()

    with lock(name, using="site1", timeout=5):
        pass


@pytest.mark.usefixtures("is_never_hung")
@pytest.mark.parametrize("is_queued", [False, True], ids=["tries", "waits on the server"])
def test_a_connection_that_breaks_as_it_is_opened_is_opened_once_more(
    proxy: Proxy, name: str, is_queued: bool
) -> None:
    replies = _replies_of_opening(proxy, rival(name))
    assert replies > 1

    for number in range(replies):
        request = rival(f"{name}:{number}")
        locks.close()
        proxy.drop_reply(after=number)
        answer = backend().try_acquire(request, queued=is_queued, left=10)
        assert isinstance(answer, Grant)
        assert backend().release(request) is Release.RELEASED
        assert number or not proxy.replies_to_drop


def _replies_of_opening(proxy: Proxy, request: Request) -> int:
    proxy.drop_reply(0, after=1000)
    session = DatabaseSession(request)
    backend()._open(session, 0, to_wait=False)
    backend()._close(session, is_sound=False)
    return 1000 - proxy.replies_to_pass


def test_an_idle_connection_that_died_is_replaced_unseen(database: str, name: str) -> None:
    with lock(name, using="locks") as lease:
        number = session_number(lease.request.owner)
    end_session(database, number)

    with lock(name, using="locks", timeout=0) as lease:
        lease.check()


def test_a_guard_of_the_old_token_makes_the_lock_busy_and_nothing_hangs(
    database: str, name: str
) -> None:
    late = rival(name)
    with lock(name, using="locks", ttl=60) as lease:
        with transaction.atomic(using=database):
            lease.guard(using=database)
            number = session_number(lease.request.owner)
            apart(database, partial(end_session, database, number))

            began = time.monotonic()
            eventually(lambda: isinstance(locks["site0"].try_acquire(late, queued=False), Busy))
            assert isinstance(locks["site0"].wait_for(late, 0.3), Busy)
            assert time.monotonic() - began < 4
            # What was had without a token was given back.
            assert locks["site1"].probe(late) is None
        granted = locks["site0"].try_acquire(late, queued=False)
        with pytest.raises(LockLost):
            lease.release()

    assert isinstance(granted, Grant)
    assert (granted.token or 0) > lease.checked_token()
    locks["site0"].release(late)


def test_a_wait_that_is_granted_while_a_guard_holds_the_old_token_ends_in_time(
    kind: tuple[str, str], name: str
) -> None:
    names = (f"{name}:{number}" for number in count())

    told_in_time(lambda: _waited_beside_a_guard(kind, next(names)), 2.5, 3.0, tries=3)


def _waited_beside_a_guard(kind: tuple[str, str], name: str) -> float:
    database, of = kind
    lease = lock(name, using="locks", ttl=60).acquire()
    assert lease
    refused: list[LockNotAcquired] = []

    def wait() -> None:
        with pytest.raises(LockNotAcquired) as busy, lock(name, using="site0", timeout=2.5):
            pass
        refused.append(busy.value)

    with transaction.atomic(using=database):
        lease.guard(using=database)
        waiting = start(wait)
        never(waiting.done, GRANTED_AFTER[of])
        number = session_number(lease.request.owner)
        apart(database, partial(end_session, database, number))
        waiting.result(10)
    with pytest.raises(LockLost):
        lease.release()

    return refused[0].waited


#: Seconds of a wait for 2.5 after which the time left for the token matters most.
GRANTED_AFTER = {"advisory": 2.3, "rowlock": 1.5}


def test_a_list_parses_no_records_of_free_locks(
    kind: tuple[str, str], database: str, name: str
) -> None:
    parse, parsed = Occupant.from_json.__func__, []  # type: ignore[attr-defined]  # of a class method

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is parse.__code__:
            parsed.append(frame)

    rows = FencingCounter.objects.using(database)
    with lock(name, using="locks") as lease:
        key = lease.request.key
        held = rows.get(method_name=key)
        rows.bulk_create(
            FencingCounter(method_name=f"{key}:{n}", value=held.value - n, holder=held.holder)
            for n in range(1, 201)
        )
        sys.setprofile(note)
        try:
            found = [each.name for each in backend().held()]
        finally:
            sys.setprofile(None)

    assert name in found
    assert len(parsed) < 20


def test_the_time_that_the_server_lets_us_wait_is_no_part_of_the_ttl(
    database: str, name: str
) -> None:
    def wait() -> float:
        with lock(name, using="site0", ttl=10, timeout=20, renew=False) as lease:
            return lease.remaining

    with lock(name, using="locks"):
        waiting = start(wait)
        never(waiting.done, 3.5)

    # One that counted the wait would have 6.5 seconds left.
    assert waiting.result(10) > 7


@pytest.mark.parametrize("shared", [False, True], ids=["writer", "readers"])
def test_a_session_that_has_only_asked_is_neither_a_holder_nor_a_waiter(
    kind: tuple[str, str], name: str, shared: bool
) -> None:
    database, _ = kind
    if database != "postgres":
        pytest.skip("its sessions have no labels")
    locked = backend()
    holders = [rival(name, shared=shared) for _ in range(1 + shared)]
    for holder in holders:
        assert isinstance(locked.try_acquire(holder, queued=False), Grant)
    assert locked.extend(holders) == [True] * len(holders)
    waits = rival(name)
    waiter = start(lambda: backend("site0").wait_for(waits, 20))
    eventually(lambda: waiters(database) == 1)

    # A waiter has its label before it blocks, and a refused one until its ROLLBACK.
    with connections[database].cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"SET LOCAL application_name = '{DatabaseSession(rival(name)).label}'")
        listed = [held for held in backend("site1").held() if held.name == name]
        cursor.execute("ROLLBACK")

    assert {held.owner_digest for held in listed} == {digest(one.owner) for one in holders}
    assert [held.waiters for held in listed] == [1] * len(holders)
    for holder in holders:
        locked.release(holder)
    assert isinstance(waiter.result(10), Grant)
    backend("site0").release(waits)


def test_a_reader_that_died_is_listed_no_more_and_leaves_nothing(
    kind: tuple[str, str], database: str, name: str
) -> None:
    locked = backend()
    if not locked.supports_shared:
        pytest.skip("it has no shared locks")
    stays, dies = rival(name, shared=True), rival(name, shared=True)
    for reader in (stays, dies):
        assert isinstance(locked.try_acquire(reader, queued=False), Grant)
    written = FencingCounter.objects.using(database).filter(method_name__startswith="reader|")
    assert written.filter(method_name__endswith=digest(dies.owner)).exists()

    end_session(database, session_number(dies.owner))

    def listed() -> list[str]:
        return [held.owner_digest for held in locked.held() if held.key == stays.key]

    eventually(lambda: listed() == [digest(stays.owner)])
    locked.release(dies)
    assert not written.filter(method_name__endswith=digest(dies.owner)).exists()
    assert locked.release(stays) is Release.RELEASED
    assert not written.filter(method_name__endswith=digest(stays.owner)).exists()
