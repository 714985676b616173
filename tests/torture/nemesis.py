"""The nemesis: kills and stops workers, breaks lines, strikes servers, and writes down what it did."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_distlock.ground import clock
from tests.torture.arenas import POWER_LOST, STEP, Blow

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.torture.arenas import Arena
    from tests.torture.crew import Crew
    from tests.torture.history import Writer

KILLED = "holder or waiter killed"
#: Seconds by which the wall clock of a worker is wrong.
WRONG = (-3600.0, -5.0, 0.0, 5.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Act:
    """One kind of fault, as the guarantees page calls it; *act* returns what was hit, and perhaps when."""

    kind: str
    effect: str
    act: Callable[[], tuple[str, tuple[float, float] | None]]


class Nemesis:
    """Strikes workers and lines in one thread, servers in another, until it is told to stop."""

    def __init__(self, arena: Arena, crew: Crew, history: Writer, seed: str) -> None:
        self._arena = arena
        self._crew = crew
        self._history = history
        self._over = threading.Event()
        self._chance = random.Random(f"{seed} workers")
        self._errors: list[BaseException] = []
        chance = random.Random(f"{seed} servers")
        self._threads = [
            threading.Thread(target=self._strike, args=(self._acts(), self._chance, 0.5)),
            threading.Thread(target=self._strike, args=(self._blows(chance), chance, 2.0)),
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the last fault end, and heal everything."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        for line in self._arena.lines:
            line.delay(0)
            line.pass_through()
        for act in self._blows(self._chance):
            if act.kind == "server's clock is set back":
                self._note(act)

    def _strike(self, acts: list[Act], chance: random.Random, pause: float) -> None:
        """Let each act happen once, and then by chance."""
        first = chance.sample(acts, len(acts))
        while acts and not self._over.wait(pause * (0.5 + chance.random())):
            try:
                self._note(first.pop() if first else chance.choice(acts))
            except BaseException as error:
                self._errors.append(error)
                raise

    def _note(self, act: Act) -> None:
        began = clock.lease_time()
        target, surely = act.act()
        began, ended = surely or (began, clock.lease_time())
        self._write(act.kind, act.effect, target, began, ended)

    def _write(self, kind: str, effect: str, target: str, began: float, ended: float) -> None:
        self._history.write(
            "fault",
            what=kind,
            began=began,
            ended=ended,
            effect=effect,
            target=target,
            told=self._arena.ttl,
        )

    def _blows(self, chance: random.Random) -> list[Act]:
        def act(blow: Blow) -> Callable[[], tuple[str, tuple[float, float] | None]]:
            return lambda: ("", blow.strike(chance))

        return [Act(blow.kind, blow.effect, act(blow)) for blow in self._arena.blows]

    def _acts(self) -> list[Act]:
        acts = [
            Act(KILLED, "X", self._kill),
            Act("holder stopped for less than the ttl", "X", lambda: self._freeze(0.1, 0.5)),
            Act("holder stopped for longer", "V", lambda: self._freeze(1.2, 2.0)),
        ]
        if self._crew.clocks:
            acts.append(Act("client's clock is wrong or is set", "X", self._set_clock))
        if self._arena.lines:
            acts += [
                Act("holder cut off from the server", self._arena.effect_of_cut, self._cut),
                Act("holder cut off without a word", "V", self._black_hole),
                Act("reply lost", self._arena.effect_of_lost_reply, self._lose_replies),
                Act("slow line", "X", self._slow),
            ]
        if self._arena.disk:
            acts.append(Act(POWER_LOST, "X", self._lose_power))
        if self._arena.purge:
            acts.append(Act("purge of stale rows", "X", lambda: self._order("purge")))
        if self._arena.listing and not self._arena.alone:
            # Both have it until the former holder's next renewal.
            acts.append(Act("forced release", "F", self._force))
        only = self._arena.only
        return [each for each in acts if each.kind == only] if only else acts

    def _kill(self) -> tuple[str, None]:
        return self._crew.replace(self._chance), None

    def _lose_power(self) -> tuple[str, None]:
        """Cut the power of all workers and of their disk."""
        disk, began = self._arena.disk, clock.lease_time()
        assert disk is not None
        disk.cut(self._chance)
        for name in self._crew.replace_all(disk.mount_again):
            self._write(KILLED, "X", name, began, clock.lease_time())
        return "", None

    def _freeze(self, least: float, most: float) -> tuple[str, None]:
        name, worker = self._crew.choose(self._chance)
        worker.stop()
        time.sleep(self._arena.ttl * self._chance.uniform(least, most))
        worker.cont()
        return name, None

    def _set_clock(self) -> tuple[str, None]:
        wall = self._chance.choice(self._crew.clocks)
        wall.set(self._chance.choice(WRONG))
        return "", None

    def _cut(self) -> tuple[str, None]:
        for line in self._arena.lines:
            line.cut()
        return self._after_a_while()

    def _black_hole(self) -> tuple[str, None]:
        for line in self._arena.lines:
            line.black_hole()
        return self._after_a_while()

    def _after_a_while(self) -> tuple[str, None]:
        time.sleep(self._arena.ttl * self._chance.uniform(0.2, 1.8))
        for line in self._arena.lines:
            line.pass_through()
        return "", None

    def _lose_replies(self) -> tuple[str, None]:
        for line in self._arena.lines:
            line.drop_reply(self._chance.randint(1, 3), after=self._chance.randint(0, 20))
        time.sleep(self._arena.ttl)
        for line in self._arena.lines:
            line.drop_reply(0)
        return "", None

    def _slow(self) -> tuple[str, None]:
        for line in self._arena.lines:
            line.delay(self._chance.uniform(0.02, 0.3))
        time.sleep(self._arena.ttl)
        for line in self._arena.lines:
            line.delay(0)
        return "", None

    def _force(self) -> tuple[str, None]:
        return self._order("force", self._chance.choice(self._crew.hot))

    def _order(self, *words: str) -> tuple[str, None]:
        # The server may be away at this moment, and the operator learns of that.
        with suppress(AssertionError):
            self._crew.order(*words)
        return "", None


def longest_clock_error(arena: Arena) -> float:
    """Return for how many seconds a lease may live on because a server's clock was set back."""
    return STEP if any("clock" in blow.kind for blow in arena.blows) else 0.0
