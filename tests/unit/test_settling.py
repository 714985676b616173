"""A verb whose reply was lost is asked once more, unless the first one took long."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from django_distlock import LockBackendError, LockOutcomeUnknown
from django_distlock.engine.steps import SETTLE, asettled, is_worth_asking_again, settled
from django_distlock.ground import clock

LOST = LockOutcomeUnknown("default", "the reply was lost")
DOWN = LockBackendError("default", "nobody is there")


class Server:
    """Takes *seconds* for each answer, by a clock that stands else; what is an error is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # From the real time on: the clock thread of an earlier test may look at it.
        self.now = clock.lease_time()
        self.asked = 0
        monkeypatch.setattr(clock, "lease_time", lambda: self.now)

    def answers(self, *answers: str | Exception, seconds: float = 0.0) -> Callable[[], str]:
        left = iter(answers)

        def ask() -> str:
            self.asked += 1
            self.now += seconds
            answer = next(left)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


async def _settled(ask: Callable[[], str], *, is_async: bool) -> str:
    if not is_async:
        return settled(ask)

    async def aask() -> str:
        return ask()

    return await asettled(aask)


both = pytest.mark.parametrize("is_async", [False, True])


@both
async def test_the_second_answer_counts(server: Server, is_async: bool) -> None:
    assert await _settled(server.answers(LOST, "yes"), is_async=is_async) == "yes"
    assert await _settled(server.answers(LOST, "yes", seconds=SETTLE), is_async=is_async) == "yes"


@both
async def test_a_server_that_hung_is_not_asked_again(server: Server, is_async: bool) -> None:
    with pytest.raises(LockOutcomeUnknown):
        await _settled(server.answers(LOST, "yes", seconds=SETTLE * 1.1), is_async=is_async)
    assert server.asked == 1


@both
async def test_what_failed_with_an_answer_is_not_asked_again(
    server: Server, is_async: bool
) -> None:
    with pytest.raises(LockBackendError, match="nobody is there"):
        await _settled(server.answers(DOWN, "yes"), is_async=is_async)
    assert server.asked == 1


@both
async def test_if_it_fails_again_the_outcome_is_as_unknown_as_before(
    server: Server, is_async: bool
) -> None:
    with pytest.raises(LockOutcomeUnknown, match="nobody is there") as caught:
        await _settled(server.answers(LOST, DOWN), is_async=is_async)
    assert caught.value.__cause__ is LOST


def test_the_first_one_may_take_longer_if_the_caller_says_so(server: Server) -> None:
    assert settled(server.answers(LOST, "yes", seconds=60.0), within=math.inf) == "yes"
    with pytest.raises(LockOutcomeUnknown):
        settled(server.answers(LOST, "yes", seconds=SETTLE), within=0.1)


def test_only_a_reply_that_was_lost_just_now_is_worth_asking_again(server: Server) -> None:
    assert is_worth_asking_again(LOST, server.now - SETTLE)
    assert not is_worth_asking_again(LOST, server.now - SETTLE * 1.1)
    assert not is_worth_asking_again(DOWN, server.now)


def test_a_reply_that_was_lost_on_an_idle_connection_always_is(server: Server) -> None:
    unseen = LockOutcomeUnknown("default", "the reply was lost", was_idle=True)
    assert is_worth_asking_again(unseen, server.now - 60.0, 0.1)
    assert settled(server.answers(unseen, "yes", seconds=60.0)) == "yes"
