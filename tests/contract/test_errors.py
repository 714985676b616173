"""A server that fails is told as that: it never looks like a busy lock, nor like a held one."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from django.core.cache import caches
from django.db import connections

from django_distlock import (
    LockBackendError,
    LockNotAcquired,
    LockNotHeld,
    NotSupported,
    distributed_lock,
    lock,
    lock_all,
    skip,
)
from django_distlock.conf import BackendSettings
from django_distlock.engine.waiting import Queueing
from django_distlock.handler import make_backend
from tests.fixtures.eventually import eventually

from .crew import length_of_line, start, taken
from .faults import Faulty
from .profiles import Profile, lacks, needs
from .rivals import Rival, Rivals


@pytest.mark.parametrize("timeout", [0, None])
def test_an_acquire_raises_the_error_at_once(
    faulty: Faulty, using: str, name: str, timeout: float | None
) -> None:
    faulty.fail("try_acquire")
    began = time.monotonic()

    with pytest.raises(LockBackendError) as caught:
        lock(name, using=using, timeout=timeout).acquire()
    with pytest.raises(LockBackendError), lock(name, using=using, timeout=timeout):
        pytest.fail("not held")

    assert time.monotonic() - began < 10
    assert caught.value.alias == using
    assert not isinstance(caught.value, LockNotAcquired | TimeoutError)


@needs("typical")
def test_lock_all_and_the_decorator_raise_it_too(faulty: Faulty, using: str, name: str) -> None:
    @distributed_lock(name, using=using, on_busy=skip("skipped"))
    def work() -> str:
        return "worked"

    faulty.fail("try_acquire")

    with pytest.raises(LockBackendError):
        lock_all(name, f"{name}:b", using=using).acquire()
    with pytest.raises(LockBackendError):
        work()


def test_a_failure_while_waiting_is_raised_and_nothing_is_left(
    faulty: Faulty, using: str, name: str, rival: Rivals, holder: Rival
) -> None:
    other = rival()
    faulty.fail("enqueue")
    faulty.fail("probe")

    if faulty.waiting.queueing is not Queueing.NONE:
        with pytest.raises(LockBackendError):
            lock(name, using=using, timeout=20).acquire()
    faulty.heal()

    holder.leaves()
    other.takes(within=15)


@needs("typical")
def test_outside_asyncio_the_error_says_what_to_use(using: str, name: str) -> None:
    async def work() -> None:
        async with lock(name, using=using):
            pytest.fail("not held")

    # As trio runs it: in no event loop of asyncio.
    with pytest.raises(NotSupported, match=r"trio\.to_thread\.run_sync"):
        work().send(None)
    with pytest.raises(NotSupported, match="outside asyncio"):
        lock(name, using=using).alocked().send(None)
    with lock(name, using=using, timeout=10) as lease:
        with pytest.raises(NotSupported, match="outside asyncio"):
            lease.aextend().send(None)
        assert lease.held


@lacks("fair")  # there each asks the server
@needs("typical")
class TestThoseWhoWaitBehindOneAnother:
    """Only the first of a process asks; a server that hangs costs each question a second."""

    CROWD = 8

    @pytest.fixture(params=["threads", "tasks"])
    def waiting(
        self, request: pytest.FixtureRequest, faulty: Faulty, using: str, name: str
    ) -> Iterator[tuple[threading.Event, list[Future[Any]]]]:
        """Waiters for a lock of this process, which is free once the event is set."""
        asked, over = lock(name, using=using, timeout=60), threading.Event()

        def hold() -> None:
            with asked:
                over.wait(60)

        def take() -> None:
            with asked:
                pass

        async def atake() -> None:
            async with asked:
                pass

        holder = start(hold)
        eventually(lambda: length_of_line(faulty, name) == 1)
        works = {"threads": take, "tasks": lambda: asyncio.run(atake())}
        waiters = [start(works[request.param]) for _ in range(self.CROWD)]
        eventually(lambda: length_of_line(faulty, name) == 1 + self.CROWD)
        yield over, waiters
        over.set()
        holder.result(20)

    def test_all_learn_it_at_once_when_the_next_question_fails_too(
        self, waiting: tuple[threading.Event, list[Future[Any]]], faulty: Faulty, using: str
    ) -> None:
        over, waiters = waiting
        faulty.fail("try_acquire")
        before = faulty.calls["try_acquire"]

        over.set()

        errors = [waiter.exception(20) for waiter in waiters]
        assert [type(error) for error in errors] == [LockBackendError] * self.CROWD
        assert {str(error) for error in errors} == {str(errors[0])}
        assert len({id(error) for error in errors}) == self.CROWD
        assert faulty.calls["try_acquire"] - before == 2

    def test_they_wait_on_when_the_next_question_is_answered(
        self, waiting: tuple[threading.Event, list[Future[Any]]], faulty: Faulty
    ) -> None:
        over, waiters = waiting
        faulty.fail("try_acquire", times=1)

        over.set()

        errors = [waiter.exception(20) for waiter in waiters]
        assert len([error for error in errors if isinstance(error, LockBackendError)]) == 1
        assert errors.count(None) == self.CROWD - 1


def test_an_extension_that_fails_leaves_the_lease_as_it_is(
    faulty: Faulty, using: str, name: str
) -> None:
    with lock(name, using=using, ttl=20, renew=False) as lease:
        before = lease.deadline
        faulty.fail("extend", times=1)

        with pytest.raises(LockBackendError):
            lease.extend()

        assert lease.held
        assert lease.deadline == before


def test_a_release_that_fails_leaves_a_lease_that_is_over(
    faulty: Faulty, using: str, name: str, rival: Rivals
) -> None:
    other = rival()
    lease = taken(name, using=using)
    faulty.fail("release", times=1)

    with pytest.raises(LockBackendError):
        lease.release()

    assert not lease.held
    with pytest.raises(LockNotHeld):
        lease.release()
    other.takes(within=15)


#: By an option of a backend: the OPTIONS with which nobody is there.
NOWHERE: dict[str, dict[str, object]] = {
    "servers": {"servers": [f"redis://127.0.0.1:{port}" for port in range(1, 6)]},
    "hosts": {"hosts": "127.0.0.1:1", "io_timeout": 0.5},
    "endpoints": {"endpoints": "127.0.0.1:1"},
    "directory": {"directory": "/dev/null/locks"},
}


def _moved_nowhere(server: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a database or a cache, or OPTIONS, with a place where nobody is."""
    if sentinels := server.get("OPTIONS", {}).get("SENTINELS"):
        nowhere = [(host, 1) for host, _ in sentinels]
        return {**server, "OPTIONS": {**server["OPTIONS"], "SENTINELS": nowhere}}
    if "LOCATION" in server:
        return {**server, "LOCATION": re.sub(r":\d+", ":1", server["LOCATION"])}
    for option, elsewhere in NOWHERE.items():
        if option in server:
            return {**server, **elsewhere}
    return {**server, "NAME": "/nonexistent/locks.sqlite3", "HOST": "127.0.0.1", "PORT": "1"}


@needs("cross_process")
def test_a_server_that_is_not_there_is_an_error_of_ours_with_its_cause(
    profile: Profile, using: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = profile.settings["OPTIONS"]
    alias = f"nowhere-{profile.name}"  # Django keeps what it made for an alias
    if NOWHERE.keys() & options.keys():
        options = _moved_nowhere(options)
    else:
        key = "cache" if "cache" in options else "using"
        known = caches.settings if "cache" in options else connections.settings
        monkeypatch.setitem(known, alias, _moved_nowhere(known[options[key]]))
        options = {**options, key: alias}
    backend = make_backend(BackendSettings("broken", profile.settings["BACKEND"], options=options))

    with pytest.raises(LockBackendError) as caught:
        Rival.of(backend, name).tries()

    assert caught.value.alias == "broken"
    assert caught.value.__cause__ is not None
    # One cause is enough to read.
    report = "".join(traceback.format_exception(caught.value))
    assert report.count("The above exception was the direct cause") == 1
    assert "During handling of the above exception" not in report
    backend.close()
