"""The arithmetic of a majority: who has won, and how long its servers are waited for."""

from __future__ import annotations

import itertools

import pytest

from django_distlock.backends.redlock.quorum import seconds_up
from django_distlock.backends.redlock.votes import (
    Election,
    agreed,
    connect_timeout,
    election,
    majority,
    server_timeout,
)


@pytest.mark.parametrize(("servers", "needed"), [(3, 2), (5, 3), (7, 4)])
def test_a_majority_is_more_than_half(servers: int, needed: int) -> None:
    assert majority(servers) == needed
    assert 2 * majority(servers) > servers


@pytest.mark.parametrize(
    ("ttl", "seconds"), [(30.0, 0.05), (1.0, 0.05), (0.5, 0.025), (0.1, 0.005), (0.02, 0.005)]
)
def test_a_server_has_a_small_part_of_the_ttl_for_its_answer(ttl: float, seconds: float) -> None:
    assert server_timeout(ttl) == pytest.approx(seconds)


def test_the_time_for_an_answer_can_be_set() -> None:
    assert server_timeout(30.0, 0.4) == 0.4
    assert connect_timeout(30.0, 0.4) == 0.4


@pytest.mark.parametrize(("ttl", "seconds"), [(30.0, 0.25), (0.4, 0.1), (0.01, 0.005)])
def test_a_new_connection_is_waited_for_no_longer_than_a_part_of_the_ttl(
    ttl: float, seconds: float
) -> None:
    assert connect_timeout(ttl) == pytest.approx(seconds)


ALL_STATES = [
    votes
    for votes in itertools.product(range(6), repeat=3)
    if sum(votes) <= 5
]  # fmt: skip


@pytest.mark.parametrize(("granted", "refused", "failed"), ALL_STATES)
def test_an_election_is_decided_as_soon_as_nothing_can_change_it(
    granted: int, refused: int, failed: int
) -> None:
    pending = 5 - granted - refused - failed
    found = election(5, granted=granted, refused=refused, failed=failed)

    possible = {_final(granted + more, 5 - failed - less) for more, less in _endings(pending)}

    assert possible == {found} if len(possible) == 1 else found is Election.OPEN


def _endings(pending: int) -> list[tuple[int, int]]:
    """Return how the rest can come out: so many more grants, and so many that do not answer."""
    return [(more, less) for more in range(pending + 1) for less in range(pending + 1 - more)]


def _final(granted: int, answered: int) -> Election:
    if granted >= 3:
        return Election.WON
    return Election.BUSY if answered >= 3 else Election.UNREACHABLE


@pytest.mark.parametrize(
    ("yes", "no", "said"), [(3, 0, True), (3, 2, True), (2, 3, False), (2, 2, None), (0, 0, None)]
)
def test_what_is_said_takes_a_majority_either_way(yes: int, no: int, said: bool | None) -> None:
    assert agreed(5, yes=yes, no=no) is said


@pytest.mark.parametrize(("said", "seconds"), [("31", 30), ("0", 0), ("-3600", 0)])
def test_a_server_is_guarded_no_longer_than_from_its_start_or_from_now(
    said: str, seconds: int
) -> None:
    """It says less than nothing after its clock was set back."""
    conversation = seconds_up(durable=False)
    next(conversation)

    with pytest.raises(StopIteration) as ended:
        conversation.send([f"uptime_in_seconds:{said}\r\naof_enabled:1\r\n".encode()])

    assert ended.value.value == seconds
