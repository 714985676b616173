"""What is wanted no more is given back together, until that has worked."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import pytest
from pytest_django.fixtures import Settings

from django_distlock.engine import leftovers as module
from django_distlock.engine.background import background
from django_distlock.engine.leftovers import Leftovers, until_done
from django_distlock.engine.values import Release, Request, new_owner
from django_distlock.exceptions import LockBackendError
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from django_distlock.handler import locks
from tests.fixtures.clocks import PutForward
from tests.fixtures.eventually import eventually, never
from tests.integration.aliases import DOWN, MEMORY

Answer = Callable[[Request], Release | Exception]
_aliases = (f"leftovers {number}" for number in itertools.count())


class Server:
    """Notes which requests it was sent together, and answers as it is told."""

    def __init__(self) -> None:
        self.alias = next(_aliases)
        self.asked: list[list[str]] = []
        self.answer: Answer = lambda _: Release.RELEASED
        self.leftovers = Leftovers(self.alias, self._revoke_all)

    def _revoke_all(self, requests: Sequence[Request]) -> Sequence[Release | Exception]:
        self.asked.append([request.name for request in requests])
        return [self.answer(request) for request in requests]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(module, "RETRY", 0.02)
    monkeypatch.setattr(module, "SECOND_LOOK", 0.02)
    return Server()


def request(name: str, ttl: float = 30) -> Request:
    return Request(name=name, key=name, owner=new_owner(), ttl=ttl, holder=Holder.current())


def test_what_comes_in_meanwhile_is_given_back_together(server: Server) -> None:
    over = threading.Event()
    background.submit(server.alias, lambda: over.wait(10))
    names = [f"lock {number}" for number in range(200)]
    for name in names:
        server.leftovers.add(request(name))

    over.set()

    eventually(lambda: server.asked)
    never(lambda: len(server.asked) > 1, 0.1)
    assert server.asked == [names]


def test_what_failed_is_tried_again_and_the_others_are_not(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = iter([LockBackendError("a", "it is down"), ValueError("a bug")])

    def answer(request: Request) -> Release | Exception:
        return next(refusals, Release.RELEASED) if request.name == "bad" else Release.RELEASED

    server.answer = answer
    over = threading.Event()
    background.submit(server.alias, lambda: over.wait(10))
    for name in ("good", "bad"):
        server.leftovers.add(request(name))
    over.set()

    eventually(lambda: len(server.asked) == 3)
    never(lambda: len(server.asked) > 3, 0.1)
    assert server.asked == [["good", "bad"], ["bad"], ["bad"]]
    messages = [record.getMessage() for record in caplog.records]
    assert [each for each in messages if each.endswith(("it is down.", "a bug"))] == [
        "Giving back 1 lock(s) failed for now: DISTLOCK['a']: it is down.",
        "Giving back 1 lock(s) failed for now: a bug",
    ]


def test_what_failed_is_not_tried_for_longer_than_its_ttl(
    server: Server, monkeypatch: pytest.MonkeyPatch, put_forward: PutForward
) -> None:
    def has_stopped() -> bool:
        tries = len(server.asked)
        never(lambda: False, 0.5)
        return len(server.asked) == tries

    monkeypatch.setattr(module, "LONGEST_RETRY", 0.02)
    server.answer = lambda _: LockBackendError("a", "it is down")
    server.leftovers.add(request("late", ttl=30))
    eventually(lambda: len(server.asked) > 2)

    put_forward(30)

    eventually(has_stopped)


def test_what_failed_is_not_tried_again_after_a_change_of_the_settings(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after override_settings() in a project's test: the tests that follow do not know that server."""

    def warnings_in(seconds: float) -> int:
        over, before = threading.Event(), len(caplog.records)
        background.submit("default", over.set, seconds)
        assert over.wait(10)
        return len(caplog.records) - before

    monkeypatch.setattr(module, "LONGEST_RETRY", 0.02)
    settings.DISTLOCK = {"default": DOWN}
    locks["default"].abandon_later(request("edited", ttl=90))
    eventually(lambda: len(caplog.records) > 2)

    settings.DISTLOCK = {"default": MEMORY}

    warnings_in(0)  # until the one that is being logged has been logged
    assert warnings_in(0.5) == 0


def test_a_job_is_tried_until_the_server_has_answered(server: Server) -> None:
    tries = list[float]()

    def job() -> None:
        tries.append(clock.lease_time())
        if len(tries) < 3:
            raise LockBackendError("a", "it is down")

    until_done(server.alias, job, clock.lease_time() + 30)

    eventually(lambda: len(tries) == 3)
    never(lambda: len(tries) > 3, 0.1)
