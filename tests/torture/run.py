"""One run in one arena: its servers, workers, nemesis, and what the checker says in the end."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_distlock.ground import clock
from tests.fixtures.postgres import PostgreSQL
from tests.torture.arenas import postgres_database
from tests.torture.checker import Finding, Verdict, check
from tests.torture.crew import Crew
from tests.torture.history import Writer, read
from tests.torture.nemesis import Nemesis, longest_clock_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.torture.arenas import Make


@dataclass(frozen=True, slots=True)
class Result:
    """What a run in the arena *name* has shown, and with which servers."""

    name: str
    seconds: float
    versions: list[str]
    verdict: Verdict


@contextmanager
def store() -> Iterator[PostgreSQL]:
    """The server of the rows, which no fault reaches."""
    with PostgreSQL() as server:
        yield server


def run(
    name: str, make: Make, rows: PostgreSQL, folder: Path, *, seconds: float, seed: int
) -> Result:
    """Torture the arena *name* for so many *seconds*; the histories are written to *folder*, which must be empty."""
    with ExitStack() as stack:
        arena = stack.enter_context(make())
        history = Writer(folder, "nemesis")
        stack.callback(history.close)
        label = f"{name}-{folder.name}"
        crew = Crew(arena, label, folder, postgres_database(rows.port), f"{seed} {name}")
        stack.callback(crew.close)
        crew.start()
        nemesis = Nemesis(arena, crew, history, f"{seed} {name}")
        began = clock.lease_time()
        nemesis.start()
        try:
            time.sleep(seconds)
        finally:
            nemesis.stop()
        time.sleep(arena.free_within + longest_clock_error(arena))
        history.write("calm", locks=crew.hot)
        time.sleep(arena.calm)
        crew.end()
        took = clock.lease_time() - began
        verdict = check(read(folder), unfenced=arena.careless)
        verdict.findings += [Finding("errors", each[:3000]) for each in crew.tracebacks()]
        return Result(name, took, arena.versions, verdict)
