"""Redlock: what becomes of it when servers are down, hang, restart or disagree."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import selectors
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import freezegun
import pytest
from django.core.checks import Error, Warning as CheckWarning

from django_distlock import (
    InvalidLockBackend,
    LockBackendError,
    LockDeadlock,
    LockLost,
    LockOutcomeUnknown,
    lock,
    locks,
)
from django_distlock.backends.redis import RedisBackend
from django_distlock.backends.redis.connections import ask
from django_distlock.backends.redlock import (
    RedlockBackend,
    backend as redlock_backend,
    servers as redlock_servers,
)
from django_distlock.backends.redlock.servers import DEBT, Servers
from django_distlock.backends.redlock.votes import Count, Question
from django_distlock.conf import BackendSettings
from django_distlock.engine.bells import ThreadBell
from django_distlock.engine.values import Busy, Grant, Release, Request
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from django_distlock.handler import make_backend
from tests.contract.crew import start
from tests.contract.profiles import PATIENT_REDLOCK as PATIENT
from tests.fixtures.certificate import tls_server
from tests.fixtures.environment import free_port
from tests.fixtures.eventually import aeventually, eventually, never
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import Redis

from .redis_tools import connections_to

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings


pytestmark = [pytest.mark.server, pytest.mark.caches]

REDLOCK = "django_distlock.backends.redlock.RedlockBackend"
HURRIED = {"server_timeout": 0.3, "connect_timeout": 0.6, "restart_guard": False}
#: The longest ttl, in seconds, of the tests of restarts.
GUARD = 4.0
HARMS = {"down": Redis.kill, "hanging": Redis.pause}
Make = Callable[..., RedlockBackend]


@pytest.fixture(scope="module")
def five() -> Iterator[list[Redis]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Redis()) for _ in range(5)]


@pytest.fixture
def servers(five: list[Redis]) -> Iterator[list[Redis]]:
    """Five servers that the test may kill and freeze."""
    yield five
    for server in five:
        if server.process is None:
            server.start()
        server.resume()


@pytest.fixture
def make(servers: list[Redis]) -> Iterator[Make]:
    """Makes backends of these servers, or of the *urls* given, as of as many processes."""
    made: list[RedlockBackend] = []

    def make(urls: list[str] | None = None, *, ttl: float = 30.0, **options: Any) -> RedlockBackend:
        made.append(_made(urls or [_url(each) for each in servers], ttl, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def using(servers: list[Redis], settings: Settings) -> Callable[..., str]:
    """Gives DISTLOCK an alias of these servers, with further OPTIONS, and returns its name."""

    def using(urls: list[str] | None = None, **options: Any) -> str:
        named = {"servers": urls or [_url(each) for each in servers], **HURRIED, **options}
        settings.DISTLOCK = {"redlock": {"BACKEND": REDLOCK, "OPTIONS": named}}
        return "redlock"

    return using


def _made(urls: list[str], ttl: float = 30.0, **options: Any) -> RedlockBackend:
    named = {"servers": urls, **HURRIED, **options}
    return RedlockBackend(BackendSettings("made", ttl=ttl, options=named))


def _url(server: Redis | Proxy) -> str:
    return f"redis://127.0.0.1:{server.port}"


def _record(name: str) -> str:
    return f"distlock:{{redlock||{name}}}"


def _clients(servers: list[Redis]) -> Iterator[Any]:
    """Give a client of each server, which is closed after it."""
    for server in servers:
        with server.client() as client:
            yield client


def _voters(servers: list[Redis], name: str) -> int:
    """Return how many of the servers that answer have the lock in somebody's hands."""
    found = 0
    for client in _clients(servers):
        since, lasts, *_ = (client.hget(_record(name), "lease") or "0 0").split()
        found += int(since) + int(lasts) > time.time() * 1e6
    return found


def _all_voted(servers: list[Redis], name: str) -> None:
    """A majority decides; the others are asked in passing, by other threads."""
    eventually(
        lambda: _voters(servers, name) == len(servers), what="who came late has voted as well"
    )


def _connecting_to(proxies: list[Proxy]) -> list[str]:
    """Return the names of the threads that connect to one of these."""
    ends = tuple(f"at {proxy.host}:{proxy.port}" for proxy in proxies)
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.endswith(ends)]


def _forget(servers: list[Redis]) -> None:
    for client in _clients(servers):
        client.flushall()


def _request(backend: RedlockBackend | RedisBackend, name: str, ttl: float = 20.0) -> Request:
    return backend.request(name, ttl=ttl, holder=Holder.current())


def _take(
    backend: RedlockBackend, name: str, ttl: float = 20.0, holder: Holder | None = None
) -> Request:
    request = backend.request(name, ttl=ttl, holder=holder or Holder.current())
    assert isinstance(backend.try_acquire(request, queued=False), Grant)
    return request


# Servers that are down, or hang.


@pytest.mark.parametrize("harm", HARMS)
def test_it_works_with_a_minority_down_or_hanging_and_waits_for_none_of_them(
    servers: list[Redis], using: Callable[..., str], name: str, harm: str
) -> None:
    for server in servers[:2]:
        HARMS[harm](server)
    alias, began = using(**PATIENT), time.monotonic()

    with lock(name, using=alias) as lease:
        lease.extend()
        assert not lock(name, using=alias, reentrant=False).acquire(timeout=0)
        lease.check()

    assert time.monotonic() - began < 3
    eventually(lambda: _voters(servers[2:], name) == 0, what="all have given it back")


@pytest.mark.parametrize("harm", HARMS)
def test_with_a_majority_gone_it_is_an_error_with_a_cause_for_each_and_leaves_nothing(
    servers: list[Redis], using: Callable[..., str], name: str, harm: str
) -> None:
    for server in servers[:3]:
        HARMS[harm](server)
    alias, began = using(), time.monotonic()

    with pytest.raises(LockBackendError) as caught:
        lock(name, using=alias).acquire(timeout=5)

    assert time.monotonic() - began < 3
    assert list(caught.value.causes) == [f"Redis at 127.0.0.1:{each.port}" for each in servers]
    assert "2 of 5 Redis servers can be used, 3 must be" in str(caught.value)
    eventually(lambda: _voters(servers[3:], name) == 0, what="what two servers granted is freed")


def test_a_refusal_waits_for_no_server_that_hangs(
    servers: list[Redis], make: Make, name: str
) -> None:
    _take(make(**PATIENT), name)
    _all_voted(servers, name)
    with ThreadPoolExecutor(1) as pool:
        other = make(server_timeout=60.0)
        _warm_up(other, name)
        for server in servers[:2]:
            server.pause()

        answer = pool.submit(other.try_acquire, _request(other, name), queued=False)

        assert isinstance(answer.result(20), Busy)


async def test_tasks_go_on_with_a_minority_that_hangs(
    servers: list[Redis], using: Callable[..., str], name: str
) -> None:
    alias = using(**PATIENT)
    async with lock(name, using=alias):
        pass
    servers[0].pause()
    servers[1].kill()
    began = time.monotonic()

    for _ in range(5):
        async with lock(name, using=alias) as lease:
            await lease.aextend()
            assert not await lock(name, using=alias, reentrant=False).aacquire(timeout=0)

    assert time.monotonic() - began < 3


# Votes that are split, late, or lost.


def test_a_lock_whose_votes_are_split_is_busy_and_nobody_has_it(
    servers: list[Redis], make: Make, name: str
) -> None:
    halves = [make([_url(each) for each in half], **PATIENT) for half in (servers[:3], servers[2:])]
    _take(halves[0], name)
    _all_voted(servers[:3], name)
    backend = make(**PATIENT)
    _forget(servers[2:3])
    _take(halves[1], name, holder=Holder("elsewhere", 1, "other"))
    _all_voted(servers[2:], name)

    answer = backend.try_acquire(_request(backend, name), queued=False)

    assert isinstance(answer, Busy)
    _forget(servers[4:])
    assert backend.try_acquire(_request(backend, name), queued=False) == Busy()
    eventually(lambda: _voters(servers[4:], name) == 0, what="the vote it got is given back")


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_vote_whose_way_back_is_cut_is_given_back_later(
    servers: list[Redis], make: Make, name: str, is_heard: bool
) -> None:
    _take(make([_url(each) for each in servers[2:]]), name)
    _all_voted(servers[2:], name)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        proxies = [stack.enter_context(Proxy(server.port)) for server in servers]
        backend = make([_url(proxy) for proxy in proxies], **PATIENT)
        _warm_up(backend, name)
        _take(backend, f"{name}-before")  # so that each server knows the script
        _all_voted(servers, f"{name}-before")
        way = backend._servers._connections[0]
        for proxy in proxies[2:]:
            proxy.hold()
        received = proxies[0].bytes_received
        if not is_heard:
            proxies[0].drop_reply()
            proxies[0].aim_at(free_port())  # a new connection would give the vote back at once
        answer = pool.submit(backend.try_acquire, _request(backend, name), queued=False)
        eventually(lambda: _voters(servers[:2], name) == 2)
        if is_heard:
            eventually(lambda: proxies[0].bytes_received > received and not way._sent)
        else:
            eventually(lambda: way._socket is None, what="its vote is lost")
        proxies[0].cut()

        for proxy in proxies[2:]:
            proxy.pass_through()
        assert isinstance(answer.result(10), Busy)
        assert _voters(servers[:1], name) == 1
        proxies[0].aim_at(servers[0].port)
        proxies[0].pass_through()

        eventually(lambda: _voters(servers[:2], name) == 0, what="the vote is given back")
        backend.close()


def _noted(servers: list[Redis], name: str) -> int:
    """Return how many of the servers have noted an owner that gave the lock back for good."""
    return sum(client.hexists(_record(name), "revoked") for client in _clients(servers))


def test_votes_that_arrive_late_are_given_back(
    servers: list[Redis],
    using: Callable[..., str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However slow the machine is: a new connection would not send the release behind these votes.
    monkeypatch.setattr(redlock_servers, "DEBT_SECONDS", 60.0)
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.port)) for server in servers]
        backend = cast(RedlockBackend, locks[using([_url(proxy) for proxy in proxies])])
        _warm_up(backend, name)
        for proxy in proxies[:3]:
            proxy.hold()
        with pytest.raises(LockOutcomeUnknown):
            lock(name, using="redlock").acquire(timeout=5)

        for proxy in proxies[:3]:
            proxy.pass_through()

        eventually(lambda: _noted(servers, name) == 5, what="the late requests have arrived")
        eventually(lambda: _voters(servers, name) == 0)
        _take(backend, name)
        locks.close()


def _warm_up(backend: RedlockBackend, name: str) -> None:
    """Return once *backend* has a connection to each server, and all their answers."""
    ways = backend._servers._connections

    def is_warm() -> bool:
        if not all(each._socket for each in ways):
            with suppress(LockBackendError):
                backend.probe(_request(backend, name, ttl=1.0))
        return all(each._socket and not each._sent for each in ways)

    eventually(is_warm)


def _saying(word: str, within: float, connecting: float = 5.0) -> Question:
    """Return a question to the first server, which answers with this *word*."""
    return Question(
        {0: ask(("ECHO", word))},
        lambda count: bool(count.answers),
        within,
        connecting,
    )


def _heard(count: Count) -> object:
    """Return what the first server answered; LookupError, which tells why, if it did not."""
    if 0 in count.failures:
        raise LookupError(count.failures[0])
    return count.answers[0]


@pytest.fixture
def asking(make: Make) -> Servers:
    """The way to the servers, with a connection to the first one."""
    found = make()._servers
    assert _heard(found.ask(_saying("warm", 5))) == b"warm"
    return found


def test_an_answer_that_nobody_waits_for_any_more_is_not_the_next_one(
    servers: list[Redis], asking: Servers
) -> None:
    servers[0].pause()
    with pytest.raises(LookupError, match=r"it did not answer within 0.05 s"):
        _heard(asking.ask(_saying("first", 0.05)))
    servers[0].resume()

    assert _heard(asking.ask(_saying("second", 5))) == b"second"


def test_threads_and_connections_are_there_when_needed_and_gone_after_the_close_or_the_backend(
    servers: list[Redis], name: str
) -> None:
    def threads() -> list[threading.Thread]:
        own = [each for each in threading.enumerate() if each not in known]
        kinds = ("distlock-redlock", "distlock-connect")
        return [each for each in own if each.name.startswith(kinds)]

    known, before = threading.enumerate(), connections_to(servers)
    backend = _made([_url(each) for each in servers])
    assert not threads()

    _take(backend, name)
    assert threads()
    assert connections_to(servers) - before
    backend.close()
    eventually(lambda: not threads() and not connections_to(servers) - before)

    _take(backend, f"{name}:again")
    assert connections_to(servers) - before
    del backend
    gc.collect()
    eventually(lambda: not threads() and not connections_to(servers) - before)


def test_a_question_that_comes_while_the_thread_ends_keeps_its_connections(
    servers: list[Redis], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ending, may_end = threading.Event(), threading.Event()

    class LateSelector(selectors.PollSelector):
        def close(self) -> None:
            is_ending.set()
            may_end.wait(10)
            super().close()

    before = connections_to(servers)
    monkeypatch.setattr("django_distlock.backends.redlock.servers.new_selector", LateSelector)
    backend = _made([_url(each) for each in servers])
    _take(backend, name)
    backend.close()
    assert is_ending.wait(10)

    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(_take, backend, f"{name}:again")
        eventually(lambda: backend._servers._jobs)
        may_end.set()
        taking.result(20)

    never(lambda: not connections_to(servers) - before, 0.3)
    backend.close()


async def test_a_task_cuts_no_connection_under_questions_that_others_wait_for(
    servers: list[Redis], asking: Servers
) -> None:
    words = [str(number) for number in range(2 * DEBT)]
    servers[0].pause()
    asked = [asyncio.create_task(asking.aask(_saying(word, 5))) for word in words]
    await aeventually(lambda: len(asking._connections[0]._sent) == len(words))

    late = asyncio.create_task(asking.aask(_saying("late", 5)))
    await aeventually(lambda: len(asking._connections[0]._sent) == len(words) + 1)

    servers[0].resume()
    heard = await asyncio.gather(*asked, late)
    assert [_heard(each) for each in heard] == [word.encode() for word in [*words, "late"]]


async def test_a_task_asks_a_silent_server_by_a_new_connection(
    servers: list[Redis], asking: Servers
) -> None:
    servers[0].pause()
    questions = [asking.aask(_saying("hello", 0.05)) for _ in range(DEBT + 1)]
    lost = await asyncio.gather(*questions)
    assert {count.failures[0] for count in lost} == {"it did not answer within 0.05 s"}

    with pytest.raises(LookupError, match=r"no connection to it within 0.05 s"):
        _heard(await asking.aask(_saying("again", 5, connecting=0.05)))

    servers[0].resume()
    assert _heard(await asking.aask(_saying("again", 5))) == b"again"


def test_a_task_gives_a_silent_server_up_while_the_tests_stop_the_clock(
    servers: list[Redis], asking: Servers
) -> None:
    async def ask() -> None:
        servers[0].pause()
        with pytest.raises(LookupError, match=r"it did not answer within 0.05 s"):
            _heard(await asking.aask(_saying("hello", 0.05)))

    with freezegun.freeze_time("2030-01-01"):
        start(lambda: asyncio.run(ask())).result(10)


async def test_answers_find_their_questions_after_all_tasks_were_cancelled(
    servers: list[Redis], asking: Servers
) -> None:
    servers[0].pause()
    lost = asyncio.create_task(asking.aask(_saying("lost", 5)))
    await aeventually(lambda: asking._connections[0]._sent)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.wait(others)
    assert lost.cancelled()

    servers[0].resume()
    assert _heard(await asking.aask(_saying("first", 1))) == b"first"
    assert _heard(await asking.aask(_saying("second", 1))) == b"second"


def test_a_process_at_its_limit_of_open_files_releases(make: Make, name: str) -> None:
    backend = make()
    request = _request(backend, name)
    assert isinstance(backend.try_acquire(request, queued=False), Grant)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)

    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        answer = backend.release(request)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert answer is Release.RELEASED


def test_a_request_overtaken_by_its_own_release_is_refused(
    servers: list[Redis], make: Make, name: str
) -> None:
    backend = make(**PATIENT)
    request = _request(backend, name)

    assert backend.release(request) is Release.GONE
    eventually(lambda: _noted(servers, name) == 5)

    assert backend.try_acquire(request, queued=False) == Busy()
    assert _voters(servers, name) == 0


def test_a_token_is_raised_where_its_owner_holds_the_lock_and_lowers_none(
    servers: list[Redis], name: str
) -> None:
    one = RedisBackend(BackendSettings("one", options={"location": _url(servers[0])}))
    held, stranger = _request(one, name), _request(one, name)
    first = one.try_acquire(held, queued=False)
    assert isinstance(first, Grant)
    assert first.token
    raised = partial(_raised, one)

    assert not raised(stranger, first.token + 9_000_000_000)
    assert raised(held, first.token - 9)
    assert [each.token for each in one.held(held.key)] == [first.token]
    assert raised(held, first.token + 8_000_000_000)
    one.release(held)

    second = one.try_acquire(stranger, queued=False)
    assert isinstance(second, Grant)
    assert second.token == first.token + 8_000_000_001
    one.close()


def _raised(backend: RedisBackend, request: Request, token: int) -> bool:
    return backend._run(backend._verbs.raise_token(request, token))


def test_a_lock_that_a_minority_has_lost_is_held_and_of_a_majority_it_is_lost(
    servers: list[Redis], using: Callable[..., str], name: str
) -> None:
    alias = using(**PATIENT)
    with lock(name, using=alias, renew=False) as lease:
        _all_voted(servers, name)
        _forget(servers[:2])
        lease.extend()

    for verb in ("extend", "release"):
        lost = lock(f"{name}:{verb}", using=alias, renew=False).acquire()
        assert lost
        _all_voted(servers, f"{name}:{verb}")
        _forget(servers[:3])

        with pytest.raises(LockLost):
            getattr(lost, verb)()

        assert _voters(servers[:3], f"{name}:{verb}") == 0


def test_a_lease_of_which_too_few_servers_are_left_keeps_no_other_from_being_renewed(
    servers: list[Redis], using: Callable[..., str], name: str
) -> None:
    alias = using(**PATIENT)
    _warm_up(cast(RedlockBackend, locks[alias]), name)
    # At once, so that one request renews both.
    kept, endangered = (
        lock(f"{name}:{each}", using=alias, ttl=3).acquire() for each in ("kept", "endangered")
    )
    assert kept
    assert endangered
    for lease in (kept, endangered):
        _all_voted(servers, lease.name)
    for client in _clients(servers[3:]):
        client.delete(_record(endangered.name))

    servers[0].kill()

    eventually(lambda: endangered.lost, what="two of five have it, and two have not")
    kept.check()
    kept.release()


# Waiters, and how they are woken.


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not woken sleeps for so long that it is seen."""
    monkeypatch.setattr(redlock_backend, "PAUSE", (15.0, 15.0))


def _places(servers: list[Redis], name: str) -> list[int]:
    """Return how many wait at each of the servers."""
    return [client.zcard(f"{_record(name)}:q") for client in _clients(servers)]


def _wait_for(using: str, name: str, timeout: float = 30.0) -> float:
    """Return when the lock was to be had."""
    with lock(name, using=using, timeout=timeout):
        return time.monotonic()


def _made_patient(servers: list[Redis], name: str, waiters: int) -> None:
    """Return once so many waiters stand in all queues, where they are not passed over while they sleep."""
    eventually(lambda: _places(servers, name) == [waiters] * len(servers), what="all are queued")
    for client in _clients(servers):
        known = client.zrange(f"{_record(name)}:q", 0, -1)
        alive = {waiter: 2e15 for waiter in known if "gone" not in waiter}
        client.zadd(f"{_record(name)}:a", alive)


def _woken_after(
    servers: list[Redis], using: str, name: str, other: RedlockBackend, *, ghosts: int = 0
) -> float:
    """Have somebody wait for what *other* holds; return the seconds from its release to the grant.

    *ghosts*: how many stand in each queue whose process is gone.
    """
    held = _take(other, name)
    _all_voted(servers, name)
    for client in _clients(servers):
        client.zremrangebyrank(f"{_record(name)}:q", ghosts, -1)
    waiter = start(lambda: _wait_for(using, name))
    one_more = ghosts + 1
    _made_patient(servers, name, one_more)
    released = time.monotonic()
    assert other.release(held) is Release.RELEASED
    delay = waiter.result(20) - released
    # A server that was asked before it heard of the release has the waiter in its queue until its patience ends.
    majority = len(servers) // 2 + 1
    eventually(lambda: _places(servers, name).count(one_more - 1) >= majority, what="it left")
    return delay


@pytest.mark.usefixtures("long_pauses")
def test_a_release_wakes_a_waiter_also_after_its_connections_were_cut(
    servers: list[Redis], using: Callable[..., str], make: Make, name: str
) -> None:
    alias, other = using(**PATIENT), make(**PATIENT)
    delays = [_woken_after(servers, alias, name, other) for _ in range(3)]
    assert statistics.median(delays) < 1

    links = [
        link
        for backend in (other, cast(RedlockBackend, locks[alias]))
        for link in backend._servers._connections
    ]
    cut = [link._socket for link in links]
    for client in _clients(servers):
        client.client_kill_filter(_type="normal", skipme=True)
    # A request that meets a closed connection is not sent again if the other servers decide.
    eventually(
        lambda: (
            not any(link._socket is each for link, each in zip(links, cut, strict=True) if each)
        ),
        what="the connections are closed",
    )

    assert _woken_after(servers, alias, name, other) < 5


@pytest.mark.usefixtures("long_pauses")
def test_waiters_whose_process_is_gone_are_passed_over(
    servers: list[Redis], using: Callable[..., str], make: Make, name: str
) -> None:
    for client in _clients(servers):
        client.zadd(f"{_record(name)}:q", {f"xgone{number}": number for number in range(3)})
    alias, other = using(**PATIENT), make(**PATIENT)

    assert _woken_after(servers, alias, name, other, ghosts=3) < 5


@pytest.mark.usefixtures("long_pauses")
def test_a_vote_that_is_given_back_wakes_nobody(
    servers: list[Redis], using: Callable[..., str], make: Make, name: str
) -> None:
    alias, other = using(**PATIENT), make(**PATIENT)
    held = _take(other, name)
    _all_voted(servers, name)
    waiter = start(lambda: _wait_for(alias, name))
    _made_patient(servers, name, 1)
    with servers[0].client() as client:
        client.delete(_record(name))

    assert isinstance(other.try_acquire(_request(other, name), queued=False), Busy)

    never(lambda: _places(servers[:1], name) != [1], 0.5)
    other.release(held)
    waiter.result(10)


@pytest.mark.usefixtures("long_pauses")
def test_a_waiter_that_gives_up_leaves_the_queues_and_wakes_the_next_one(
    servers: list[Redis], using: Callable[..., str], make: Make, name: str
) -> None:
    alias, first = using(**PATIENT), make(**PATIENT)
    held = _take(first, name)
    _all_voted(servers, name)
    gives_up = _request(first, name)
    assert isinstance(first.try_acquire(gives_up, queued=True), Busy)
    eventually(lambda: _places(servers, name) == [1] * 5, what="it stands first")
    rung = start(partial(first.sleep, gives_up, ThreadBell(), 60.0))
    waiter = start(lambda: _wait_for(alias, name))
    _made_patient(servers, name, 2)
    first.release(held)
    rung.result(10)

    first.dequeue(gives_up)

    waiter.result(10)
    eventually(lambda: not any(_places(servers, name)))


def test_a_waiter_that_may_not_listen_asks_again(
    servers: list[Redis], using: Callable[..., str], make: Make, name: str
) -> None:
    for client in _clients(servers):
        client.execute_command(
            "ACL", "SETUSER", "deaf", "reset", "on", ">hush", "~*", "+@all", "-@blocking"
        )
    urls = [_url(server).replace("//", "//deaf:hush@") for server in servers]
    alias, other = using(urls, **PATIENT), make(urls, **PATIENT)

    assert _woken_after(servers, alias, name, other) < 5


# Servers that restart without their data.


def _let_a_second_one_in(
    servers: list[Redis], name: str, first: RedlockBackend, second: RedlockBackend, up: int
) -> bool:
    """Have *first* hold with three votes, one of which is lost by a restart; tell if *second* gets the lock.

    The other two servers have been *up* for so many seconds by then.
    """
    for server in servers[3:]:
        server.kill()
    held = _take(first, name, ttl=GUARD)
    for server in servers[3:]:
        server.start()
    while not all(_uptime(each) >= up for each in servers[3:]):
        assert first.extend([held]) == [True]
    start = clock.lease_time()
    assert first.extend([held]) == [True]
    servers[2].restart()
    _warm_up(second, f"{name}:other")
    got_it = isinstance(second.try_acquire(_request(second, name, ttl=GUARD), queued=False), Grant)
    assert clock.lease_time() < start + GUARD - clock.drift(GUARD), "the first one's lease is over"
    return got_it


def _uptime(server: Redis) -> int:
    return int(server.info("server")["uptime_in_seconds"])


def test_without_the_guard_one_restart_makes_two_majorities(
    servers: list[Redis], make: Make, name: str
) -> None:
    assert _let_a_second_one_in(servers, name, make(**PATIENT), make(**PATIENT), up=0)


def test_the_guard_keeps_a_restart_from_making_two_majorities(
    servers: list[Redis], make: Make, name: str
) -> None:
    guarded = {**PATIENT, "restart_guard": True, "longest_ttl": GUARD}
    eventually(lambda: all(_uptime(each) >= 5 for each in servers), 30)

    assert not _let_a_second_one_in(servers, name, make(**guarded), make(**guarded), up=5)


def test_servers_that_have_just_started_grant_nothing_and_say_how_long(
    make: Make, name: str
) -> None:
    with ExitStack() as stack:
        young = [stack.enter_context(Redis()) for _ in range(3)]
        backend = make([_url(each) for each in young], **{**PATIENT, "restart_guard": True})

        with pytest.raises(LockBackendError) as caught:
            backend.try_acquire(_request(backend, name), queued=False)

        causes = list(caught.value.causes.values())
        told = [
            re.fullmatch(r"it started lately, and grants nothing for (\d+) s more", each)
            for each in causes
        ]
        left = [int(each[1]) for each in told if each]
        assert len(left) >= 2
        assert all(25 <= each <= 31 for each in left)
        backend.close()


@pytest.mark.parametrize("is_durable", [True, False])
def test_the_guard_is_off_for_servers_that_say_and_show_that_they_are_durable(
    make: Make, name: str, is_durable: bool
) -> None:
    disk = {"appendonly": "yes", "appendfsync": "always"} if is_durable else {}
    with ExitStack() as stack:
        young = [stack.enter_context(Redis(settings=disk)) for _ in range(3)]
        options = {**PATIENT, "restart_guard": True, "durable": True}
        backend = make([_url(each) for each in young], **options)
        request = _request(backend, name)

        if is_durable:
            assert isinstance(backend.try_acquire(request, queued=False), Grant)
            for server in young:
                server.restart()
            assert backend.probe(request) is not None
        else:
            with pytest.raises(LockBackendError):
                backend.try_acquire(request, queued=False)
        backend.close()


def test_a_ttl_longer_than_what_the_guard_waits_for_is_refused(make: Make, name: str) -> None:
    backend = make(restart_guard=True, longest_ttl=10)

    with pytest.raises(ValueError, match="a ttl of 20 seconds is more than 10 seconds"):
        _request(backend, name, ttl=20.0)


# Fencing.


def test_a_token_is_higher_than_the_last_though_that_came_from_a_clock_far_ahead(
    servers: list[Redis], make: Make, name: str
) -> None:
    backend = make(fencing=True, **PATIENT)
    ahead = time.time_ns() // 1000 + 3_600_000_000
    with servers[0].client() as client:
        client.hset(_record(name), "token", ahead)
    for server in servers[3:]:
        server.kill()
    first = backend.try_acquire(request := _request(backend, name), queued=False)
    assert isinstance(first, Grant)
    assert first.token == ahead + 1
    assert backend.try_acquire(request, queued=False) == first
    backend.release(request)
    for server in servers[3:]:
        server.start()
    servers[0].kill()

    second = backend.try_acquire(_request(backend, name), queued=False)

    assert isinstance(second, Grant)
    assert (second.token or 0) > ahead + 1


def test_who_asks_again_never_gets_a_lower_token(
    servers: list[Redis], make: Make, name: str
) -> None:
    """A server that was late the first time may raise it: its counter is ahead."""
    backend = make(fencing=True, **PATIENT)
    _warm_up(backend, f"{name}:warm")
    with servers[0].client() as client:
        client.hset(_record(name), "token", time.time_ns() // 1000 + 3_600_000_000)
    request = _request(backend, name)

    # Whoever answers first.
    answers = [backend.try_acquire(request, queued=False) for _ in range(6)]
    tokens = [answer.token or 0 for answer in answers if isinstance(answer, Grant)]

    assert len(tokens) == 6
    assert tokens == sorted(tokens)


def test_a_majority_that_goes_between_the_two_rounds_is_an_error_and_no_busy_lock(
    servers: list[Redis], make: Make, name: str
) -> None:
    with Proxy(servers[2].port) as proxy:
        urls = [_url(each) for each in servers]
        urls[2] = _url(proxy)
        backend = make(urls, fencing=True, **PATIENT)
        _warm_up(backend, name)
        _take(backend, f"{name}:before")  # so that the servers know the scripts
        _all_voted(servers, f"{name}:before")
        _warm_up(backend, name)
        for server in servers[3:]:
            server.kill()
        proxy.delay(0.2)  # so that these two have failed before the third vote comes
        proxy.drop_reply(after=1)
        proxy.aim_at(free_port())

        with pytest.raises(LockBackendError, match="2 of 5 Redis servers can be used"):
            backend.try_acquire(_request(backend, name), queued=False)

        assert proxy.replies_to_drop == 0
        backend.close()


# What it costs.


@pytest.mark.parametrize(("fencing", "asked"), [(False, 2), (True, 3)])
def test_a_lock_that_is_free_takes_one_question_and_one_to_give_it_back(
    servers: list[Redis], make: Make, name: str, fencing: bool, asked: int
) -> None:
    backend = make(fencing=fencing, **PATIENT)
    for number in range(2):  # the first time, scripts are loaded
        _warm_up(backend, f"{name}:warm")
        backend.release(_take(backend, f"{name}:{number}"))
    _warm_up(backend, f"{name}:warm")
    with servers[0].monitor() as monitor:
        backend.release(_take(backend, name))
        eventually(lambda: monitor.about(_record(name)) == ["EVALSHA"] * asked)


# Finalizers that run in the thread that talks to the servers.


class _Finalizer:
    def __init__(self, work: Callable[[], object], raised: list[Exception]) -> None:
        self._work, self._raised = work, raised

    def __del__(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self._raised.append(error)


def _finalize_in_the_thread(alias: str, work: Callable[[], object]) -> list[Exception]:
    """Have a finalizer do *work* in the thread that talks to the servers; return what it raises, later."""
    raised = list[Exception]()
    box = [_Finalizer(work, raised)]
    cast(RedlockBackend, locks[alias])._servers.submit(box.clear)
    return raised


def _acquire_in_a_task(name: str, using: str) -> None:
    async def work() -> None:
        async with lock(name, using=using):
            pass

    asyncio.run(work())


def _acquire(name: str, using: str) -> None:
    with lock(name, using=using):
        pass


@pytest.mark.timeout(60)
@pytest.mark.parametrize("acquire", [_acquire, _acquire_in_a_task])
def test_a_finalizer_in_the_thread_is_refused_and_other_locks_go_on(
    using: Callable[..., str], name: str, acquire: Callable[[str, str], None]
) -> None:
    alias = using()
    raised = _finalize_in_the_thread(alias, lambda: acquire(name, alias))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(_acquire, f"{name}:other", alias).result(timeout=5)
    [error] = eventually(lambda: raised)
    assert isinstance(error, LockBackendError)
    assert "let another thread do it" in str(error)
    _acquire(name, alias)  # nothing of it is left


@pytest.mark.timeout(60)
def test_a_finalizer_in_the_thread_does_not_wait_for_a_lock_of_its_process(
    using: Callable[..., str], name: str
) -> None:
    alias = using()
    with lock(name, using=alias):
        waiting = partial(lock(name, using=alias).acquire, timeout=None)
        raised = _finalize_in_the_thread(alias, waiting)

        [error] = eventually(lambda: raised)
        assert isinstance(error, LockDeadlock)


def test_an_answer_that_the_thread_does_not_tell_is_not_waited_for_without_end(
    make: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    _warm_up(backend, f"{name}:warm")
    goes_on = threading.Event()
    backend._servers.submit(goes_on.wait)
    monkeypatch.setattr(redlock_servers, "LATE", 0.1)

    with pytest.raises(LockOutcomeUnknown, match="held up"):
        backend.try_acquire(_request(backend, name), queued=False)

    goes_on.set()


def test_a_pause_of_this_process_is_no_failure_of_the_servers(
    servers: list[Redis], make: Make, name: str
) -> None:
    """The votes have not come when it goes on, long after they should have."""
    within = 0.6
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        proxies = [stack.enter_context(Proxy(server.port)) for server in servers]
        backend = make([_url(proxy) for proxy in proxies], server_timeout=within)
        _warm_up(backend, name)
        for proxy in proxies:
            proxy.hold()
        is_held_up, goes_on = threading.Event(), threading.Event()

        def hold_up() -> None:
            is_held_up.set()
            goes_on.wait(20)

        answer = pool.submit(backend.try_acquire, _request(backend, name), queued=False)
        eventually(lambda: bool(backend._servers._watched), what="it has asked")
        asked_at = time.monotonic()
        backend._servers.submit(hold_up)
        assert is_held_up.wait(20)
        eventually(lambda: time.monotonic() > asked_at + within)
        goes_on.set()
        eventually(lambda: not backend._servers._jobs, what="it has gone on")
        for proxy in proxies:
            proxy.pass_through()

        assert isinstance(answer.result(20), Grant)
        backend.close()


def test_servers_that_come_back_vote_again(servers: list[Redis], make: Make, name: str) -> None:
    backend = make(**PATIENT)
    for number in range(3):
        for server in servers[:2]:
            server.restart()
        backend.release(_take(backend, f"{name}:{number}"))
    backend.release(_take(backend, f"{name}:last"))

    def has_all() -> bool:
        request = _take(backend, name)
        voters = _voters(servers, name)
        backend.release(request)
        return voters == 5

    eventually(has_all, what="all five vote again")


# Listing, settings, checks.


def test_what_a_majority_has_is_listed_though_servers_are_down(
    servers: list[Redis], make: Make, name: str
) -> None:
    backend = make(fencing=True, **PATIENT)
    _take(backend, name)
    _take(make([_url(each) for each in servers[:3]], **PATIENT), f"{name}:three")
    _all_voted(servers, name)
    _all_voted(servers[:3], f"{name}:three")
    _forget(servers[2:3])
    with servers[1].client() as client:
        client.delete(_record(f"{name}:three"))
    servers[4].kill()

    assert [each.name for each in backend.held() if each.name.startswith(name)] == [name]
    for server in servers[2:4]:
        server.kill()
    with pytest.raises(LockBackendError) as caught:
        list(backend.held())
    assert len(caught.value.causes) == 5


def test_what_a_majority_may_have_is_listed_and_can_be_freed(
    servers: list[Redis], make: Make, name: str
) -> None:
    backend = make(**PATIENT)
    request = _take(backend, name)
    _all_voted(servers, name)
    _forget(servers[3:])  # as if they had been down when it was granted
    servers[0].kill()

    [held] = backend.held(request.key)
    assert backend.force_release(held.key, held.owner_digest)

    _take(backend, name)


def test_a_listing_goes_to_the_end(
    servers: list[Redis], make: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_distlock.backends.redlock.quorum.BATCH", 8)
    backend = make(**PATIENT)
    names = [f"{name}:{number:02}" for number in range(20)]
    for each in names:
        _take(backend, each)
    for client in _clients(servers):  # among more keys than a server looks through at once
        client.mset({f"other:{number}": "" for number in range(3000)})

    assert [each.name for each in backend.held() if each.name.startswith(name)] == names


URLS = [f"redis://127.0.0.1:{port}" for port in range(1, 7)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "'servers' must be 3, 5 or another odd number of servers, not 0"),
        ({"servers": URLS[:2]}, "not 2"),
        ({"servers": URLS[0]}, "must be a list"),
        ({"servers": [*URLS[:2], URLS[0]]}, "127.0.0.1:1 stands there twice"),
        ({"servers": [*URLS[:2], f"{URLS[0]}/3"]}, "127.0.0.1:1 stands there twice"),
        ({"servers": [*URLS[:2], "nowhere"]}, "CACHES has no alias 'nowhere'"),
        ({"servers": [*URLS[:2], "redis//:hush@127.0.0.1"]}, "a URL needs ://"),
        ({"servers": [*URLS[:2], "user:hush@127.0.0.1"]}, "a URL needs ://"),
        ({"servers": URLS[:3], "options": {"nonsense": 1}}, "'nonsense'"),
        ({"servers": URLS[:3], "server_timeout": 0}, "'server_timeout' must be more than 0"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidLockBackend, match="DISTLOCK\\['x'\\]: OPTIONS: ") as caught:
        make_backend(BackendSettings("x", REDLOCK, options=options))

    assert said in str(caught.value)
    assert "hush" not in str(caught.value)


async def test_tls(
    servers: list[Redis], make: Make, using: Callable[..., str], certificate: Path, name: str
) -> None:
    tls = tls_server(certificate)
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.port, tls=tls)) for server in servers]
        urls = [f"rediss://127.0.0.1:{proxy.port}" for proxy in proxies]
        alias = using([f"{url}?ssl_ca_certs={certificate}" for url in urls], **PATIENT)

        with lock(name, using=alias):
            pass
        async with lock(name, using=alias):
            pass
        locks.close()
        with lock(name, using=using(urls, options={"ssl_ca_certs": str(certificate)}, **PATIENT)):
            pass

        await aeventually(lambda: all(proxy.bytes_sent for proxy in proxies))
        backend = make(urls, **PATIENT)
        with pytest.raises(LockBackendError, match="certificate"):
            _take(backend, name)
        backend.close()
        locks.close()
        # Those who are late still connect: ssl of Python 3.11 does not close what is reset in its first steps.
        await aeventually(lambda: not _connecting_to(proxies))


def test_passwords_are_in_no_text(make: Make) -> None:
    urls = [url.replace("//", "//:hush@") for url in URLS[:3]]
    backend = make(urls)

    with pytest.raises(LockBackendError) as caught:
        backend.try_acquire(_request(backend, "any"), queued=False)

    assert "hush" not in f"{caught.value} {backend.options} {backend.sources}"


def test_checks_find_one_server_named_twice_and_one_that_is_not_durable(
    servers: list[Redis], make: Make
) -> None:
    ports = [server.port for server in servers[:2]]
    urls = [f"redis://127.0.0.1:{ports[0]}", f"redis://127.0.0.1:{ports[1]}"]
    backend = make([*urls, f"redis://localhost:{ports[0]}"], durable=True)

    found = backend.check(["default"])

    assert [each.id for each in found] == ["distlock.E031"] * 3 + ["distlock.E030"]
    assert found[-1] == Error(
        f"DISTLOCK['made']: Redis at 127.0.0.1:{ports[0]} and Redis at localhost:{ports[0]} "
        "are one and the same server.",
        hint="Name servers that can fail one by one.",
        id="distlock.E030",
    )


def test_a_user_without_info_gets_no_lock_and_the_check_says_what_to_grant(
    servers: list[Redis], make: Make, name: str
) -> None:
    for client in _clients(servers):
        client.execute_command(
            "ACL", "SETUSER", "blind", "reset", "on", ">hush", "~*", "+@all", "-@dangerous"
        )
    urls = [_url(server).replace("//", "//blind:hush@") for server in servers]
    guarded = make(urls, **{**PATIENT, "restart_guard": True})

    with pytest.raises(LockBackendError, match=r"it refused: .*'info'.* \+info"):
        guarded.try_acquire(_request(guarded, name), queued=False)

    found = guarded.check(["default"])
    assert [each.id for each in found] == ["distlock.E032"] * 5
    assert found[0].hint == "Let its user run INFO: ACL SETUSER <user> +info."
    _take(make(urls, **PATIENT), name)


def test_checks_warn_of_a_guard_that_is_off(make: Make) -> None:
    found = make().check()

    assert [each.id for each in found] == ["distlock.W030"]
    assert isinstance(found[0], CheckWarning)
    assert make(restart_guard=True).check(["default"]) == make().check(["default"]) == []
