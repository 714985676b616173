"""Lets one session go on at a time, and judges each step."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from django.db import connections

from django_distlock.backends import rowlock

from .acts import LOCK_NAME, Player
from .promises import Broken, Promises
from .servers import forget
from .sessions import ASLEEP, ENDED, LONGEST, PAUSING, READY, RUNNING, stepping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .plans import Chooser, Plan
    from .servers import Database

#: How many sessions a plan can have.
SESSIONS = 3
#: Seconds between two looks whether a session waits on the server.
LOOK = 0.002


@dataclass
class Outcome:
    """What a schedule has shown: the promise that was broken, the steps, and how often each promise was checked."""

    plan: Plan
    broken: BaseException | None = None
    steps: list[str] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    #: How many statements had to wait for another session.
    waits: int = 0


class Stage:
    """Sessions at one isolation level on one server."""

    def __init__(self, server: Database, level: str) -> None:
        self._server = server
        self._alias = f"{server.alias}_{level.lower()}"
        settings = {**connections.settings[server.alias]}
        settings["OPTIONS"] = {**settings["OPTIONS"], **server.isolated(level)}
        connections.settings[self._alias] = settings
        self._players: list[Player] = []
        if server.waits:
            assert rowlock._backend(self._alias).schema is not None  # as in Player._open()
        self._make_players()

    def close(self) -> None:
        self._close_players()
        if (backend := rowlock._backends.pop(self._alias, None)) is not None:
            backend.close()
        forget(self._alias)

    def run(self, plan: Plan, chooser: Chooser) -> Outcome:
        """Play *plan* to its end, or to the first broken promise."""
        outcome = Outcome(plan)
        key = self._players[0].backend.key_of(LOCK_NAME)
        self._server.reset(key, is_old=plan.is_old)
        self._server.called()
        promises = self._promises = Promises(self._server, key)
        players = self._players[: len(plan.scripts)]
        try:
            for player, script in zip(players, plan.scripts, strict=True):
                player.begin()
                player.promises = promises
                player.start(partial(player.play, script))
            self._play(players, chooser, outcome)
        except (Broken, Exception) as broken:  # noqa: BLE001 - it is shown
            outcome.broken = broken
            self._close_players()
            self._make_players()
        outcome.checked = promises.checked
        return outcome

    def _close_players(self) -> None:
        # All at once, as one may wait on the server for another.
        for player in self._players:
            player.give_up()
        for player in self._players:
            has_ended = player.state == ENDED or player.stands_within(LONGEST)
            assert has_ended, f"session {player.number} does not end"
            player.close()

    def _make_players(self) -> None:
        self._players = [Player(n + 1, self._server, self._alias) for n in range(SESSIONS)]

    def _play(self, players: list[Player], chooser: Chooser, outcome: Outcome) -> None:
        promises, last = self._promises, None
        self._called: set[int] = set()
        while True:
            outcome.waits += self._settle(players)
            promises.check()
            self._called |= self._server.called()
            if all(each.state == ENDED for each in players):
                return
            ready = self._ready(players) or self._just_came(players)
            if ready:
                last = chooser.choose(ready, last)
                outcome.steps.append(f"{last.number}: {last.at}")
                self._let_go(last, players)
            else:
                self._await_time_out(players)

    def _let_go(self, player: Player, players: list[Player]) -> None:
        promises = self._promises
        for each in players:
            if each.state == RUNNING:
                promises.decided_after[each] = promises.seen[-1].now
        if player.at != "commit":
            promises.decided_after.pop(player, None)
        if player.state == ASLEEP:
            self._called.discard(player.ears.ticket)
        if player.is_enqueuing:
            player.place_since = len(promises.seen)
        if player.at == "expire":
            promises.expire()
            for each in players:
                each.is_timed_out = True
        player.let_go()

    def _ready(self, players: list[Player]) -> list[Player]:
        """Return who can go on; those that pause between two tries only if nobody else can."""
        ready = [each for each in players if each.state == READY]
        asleep = [each for each in players if each.state == ASLEEP]
        if self._server.calls:
            ready += [
                each for each in asleep if each.ears.ticket in self._called or each.is_timed_out
            ]
        elif self._promises.seen[-1].is_free:
            ready += asleep
        return ready or [each for each in players if each.state == PAUSING]

    def _just_came(self, players: list[Player]) -> list[Player]:
        """Return sleepers that the last release did not call, as it had looked for waiters before they had their places.

        They look again in milliseconds, as their pauses have just begun to grow.
        """
        asleep = (each for each in players if each.state == ASLEEP)
        return [each for each in asleep if each.place_since > self._promises.released_at]

    def _settle(self, players: list[Player]) -> int:
        """Return when all sessions stand still, or wait on the server: how many began to."""
        began = monotonic()
        while running := [each for each in players if not each.stands_within(0)]:
            if running[0].stands_within(LOOK):
                continue
            # All of them at one moment: a session that has stopped since may have ended the wait of another.
            waiting = self._server.waiting([each.pid for each in running])
            if all(each.pid in waiting for each in running):
                break
            if monotonic() - began > LONGEST:
                raise Broken(f"a session hangs: {[(each.number, each.at) for each in running]}")
        for each in players:
            if each.error is not None:
                raise each.error
        return len(running)

    def _await_time_out(self, players: list[Player]) -> None:
        """Nobody can go on: return when a wait on the server has reached its limit."""
        waiting = [each for each in players if each.state == RUNNING]
        until = monotonic() + LONGEST
        while not any(each.stands_within(LOOK) for each in waiting):
            if not waiting or monotonic() > until:
                stuck = ", ".join(f"{each.number} {each.state}" for each in players)
                raise Broken(f"somebody can go on: {stuck}, the row is {self._promises.seen[-1]}")


@contextmanager
def staged(server: Database, level: str) -> Iterator[Stage]:
    """Give a stage on *server*, and close it."""
    isolation = f" ISOLATION LEVEL {level.replace('_', ' ')}"
    with stepping(isolation):
        stage = Stage(server, level)
        try:
            yield stage
        finally:
            stage.close()
