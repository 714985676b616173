"""Idle connections: which of them are used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_distlock.backends.idle import IDLE, IdleStack

if TYPE_CHECKING:
    from tests.fixtures.clocks import StoppedClock


class Connection:
    def __init__(self) -> None:
        self.used_at = 0.0
        self.is_closed = self.has_ended = False

    def has_news(self) -> bool:
        return self.has_ended

    def close(self) -> None:
        self.is_closed = True


def test_the_newest_is_used_first_and_those_that_the_server_closed_are_not(
    wait_clock: StoppedClock,
) -> None:
    idle, (first, second, ended) = IdleStack(), [Connection() for _ in range(3)]
    for connection in (first, second, ended):
        idle.keep(connection)
    ended.has_ended = True

    assert idle.fit_one() is second
    assert ended.is_closed
    assert idle.fit_one() is first
    assert idle.fit_one() is None


def test_one_that_was_idle_for_a_minute_is_closed_also_if_it_is_the_last(
    wait_clock: StoppedClock,
) -> None:
    idle, connection = IdleStack(), Connection()
    idle.keep(connection)
    wait_clock.now += IDLE - 1
    assert idle.fit_one() is connection

    idle.keep(connection)
    wait_clock.now += IDLE

    assert idle.fit_one() is None
    assert connection.is_closed


def test_those_that_are_not_needed_are_closed_when_another_is_kept(
    wait_clock: StoppedClock,
) -> None:
    idle, (unused, used) = IdleStack(), [Connection() for _ in range(2)]
    idle.keep(unused)
    wait_clock.now += IDLE + 1

    idle.keep(used)

    assert unused.is_closed
    assert list(idle) == [used]
