"""Fencing tokens of a majority, as a model: every order in which messages can arrive, be lost or come late.

Three servers whose counters begin apart, as their clocks do. A client asks each server for its vote, again if need be;
with two votes it takes the highest of the counters that came with them, has two servers write that down, and then
holds the lock, until it gives it back or its own clock ends that. Then only may a server forget it: drift sees to it.
Any server may do that or not, at any time after; and a question may still arrive then.
Tokens must rise from each holder to the next.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from django_distlock.backends.redlock.votes import majority

SERVERS = range(3)
#: Where the counters of the servers stand at first.
COUNTERS = (0, 2, 4)
NOBODY = -1


class Way(enum.Enum):
    """What a winner does with its token before it holds the lock."""

    OWNERS_ONLY = "has it written down by servers where it still holds the lock"
    ANYBODY = "has it written down by any servers"
    NOT_AT_ALL = "uses it at once"


class Phase(enum.IntEnum):
    ASKING = 0
    WRITING = 1
    HOLDING = 2
    OVER = 3


class Client(NamedTuple):
    phase: Phase = Phase.ASKING
    #: By server: the counter that came with its vote; 0 if there is none (yet).
    votes: tuple[int, ...] = (0, 0, 0)
    token: int = 0
    #: By server: whether it is known to have written the token down.
    written: tuple[bool, ...] = (False, False, False)


class State(NamedTuple):
    counters: tuple[int, ...]
    owners: tuple[int, ...]
    clients: tuple[Client, ...]
    #: The token of the last one who held the lock.
    last: int = 0


class FallingTokenError(AssertionError):
    """A holder has no higher token than the one before."""


class TwoHoldersError(AssertionError):
    """Two hold the lock."""


class Model:
    """All that can follow from a state."""

    def __init__(self, way: Way, clients: int) -> None:
        self._way = way
        self.first = State(COUNTERS, (NOBODY,) * 3, (Client(),) * clients)

    def after(self, state: State) -> Iterator[State]:
        for number, client in enumerate(state.clients):
            for server in SERVERS:
                yield from self._ask(state, number, client, server)
                if client.phase is Phase.WRITING:
                    yield from self._write(state, number, client, server)
            if client.phase is not Phase.OVER:
                yield from self._decide(state, number, client)
                yield _with(state, number, _over(client))
        yield from _forget(state)

    def _ask(self, state: State, number: int, client: Client, server: int) -> Iterator[State]:
        if client.votes[server]:
            return
        counter, owner = state.counters[server], state.owners[server]
        if owner == NOBODY:
            counter += 1
            state = state._replace(
                counters=_put(state.counters, server, counter),
                owners=_put(state.owners, server, number),
            )
            if client.phase is not Phase.OVER:
                yield state  # the answer is lost
        elif owner != number:
            return
        yield _with(state, number, client._replace(votes=_put(client.votes, server, counter)))

    def _write(self, state: State, number: int, client: Client, server: int) -> Iterator[State]:
        is_barred = self._way is Way.OWNERS_ONLY and state.owners[server] != number
        if client.written[server] or is_barred:
            return
        raised = max(state.counters[server], client.token)
        state = state._replace(counters=_put(state.counters, server, raised))
        yield state  # the answer is lost
        yield _with(state, number, client._replace(written=_put(client.written, server, True)))

    def _decide(self, state: State, number: int, client: Client) -> Iterator[State]:
        votes = [vote for vote in client.votes if vote]
        if client.phase is Phase.ASKING and len(votes) >= majority(3):
            won = client._replace(phase=Phase.WRITING, token=max(votes))
            is_at_once = self._way is Way.NOT_AT_ALL
            yield _hold(state, number, won) if is_at_once else _with(state, number, won)
        if client.phase is Phase.WRITING and sum(client.written) >= majority(3):
            yield _hold(state, number, client)


def _hold(state: State, number: int, client: Client) -> State:
    if any(each.phase is Phase.HOLDING for each in state.clients):
        raise TwoHoldersError(state)
    if client.token <= state.last:
        raise FallingTokenError(state)
    held = _with(state, number, client._replace(phase=Phase.HOLDING))
    return held._replace(last=client.token)


def _forget(state: State) -> Iterator[State]:
    for server, owner in enumerate(state.owners):
        if owner != NOBODY and state.clients[owner].phase is Phase.OVER:
            yield state._replace(owners=_put(state.owners, server, NOBODY))


def _over(client: Client) -> Client:
    return client._replace(phase=Phase.OVER)


def _with(state: State, number: int, client: Client) -> State:
    return state._replace(clients=_put(state.clients, number, _forgetful(client)))


def _forgetful(client: Client) -> Client:
    """Return it without what makes no difference any more: fewer states, the same futures."""
    if client.phase is Phase.ASKING:
        return client
    votes = tuple(int(vote > 0) for vote in client.votes)
    if client.phase is Phase.WRITING:
        return client._replace(votes=votes)
    return Client(client.phase, votes)


def _put(values: tuple, place: int, value: object) -> tuple:  # type: ignore[type-arg] # of any values
    return (*values[:place], value, *values[place + 1 :])


def _explore(model: Model) -> int:
    """Return how many states there are; an error where one is wrong."""
    seen = {model.first}
    todo = [model.first]
    while todo:
        for state in model.after(todo.pop()):
            known = _canonical(state)
            if known not in seen:
                seen.add(known)
                todo.append(known)
    return len(seen)


def _canonical(state: State) -> State:
    """Return *state* with its clients in order: they are alike, and which is which does not matter."""
    owned = [
        tuple(owner == number for owner in state.owners) for number in range(len(state.clients))
    ]
    order = sorted(
        range(len(state.clients)), key=lambda number: (state.clients[number], owned[number])
    )
    if order == list(range(len(order))):
        return state
    names = {NOBODY: NOBODY, **{old: new for new, old in enumerate(order)}}
    return state._replace(
        owners=tuple(names[owner] for owner in state.owners),
        clients=tuple(state.clients[number] for number in order),
    )


@pytest.mark.slow
def test_tokens_of_two_clients_rise_in_every_order_of_events() -> None:
    assert _explore(Model(Way.OWNERS_ONLY, clients=2)) > 10_000


def test_without_the_second_round_a_token_falls() -> None:
    with pytest.raises(FallingTokenError):
        _explore(Model(Way.NOT_AT_ALL, clients=2))


@pytest.mark.slow
def test_a_token_falls_if_it_may_be_written_down_where_the_lock_is_not_held() -> None:
    with pytest.raises(FallingTokenError):
        _explore(Model(Way.ANYBODY, clients=2))
