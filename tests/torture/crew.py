"""The processes of a run: workers, which come and go, and an operator."""

from __future__ import annotations

import os
import random
import threading
from typing import TYPE_CHECKING, Any

from tests.fixtures.processes import Child
from tests.fixtures.warm import ROOT
from tests.torture.clocks import worker_clock
from tests.torture.rows import STORE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.torture.arenas import Arena
    from tests.torture.clocks import WallClock

#: Of each worker.
THREADS, TASKS = 2, 2
#: One of them has a wall clock of its own, and every second one has lines that can be broken.
WITH_CLOCK = 2
#: These two import another version of the package, if there is one: of those with lines, and of the others.
OF_OTHER_VERSION = 0, 3
#: So often each lock is wanted; those that are wanted least are purged now and then.
WISHES = {"hot": 12, "warm": 4, "readers": 4, "few": 4, "rare1": 1, "rare2": 1}
SHARED, LIMITED, HOT = "readers", "few", ("hot", "warm", "readers", "few")
LIMIT = 2
TRACEBACK = "Traceback (most recent call last)"


class Crew:
    """The processes that use *arena*; their histories are in *folder*."""

    def __init__(
        self,
        arena: Arena,
        name: str,
        folder: Path,
        store: dict[str, Any],
        seed: str,
        *,
        beside: Path | None = None,
    ) -> None:
        self._arena = arena
        self._folder = folder
        self._store = store
        self._names = {wish: f"{name}-{wish}" for wish in WISHES}
        self._other_version = (
            {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{beside}{os.pathsep}{ROOT}"} if beside else {}
        )
        self._seeds = random.Random(f"{seed} crew")
        self._born: dict[int, int] = {}
        self._mutex = threading.Lock()
        self.clocks: list[WallClock] = []
        self.workers: dict[int, tuple[str, Child]] = {}
        self._operator = self._child("operate", config=self._config(), folder=str(folder))

    @property
    def names(self) -> list[str]:
        """All locks."""
        return [*self._names.values()]

    @property
    def hot(self) -> list[str]:
        """The locks that somebody always wants."""
        return [self._names[wish] for wish in HOT]

    def start(self) -> None:
        """Start the operator, who makes the rows, and then the workers."""
        self._operator.expect("ready", 60)
        self._arena.settle()
        if self._arena.workers > WITH_CLOCK and self._arena.blows:
            self.clocks.append(worker_clock(self._folder, "worker"))
        for each in range(self._arena.workers):
            self._begin(each)

    def choose(self, chance: random.Random) -> tuple[str, Child]:
        """Return the name of a worker and the worker."""
        return self.workers[chance.choice(sorted(self.workers))]

    def replace(self, chance: random.Random) -> str:
        """Kill a worker, start another, and return the name of the one that was killed."""
        number = chance.choice(sorted(self.workers))
        name, worker = self.workers[number]
        worker.kill()
        worker.close()
        self._begin(number)
        return name

    def replace_all(self, meanwhile: Callable[[], None]) -> list[str]:
        """Kill all workers, do something *meanwhile*, start others, and return the names of those that were killed."""
        killed = [*self.workers.items()]
        for _, (_, worker) in killed:
            worker.kill()
            worker.close()
        meanwhile()
        for number, _ in killed:
            self._begin(number)
        return [name for _, (name, _) in killed]

    def order(self, *words: str) -> str:
        """Have the operator do something, and return what they said."""
        with self._mutex:
            self._operator.tell(" ".join(words))
            return str(self._operator.expect("done", 60)["said"])

    def end(self) -> None:
        """Have all workers end, look whether every lock is free, and count the rows."""
        for _, worker in self.workers.values():
            worker.tell("end")
        for _, worker in self.workers.values():
            worker.wait(60)
        self.order("probe", *self.names)
        self.order("rows", *self.names)

    def close(self) -> None:
        """End all processes, whatever they do."""
        for _, worker in self.workers.values():
            worker.close()
        self._operator.close()

    def tracebacks(self) -> list[str]:
        """Return what the workers printed of exceptions that nobody expected; log lines are no such thing."""
        printed = (worker.stderr for _, worker in self.workers.values())
        return [text[text.index(TRACEBACK) :] for text in printed if TRACEBACK in text]

    def _begin(self, number: int) -> None:
        self._born[number] = self._born.get(number, 0) + 1
        name = f"worker{number}.{self._born[number]}"
        environment = self._other_version if number in OF_OTHER_VERSION else {}
        if number == WITH_CLOCK and self.clocks:
            environment = self.clocks[0].environment
        worker = self._child(
            "work",
            environment,
            config=self._config(number),
            folder=str(self._folder),
            name=name,
            seed=self._seeds.getrandbits(32),
        )
        self.workers[number] = (name, worker)

    def _child(
        self, act: str, environment: dict[str, str] | None = None, **arguments: Any
    ) -> Child:
        return Child(f"tests.torture.worker:{act}", environment=environment or {}, **arguments)

    def _config(self, number: int = 0) -> dict[str, Any]:
        arena, names = self._arena, self._names
        more = 2 if arena.alone else 1
        lined = bool(number % 2 and arena.lines)
        databases = arena.lined_databases if lined and arena.lined_databases else arena.databases
        if arena.spread:
            databases = arena.spread[number % len(arena.spread)]
        return {
            "alias": arena.lined if lined and arena.lined else arena.alias,
            "databases": {**databases, STORE: self._store},
            "caches": arena.caches,
            "migrated": arena.migrated,
            "ttl": arena.ttl,
            "free_within": arena.free_within,
            "fencing": arena.fencing,
            "careless": arena.careless,
            "pause": arena.pause,
            "work": arena.work,
            "threads": THREADS * more,
            "tasks": TASKS * more,
            "names": self.names,
            "locks": [names[wish] for wish, often in WISHES.items() for _ in range(often)],
            "shared": [names[SHARED]] if arena.shared else [],
            "limits": {names[LIMITED]: LIMIT},
        }
